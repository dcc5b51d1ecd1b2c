"""Numbers to the buffers of a low-rank store."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.stores.lowrank.layout import Factor, landmark_code, vector_code


def factors(name: str, factors: Tensor, factor: Factor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Token factors (n, rank) as buffers, the same for every layer of a window; name is "key" or "value"."""
    code = factor.code
    if code is None:
        return {f"{name}_factors": narrow(factors, dtype)}
    codes, norms = code.encode(factors)
    return {f"{name}_factors": codes, f"{name}_norms": norms}


def basis(name: str, basis: Tensor, factor: Factor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A layer's basis (kv_heads, rank, dim) as buffers."""
    if factor.code is not None:
        basis = factor.code.rotate(basis.transpose(1, 2)).transpose(1, 2)
    if factor.basis_bits == 16:
        return {f"{name}_basis": narrow(basis, dtype)}
    codes, scales = vector_code(basis.shape[-1]).encode(basis)
    return {f"{name}_basis": codes, f"{name}_scales": scales}


def landmarks(marks: Tensor) -> dict[str, Tensor]:
    """Mean keys (kv_heads, chunks, key_dim) after RoPE as buffers."""
    codes, scales = landmark_code(marks.shape[-1]).encode(marks)
    return {"landmarks": codes, "landmark_scales": scales}


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A 16-bit copy, in bfloat16 where the wanted dtype is too narrow."""
    beyond = bool((x.abs() > torch.finfo(dtype).max).any())
    return x.to(torch.bfloat16 if beyond else dtype).contiguous().clone()
