"""Codebook values straight from packed bytes: one table look-up a byte, no unpacking.

A byte of a 4-bit plane holds codes i and i + m of a row (see `packing`), so a table of 256 pairs turns m bytes into
2 m values in the order 0, m, 1, m + 1, ... `order` gives that order; whoever multiplies by the values permutes the other
operand once instead of sorting them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvfold.codecs.codebook import gaussian_levels
from kvfold.codecs.packing import unpack

_WHOLE = {2: torch.complex128, 4: torch.float64, 8: torch.float32}
"""A dtype as wide as all float32 values of one byte: gathering single elements is much faster than short rows."""


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    return gaussian_levels(bits).to(device)


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    byte = torch.arange(256)
    levels = gaussian_levels(bits)
    per_byte = 8 // bits
    codes = torch.stack([(byte >> (bits * k)) & (2**bits - 1) for k in range(per_byte)], -1)
    return levels[codes].contiguous().view(_WHOLE[bits]).flatten().to(device)


@cache
def order(n: int, bits: int) -> Tensor:
    """Where each of the values that `values` returns stands in its row: (n,) int64 on the CPU.

    Rows whose last byte is not full come back in plain order.
    """
    per_byte = 8 // bits if bits in _WHOLE else 1
    if n % per_byte:
        return torch.arange(n)
    return torch.arange(n).view(per_byte, -1).t().flatten()


def values(packed: Tensor, bits: int, n: int) -> Tensor:
    """Levels of N(0, 1)'s Lloyd-Max codebook for packed codes.

    Parameters
    ----------
    packed : (rows, packed_bytes(n, bits)) uint8
    bits : int
    n : int
        Codes in a row.

    Returns
    -------
    (rows, n) float32, columns in the order that `order(n, bits)` tells.
    """
    if bits in _WHOLE and n % (8 // bits) == 0:
        found = _table(bits, packed.device).index_select(0, packed.flatten().int())
        return found.view(torch.float32).view(packed.shape[0], n)
    return _levels(bits, packed.device)[unpack(packed, bits, n).long()]
