"""In which 16 bits numbers are stored."""

from __future__ import annotations

import torch
from torch import Tensor


def half(dtype: torch.dtype, *states: Tensor) -> torch.dtype:
    """The model's dtype if it has 16 bits, else float16; bfloat16 where that cannot hold some states."""
    if dtype == torch.bfloat16:
        return dtype
    largest = torch.finfo(torch.float16).max
    beyond = any(x.dtype != torch.float16 and bool((x.abs() > largest).any()) for x in states)
    return torch.bfloat16 if beyond else torch.float16


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A 16-bit copy, in bfloat16 where the wanted dtype is too narrow."""
    return x.to(half(dtype, x)).contiguous().clone()
