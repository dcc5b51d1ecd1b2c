"""Codes of tokens at their grades."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.affine import quantise
from kvfold.codecs.codebook import common_levels
from kvfold.codecs.codebook import encode as nearest
from kvfold.kernels import graded
from kvfold.kernels.channel_sums import AT_A_TIME
from kvfold.kernels.position_bias import turns
from kvfold.stores.base import Rotary
from kvfold.stores.graded.frame import (
    Frame,
    GradedLayout,
    normal_keys,
    normal_values,
    require,
    value_rotation,
)
from kvfold.stores.graded.sections import Section, key_sections, value_sections
from kvfold.stores.ragged import position_dtype
from kvfold.stores.sixteen import half


def encode(
    keys: Tensor, values: Tensor, grades: Tensor, layout: GradedLayout, frame: Frame, rotary: Rotary | None
) -> tuple[dict[str, Tensor], list[list[list[int]]]]:
    """Buffers of a `GradedStore`, and its counts as the host has them; arguments as for its `encode`."""
    count = frame.value_bits.shape[-1]
    ordered, order = torch.sort(grades, dim=-1, stable=True)
    edges = torch.arange(1, count + 4, dtype=grades.dtype, device=grades.device)
    ends = torch.searchsorted(ordered, edges.expand(*grades.shape[:2], -1).contiguous(), out_int32=True)
    counts = ends[..., 1:] - ends[..., :-1]
    host_counts: list[list[list[int]]] = counts.tolist()
    wide = half(keys.dtype, keys, values)
    rows = [
        _encode_row(keys[row], values[row], order[row], counts[row], own, layout, frame, row, rotary, wide)
        for row, own in enumerate(host_counts)
    ]
    buffers = (
        rows[0] if len(rows) == 1 else {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
    )
    buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
    buffers["counts"] = counts
    return buffers, host_counts


def _encode_row(
    keys: Tensor,
    values: Tensor,
    order: Tensor,
    counts: Tensor,
    host_counts: list[list[int]],
    layout: GradedLayout,
    frame: Frame,
    row: int,
    rotary: Rotary | None,
    wide: torch.dtype,
) -> dict[str, Tensor]:
    """Of one row; `order` has the tokens (kv_heads, tokens) by grade, those that are evicted first."""
    meta = torch.bfloat16 if frame.key_mean.dtype == torch.bfloat16 else torch.float16
    index = [own[own.shape[0] - sum(kept) :] for own, kept in zip(order, host_counts, strict=True)]
    split = [one.split([sum(kept[:-2]), *kept[-2:]]) for one, kept in zip(index, host_counts, strict=True)]

    def picked(part: int) -> tuple[Tensor, Tensor]:
        """Head and token of all fine (1) or exact (2) ones."""
        tokens = torch.cat([pieces[part] for pieces in split])
        heads = torch.arange(len(split), device=tokens.device)
        heads = heads.repeat_interleave(counts[:, part - 3], output_size=len(tokens))
        return heads, tokens

    fine, exact = picked(1), picked(2)
    by_kernels = graded.serves(keys.device, layout.key_dim, layout.value_dim, len(host_counts[0]) - 2)
    fine_keys, fine_values, fine_scales = (_fine_by_kernels if by_kernels else _fine)(
        keys, values, *fine, meta
    )
    buffers = {
        "positions": torch.cat(index),
        "fine_keys": fine_keys,
        "fine_values": fine_values,
        "fine_scales": fine_scales,
        "exact_keys": keys[exact].to(wide),
        "exact_values": values[exact].to(wide),
    }
    key_counts, value_bits = frame.grades[0][row], frame.grades[1][row]
    sections = (
        key_sections(layout.widths, host_counts, key_counts),
        value_sections(layout.value_dim, host_counts, value_bits),
    )
    names = "key_codes", "value_codes"
    for name, own in zip(names, sections, strict=True):
        size = sum(section.nbytes for section in own)
        buffers[name] = torch.empty(size, dtype=torch.uint8, device=keys.device)
    coded = sum(len(pieces[0]) for pieces in split)
    buffers["magnitudes"] = torch.empty(coded, dtype=torch.uint8, device=keys.device)
    if not coded:
        return buffers
    into = buffers["key_codes"], buffers["value_codes"], buffers["magnitudes"]
    if by_kernels:
        empty = _without_values(host_counts, value_bits)
        places = buffers["positions"], [len(one) for one in index], [len(pieces[0]) for pieces in split]
        _by_kernels(keys, values, sections, empty, places, layout, frame, row, rotary, into)
    else:
        chosen = [pieces[0] for pieces in split]
        _plainly(keys, values, sections, chosen, host_counts, layout, frame, row, rotary, into)
    return buffers


def _fine(
    keys: Tensor, values: Tensor, heads: Tensor, tokens: Tensor, meta: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of keys and of values, and (n, 4): scale and minimum of key and value."""
    key, value = (quantise(states[heads, tokens].float(), 8, meta_dtype=meta) for states in (keys, values))
    return key.codes, value.codes, torch.cat([key.scale, key.minimum, value.scale, value.minimum], 1)


def _fine_by_kernels(
    keys: Tensor, values: Tensor, heads: Tensor, tokens: Tensor, meta: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from kvfold.kernels import triton_graded_pack

    return triton_graded_pack.pack_fine(keys, values, heads, tokens, meta)


def _plainly(
    keys: Tensor,
    values: Tensor,
    sections: tuple[list[Section], list[Section]],
    coded: list[Tensor],
    counts: list[list[int]],
    layout: GradedLayout,
    frame: Frame,
    row: int,
    rotary: Rotary | None,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write codes and magnitudes, some tokens of a head and a grade at a time."""
    pieces: dict[tuple[int, int], list[tuple[bool, Section, Tensor]]] = {}
    for of_keys, own, codes in zip((True, False), sections, into):
        for section, piece in zip(own, codes.split([section.nbytes for section in own]), strict=True):
            pieces.setdefault((section.head, section.start), []).append((of_keys, section, piece))
    sizes = into[2].split([len(one) for one in coded])
    for head, index in enumerate(coded):
        one = slice(head, head + 1)
        frame_of_head, order = frame.of_heads(one), frame.order[row, head].long()
        ends = list(accumulate(counts[head][:-2], initial=0))
        for first, stop in pairwise(ends):
            for begin in range(first, stop, AT_A_TIME):
                end = min(begin + AT_A_TIME, stop)
                some = index[begin:end]
                z = normal_keys(keys[one], frame_of_head, row, rotary, layout.shifts[row], some)[0]
                w, sizes[head][begin:end] = (
                    part[0] for part in normal_values(values[one, some], frame_of_head, row)
                )
                for of_keys, section, piece in pieces.get((head, first), ()):
                    channels = order[section.column : section.column + section.channels]
                    packed = _code(z[:, channels] if of_keys else w, section.width)
                    piece[(begin - first) * section.row_bytes : (end - first) * section.row_bytes] = packed


def _by_kernels(
    keys: Tensor,
    values: Tensor,
    sections: tuple[list[Section], list[Section]],
    empty: list[Section],
    places: tuple[Tensor, Sequence[int], Sequence[int]],
    layout: GradedLayout,
    frame: Frame,
    row: int,
    rotary: Rotary | None,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write codes and magnitudes, a launch for each width; `places` are all tokens kept, and how many each head keeps and codes."""
    from kvfold.kernels import triton_graded_pack

    index, kept, coded = places
    first, sized = list(accumulate(kept, initial=0)), list(accumulate(coded, initial=0))
    tables: tuple[dict[int, list[list[int]]], dict[int, list[list[int]]]] = ({}, {})
    begin = 0
    for section in sections[0]:
        place = [section.head, first[section.head] + section.start, section.stop - section.start]
        place += [section.column, section.channels, begin]
        tables[0].setdefault(section.width, []).append(place)
        begin += section.nbytes
    begin = 0
    for section in [*sections[1], *empty]:
        place = [section.head, first[section.head] + section.start, section.stop - section.start]
        tables[1].setdefault(section.width, []).append([*place, begin, sized[section.head] + section.start])
        begin += section.nbytes if section.width else 0
    boundaries = {width: _boundaries(width, keys.device) for width in range(1, 9)}
    turned = turn = None
    if frame.key_turned is not None:
        turned = frame.key_turned[row]
        turn = turns(require(rotary), layout.key_dim, keys.shape[1], layout.shifts[row], keys.device)
    triton_graded_pack.pack_keys(
        keys,
        index,
        tables[0],
        turned,
        turn,
        frame.key_mean[row],
        frame.key_deviation[row],
        frame.order[row].long(),
        boundaries,
        lookup.NEIGHBOURS,
        into[0],
    )
    triton_graded_pack.pack_values(
        values,
        index,
        tables[1],
        frame.value_mean[row],
        value_rotation(layout.value_dim, keys.device),
        frame.value_magnitude[row],
        boundaries,
        lookup.NEIGHBOURS,
        into[1],
        into[2],
    )


def _without_values(counts: list[list[int]], bits: list[list[int]]) -> list[Section]:
    """Tokens of the grades at which values have no bits: they have a magnitude."""
    found = []
    for head, (head_counts, head_bits) in enumerate(zip(counts, bits, strict=True)):
        start = 0
        for count, own in zip(head_counts, head_bits):
            if count and not own:
                found.append(Section(0, head, start, start + count, 0, 0))
            start += count
    return found


@cache
def _boundaries(width: int, device: torch.device) -> Tensor:
    levels = common_levels(width)
    return ((levels[1:] + levels[:-1]) / 2).to(device)


def _code(z: Tensor, width: int) -> Tensor:
    """Codes of (tokens, channels), packed and flat."""
    return lookup.pack(nearest(z.contiguous(), common_levels(width).to(z.device)), width).flatten()
