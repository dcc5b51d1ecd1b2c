"""Codebook values straight from packed bytes: one table look-up a byte, no unpacking.

`packing.pack` puts codes i, i + m, ... of a row into its byte i. `pack` here hands it the codes in such an order that
neighbours share a byte, and a table of 256 tuples then turns bytes into values in plain order. Rows of any number of
lengths that follow each other in one buffer need one look-up only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.codecs import packing
from kvfold.codecs.codebook import common_levels

_WHOLE = {2: torch.complex128, 4: torch.float64, 8: torch.float32}
"""A dtype as wide as all float32 values of one byte: gathering single elements is much faster than short rows."""

NEIGHBOURS = frozenset(_WHOLE)
"""Widths of which a byte holds neighbours."""


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    return common_levels(bits).to(device)


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    byte = torch.arange(256)
    levels = common_levels(bits)
    per_byte = 8 // bits
    codes = torch.stack([(byte >> (bits * k)) & (2**bits - 1) for k in range(per_byte)], -1)
    return levels[codes].contiguous().view(_WHOLE[bits]).flatten().to(device)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack rows of codes for `values`.

    Parameters
    ----------
    codes : (rows, n) uint8
    bits : int

    Returns
    -------
    (rows, packed_bytes(n, bits)) uint8
    """
    if bits in _WHOLE:
        per_byte = 8 // bits
        rows, n = codes.shape
        codes = pad(codes, (0, -n % per_byte)).view(rows, -1, per_byte).transpose(1, 2).reshape(rows, -1)
    return packing.pack(codes, bits)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `pack`: codes (rows, n) uint8."""
    if bits not in _WHOLE:
        return packing.unpack(packed, bits, n)
    per_byte = 8 // bits
    codes = packing.unpack(packed, bits, packed.shape[1] * per_byte)
    return codes.view(len(codes), per_byte, -1).transpose(1, 2).flatten(1)[:, :n]


def values(packed: Tensor, bits: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Levels (`codebook.common_levels`) of blocks of packed rows.

    Parameters
    ----------
    packed : (bytes,) uint8
        Blocks of rows from `pack`, one after the other.
    bits : int
    shapes : sequence of (rows, n)
        Rows of each block and codes in a row.

    Returns
    -------
    list of (rows, n) float32
        Views whose rows may lie further apart than n.
    """
    if bits in _WHOLE:
        found = _table(bits, packed.device).index_select(0, packed.int()).view(torch.float32)
        per_byte = 8 // bits
        blocks, start = [], 0
        for rows, n in shapes:
            width = -(-n // per_byte) * per_byte
            blocks.append(found.as_strided((rows, n), (width, 1), start))
            start += rows * width
        return blocks
    sizes = [rows * packing.packed_bytes(n, bits) for rows, n in shapes]
    levels = _levels(bits, packed.device)
    return [
        levels[packing.unpack(block.view(rows, -1), bits, n).int()]
        for block, (rows, n) in zip(packed.split(sizes), shapes, strict=True)
    ]
