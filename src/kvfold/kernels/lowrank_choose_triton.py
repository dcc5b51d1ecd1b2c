"""The Triton kernels of `lowrank_choose`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.lowrank_rows_triton import (
    BANNED,
    CHUNKS,
    FIELDS,
    LANDMARK_SCALES,
    LANDMARKS,
    OUTLIERS,
    ROW,
    left_out,
    number,
    place,
    power_above,
)

BINS = 4096
"""Of a chunk's share: the logarithm of the largest that heads can give in steps of 1 / 128."""
_BINS = tl.constexpr(BINS)


@triton.jit
def _level(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Level of a 4-bit code, an odd polynomial of (2 code - 15) / 16: reading a table takes longer than the rest."""
    x = (code.to(tl.uint16) << 1 | 0x5400).to(tl.float16, bitcast=True) - 64.9375
    square = x * x
    return (((D * square + C) * square + B) * square + A) * x


@triton.jit
def score(
    query, landmarks, scales, rotation, outliers, logits, block_lse, counts, table, chunks, pitch, blocks, each, banned,
    scaling, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, NBYTES: tl.constexpr,
    NBYTES_UP: tl.constexpr, SETS: tl.constexpr, BANNED_UP: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits of one KV head's queries on some blocks of landmarks, and the log-sum-exp of each; no chunk is counted yet."""
    head, one = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    if (tl.program_id(0) == 0) & (head < SETS):
        bins = tl.arange(0, _BINS)
        tl.store(counts + (one * SETS + head) * _BINS + bins, tl.zeros([_BINS], tl.int32))
    rows, dims, byte = tl.arange(0, ROWS), tl.arange(0, DIM_UP), tl.arange(0, NBYTES_UP)
    table += one * FIELDS
    chunks = number(table, CHUNKS, chunks, ALIGN)
    landmarks, scales = (
        place(landmarks, table, LANDMARKS, ALIGN),
        place(scales, table, LANDMARK_SCALES, ALIGN),
    )
    if BANNED_UP:
        outliers, banned = place(outliers, table, OUTLIERS, ALIGN), number(table, BANNED, banned, ALIGN)
    source = number(table, ROW, 0, ALIGN) * heads + head * GROUP + rows
    q = tl.load(
        query + source[None, :] * DIM + dims[:, None],
        mask=(rows[None, :] < GROUP) & (dims[:, None] < DIM),
        other=0.0,
    ).to(tl.float32)
    largest = power_above(tl.max(tl.abs(q), 0))
    q = (q / largest[None, :]).to(tl.float16)
    # A byte holds a channel of the first half and one of the second, whose padding meets a zero.
    inside = (byte < NBYTES)[:, None] & (dims < DIM)[None, :]
    turn = tl.load(rotation + byte[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    first = tl.dot(turn, q).to(tl.float16)
    inside = inside & (byte < DIM - NBYTES)[:, None]
    turn = tl.load(rotation + (NBYTES + byte[:, None]) * DIM + dims[None, :], mask=inside, other=0.0)
    second = tl.dot(turn, q).to(tl.float16)
    target = one * heads + head * GROUP + rows
    padded = (chunks + 15) // 16 * 16
    last = tl.minimum((tl.program_id(0) + 1) * each, (chunks + BLOCK - 1) // BLOCK)
    for block in range(tl.program_id(0) * each, last):
        index = block * BLOCK + tl.arange(0, BLOCK)
        there = index < chunks
        line = head * chunks + index
        codes = tl.load(
            landmarks + line[:, None] * NBYTES + byte[None, :],
            mask=there[:, None] & (byte < NBYTES)[None, :],
            other=0,
        )
        found = tl.dot(_level(codes & 15, A, B, C, D), first)
        found = tl.dot(_level(codes >> 4, A, B, C, D), second, found)
        scale = tl.load(scales + line, mask=there, other=0.0).to(tl.float32)
        found = found * (largest * scaling)[None, :] * scale[:, None]
        if BANNED_UP:
            there = there & ~left_out(index, outliers, head, banned, BANNED_UP)
        found = tl.where(there[:, None], found, float("-inf"))
        top = tl.max(found, 0)
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(found - safe[None, :]), 0)
        lse = tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(block_lse + target * blocks + block, lse, mask=rows < GROUP)
        tl.store(
            logits + target[None, :] * pitch + index[:, None],
            found,
            mask=(rows < GROUP)[None, :] & (index < padded)[:, None],
        )


@triton.jit
def share(
    logits, block_lse, shares, counts, table, chunks, pitch, blocks, largest,
    HEADS: tl.constexpr, HEADS_UP: tl.constexpr, BLOCKS_UP: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the query heads of a set give each chunk of a block, of the softmax over all landmarks: its bin, counted."""
    block, one = tl.program_id(0), tl.program_id(2).to(tl.int64)
    own = one * tl.num_programs(1) + tl.program_id(1)
    chunks = number(table + one * FIELDS, CHUNKS, chunks, ALIGN)
    head, part = tl.arange(0, HEADS_UP), tl.arange(0, BLOCKS_UP)
    line = own * HEADS + head
    index = block * BLOCK + tl.arange(0, BLOCK)
    # Of the padding nothing is given to any: many numbers are read at a time.
    padded = (chunks + 15) // 16 * 16
    # All reads are asked for first.
    found = tl.load(
        logits + line[:, None] * pitch + index[None, :],
        mask=(head[:, None] < HEADS) & (index < padded)[None, :],
        other=float("-inf"),
    )
    lse = tl.load(
        block_lse + line[:, None] * blocks + part[None, :],
        mask=(head[:, None] < HEADS) & (part * BLOCK < chunks)[None, :],
        other=float("-inf"),
    )
    top = tl.max(lse, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = safe + tl.log(tl.maximum(tl.sum(tl.exp(lse - safe[:, None]), 1), 1e-30))
    found -= total[:, None]
    top = tl.max(found, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    given = safe + tl.log(tl.maximum(tl.sum(tl.exp(found - safe[None, :]), 0), 1e-30))
    bin = (_BINS - 1) - 128.0 * (largest - given)
    bin = tl.where(top == float("-inf"), 0.0, tl.minimum(tl.maximum(bin, 0.0), _BINS - 1)).to(tl.int32)
    tl.store(shares + own * pitch + index, tl.where(index < chunks, bin, -1), mask=index < padded)
    tl.atomic_add(counts + own * _BINS + bin, 1, mask=index < chunks, sem="relaxed")


@triton.jit
def choose(
    shares, counts, chosen, table, chunks, pitch, selected,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Those of a block that are among the `selected` largest shares of a set, in order of their index."""
    one, sets, start = tl.program_id(2).to(tl.int64), tl.num_programs(1), tl.program_id(0) * BLOCK
    own = one * sets + tl.program_id(1)
    table += one * FIELDS
    chunks = number(table, CHUNKS, chunks, ALIGN)
    bins = tl.arange(0, _BINS)
    count = tl.load(counts + own * _BINS + bins)
    here = start + tl.arange(0, BLOCK)
    padded = (chunks + 15) // 16 * 16
    mine = tl.load(shares + own * pitch + here, mask=here < padded, other=-1)
    at_least = chunks - tl.cumsum(count, 0) + count
    least = tl.max(tl.where(at_least >= selected, bins, 0), 0)
    left = selected - tl.sum(tl.where(bins > least, count, 0), 0)
    # What earlier blocks take.
    wide = tl.arange(0, WIDE)
    above, equal = tl.zeros([WIDE], tl.int32), tl.zeros([WIDE], tl.int32)
    stop = tl.minimum(start, padded)
    for begin in range(0, stop, WIDE):
        index = begin + wide
        x = tl.load(shares + own * pitch + index, mask=index < stop, other=-1)
        above += (x > least).to(tl.int32)
        equal += (x == least).to(tl.int32)
    equals = tl.sum(equal, 0)
    before = tl.sum(above, 0) + tl.minimum(equals, left)
    equal_here = (mine == least).to(tl.int32)
    take = (mine > least) | ((equal_here != 0) & (equals + tl.cumsum(equal_here, 0) <= left))
    where = before + tl.cumsum(take.to(tl.int32), 0) - 1
    target = chosen + (number(table, ROW, 0, ALIGN) * sets + tl.program_id(1)).to(tl.int64) * selected
    tl.store(target + where, here, mask=take)
