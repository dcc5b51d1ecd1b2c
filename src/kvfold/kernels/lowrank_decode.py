"""Decode attention over low-rank keys and values: rebuilt a tile at a time, or only where landmarks recommend it, in Triton.

Rows of token factors, all of them in pieces or the chosen chunks only, are decoded once for all heads into a small scratch;
keys are rebuilt from it tile by tile, turned to their positions by turning the query the other way, and forgotten; values are
never rebuilt: weights times factors is a short vector, which meets the basis once. One set of launches serves the rows of a
batch, as many at a time as the scratch holds. Nothing waits for the host, so that a CUDA graph can replay it.
`stores.lowrank` is the plain twin.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.codebook import integer_levels
from kvfold.kernels.dense_decode import MAX_DIM, problem
from kvfold.kernels.lowrank_rows import COLUMNS, Factors, Rows, power, programs, rotation, tiles
from kvfold.kernels.position_bias import FINE, Turns
from kvfold.kernels.reference import Part
from kvfold.kernels.streams import aside, joined

__all__ = ["NEAR", "PIECE", "Decoded", "attend", "fits", "narrow", "problem"]

Decoded = tuple[Tensor, Tensor, Tensor]
"""Of chosen chunks: numbers of keys and of values (rows * sets, tokens, rank), and factors on them (2, rows * sets, tokens)."""

MAX_HEADS = 64
"""Most query heads."""
PIECE, CHOSEN = 1 << 13, 1 << 17
"""Tokens in the scratch at a time: of all, about what a cache of 50 MB holds; of chosen ones, as many rows' as fill the GPU
several times over with each kernel."""
NEAR, BASIS, VALUES = range(3)
"""Numbers of the streams aside on which other tokens are read, and the keys' basis and values decoded."""


def fits(query: Tensor, keys: Factors, values: Factors) -> bool:
    """Whether shapes and dtypes are such that the kernels serve: one query a head."""
    return (
        query.shape[2] == 1
        and query.shape[3] == keys.dim
        and query.shape[1] <= MAX_HEADS
        and max(keys.dim, values.dim) <= MAX_DIM
        and all(side.code is not None or side.factors.dtype == side.scratch for side in (keys, values))
    )


def narrow(turns: Turns) -> Turns:
    """Tables of 16 bits: half of what a program reads, and as many registers."""
    tables = {
        name: getattr(turns, name).half() for name in ("coarse_cos", "coarse_sin", "fine_cos", "fine_sin")
    }
    return turns._replace(**tables)


def attend(
    query: Tensor,
    rows: Rows,
    turns: Turns | None,
    near: Part,
    into: Part,
    scaling: float,
    softcap: float | None = None,
    *,
    chosen: Tensor | None = None,
    chunk: int = 1,
    piece: int | None = None,
    decoded: Decoded | None = None,
) -> Decoded | None:
    """Attention of one query a head over all tokens in factors, or over chosen chunks, and over others beside them.

    Parameters
    ----------
    query : (batch, heads, 1, key_dim)
        Contiguous.
    rows : Rows
    turns : Turns or None
        RoPE's tables, `narrow` ones rather; None where keys are as they are.
    near : (outputs (batch, heads, splits, value_dim) float32, log-sum-exp (batch, heads, splits) float32)
        Of other tokens, by splits (`dense_decode.partials`), launched aside on `NEAR`.
    into : (output (batch, heads, 1, value_dim), log-sum-exp (batch, heads, 1) float32)
        Written where these rows are.
    scaling : float
    softcap : float, optional
    chosen : (batch, sets, n) int32, optional
        Chunks that each KV head, or all (one set), read. Without them, one row's tokens or all rows' fit in a piece.
    chunk : int
        Tokens in one.
    piece : int, optional
        Tokens decoded at a time, a multiple of 128: `PIECE`, or `CHOSEN` of chosen chunks.
    decoded : Decoded, optional
        What another layer with the same factors returned for the same rows and chunks.

    Returns
    -------
    Decoded or None
        Of chosen chunks, where all were decoded at once.
    """
    kernels, heads, device = _kernels(), query.shape[1], query.device
    keys, values = rows.first.keys, rows.first.values
    kv_heads, dim, group = keys.basis.shape[0], keys.dim, heads // keys.basis.shape[0]
    sets, selected = (1, 0) if chosen is None else chosen.shape[1:]
    tokens = rows.tokens if chosen is None else selected * chunk
    piece = piece or (PIECE if chosen is None else CHOSEN)
    length, pieces = -(-min(tokens, piece) // 16) * 16, -(-tokens // piece)
    # As many rows at a time as fit, about as many each time.
    together = -(-len(rows) // -(-len(rows) // max(1, piece // (sets * length))))
    with aside(device, BASIS):
        basis, basis_scale, pitch = _key_basis(rows)
    at = [query] * 5 if turns is None else [turns.partner, *turns[2:6]]
    outliers = rows.first.outliers
    width = min(128, power(rows.ranks[1]))
    blocks = -(-rows.ranks[1] // width)
    splits = -(-2 * programs(device) // (together * sets * blocks))
    each = max(64, -(-length // splits // 64) * 64)
    splits = -(-length // each)
    every = pieces * splits
    partial = query.new_empty(len(rows), heads, every, blocks * width, dtype=torch.float32)
    partial_lse = query.new_empty(len(rows), heads, every, dtype=torch.float32)
    logits = query.new_empty(together, heads, length, dtype=torch.float32)
    # Keys of a tile are in registers.
    tile = 128 if dim <= 128 else 64
    scratch = _Scratch(rows, sets, together, length, chosen, chunk, decoded)
    for begin in range(0, len(rows), together):
        some = min(together, len(rows) - begin)
        for index in range(pieces):
            first, count = index * piece, min(piece, tokens - index * piece)
            with aside(device, VALUES) if decoded is None else nullcontext():
                value_rows, value_scales, value_stride, value_there = scratch.fill(
                    1, begin, some, first, count
                )
            key_rows, key_scales, key_stride, key_there = scratch.fill(0, begin, some, first, count)
            if not (begin or index):
                joined(device, BASIS)
            kernels.logits[(kv_heads, -(-count // tile), some)](
                query, key_rows, key_scales, key_stride, basis, basis_scale, query if keys.mean is None else keys.mean, *at,
                query if chosen is None else chosen, query if outliers is None else outliers, logits, rows.table, begin,
                length, count, first, rows.first.start, keys.rank, pitch, selected,
                0 if outliers is None else outliers.shape[1], scaling, 1.0 if turns is None else turns.scale, softcap or 0.0,
                GROUP=group, ROWS=power(group), DIM=dim, DIM_UP=power(dim), CHUNK=chunk, SETS=sets,
                BANNED_UP=rows.outliers and power(rows.outliers), FINE=FINE, GATHERED=chosen is not None,
                SCALED=keys.code is not None, BASIS_SCALED=keys.scales is not None, MEANS=keys.mean is not None,
                TURNED=turns is not None, CAPPED=softcap is not None, THERE=key_there, ALIGN=rows.align, BLOCK=tile, STEP=64,
                num_warps=8, num_stages=4,
            )  # fmt: skip
            if decoded is None:
                joined(device, VALUES)
            kernels.mix[(splits, blocks, sets * some)](
                logits, value_rows, value_scales, value_stride, partial, partial_lse, rows.table, begin, sets, values.rank,
                length, count, first, each, every, index * splits, blocks * width, HEADS=heads // sets,
                ROWS=power(heads // sets), WIDTH=width, GATHERED=chosen is not None, SCALED=values.code is not None,
                THERE=value_there, ALIGN=rows.align, BLOCK=64, num_warps=4, num_stages=3,
            )  # fmt: skip
    coded = values.scales is not None
    part = min(width, 64)
    parts = blocks * width // part
    rebuilt = query.new_empty(len(rows), heads, parts, values.dim, dtype=torch.float32)
    kernels.rebuild[(kv_heads, parts, len(rows))](
        partial, partial_lse, values.basis, values.scales if coded else query, rebuilt, rows.table, every, parts, values.rank,
        blocks * width, _step(values.dim) if coded else 1.0, GROUP=group, ROWS=power(group), VALUE=values.dim,
        VALUE_UP=power(values.dim), SPLITS_UP=power(every), CODED=coded, ALIGN=rows.align, BLOCK=part, STEP=8, num_warps=8,
    )  # fmt: skip
    joined(device, NEAR)
    kernels.finish[(heads, -(-values.dim // 32), len(rows))](
        rebuilt, partial_lse, rotation(values.dim, device) if coded else query, query if values.mean is None else values.mean,
        *near, *into, rows.table, every, parts, near[1].shape[2], GROUP=group, VALUE=values.dim, VALUE_UP=power(values.dim),
        SPLITS_UP=power(every), BLOCKS_UP=power(parts), NEAR_UP=power(near[1].shape[2]), CODED=coded,
        MEANS=values.mean is not None, ALIGN=rows.align, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return None if chosen is None or pieces > 1 or together < len(rows) else scratch.all


class _Scratch:
    """Decoded token factors of one piece of some rows: rows of numbers, each beside the factor on it."""

    def __init__(
        self,
        rows: Rows,
        sets: int,
        together: int,
        length: int,
        chosen: Tensor | None,
        chunk: int,
        decoded: Decoded | None = None,
    ):
        self.rows, self.sets, self.length, self.chosen, self.chunk = rows, sets, length, chosen, chunk
        self.sides = rows.first.keys, rows.first.values
        # 16-bit factors that are read in order are read where they lie.
        self.there = [chosen is None and side.code is None for side in self.sides]
        self.filled = decoded is not None
        if decoded is not None:
            *self.numbers, self.scales = decoded
            return
        self.numbers = [
            side.factors
            if there
            else side.factors.new_empty(together * sets, length, most, dtype=side.scratch)
            for side, there, most in zip(self.sides, self.there, rows.padded, strict=True)
        ]
        self.scales = rows.first.keys.factors.new_empty(2, together * sets, length, dtype=torch.float32)

    @property
    def all(self) -> Decoded:
        return self.numbers[0], self.numbers[1], self.scales

    def fill(
        self, part: int, begin: int, some: int, first: int, count: int
    ) -> tuple[Tensor, Tensor, int, bool]:
        """Of keys (0) or values (1): numbers, factors on them, numbers from one token to the next, and whether nothing was decoded."""
        side, numbers, scales, chosen = self.sides[part], self.numbers[part], self.scales[part], self.chosen
        if self.there[part]:
            return numbers, numbers, 0, True
        if self.filled:
            return numbers, scales, self.rows.padded[part], False
        of, levels, norms = numbers, numbers, numbers
        if side.code is not None and side.norms is not None:
            of, levels, norms = *tiles(side.code, numbers.device), side.norms
        _kernels().unpack[(-(-count // 32), self.rows.parts[part], self.sets * some)](
            side.factors, norms, of, levels, numbers, scales, self.rows.table, _kernels().SIDES[part], begin, self.sets,
            side.rank, side.factors.shape[1], norms.shape[-1], self.rows.padded[part], numbers if chosen is None else chosen,
            self.length, count, first, 0 if chosen is None else chosen.shape[2], CODED=side.code is not None,
            EIGHTS=side.eights, GROUPS_UP=power(self.rows.groups[part], 8), CHUNK=self.chunk, GATHERED=chosen is not None, ALIGN=self.rows.align,
            BLOCK=32, STEP=COLUMNS, num_warps=8,
        )  # fmt: skip
        return numbers, scales, self.rows.padded[part], False


def _key_basis(rows: Rows) -> tuple[Tensor, Tensor, int]:
    """Basis rows of keys in 16 bits, the factor on each head's, and how many rows a head has there.

    Decoded ones are (rows, kv_heads, most, dim) and (rows, kv_heads).
    """
    keys = rows.first.keys
    if keys.scales is None:
        return keys.basis, keys.basis, 0
    most, (kv_heads, _, dim) = rows.ranks[0], keys.basis.shape
    basis = torch.empty(len(rows), kv_heads, most, dim, dtype=torch.float16, device=keys.basis.device)
    factor = torch.empty(len(rows), kv_heads, dtype=torch.float32, device=keys.basis.device)
    _kernels().unpack_basis[(-(-most // 64), kv_heads, len(rows))](
        keys.basis, keys.scales, rotation(dim, basis.device), basis, factor, rows.table, keys.rank, most, _step(dim), DIM=dim,
        DIM_UP=power(dim), RANK_UP=power(most), ALIGN=rows.align, BLOCK=64, num_warps=8,
    )  # fmt: skip
    return basis, factor, most


@cache
def _step(dim: int) -> float:
    """Between the levels of the 8-bit code of vectors, which are (code - 127.5) times it."""
    return float(integer_levels(8, dim)[-1]) / 127.5


@cache
def _kernels() -> Any:
    from kvfold.kernels import lowrank_decode_triton

    return lowrank_decode_triton
