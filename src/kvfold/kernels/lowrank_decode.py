"""Decode attention over low-rank keys and values: rebuilt a tile at a time, or only where landmarks recommend it, in Triton.

Rows of token factors, all of them in pieces or the chosen chunks only, are decoded once for all heads into a small scratch;
keys are rebuilt from it tile by tile, turned to their positions by turning the query the other way, and forgotten; values are
never rebuilt: weights times factors is a short vector, which meets the basis once. Nothing waits for the host, so that a CUDA
graph can replay it. `stores.lowrank` is the plain twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.dense_decode import MAX_DIM, problem
from kvfold.kernels.position_bias import FINE, Turns
from kvfold.kernels.reference import Part
from kvfold.kernels.streams import aside, joined
from kvfold.kernels.transfer import sent

__all__ = ["Factors", "attend", "choose", "fits", "key_basis", "narrow", "prepare", "problem"]

MAX_HEADS = 64
"""Most query heads."""
PIECE = 1 << 13
"""Tokens in the scratch at a time: about what a cache of 50 MB holds."""
COLUMNS = 32
"""Of eight components each, that a program decodes of a row."""


@dataclass(frozen=True)
class Factors:
    """Keys (before RoPE) or values of one layer as factors.

    Attributes
    ----------
    factors : (tokens, rank) 16-bit, or (tokens, bytes) uint8
    norms : (tokens, groups) or None
    code : RotatedCode or None
        Of the factors; None where they are 16-bit.
    basis : (kv_heads, rank, dim) 16-bit, or uint8 codes of as many bytes
    scales : (kv_heads, rank, 1) or None
        Of coded basis rows.
    mean : (kv_heads, dim) or None
        Added to every token.
    """

    factors: Tensor
    norms: Tensor | None
    code: RotatedCode | None
    basis: Tensor
    scales: Tensor | None
    mean: Tensor | None

    @property
    def rank(self) -> int:
        """Components."""
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return self.basis.shape[2]

    @property
    def scratch(self) -> torch.dtype:
        """Of decoded factors."""
        return torch.float16 if self.scales is not None else self.basis.dtype


def fits(query: Tensor, keys: Factors, values: Factors) -> bool:
    """Whether shapes and dtypes are such that the kernels serve: one query a head."""
    return (
        query.shape[2] == 1
        and query.shape[3] == keys.dim
        and query.shape[1] <= MAX_HEADS
        and max(keys.dim, values.dim) <= MAX_DIM
        and len(keys.factors) > 0
        and all(side.code is not None or side.factors.dtype == side.scratch for side in (keys, values))
    )


def prepare(keys: Factors, values: Factors, landmarks: bool) -> None:
    """Make the tables that the kernels read, which are kept, on the current stream: launches on others must not."""
    device = keys.factors.device
    for side in (keys, values):
        if side.code is not None:
            _tiles(side.code, device)
        if side.scales is not None:
            _rotation(side.dim, device)
    if landmarks:
        _landmark_tables(keys.dim, device)


def narrow(turns: Turns) -> Turns:
    """Tables of 16 bits: half of what a program reads, and as many registers."""
    tables = {
        name: getattr(turns, name).half() for name in ("coarse_cos", "coarse_sin", "fine_cos", "fine_sin")
    }
    return turns._replace(**tables)


def choose(
    query: Tensor,
    landmarks: Tensor,
    scales: Tensor,
    outliers: Tensor,
    scaling: float,
    selected: int,
    sets: int,
) -> Tensor:
    """Chunks whose landmarks get the most of the query heads' softmax over landmarks.

    Parameters
    ----------
    query : (1, heads, 1, key_dim)
    landmarks : (kv_heads, chunks, key_dim / 2) uint8
        Mean keys in rotated codes of 4 bits.
    scales : (kv_heads, chunks, 1)
    outliers : (kv_heads, n)
        Chunks that a KV head leaves out.
    scaling : float
    selected : int
        At most `chunks`.
    sets : kv_heads or 1
        Each KV head chooses, or all together.

    Returns
    -------
    (sets, selected) int32, ascending; of chunks whose shares differ by less than a hundredth, the first ones
    """
    kernels, (kv_heads, chunks, nbytes) = _kernels(), landmarks.shape
    heads, dim, block, banned = query.shape[1], query.shape[3], 128, outliers.shape[1]
    rotation, powers = _landmark_tables(dim, query.device)
    blocks = -(-chunks // block)
    logits = query.new_empty(heads, chunks, dtype=torch.float32)
    block_lse = query.new_empty(heads, blocks, dtype=torch.float32)
    counts = query.new_empty(sets, kernels.BINS, dtype=torch.int32)
    each = -(-blocks * kv_heads // (2 * _programs(query.device)))
    kernels.score[(-(-blocks // each), kv_heads)](
        query.contiguous(), landmarks, scales, rotation, outliers, logits, block_lse, counts, chunks, blocks, each,
        banned, scaling, *powers, GROUP=heads // kv_heads, ROWS=_rows(heads // kv_heads), DIM=dim, DIM_UP=_power(dim),
        NBYTES=nbytes, NBYTES_UP=_power(nbytes), SETS=sets, BANNED_UP=banned and _power(banned), BLOCK=block,
        num_warps=8, num_stages=4,
    )  # fmt: skip
    shares = query.new_empty(sets, chunks, dtype=torch.int32)
    kernels.share[(blocks, sets)](
        logits, block_lse, shares, counts, chunks, blocks, math.log(heads // sets), HEADS=heads // sets,
        HEADS_UP=_power(heads // sets), BLOCKS_UP=_power(blocks), BLOCK=block, num_warps=4,
    )  # fmt: skip
    chosen = query.new_empty(sets, selected, dtype=torch.int32)
    kernels.choose[(-(-chunks // 1024), sets)](
        shares, counts, chosen, chunks, selected, BLOCK=1024, WIDE=8192, num_warps=8
    )
    return chosen


def attend(
    query: Tensor,
    keys: Factors,
    values: Factors,
    turns: Turns | None,
    start: int,
    scaling: float,
    softcap: float | None = None,
    *,
    chosen: Tensor | None = None,
    chunk: int = 1,
    outliers: Tensor | None = None,
    basis: tuple[Tensor, Tensor] | None = None,
    near: Part | None = None,
    stream: int = 0,
    piece: int = PIECE,
) -> Part:
    """Attention of one query a head over all tokens in factors, or over chosen chunks, and over others beside them.

    Parameters
    ----------
    query : (1, heads, 1, key_dim)
    keys, values : Factors
    turns : Turns or None
        RoPE's tables, `narrow` ones rather; None where keys are as they are.
    start : int
        Row of the tables that the first token has.
    scaling : float
    softcap : float, optional
    chosen : (sets, n) int32, optional
        Chunks that each KV head, or all (one set), read.
    chunk : int
        Tokens in one.
    outliers : (kv_heads, n), optional
        Chunks that a KV head does not read.
    basis : (Tensor, Tensor), optional
        Of `key_basis`.
    near : (outputs (1, heads, splits, value_dim) float32, log-sum-exp (1, heads, splits) float32), optional
        Of other tokens, by splits (`dense_decode.partials`).
    stream : int
        Number of the one aside on which values are decoded beside keys.
    piece : int
        Tokens decoded at a time; a multiple of 128.

    Returns
    -------
    (output (1, heads, 1, value_dim), in the query's dtype with `near` and float32 without; log-sum-exp (1, heads, 1) float32)
    """
    kernels, heads, device = _kernels(), query.shape[1], query.device
    kv_heads, dim = keys.basis.shape[0], keys.dim
    sets = 1 if chosen is None else len(chosen)
    tokens = len(keys.factors) if chosen is None else chosen.shape[1] * chunk
    query = query.contiguous()
    rows, row_scale = key_basis(keys) if basis is None else basis
    at = [query] * 5 if turns is None else [turns.partner, *turns[2:6]]
    banned = 0 if outliers is None else outliers.shape[1]
    width = min(128, max(16, _power(values.rank)))
    blocks = -(-values.rank // width)
    length, pieces = min(tokens, piece), -(-tokens // piece)
    splits = max(1, 2 * _programs(device) // (sets * blocks))
    each = max(64, -(-length // splits // 64) * 64)
    splits = -(-length // each)
    partial = query.new_empty(heads, pieces * splits, blocks * width, dtype=torch.float32)
    partial_lse = query.new_empty(heads, pieces * splits, dtype=torch.float32)
    logits = query.new_empty(heads, length, dtype=torch.float32)
    # Keys of a tile are in registers.
    tile = 128 if dim <= 128 else 64
    scratch = _Scratch(keys, values, sets, length, chosen, chunk)
    for index in range(pieces):
        first, count = index * piece, min(piece, tokens - index * piece)
        with aside(device, stream):
            value_side = scratch.fill(1, first, count)
        key_side = scratch.fill(0, first, count)
        kernels.logits[(kv_heads, -(-count // tile))](
            query, *key_side, rows, row_scale, query if keys.mean is None else keys.mean, *at,
            query if chosen is None else chosen, query if outliers is None else outliers, logits,
            length, count, first, start, keys.rank, 0 if chosen is None else chosen.shape[1], banned, scaling,
            1.0 if turns is None else turns.scale, softcap or 0.0, GROUP=heads // kv_heads,
            ROWS=_rows(heads // kv_heads), DIM=dim, DIM_UP=_power(dim), CHUNK=chunk, SETS=sets, BANNED_UP=banned and _power(banned), FINE=FINE,
            GATHERED=chosen is not None, SCALED=keys.code is not None, BASIS_SCALED=keys.scales is not None,
            MEAN=keys.mean is not None, TURNED=turns is not None, CAPPED=softcap is not None, BLOCK=tile, STEP=64,
            num_warps=8, num_stages=4,
        )  # fmt: skip
        joined(device, stream)
        kernels.mix[(splits, blocks, sets)](
            logits, *value_side, partial, partial_lse, length, count, each, pieces * splits, index * splits, blocks * width,
            HEADS=heads // sets, ROWS=_rows(heads // sets), WIDTH=width, SCALED=values.code is not None,
            BLOCK=64, num_warps=4, num_stages=3,
        )  # fmt: skip
    output = query.new_empty(1, heads, 1, values.dim, dtype=torch.float32 if near is None else query.dtype)
    lse = query.new_empty(1, heads, 1, dtype=torch.float32)
    coded = values.scales is not None
    part = min(width, 64)
    parts = blocks * width // part
    rebuilt = query.new_empty(heads, parts, values.dim, dtype=torch.float32)
    kernels.rebuild[(kv_heads, parts)](
        partial, partial_lse, values.basis, values.scales if coded else query, rebuilt, pieces * splits, parts, values.rank,
        blocks * width, _step(values.dim) if coded else 1.0, GROUP=heads // kv_heads, ROWS=_rows(heads // kv_heads),
        VALUE=values.dim, VALUE_UP=_power(values.dim), SPLITS_UP=_power(pieces * splits), CODED=coded, BLOCK=part, STEP=8,
        num_warps=8,
    )  # fmt: skip
    kernels.finish[(heads, -(-values.dim // 32))](
        rebuilt, partial_lse, _rotation(values.dim, device) if coded else query, query if values.mean is None else values.mean,
        *(near or (partial, partial_lse)), output, lse, pieces * splits, parts, 0 if near is None else near[1].shape[2],
        GROUP=heads // kv_heads, VALUE=values.dim, VALUE_UP=_power(values.dim),
        SPLITS_UP=_power(pieces * splits), BLOCKS_UP=_power(parts),
        NEAR_UP=0 if near is None else _power(near[1].shape[2]), CODED=coded, MEAN=values.mean is not None,
        BLOCK=32, num_warps=4,
    )  # fmt: skip
    return output, lse


class _Scratch:
    """Decoded token factors of one piece: rows of numbers, each beside the factor on it."""

    def __init__(
        self, keys: Factors, values: Factors, sets: int, length: int, chosen: Tensor | None, chunk: int
    ):
        self.sides, self.sets, self.length = (keys, values), sets, length
        self.chosen, self.chunk = chosen, chunk
        # 16-bit factors that are read in order are read where they lie.
        self.there = [chosen is None and side.code is None for side in self.sides]
        self.rows = [
            side.factors
            if there
            else side.factors.new_empty(sets, length, -(-side.rank // 16) * 16, dtype=side.scratch)
            for side, there in zip(self.sides, self.there, strict=True)
        ]
        self.scales = keys.factors.new_empty(2, sets, length, dtype=torch.float32)

    def fill(self, part: int, first: int, count: int) -> tuple[Tensor, Tensor, int]:
        """Of keys (0) or values (1): rows, factors on them, and numbers from one row to the next."""
        side, rows, scales, chosen = self.sides[part], self.rows[part], self.scales[part], self.chosen
        if self.there[part]:
            return rows[first:], rows, rows.shape[1]
        tiles, levels, norms = rows, rows, rows
        parts, groups, eights = -(-rows.shape[-1] // (8 * COLUMNS)), 8, False
        if side.code is not None and side.norms is not None:
            tiles, levels, norms = *_tiles(side.code, rows.device), side.norms
            parts, groups = len(tiles), _power(norms.shape[-1], 8)
            eights = all(count % 8 == 0 for _, count in side.code.groups)
        _kernels().unpack[(-(-count // 32), parts, self.sets)](
            side.factors, norms, tiles, levels, rows, scales, side.rank, side.factors.shape[1], norms.shape[-1], rows.shape[-1],
            rows if chosen is None else chosen, self.length, count, first, 0 if chosen is None else chosen.shape[1],
            CODED=side.code is not None, EIGHTS=eights, GROUPS_UP=groups, CHUNK=self.chunk, GATHERED=chosen is not None,
            BLOCK=32, STEP=COLUMNS, num_warps=8,
        )  # fmt: skip
        return rows, scales, rows.shape[-1]


def key_basis(keys: Factors) -> tuple[Tensor, Tensor]:
    """Basis rows (kv_heads, rank, dim) of keys in 16 bits, and the factor (kv_heads,) on each head's."""
    if keys.scales is None:
        return keys.basis, keys.basis
    kv_heads, rank, dim = keys.basis.shape
    basis = torch.empty(kv_heads, rank, dim, dtype=torch.float16, device=keys.basis.device)
    factor = torch.empty(kv_heads, dtype=torch.float32, device=keys.basis.device)
    _kernels().unpack_basis[(-(-rank // 64), kv_heads)](
        keys.basis, keys.scales, _rotation(dim, basis.device), basis, factor, rank, _step(dim), DIM=dim, DIM_UP=_power(dim),
        RANK_UP=_power(rank), BLOCK=64, num_warps=8,
    )  # fmt: skip
    return basis, factor


def _programs(device: torch.device) -> int:
    """Multiprocessors."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _step(dim: int) -> float:
    """Between the levels of the 8-bit code of vectors, which are (code - 127.5) times it."""
    return float(integer_levels(8, dim)[-1]) / 127.5


def _rotation(dim: int, device: torch.device) -> Tensor:
    """The rotation of that code, (dim, dim) float32."""
    ((rotation, _),) = RotatedCode(((8, dim),)).tables(device)
    return rotation


@cache
def _landmark_tables(dim: int, device: torch.device) -> tuple[Tensor, list[float]]:
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
def _tiles(code: RotatedCode, device: torch.device) -> tuple[Tensor, Tensor]:
    """What programs decode, (n, 8) int32, and the levels of all groups.

    A row: width, group, its first component, its components, first column, first byte, first level, nothing. A column is eight
    components, an eighth of the group apart. The last row is of a row's padding.
    """
    rows, books, start, byte, book = [], [], 0, 0, 0
    for group, ((width, count), (_, levels)) in enumerate(zip(code.groups, code.tables(device), strict=True)):
        for column in range(0, -(-count // 8), COLUMNS):
            rows.append([width, group, start, count, column, byte, book, 0])
        books.append(levels)
        start, byte, book = start + count, byte + packed_bytes(count, width), book + len(levels)
    if start % 16:
        rows.append([0, 0, start, 16 - start % 16, 0, 0, 0, 0])
    return sent(torch.tensor(rows, dtype=torch.int32), device), torch.cat(books)


def _rows(n: int) -> int:
    return max(16, _power(n))


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << max(n - 1, 0).bit_length())


@cache
def _kernels() -> Any:
    from kvfold.kernels import lowrank_decode_triton

    return lowrank_decode_triton
