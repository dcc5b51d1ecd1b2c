"""Norms as 8-bit logarithms: half the bytes of float16, and a codebook beside which 2 % more or less cost nothing."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

STEPS = 16
"""Steps in an octave; 128 stands for the unit, so that 8 octaves either way can be told."""


def unit_of(norms: Tensor) -> Tensor:
    """Geometric mean of the norms that are not 0.

    Parameters
    ----------
    norms : (rows, tokens, n) float32

    Returns
    -------
    (rows, n) float32
        0 where all are 0.
    """
    some = norms != 0  # those that are not finite too: they must not pass for a small number
    total = torch.where(some, norms.log2(), 0).sum(1)
    return torch.where(some.any(1), torch.exp2(total / some.sum(1).clamp_min(1)), 0)


def encode(norms: Tensor, unit: Tensor) -> Tensor:
    """Nearest codes, uint8; what lies beyond 8 octaves from the unit (0 too) gets the last one."""
    octaves = (norms.float() / unit.clamp_min(torch.finfo(torch.float32).tiny)).log2()
    return (octaves * STEPS + 128).round().clamp(0, 255).to(torch.uint8)


def decode(codes: Tensor, unit: Tensor) -> Tensor:
    """Norms, float32."""
    return _table(codes.device)[codes.int()] * unit


@cache
def _table(device: torch.device) -> Tensor:
    return torch.exp2((torch.arange(256, device=device) - 128) / STEPS)
