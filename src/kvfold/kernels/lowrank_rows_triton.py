"""What the Triton kernels of `lowrank_choose` and `lowrank_decode` share: where a row lies, and small functions."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(32)
"""Numbers of a row in the table of `lowrank_rows.Rows`, in the order of these names."""
ROW, START, TOKENS, OUTLIERS, BANNED, LANDMARKS, LANDMARK_SCALES, CHUNKS = map(tl.constexpr, range(8))
KEYS, VALUES = map(tl.constexpr, (8, 20))
"""Where those of a side begin."""
FACTORS, NORMS, TILES, LEVELS, BASIS, SCALES, MEAN, RANK, NBYTES, GROUPS, PARTS = map(tl.constexpr, range(11))


@triton.jit
def number(table, field, one, ALIGN: tl.constexpr):
    """A number of a row; of the only one where there is no table."""
    if ALIGN:
        one = tl.load(table + field).to(tl.int32)
    return one


@triton.jit
def place(pointer, table, field, ALIGN: tl.constexpr):
    """Where a row's tensor begins, given where the first row's does."""
    if ALIGN:
        pointer += tl.multiple_of(tl.load(table + field), ALIGN)
    return pointer


@triton.jit
def power_above(x):
    """The power of two at or above: dividing by it costs no bit."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(x, 1e-30))))


@triton.jit
def left_out(chunk, outliers, head, banned, BANNED_UP: tl.constexpr):
    """Which of some chunks are a head's outliers."""
    one = tl.arange(0, BANNED_UP)
    them = tl.load(outliers + head * banned + one, mask=one < banned, other=0).to(tl.int32)
    them = tl.where(one < banned, them, -1)
    return tl.max((chunk[:, None] == them[None, :]).to(tl.int32), 1) != 0
