"""Low-rank rows of a batch that the same launches read, and where each one's buffers lie: a table on the device.

Rows are in memory of their own and differ in tokens, ranks and codes. A program looks up what is its row's: how far its
tensors are from the first row's, whose address the launch is given, and its sizes. A batch of one needs no table: its
launches are given everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.transfer import sent

COLUMNS = 32
"""Of eight components each, that a program decodes of a row."""
FIELDS = 32
"""Numbers of a row in the table: `lowrank_rows_triton` names them."""
ALIGNED = 16
"""Elements; how far tensors are from each other is a multiple where memory is as PyTorch gives it."""


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
    def padded(self) -> int:
        """Components of a decoded row, zeros at its end among them."""
        return -(-self.rank // 16) * 16

    @property
    def dim(self) -> int:
        """Channels of a head."""
        return self.basis.shape[2]

    @property
    def scratch(self) -> torch.dtype:
        """Of decoded factors."""
        return torch.float16 if self.scales is not None else self.basis.dtype

    @property
    def eights(self) -> bool:
        """Whether every group's components are a multiple of eight."""
        return self.code is not None and all(count % 8 == 0 for _, count in self.code.groups)

    @property
    def parts(self) -> int:
        """Programs that decode a token."""
        if self.code is None:
            return -(-self.padded // (8 * COLUMNS))
        return len(tiles(self.code, self.factors.device)[0])


@dataclass(frozen=True)
class Row:
    """What one row of a batch reads.

    Attributes
    ----------
    number : int
        Of the batch.
    keys, values : Factors
    start : int
        Row of the position tables that the first token has.
    outliers : (kv_heads, n) or None
        Chunks that a KV head does not read.
    landmarks : (kv_heads, chunks, key_dim / 2) uint8, or None
        Mean keys in rotated codes of 4 bits.
    landmark_scales : (kv_heads, chunks, 1) or None
    """

    number: int
    keys: Factors
    values: Factors
    start: int = 0
    outliers: Tensor | None = None
    landmarks: Tensor | None = None
    landmark_scales: Tensor | None = None

    @property
    def tokens(self) -> int:
        """In factors."""
        return len(self.keys.factors)

    @property
    def kind(self) -> tuple[object, ...]:
        """Rows for which it is the same may be read by the same launches."""
        tensors = [self.outliers, self.landmarks, self.landmark_scales]
        for side in (self.keys, self.values):
            tensors += [side.factors, side.norms, side.basis, side.scales, side.mean]
        return (*(one is not None and one.dtype for one in tensors), self.keys.eights, self.values.eights)


class Rows:
    """Rows of one kind; makes, on the current stream, tables that launches on others must not.

    Parameters
    ----------
    rows : sequence of Row
    batch : int
        Rows of the batch that they are of.

    Attributes
    ----------
    first : Row
        Whose tensors the launches are given.
    table : (rows, FIELDS) int64
    align : int
        Every tensor is a multiple of so many elements from the first row's; 0: a batch of one, whose table has nothing.
    tokens, chunks, outliers : int
        The most of any row.
    ranks, padded, parts, groups : (int, int)
        The most of any row's keys and values.
    """

    def __init__(self, rows: Sequence[Row], batch: int):
        self.rows, self.first, self.align = tuple(rows), rows[0], 0
        device = self.first.keys.factors.device
        for side in (self.first.keys, self.first.values):
            if side.scales is not None:
                rotation(side.dim, device)
        self.tokens = max(row.tokens for row in rows)
        self.chunks = max(0 if row.landmarks is None else row.landmarks.shape[1] for row in rows)
        self.outliers = max(0 if row.outliers is None else row.outliers.shape[1] for row in rows)
        sides = [row.keys for row in rows], [row.values for row in rows]
        self.ranks, self.padded, self.parts = (
            tuple(max(getattr(one, name) for one in side) for side in sides)
            for name in ("rank", "padded", "parts")
        )
        self.groups = tuple(max(0 if x.norms is None else x.norms.shape[1] for x in side) for side in sides)
        numbers = [self._numbers(row) for row in rows]
        self.table = self.first.keys.factors
        if batch > 1:
            self.align = math.gcd(ALIGNED, *(far for _, away in numbers for far in away))
            self.table = sent(torch.tensor([fields for fields, _ in numbers], dtype=torch.int64), device)

    def __len__(self) -> int:
        return len(self.rows)

    def _numbers(self, row: Row) -> tuple[list[int], list[int]]:
        """A row of the table, and those of its numbers that say how far tensors are from the first row's."""
        first, away = self.first, []

        def far(one: Tensor | None, base: Tensor | None) -> int:
            away.append(0 if one is None or base is None else _far(one, base))
            return away[-1]

        fields = [
            row.number, row.start, row.tokens,
            far(row.outliers, first.outliers), 0 if row.outliers is None else row.outliers.shape[1],
            far(row.landmarks, first.landmarks), far(row.landmark_scales, first.landmark_scales),
            0 if row.landmarks is None else row.landmarks.shape[1],
        ]  # fmt: skip
        for side, base in ((row.keys, first.keys), (row.values, first.values)):
            tables = [
                (None, None) if x.code is None else tiles(x.code, x.factors.device) for x in (side, base)
            ]
            fields += [
                far(side.factors, base.factors), far(side.norms, base.norms),
                *(far(one, other) for one, other in zip(*tables, strict=True)),
                far(side.basis, base.basis), far(side.scales, base.scales), far(side.mean, base.mean),
                side.rank, side.factors.shape[1], 0 if side.norms is None else side.norms.shape[1], side.parts, 0,
            ]  # fmt: skip
        return fields, away


def alike(rows: Iterable[Row], batch: int, most: int | None = None) -> list[Rows]:
    """Rows of each kind together; with `most`, no more of them than have so many tokens in all."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    found = []
    for some in kinds.values():
        step = len(some) if most is None else max(1, most // max(row.tokens for row in some))
        found += [Rows(some[start : start + step], batch) for start in range(0, len(some), step)]
    return found


def exact(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Exact:
    """Exact tokens of every row of a batch, (kv_heads, tokens, key_dim | value_dim) each, contiguous."""
    if len(keys) == 1:
        return Exact(keys[0][None], values[0][None])
    longest = max(range(len(keys)), key=lambda row: keys[row].shape[1])
    places = [
        [_far(one, keys[longest]), _far(other, values[longest]), one.shape[1]]
        for one, other in zip(keys, values, strict=True)
    ]
    return Exact(
        keys[longest][None],
        values[longest][None],
        places=sent(torch.tensor(places, dtype=torch.int64), keys[0].device),
        align=math.gcd(ALIGNED, *(far for place in places for far in place[:2])),
    )


def rotation(dim: int, device: torch.device) -> Tensor:
    """The rotation of the 8-bit code of vectors, (dim, dim) float32."""
    ((matrix, _),) = RotatedCode(((8, dim),)).tables(device)
    return matrix


@cache
def tiles(code: RotatedCode, device: torch.device) -> tuple[Tensor, Tensor]:
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


def power(n: int, least: int = 16) -> int:
    """The power of two at or above, not below `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def programs(device: torch.device) -> int:
    """Multiprocessors."""
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def _far(one: Tensor, base: Tensor) -> int:
    """Elements from one tensor to another."""
    return (one.data_ptr() - base.data_ptr()) // one.element_size()
