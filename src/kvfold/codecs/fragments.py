"""Records: 64 coded tokens of one KV head, laid out as tensor cores want their left operand.

A record is 16-bit or 8-bit numbers of its tokens (norms of keys, magnitudes of values), then the codes of its keys and of its
values, a tile of 16 channels after the other. Every tile of keys has a width of its own, all values of a record have one.
Inside a tile the codes lie as 32 threads hold them, eight registers of four each, when a matrix product of 8-bit integers takes
its left operand from registers (PTX ISA, mma.m16n8k16 and m16n8k32): keys with tokens as rows, values with channels as rows.

numbers of tokens (128 bytes each, 64 as logarithms)
    the norm of each group of tiles, then the magnitude; of token 16 i + 8 j + row at index 8 row + 2 i + j
codes of a tile (128 bytes times the width)
    four groups of eight codes a thread. Width 4: a word for each group, its codes in nibbles. 3: the first three groups as at width 4,
    the last one's bits in what is left of their nibbles. 2 and 1: two and four groups in a nibble. 8: a byte a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

TOKENS = 64
"""Tokens of a record."""
TILE = 16
"""Channels of a tile."""
MOST_TILES = 16
WIDTHS = (1, 2, 3, 4, 8)
STEPS = 16
"""Logarithms: steps in an octave, 128 stands for 1."""

Kind = Literal["keys", "values"]


@dataclass(frozen=True)
class RecordFormat:
    """What a record holds.

    Attributes
    ----------
    key_widths : tuple of int
        Width of the codes of each tile of keys: 0 (none), 1, 2, 3, 4 or 8.
    value_width : int
        Width of all values' codes.
    key_norms : int
        Norms of a key: one for each group of tiles, or 0 (all are 1).
    magnitudes : bool
        Values have a magnitude each; otherwise it is 1.
    logarithms : bool
        Norms and magnitudes are bytes, 2 ** ((byte - 128) / STEPS); otherwise float16.

    Raises
    ------
    ValueError
        A width that no record can have, or too many tiles.
    """

    key_widths: tuple[int, ...]
    value_width: int
    key_norms: int = 1
    magnitudes: bool = True
    logarithms: bool = False

    def __post_init__(self) -> None:
        wrong = sorted(({*self.key_widths} - {0, *WIDTHS}) | ({self.value_width} - {*WIDTHS}))
        if wrong:
            raise ValueError(f"records have codes of {WIDTHS} bits, not {wrong}; round them up")
        if not 1 <= len(self.key_widths) <= MOST_TILES:
            raise ValueError(f"records have 1 to {MOST_TILES} tiles of {TILE}, not {len(self.key_widths)}")

    @property
    def dim(self) -> int:
        """Channels of a key, and of a value."""
        return TILE * len(self.key_widths)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each part, as they follow each other: numbers, each tile of keys, all values."""
        numbers = (self.key_norms + self.magnitudes) * self.number_bytes
        tiles = [tile_bytes(width) for width in self.key_widths]
        return [numbers, *tiles, tile_bytes(self.value_width) * len(self.key_widths)]

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of all tokens."""
        return TOKENS * (1 if self.logarithms else 2)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of 64."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Coded:
    """Tokens as records hold them.

    Attributes
    ----------
    keys, values : (..., tokens, dim) uint8
        Codes; those of tiles without any are ignored, and 0 when read.
    key_norms : (..., tokens, groups) or None
        float16, or uint8 logarithms.
    magnitudes : (..., tokens) or None
        Likewise.
    """

    keys: Tensor
    values: Tensor
    key_norms: Tensor | None = None
    magnitudes: Tensor | None = None


def pack(coded: Coded, layout: RecordFormat) -> Tensor:
    """Records of tokens.

    Parameters
    ----------
    coded : Coded
    layout : RecordFormat

    Returns
    -------
    (..., records, layout.nbytes) uint8
        Of 64 tokens each; what is missing in the last one is 0.

    Raises
    ------
    ValueError
        Shapes or dtypes are not those of the format.
    """
    _check(coded, layout)
    keys, values = (_whole(x, 2) for x in (coded.keys, coded.values))
    arrays = [] if coded.key_norms is None else list(coded.key_norms.unbind(-1))
    arrays += [] if coded.magnitudes is None else [coded.magnitudes]
    parts = [_pack_numbers(_whole(x, 1)) for x in arrays]
    tiles = keys.unflatten(-1, (-1, TILE)).unbind(-2)
    parts += [pack_tile(tile, width, "keys") for tile, width in zip(tiles, layout.key_widths) if width]
    parts += [
        pack_tile(tile, layout.value_width, "values") for tile in values.unflatten(-1, (-1, TILE)).unbind(-2)
    ]
    return torch.cat(parts, -1)


def pack_mixed(
    keys: Tensor, values: Tensor, numbers: Tensor, layouts: Sequence[RecordFormat], records: Sequence[int]
) -> Tensor:
    """Records of several formats, one after the other, in as many steps as there are widths.

    Parameters
    ----------
    keys, values : (64 * all records, dim) uint8
        Codes; what is missing in a record is 0.
    numbers : (64 * all records, n) float16, or uint8 logarithms
        Norms, then the magnitude, of those that a format has; what follows is ignored.
    layouts : sequence of RecordFormat
    records : sequence of int
        Of each format.

    Returns
    -------
    (bytes,) uint8

    Raises
    ------
    ValueError
        Shapes or dtypes are not those of the formats.
    """
    device, count = keys.device, sum(records)
    if not count:
        return keys.new_zeros(0)
    for layout in layouts:
        dtype = torch.uint8 if layout.logarithms else torch.float16
        if keys.shape != values.shape or keys.shape != (TOKENS * count, layout.dim) or numbers.dtype != dtype:
            raise ValueError(
                f"{count} records hold {TOKENS * count} tokens of {layout.dim} channels and {dtype} numbers, got"
                f" {tuple(keys.shape)}, {tuple(values.shape)} and {numbers.dtype}"
            )
    repeats = torch.tensor(records)
    tiles = [[*layout.key_widths, *[layout.value_width] * len(layout.key_widths)] for layout in layouts]
    widths = torch.tensor(tiles).repeat_interleave(repeats, 0)
    counts = torch.tensor([one.key_norms + one.magnitudes for one in layouts]).repeat_interleave(repeats)
    # In units of 64 bytes: a number is one, or two of 16 bits; a tile is two a bit.
    unit = numbers.dtype.itemsize
    ends = (2 * widths.sum(1) + unit * counts).cumsum(0)
    begins = ends - 2 * widths.sum(1) - unit * counts
    starts = (ends - 2 * widths.sum(1))[:, None] + 2 * (widths.cumsum(1) - widths)
    data = torch.empty(int(ends[-1]), TOKENS, dtype=torch.uint8, device=device)
    for index in range(int(counts.max())):
        record = (counts > index).nonzero()[:, 0]
        units = (begins[record] + unit * index)[:, None] + torch.arange(unit)
        packed = _pack_numbers(numbers[:, index])[record.to(device)]
        data[units.to(device)] = packed.view(-1, unit, TOKENS)
    half = widths.shape[1] // 2
    codes: dict[Kind, Tensor] = {"keys": keys, "values": values}
    for at, (kind, x) in enumerate(codes.items()):
        by_tile = x.unflatten(0, (-1, TOKENS)).unflatten(-1, (-1, TILE))
        own = slice(at * half, (at + 1) * half)
        for width in {*widths[:, own].flatten().tolist()} - {0}:
            record, tile = (widths[:, own] == width).nonzero(as_tuple=True)
            units = starts[:, own][record, tile][:, None] + torch.arange(2 * width)
            packed = pack_tile(by_tile[record.to(device), :, tile.to(device)], width, kind)
            data[units.to(device)] = packed.view(-1, 2 * width, TOKENS)
    return data.flatten()


def unpack(records: Tensor, layout: RecordFormat, tokens: int) -> Coded:
    """What `pack` was given.

    Parameters
    ----------
    records : (..., records, layout.nbytes) uint8
    layout : RecordFormat
    tokens : int
        Of all the records.

    Raises
    ------
    ValueError
        The records are not of that format, or not as many as the tokens need.
    """
    if records.shape[-1] != layout.nbytes or records.shape[-2] != -(-tokens // TOKENS):
        raise ValueError(
            f"{tokens} tokens are {-(-tokens // TOKENS)} records of {layout.nbytes} bytes, not {tuple(records.shape)}"
        )
    stored, *keys, values = records.split(layout.sizes, -1)
    count = layout.key_norms + layout.magnitudes
    chunks = stored.chunk(count, -1) if count else ()
    arrays = [_unpack_numbers(chunk, layout.logarithms)[..., :tokens] for chunk in chunks]
    absent = torch.zeros(*records.shape[:-1], TOKENS, TILE, dtype=torch.uint8, device=records.device)
    key_tiles = [
        unpack_tile(x, width, "keys") if width else absent for x, width in zip(keys, layout.key_widths)
    ]
    value_tiles = [
        unpack_tile(x, layout.value_width, "values") for x in values.chunk(len(layout.key_widths), -1)
    ]
    return Coded(
        torch.cat(key_tiles, -1).flatten(-3, -2)[..., :tokens, :],
        torch.cat(value_tiles, -1).flatten(-3, -2)[..., :tokens, :],
        torch.stack(arrays[: layout.key_norms], -1) if layout.key_norms else None,
        arrays[-1] if layout.magnitudes else None,
    )


def tile_bytes(width: int) -> int:
    """Bytes of a tile's codes."""
    return TOKENS * TILE * width // 8


def pack_tile(codes: Tensor, width: int, kind: Kind) -> Tensor:
    """Codes (..., 64 * n, 16) uint8 of one tile as bytes (..., n, 128 * width)."""
    codes = codes.unflatten(-2, (-1, TOKENS))
    if kind == "keys":  # tokens (4, half of the rows, row), channels (thread of four, byte)
        codes = codes.unflatten(-2, (4, 2, 8)).unflatten(-1, (4, 4)).movedim((-3, -2), (-5, -4))
    else:  # tokens (4, low bit of the byte, thread of four, high bit), channels (half of the rows, row)
        codes = codes.unflatten(-2, (4, 2, 4, 2)).unflatten(-1, (2, 8))
        codes = codes.movedim((-1, -4, -6, -2, -3, -5), (-6, -5, -4, -3, -2, -1))
    codes = codes.reshape(*codes.shape[: -5 if kind == "keys" else -6], 32, 4, 8)  # thread, group, code
    if width == 8:
        return codes.unflatten(-2, (2, 2)).movedim(-3, -4).flatten(-4)
    first, second, third, fourth = codes.unbind(-2)
    if width == 4:
        return _nibbles(codes).flatten(-3)
    if width == 3:
        words = [x | (fourth >> bit & 1) << 3 for bit, x in enumerate((first, second, third))]
        return torch.cat(
            [_nibbles(torch.stack(words[:2], -2)).flatten(-3), _nibbles(words[2]).flatten(-2)], -1
        )
    if width == 2:
        return _nibbles(torch.stack([first | second << 2, third | fourth << 2], -2)).flatten(-3)
    return _nibbles(first | second << 1 | third << 2 | fourth << 3).flatten(-2)


def unpack_tile(packed: Tensor, width: int, kind: Kind) -> Tensor:
    """The inverse: bytes (..., 128 * width) to codes (..., 64, 16)."""
    if width == 8:
        codes = packed.unflatten(-1, (2, 32, 2, 8)).movedim(-4, -3).flatten(-3, -2)
    elif width == 4:
        codes = _of_nibbles(packed.unflatten(-1, (32, 4, 4)))
    elif width == 3:
        words = torch.cat(
            [packed[..., :256].unflatten(-1, (32, 2, 4)), packed[..., 256:].unflatten(-1, (32, 1, 4))], -2
        )
        nibbles = _of_nibbles(words)
        bits = (nibbles >> 3).unbind(-2)
        fourth = bits[0] | bits[1] << 1 | bits[2] << 2
        codes = torch.cat([nibbles & 7, fourth[..., None, :]], -2)
    elif width == 2:
        nibbles = _of_nibbles(packed.unflatten(-1, (32, 2, 4)))
        codes = torch.stack([nibbles & 3, nibbles >> 2], -2).flatten(-3, -2)
    else:
        nibbles = _of_nibbles(packed.unflatten(-1, (32, 4)))
        codes = torch.stack([nibbles >> bit & 1 for bit in range(4)], -2)
    leading = codes.shape[:-3]
    if kind == "keys":
        codes = codes.reshape(*leading, 8, 4, 4, 2, 4).movedim((-5, -4), (-3, -2))
    else:
        codes = codes.reshape(*leading, 8, 4, 4, 2, 2, 2)
        codes = codes.movedim((-6, -5, -4, -3, -2, -1), (-1, -4, -6, -2, -3, -5))
    return codes.reshape(*leading, TOKENS, TILE)


def numbers(stored: Tensor) -> Tensor:
    """What stored norms or magnitudes (float16, or uint8 logarithms) stand for, float32."""
    return torch.exp2((stored.float() - 128) / STEPS) if stored.dtype == torch.uint8 else stored.float()


def _check(coded: Coded, layout: RecordFormat) -> None:
    shape = coded.keys.shape
    if coded.values.shape != shape or shape[-1] != layout.dim:
        raise ValueError(
            f"keys {tuple(shape)} and values {tuple(coded.values.shape)} must be (..., tokens, {layout.dim})"
        )
    groups = 0 if coded.key_norms is None else coded.key_norms.shape[-1]
    if groups != layout.key_norms or (coded.magnitudes is not None) != layout.magnitudes:
        raise ValueError(
            f"the format has {layout.key_norms} norms and magnitudes {layout.magnitudes}, not {groups} and "
            f"{coded.magnitudes is not None}"
        )
    dtype = torch.uint8 if layout.logarithms else torch.float16
    for x in (coded.key_norms, coded.magnitudes):
        if x is not None and x.dtype != dtype:
            raise ValueError(f"norms and magnitudes of this format are {dtype}, not {x.dtype}")


def _whole(x: Tensor, dims: int) -> Tensor:
    """Pad the tokens, the first of the last `dims` dimensions, to whole records."""
    return torch.nn.functional.pad(x, (0, 0) * (dims - 1) + (0, -x.shape[-dims] % TOKENS))


def _nibbles(codes: Tensor) -> Tensor:
    """Codes (..., 8) below 16 as (..., 4) bytes, low ones first."""
    low, high = codes.unflatten(-1, (4, 2)).unbind(-1)
    return low | high << 4


def _of_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _pack_numbers(x: Tensor) -> Tensor:
    """Numbers (..., 64 * n) as bytes (..., n, 64 | 128)."""
    x = x.unflatten(-1, (-1, 4, 2, 8)).movedim(-1, -3).flatten(-3)
    return x.contiguous().view(torch.uint8)


def _unpack_numbers(packed: Tensor, logarithms: bool) -> Tensor:
    x = packed if logarithms else packed.contiguous().view(torch.float16)
    return x.unflatten(-1, (8, 4, 2)).movedim(-3, -1).flatten(-4)
