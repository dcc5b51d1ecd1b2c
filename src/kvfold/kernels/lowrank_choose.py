"""Which chunks of a prompt queries read, by a softmax over their landmarks, in Triton."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.lowrank_rows import Rows, power, programs

BLOCK = 128
"""Chunks that a program scores at a time."""
BEGIN = 4
"""Blocks that take as long as turning the query."""


def choose(query: Tensor, rows: Rows, chosen: Tensor, scaling: float) -> None:
    """Find chunks whose landmarks get the most of the query heads' softmax over landmarks.

    Parameters
    ----------
    query : (batch, heads, 1, key_dim)
        Contiguous.
    rows : Rows
        With landmarks and outliers.
    chosen : (batch, sets, selected) int32
        Written where these rows are, ascending; `selected` is at most the chunks of any. Each KV head chooses (as many
        sets), or all together (one). Of chunks whose shares differ by less than a hundredth, the first ones.
    scaling : float
    """
    kernels, first = _kernels(), rows.first
    assert first.landmarks is not None and first.outliers is not None
    (kv_heads, chunks, nbytes), (_, sets, selected) = first.landmarks.shape, chosen.shape
    heads, dim, count = query.shape[1], query.shape[3], len(rows)
    rotation, powers = _tables(dim, query.device)
    blocks, pitch = -(-rows.chunks // BLOCK), -(-rows.chunks // 16) * 16
    logits = query.new_empty(count, heads, pitch, dtype=torch.float32)
    block_lse = query.new_empty(count, heads, blocks, dtype=torch.float32)
    counts = query.new_empty(count, sets, kernels.BINS, dtype=torch.int32)
    # Two programs a multiprocessor, if of 128 registers.
    each = _each(blocks, kv_heads * count, 2 * programs(query.device))
    group = heads // kv_heads
    kernels.score[(-(-blocks // each), kv_heads, count)](
        query, first.landmarks, first.landmark_scales, rotation, first.outliers, logits, block_lse, counts, rows.table,
        chunks, pitch, blocks, each, first.outliers.shape[1], scaling, *powers, GROUP=group, ROWS=power(group), DIM=dim,
        DIM_UP=power(dim), NBYTES=nbytes, NBYTES_UP=power(nbytes), SETS=sets, BANNED_UP=rows.outliers and power(rows.outliers),
        ALIGN=rows.align, BLOCK=BLOCK, num_warps=8, num_stages=4, maxnreg=128,
    )  # fmt: skip
    shares = query.new_empty(count, sets, pitch, dtype=torch.int32)
    kernels.share[(blocks, sets, count)](
        logits, block_lse, shares, counts, rows.table, chunks, pitch, blocks, math.log(heads // sets), HEADS=heads // sets,
        HEADS_UP=power(heads // sets), BLOCKS_UP=power(blocks), ALIGN=rows.align, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    kernels.choose[(-(-rows.chunks // 1024), sets, count)](
        shares, counts, chosen, rows.table, chunks, pitch, selected, ALIGN=rows.align, BLOCK=1024, WIDE=8192, num_warps=8
    )  # fmt: skip


@cache
def _each(blocks: int, others: int, slots: int) -> int:
    """Blocks of a program, such that programs are done soonest: `slots` run at once, and to begin takes as long as `BEGIN`."""

    def time(each: int) -> int:
        return math.ceil(math.ceil(blocks / each) * others / slots) * (each + BEGIN)

    return min(range(1, blocks + 1), key=time)


@cache
def _tables(dim: int, device: torch.device) -> tuple[Tensor, list[float]]:
    """Rotation (dim, dim) float16 of the code of landmarks, and an odd polynomial that is near its levels.

    The polynomial's error is a twelfth of the code's own.
    """
    ((rotation, _),) = RotatedCode(((4, dim),)).tables(device)
    return rotation.half(), _polynomial(dim)


@cache
def _polynomial(dim: int) -> list[float]:
    x = (torch.arange(16, dtype=torch.float64) * 2 - 15) / 16
    powers = torch.stack([x**power for power in (1, 3, 5, 7)], 1)
    return torch.linalg.lstsq(powers, integer_levels(4, dim).double()[:, None]).solution.flatten().tolist()


@cache
def _kernels() -> Any:
    from kvfold.kernels import lowrank_choose_triton

    return lowrank_choose_triton
