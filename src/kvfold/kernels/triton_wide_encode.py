"""The kernel of `kvfold.kernels.wide_encode`, in Triton: a program codes one group of some vectors."""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.wide_encode import table

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode

BLOCK, LANES = 16, 32
"""Vectors of a program; channels, or bytes, at a time."""


@triton.jit
def _code(x, length, boundaries, width):
    """Boundaries below each number: of those of a width's levels, by bisection."""
    unit = x / length[:, None]
    code = tl.zeros(x.shape, tl.int32)
    for bit in range(width):
        probe = code + (1 << (width - 1 - bit))
        code = tl.where(tl.load(boundaries + probe - 1) < unit, probe, code)
    return code


@triton.jit
def _encode(
    y, codes, norms, groups, levels, boundaries, rows, dim, code_bytes,
    BLOCK: tl.constexpr, LANES: tl.constexpr, KEEP_NORM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    first, channels = tl.load(groups + 5 * group), tl.load(groups + 5 * group + 1)
    width, byte = tl.load(groups + 5 * group + 2), tl.load(groups + 5 * group + 3)
    book = tl.load(groups + 5 * group + 4)
    row, lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LANES)
    seen = (row < rows)[:, None]
    source, target = y + row[:, None] * dim + first, codes + row[:, None] * code_bytes

    squares = tl.zeros([BLOCK, LANES], tl.float32)
    for begin in range(0, channels, LANES):
        channel = (begin + lane)[None, :]
        x = tl.load(source + channel, mask=seen & (channel < channels), other=0.0)
        squares += x * x
    norm = tl.sqrt(tl.sum(squares, 1))
    length = tl.maximum(norm, 1e-30)
    if KEEP_NORM:
        squares = tl.zeros([BLOCK, LANES], tl.float32)
        for begin in range(0, channels, LANES):
            channel = (begin + lane)[None, :]
            x = tl.load(source + channel, mask=seen & (channel < channels), other=0.0)
            level = tl.load(levels + book + _code(x, length, boundaries + book, width))
            squares += tl.where(channel < channels, level * level, 0.0)
        norm = norm / tl.maximum(tl.sqrt(tl.sum(squares, 1)), 1e-30)
    tl.store(norms + row * tl.num_programs(1) + group, norm, mask=row < rows)

    # The planes of a width, the widest first, of the low bits (`codecs.packing`); what it has not has no bytes.
    low = 0
    for index in tl.static_range(4):
        plane = 8 >> index
        has = width // plane % 2
        count = (channels * plane + 7) // 8 * has
        for begin in range(0, count, LANES):
            packed = tl.zeros([BLOCK, LANES], tl.int32)
            for share in tl.static_range(1 << index):
                channel = (begin + lane + share * count)[None, :]
                inside = (channel < channels) & (begin + lane < count)[None, :]
                x = tl.load(source + channel, mask=seen & inside, other=0.0)
                bits = _code(x, length, boundaries + book, width) >> low & ((1 << plane) - 1)
                packed |= tl.where(inside, bits << (share * plane), 0)
            here = seen & (begin + lane < count)[None, :]
            tl.store(target + byte + (begin + lane)[None, :], packed.to(tl.uint8), mask=here)
        low, byte = low + plane * has, byte + count


def encode(y: Tensor, code: RotatedCode) -> tuple[Tensor, Tensor]:
    """Codes (n, nbytes) uint8 and norms (n, groups) float32 of y (n, dim); never waits for the device."""
    y = y.float().contiguous()
    rows, groups = len(y), len(code.groups)
    codes = torch.empty(rows, code.nbytes, dtype=torch.uint8, device=y.device)
    norms = torch.empty(rows, groups, device=y.device)
    _encode[(triton.cdiv(rows, BLOCK), groups)](
        y, codes, norms, *table(code, y.device), rows, code.dim, code.nbytes,
        BLOCK=BLOCK, LANES=LANES, KEEP_NORM=code.keep_norm, num_warps=4,
    )  # fmt: skip
    return codes, norms
