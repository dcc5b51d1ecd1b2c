"""Where each head's and grade's tokens lie in the buffers of a graded store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.packing import packed_bytes
from kvfold.stores.graded.frame import Frame, GradedLayout
from kvfold.stores.ragged import Cursor


class Section(NamedTuple):
    """Codes of one width of one head: some tokens by some channels."""

    width: int
    head: int
    start: int
    """First token, as the head's tokens are ordered."""
    stop: int
    column: int
    """First channel, as the head's channels are ordered."""
    channels: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return packed_bytes(self.channels, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return (self.stop - self.start) * self.row_bytes


class Block(NamedTuple):
    """Sections of one width whose codes follow each other."""

    codes: Tensor
    """View (bytes,)"""
    sections: list[Section]

    def decode(self) -> Iterator[tuple[Section, Tensor]]:
        """Each section with its values (tokens, channels) float32, by one look-up for all."""
        shapes = [(section.stop - section.start, section.channels) for section in self.sections]
        return zip(self.sections, lookup.values(self.codes, self.sections[0].width, shapes), strict=True)

    def of_head(self, head: int) -> Block:
        """The sections of one head only, which follow each other too."""
        before = sum(section.nbytes for section in self.sections if section.head < head)
        chosen = [section for section in self.sections if section.head == head]
        return Block(self.codes[before : before + sum(section.nbytes for section in chosen)], chosen)


class Head(NamedTuple):
    """Where one head's tokens lie in its row's buffers: coded ones first, then fine, then exact."""

    first: int
    coded: int
    fine: slice
    exact: slice

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return self.coded + self.fine.stop - self.fine.start + self.exact.stop - self.exact.start


@dataclass(frozen=True)
class Row:
    """Views of one row."""

    buffers: dict[str, Tensor]
    """The row's part of every buffer but the counts"""
    heads: list[Head]
    sections: tuple[list[Section], list[Section]]
    """Of key codes and of value codes"""
    block: int
    """Bytes of a block of codes at most"""

    @cached_property
    def keys(self) -> list[Block]:
        """Key codes in blocks, cut when first attended to: a long prompt has many."""
        return _blocks(self.buffers["key_codes"], self.sections[0], self.block)

    @cached_property
    def values(self) -> list[Block]:
        """Value codes in blocks."""
        return _blocks(self.buffers["value_codes"], self.sections[1], self.block)


def cut(
    layout: GradedLayout,
    frame: Frame,
    buffers: Mapping[str, Tensor],
    counts: list[list[list[int]]],
    block: int,
) -> list[Row]:
    """Views of each row, which `counts` cut (rows, kv_heads, grades + 2); blocks of codes have at most `block` bytes, if one token has no more.

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """
    if len(layout.shifts) != len(layout.real_tokens) or len(counts) != len(layout.real_tokens):
        raise ValueError("counts, shifts and real_tokens disagree on the number of rows")
    cursor = Cursor({name: buffer for name, buffer in buffers.items() if name != "counts"})
    key_counts, value_bits = frame.grades
    rows = []
    for row, own_counts in enumerate(counts):
        starts = dict(cursor.at)
        sections = (
            key_sections(layout.widths, own_counts, key_counts[row]),
            value_sections(layout.value_dim, own_counts, value_bits[row]),
        )
        for name, own in zip(("key_codes", "value_codes"), sections, strict=True):
            cursor.take(name, sum(section.nbytes for section in own))
        heads = []
        first = fine = exact = 0
        for *graded, fine_count, exact_count in own_counts:
            coded = sum(graded)
            heads.append(
                Head(first, coded, slice(fine, fine + fine_count), slice(exact, exact + exact_count))
            )
            first += coded + fine_count + exact_count
            fine, exact = fine + fine_count, exact + exact_count
        cursor.take("positions", first)
        cursor.take("magnitudes", first - fine - exact)
        for name in ("fine_keys", "fine_values", "fine_scales"):
            cursor.take(name, fine)
        for name in ("exact_keys", "exact_values"):
            cursor.take(name, exact)
        parts = {name: buffers[name][start : cursor.at[name]] for name, start in starts.items()}
        rows.append(Row(parts, heads, sections, block))
    cursor.finish()
    return rows


def _blocks(codes: Tensor, sections: list[Section], size_of_block: int) -> list[Block]:
    """Sections of one width together, as many as one look-up may take."""
    blocks: list[Block] = []
    pieces: list[Section] = []
    begin = size = 0

    def flush() -> None:
        nonlocal begin, size, pieces
        if pieces:
            blocks.append(Block(codes[begin : begin + size], pieces))
        begin, size, pieces = begin + size, 0, []

    for section in sections:
        step = max(1, size_of_block // section.row_bytes)
        for start in range(section.start, section.stop, step):
            piece = section._replace(start=start, stop=min(start + step, section.stop))
            if pieces and (pieces[-1].width != piece.width or size + piece.nbytes > size_of_block):
                flush()
            pieces.append(piece)
            size += piece.nbytes
    flush()
    return blocks


def key_sections(
    widths: tuple[int, ...], counts: list[list[int]], channels: list[list[list[int]]]
) -> list[Section]:
    """Key codes of one row in the order they are stored in.

    Parameters
    ----------
    widths : tuple of int
    counts : (heads, grades + 2)
        Tokens.
    channels : (heads, grades, widths)
    """
    sections = []
    for index, width in enumerate(widths):
        for head, (head_counts, head_channels) in enumerate(zip(counts, channels, strict=True)):
            start = 0
            for count, by_width in zip(head_counts, head_channels):
                if count and by_width[index]:
                    column = sum(by_width[:index])
                    sections.append(Section(width, head, start, start + count, column, by_width[index]))
                start += count
    return sections


def value_sections(dim: int, counts: list[list[int]], bits: list[list[int]]) -> list[Section]:
    """Value codes of one row in the order they are stored in; bits (heads, grades)."""
    sections = []
    for width in range(8, 0, -1):
        for head, (head_counts, head_bits) in enumerate(zip(counts, bits, strict=True)):
            start = 0
            for count, own in zip(head_counts, head_bits):
                if count and own == width:
                    sections.append(Section(width, head, start, start + count, 0, dim))
                start += count
    return sections


def sizes(layout: GradedLayout, frame: Frame, counts: list[list[int]], row: int) -> dict[str, list[int]]:
    """Elements of each piece of one row's buffers that one head and grade own, in the order they are stored in."""
    channels, bits = frame.grades[0][row], frame.grades[1][row]
    heads = list(zip(counts, channels, bits, strict=True))
    keys = [
        count * packed_bytes(by_width[index], width)
        for index, width in enumerate(layout.widths)
        for head_counts, head_channels, _ in heads
        for count, by_width in zip(head_counts, head_channels)
    ]
    values = [
        count * packed_bytes(layout.value_dim, width) * (own == width)
        for width in range(8, 0, -1)
        for head_counts, _, head_bits in heads
        for count, own in zip(head_counts, head_bits)
    ]
    fine, exact = [head[-2] for head in counts], [head[-1] for head in counts]
    return {
        "positions": [count for head in counts for count in head],
        "key_codes": keys,
        "value_codes": values,
        "magnitudes": [count for head in counts for count in head[:-2]],
        "fine_keys": fine,
        "fine_values": fine,
        "fine_scales": fine,
        "exact_keys": exact,
        "exact_values": exact,
    }
