"""Graded tokens: each kept token belongs to a grade, and a grade sets the width of every channel.

A grade fixes a width for each key channel and one width for the value. Keys are coded relative to one vector turned by
RoPE to each position (the mean key before RoPE, which holds a key bias) and to each channel's mean and deviation; values
relative to their mean, rotated, with one 8-bit magnitude a token. Codes index the Lloyd-Max codebook of N(0, 1), so no
scale is stored for a group of tokens. Two more grades take sinks and outliers, which no shared frame fits: "fine" tokens
have 8 bits between their own extremes, "exact" ones stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.affine import dequantise, quantise
from kvfold.codecs.codebook import encode as nearest
from kvfold.codecs.codebook import gaussian_levels
from kvfold.codecs.packing import pack, packed_bytes
from kvfold.codecs.rotation import hadamard
from kvfold.kernels.position_bias import position_logits, turned_rows
from kvfold.kernels.reference import Part, soft_cap
from kvfold.stores.base import AttendContext, Kept, Rotary, Store, attend_expanded
from kvfold.stores.trizone import position_dtype

STEPS = 16
"""8-bit magnitudes: steps in an octave, centred on the head's own mean magnitude."""


@cache
def value_rotation(dim: int, device: torch.device) -> Tensor:
    """The rotation of values, the same for every head: (dim, dim) float32."""
    return hadamard(dim, seed=0).to(device)


@dataclass(frozen=True)
class Frame:
    """What coded tokens of each head are relative to; blocks of generated tokens share their prompt's.

    Attributes
    ----------
    key_turned : (rows, kv_heads, key_dim) or None
        Vector that RoPE turns to each token's position and that is taken from its key. None without RoPE.
    key_mean, key_deviation : (rows, kv_heads, key_dim)
    value_mean : (rows, kv_heads, value_dim)
    value_magnitude : (rows, kv_heads) float32
        Unit of the 8-bit magnitudes.
    order : (rows, kv_heads, key_dim) uint8
        Channels, most precise first; the same for every grade.
    key_counts : (rows, kv_heads, grades, key widths) int16
        Channels of each width, widest first.
    value_bits : (rows, kv_heads, grades) uint8
    """

    key_turned: Tensor | None
    key_mean: Tensor
    key_deviation: Tensor
    value_mean: Tensor
    value_magnitude: Tensor
    order: Tensor
    key_counts: Tensor
    value_bits: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def select(self, rows: Tensor) -> Frame:
        """Of the given rows only."""
        return Frame(**{name: None if value is None else value[rows] for name, value in vars(self).items()})


@dataclass(frozen=True)
class GradedLayout:
    """What is not a tensor.

    Attributes
    ----------
    widths : tuple of int
        Key widths above 0 in use, widest first.
    tokens : int
        Logical length of the segment.
    real_tokens : tuple of int
    shifts : tuple of int
        RoPE position minus logical index, for each row.
    key_dim, value_dim : int
    """

    widths: tuple[int, ...]
    tokens: int
    real_tokens: tuple[int, ...]
    shifts: tuple[int, ...]
    key_dim: int
    value_dim: int

    def token_bytes(self, key_counts: list[int], value_bits: int) -> int:
        """Bytes of one token of a grade: codes, position, magnitude."""
        keys = sum(packed_bytes(count, width) for count, width in zip(key_counts, self.widths) if count)
        values = packed_bytes(self.value_dim, value_bits) if value_bits else 0
        return keys + values + position_dtype(self.tokens).itemsize + 1

    @property
    def fine_bytes(self) -> int:
        """Bytes of one token at 8 bits with its own scales."""
        return self.key_dim + self.value_dim + 8 + position_dtype(self.tokens).itemsize

    @property
    def exact_bytes(self) -> int:
        """Bytes of one token kept as it is."""
        return 2 * (self.key_dim + self.value_dim) + position_dtype(self.tokens).itemsize

    def frame_bytes(self, heads: int, grades: int, turned: bool) -> int:
        """Bytes of one row's frame and token counts."""
        frame = 2 * self.key_dim * (3 if turned else 2) + 2 * self.value_dim + 4
        tables = self.key_dim + grades * (2 * len(self.widths) + 1)
        return heads * (frame + tables + 4 * (grades + 2))


@dataclass(frozen=True)
class _Grade:
    """Views of one grade of one (row, head); rows are tokens."""

    positions: Tensor
    keys: list[tuple[int, int, Tensor]]
    """(width, channels, codes)"""
    value_bits: int
    values: Tensor
    magnitudes: Tensor


@dataclass(frozen=True)
class _Segment:
    """Views of one (row, head)."""

    positions: Tensor
    grades: list[_Grade]
    fine_keys: Tensor
    fine_values: Tensor
    fine_scales: Tensor
    exact_keys: Tensor
    exact_values: Tensor


class GradedStore(Store):
    """Tokens coded by grade.

    Parameters
    ----------
    layout : GradedLayout
    frame : Frame
    buffers : mapping of str to Tensor
        "counts" (rows, kv_heads, grades + 2) int32, fine and exact last; "positions" (kept,) int16 or int32;
        "key_codes" and "value_codes" (bytes,) uint8; "magnitudes" (coded,) uint8; "fine_keys" and "fine_values"
        (fine, dim) uint8 with "fine_scales" (fine, 4): scale and minimum of key and value; "exact_keys" and
        "exact_values" (exact, dim). All segment-major, then by grade, then by position.

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "graded"
    purposes = {
        "counts": "order",
        "order": "order",
        "key_counts": "order",
        "value_bits": "order",
        "positions": "positions",
        "key_codes": "codes",
        "value_codes": "codes",
        "magnitudes": "norms",
        "value_magnitude": "norms",
        "fine_keys": "codes",
        "fine_values": "codes",
        "fine_scales": "scales",
        "exact_keys": "fp16 rows",
        "exact_values": "fp16 rows",
        "key_turned": "means",
        "key_mean": "means",
        "key_deviation": "scales",
        "value_mean": "means",
    }
    block = 8192
    """Tokens of a grade decoded at a time."""

    def __init__(self, layout: GradedLayout, frame: Frame, buffers: Mapping[str, Tensor]):
        self.layout, self.frame, self.buffers = layout, frame, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads = frame.order.shape[1]
        self.key_dim, self.value_dim = layout.key_dim, layout.value_dim
        self._segments = self._cut()

    def _cut(self) -> list[list[_Segment]]:
        """Views of each segment; checks that every buffer is used to its last element."""
        layout, buffers = self.layout, self.buffers
        if len(layout.shifts) != len(layout.real_tokens) or len(buffers["counts"]) != len(layout.real_tokens):
            raise ValueError("counts, shifts and real_tokens disagree on the number of rows")
        cursor = dict.fromkeys(buffers, 0)

        def take(name: str, count: int) -> Tensor:
            start = cursor[name]
            cursor[name] += count
            if cursor[name] > buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is shorter than the counts say")
            return buffers[name][start : start + count]

        key_counts, value_bits = self.frame.key_counts.tolist(), self.frame.value_bits.tolist()
        rows = []
        for row, row_counts in enumerate(buffers["counts"].tolist()):
            segments = []
            for head, counts in enumerate(row_counts):
                positions = take("positions", sum(counts))
                grades, start = [], 0
                for grade, count in enumerate(counts[:-2]):
                    if not count:
                        continue
                    keys = []
                    for width, channels in zip(layout.widths, key_counts[row][head][grade], strict=True):
                        if channels:
                            row_bytes = packed_bytes(channels, width)
                            codes = take("key_codes", count * row_bytes).view(count, row_bytes)
                            keys.append((width, channels, codes))
                    bits = value_bits[row][head][grade]
                    row_bytes = packed_bytes(layout.value_dim, bits) if bits else 0
                    values = take("value_codes", count * row_bytes).view(count, row_bytes)
                    where = positions[start : start + count]
                    grades.append(_Grade(where, keys, bits, values, take("magnitudes", count)))
                    start += count
                fine, exact = counts[-2:]
                own = [take(name, fine) for name in ("fine_keys", "fine_values", "fine_scales")]
                own += [take(name, exact) for name in ("exact_keys", "exact_values")]
                segments.append(_Segment(positions, grades, *own))
            rows.append(segments)
        for name, used in cursor.items():
            if name != "counts" and used != buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is longer than the counts say")
        return rows

    # ---- encoding ----

    @classmethod
    def encode(
        cls,
        keys: Tensor,
        values: Tensor,
        grades: Tensor,
        layout: GradedLayout,
        frame: Frame,
        rotary: Rotary | None,
    ) -> GradedStore:
        """Code tokens at their grades.

        Parameters
        ----------
        keys, values : (rows, kv_heads, tokens, key_dim | value_dim)
        grades : (rows, kv_heads, tokens) uint8
            0: evicted; 1 to J: grade; J + 1: fine; J + 2: exact.
        layout : GradedLayout
        frame : Frame
        rotary : Rotary or None
            Needed if the frame has `key_turned`.
        """
        rows, heads, tokens = grades.shape
        count = frame.value_bits.shape[-1]
        half = keys.dtype if keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
        counts = torch.stack([(grades == grade).sum(-1) for grade in range(1, count + 3)], -1).int()
        sorted_tokens = torch.sort(grades, dim=-1, stable=True).indices
        key_counts, value_bits = frame.key_counts.tolist(), frame.value_bits.tolist()
        meta = torch.bfloat16 if frame.key_mean.dtype == torch.bfloat16 else torch.float16
        names = ("positions", "key_codes", "value_codes", "magnitudes")
        names += ("fine_keys", "fine_values", "fine_scales", "exact_keys", "exact_values")
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        host_counts = counts.tolist()
        for row in range(rows):
            z = normal_keys(keys[row], frame, row, rotary, layout.shifts[row])
            w, magnitudes = normal_values(values[row], frame, row)
            for head in range(heads):
                kept = sum(host_counts[row][head])
                chosen = sorted_tokens[row, head, tokens - kept :]
                parts["positions"].append(chosen)
                order = frame.order[row, head].long()
                start = 0
                for grade, number in enumerate(host_counts[row][head][:-2]):
                    index = chosen[start : start + number]
                    start += number
                    column = 0
                    for width, channels in zip(layout.widths, key_counts[row][head][grade], strict=True):
                        if channels and number:
                            block = z[head, index][:, order[column : column + channels]]
                            parts["key_codes"].append(_code(block, width).flatten())
                        column += channels
                    bits = value_bits[row][head][grade]
                    if bits and number:
                        parts["value_codes"].append(_code(w[head, index], bits).flatten())
                    parts["magnitudes"].append(magnitudes[head, index])
                fine = chosen[start : start + host_counts[row][head][-2]]
                key = quantise(keys[row, head, fine].float(), 8, meta_dtype=meta)
                value = quantise(values[row, head, fine].float(), 8, meta_dtype=meta)
                parts["fine_keys"].append(key.codes)
                parts["fine_values"].append(value.codes)
                parts["fine_scales"].append(torch.cat([key.scale, key.minimum, value.scale, value.minimum], 1))
                exact = chosen[start + len(fine) :]
                parts["exact_keys"].append(keys[row, head, exact].to(half))
                parts["exact_values"].append(values[row, head, exact].to(half))
        empty = keys.new_zeros(0, dtype=torch.uint8)
        buffers = {name: torch.cat(pieces) if pieces else empty for name, pieces in parts.items()}
        buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
        buffers["counts"] = counts
        return cls(layout, frame, buffers)

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        batch, heads, queries, _ = query.shape
        sources = list(range(batch)) if rows is None else rows.tolist()
        output = lse = None
        for row in sorted(set(sources)):
            index = [position for position, source in enumerate(sources) if source == row]
            q = query[index].float().transpose(0, 1).flatten(1, 2)
            out, part = self._attend_row(row, q, context)
            if output is None or lse is None:
                output = out.new_zeros(batch, heads, queries, out.shape[-1])
                lse = out.new_full((batch, heads, queries), -torch.inf)
            output[index] = out.view(heads, len(index), queries, -1).transpose(0, 1)
            lse[index] = part.view(heads, len(index), queries).transpose(0, 1)
        assert output is not None and lse is not None
        return output, lse

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of query (heads, n, query_dim) over one row's segments."""
        if context.expand is not None:
            return attend_expanded(self.kept(row, 0, context.rotary), query, context)
        heads, count, dim = query.shape
        q = query.reshape(self.kv_heads, -1, dim) * context.scaling
        limit = max(1, (1 << 24) // max(self.layout.tokens, 1))
        parts = [self._attend_some(row, q[:, start : start + limit], context) for start in range(0, q.shape[1], limit)]
        return (
            torch.cat([part[0] for part in parts], 1).view(heads, count, self.value_dim),
            torch.cat([part[1] for part in parts], 1).view(heads, count),
        )

    def _attend_some(self, row: int, q: Tensor, context: AttendContext) -> Part:
        """As `_attend_row` for scaled queries grouped by KV head (kv_heads, n, key_dim)."""
        frame = self.frame
        turned = None
        if frame.key_turned is not None:
            rotary = _require(context.rotary)
            turned = position_logits(
                q, frame.key_turned[row].float(), rotary, self.layout.tokens, self.layout.shifts[row]
            )
        scaled = (q * frame.key_deviation[row][:, None].float()).gather(
            2, frame.order[row].long()[:, None].expand(-1, q.shape[1], -1)
        )
        constant = q @ frame.key_mean[row].float()[..., None]
        magnitude = frame.value_magnitude[row].tolist()
        rotated, coded, exact, lses = [], [], [], []
        for head, segment in enumerate(self._segments[row]):
            logits = [self._logits(grade, scaled[head]) + constant[head] for grade in segment.grades]
            if turned is not None:
                logits = [
                    part + turned[head].index_select(1, grade.positions.int())
                    for part, grade in zip(logits, segment.grades)
                ]
            key_scale, key_minimum, value_scale, value_minimum = segment.fine_scales.float().unbind(1)
            if len(key_scale):
                product = q[head] @ segment.fine_keys.float().t()
                logits.append(product * key_scale + q[head].sum(1, keepdim=True) * key_minimum)
            logits.append(q[head] @ segment.exact_keys.float().t())
            scores = soft_cap(torch.cat(logits, 1), context.softcap)
            if self.tokens < self.layout.tokens:
                scores = scores.masked_fill(segment.positions >= self.tokens, -torch.inf)
            lse = torch.logsumexp(scores, 1) if scores.shape[1] else scores.new_full((len(scores),), -torch.inf)
            weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[:, None])
            mixed = weights.new_zeros(weights.shape[0], self.value_dim)
            column = 0
            for grade in segment.grades:
                number = grade.magnitudes.shape[0]
                self._mix(grade, weights[:, column : column + number], mixed, magnitude[head])
                column += number
            rotated.append(mixed)
            coded.append(weights[:, :column].sum(1, keepdim=True))
            fine = weights[:, column : column + len(value_scale)]
            plain = weights[:, column + len(value_scale) :] @ segment.exact_values.float()
            if len(value_scale):
                plain += (fine * value_scale) @ segment.fine_values.float() + fine @ value_minimum[:, None]
            exact.append(plain)
            lses.append(lse)
        output = torch.stack(rotated) @ value_rotation(self.value_dim, q.device)
        output += torch.stack(coded) * frame.value_mean[row][:, None].float() + torch.stack(exact)
        return output, torch.stack(lses)

    def _logits(self, grade: _Grade, q: Tensor) -> Tensor:
        """Queries (n, key_dim) in the frame's units and channel order, against a grade's codes: (n, tokens)."""
        number = grade.magnitudes.shape[0]
        logits = q.new_zeros(q.shape[0], number)
        column = 0
        for width, channels, codes in grade.keys:
            part = q[:, column : column + channels]
            part = part[:, _order(channels, width, q.device)]
            column += channels
            for start in range(0, number, self.block):
                span = slice(start, min(start + self.block, number))
                logits[:, span].addmm_(part, lookup.values(codes[span], width, channels).t())
        return logits

    def _mix(self, grade: _Grade, weights: Tensor, output: Tensor, unit: float) -> None:
        """Add weights (n, tokens) times a grade's values, still rotated, to output (n, value_dim)."""
        if not grade.value_bits:
            return
        number = grade.magnitudes.shape[0]
        weights = weights * _magnitudes(grade.magnitudes, unit)
        order = _order(self.value_dim, grade.value_bits, weights.device)
        for start in range(0, number, self.block):
            span = slice(start, min(start + self.block, number))
            part = weights[:, span] @ lookup.values(grade.values[span], grade.value_bits, self.value_dim)
            output.index_add_(1, order, part)

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        segment, frame = self._segments[row][head], self.frame
        order = frame.order[row, head].long()
        keys, values = [], []
        for grade in segment.grades:
            number = grade.magnitudes.shape[0]
            z = torch.zeros(number, self.key_dim, device=order.device)
            column = 0
            for width, channels, codes in grade.keys:
                where = order[column : column + channels][_order(channels, width, order.device)]
                z[:, where] = lookup.values(codes, width, channels)
                column += channels
            keys.append(z * frame.key_deviation[row, head].float() + frame.key_mean[row, head].float())
            w = torch.zeros(number, self.value_dim, device=order.device)
            if grade.value_bits:
                where = _order(self.value_dim, grade.value_bits, order.device)
                w[:, where] = lookup.values(grade.values, grade.value_bits, self.value_dim)
                w *= _magnitudes(grade.magnitudes, float(frame.value_magnitude[row, head]))[:, None]
            values.append(w @ value_rotation(self.value_dim, order.device) + frame.value_mean[row, head].float())
        positions = segment.positions.long()
        if frame.key_turned is not None and keys:
            vector = frame.key_turned[row, head].float()[None]
            turned = turned_rows(vector, _require(rotary), self.layout.tokens, self.layout.shifts[row])[0]
            keys = [torch.cat(keys)]
            keys[0] += turned[positions[: len(keys[0])]]
        scales = segment.fine_scales
        keys.append(dequantise(segment.fine_keys, scales[:, :1], scales[:, 1:2]))
        values.append(dequantise(segment.fine_values, scales[:, 2:3], scales[:, 3:]))
        all_keys = torch.cat([*keys, segment.exact_keys.float()])
        all_values = torch.cat([*values, segment.exact_values.float()])
        if self.tokens < self.layout.tokens:
            alive = positions < self.tokens
            return Kept(positions[alive], all_keys[alive], all_values[alive])
        return Kept(positions, all_keys, all_values)

    def crop(self, tokens: int) -> GradedStore:
        """Hide what lies at or after `tokens`; the bytes stay."""
        other = GradedStore(self.layout, self.frame, self.buffers)
        gone = self.tokens - tokens
        other.tokens = tokens
        other.real_tokens = tuple(max(count - gone, 0) for count in self.real_tokens)
        return other

    def select(self, rows: Tensor) -> GradedStore:
        chosen = rows.tolist()
        parts: dict[str, list[Tensor]] = {name: [] for name in self.buffers if name != "counts"}
        for row in chosen:
            for segment in self._segments[row]:
                parts["positions"].append(segment.positions)
                for name in ("fine_keys", "fine_values", "fine_scales", "exact_keys", "exact_values"):
                    parts[name].append(getattr(segment, name))
                for grade in segment.grades:
                    parts["key_codes"] += [codes.flatten() for _, _, codes in grade.keys]
                    parts["value_codes"].append(grade.values.flatten())
                    parts["magnitudes"].append(grade.magnitudes)
        buffers = {name: torch.cat(pieces) if pieces else self.buffers[name][:0] for name, pieces in parts.items()}
        buffers["counts"] = self.buffers["counts"][rows]
        layout = replace(
            self.layout,
            real_tokens=tuple(self.layout.real_tokens[row] for row in chosen),
            shifts=tuple(self.layout.shifts[row] for row in chosen),
        )
        other = GradedStore(layout, self.frame.select(rows), buffers)
        other.tokens = self.tokens
        other.real_tokens = tuple(self.real_tokens[row] for row in chosen)
        return other

    def widths(self) -> list[dict[str, dict[int, int]]]:
        counts = self.buffers["counts"].tolist()
        key_counts, value_bits = self.frame.key_counts.tolist(), self.frame.value_bits.tolist()
        result = []
        for head in range(self.kv_heads):
            values: dict[int, int] = {0: 0, 8: 0, 16: 0}
            keys: dict[int, int] = {0: 0, 8: 0, 16: 0}
            for row in range(len(counts)):
                *graded, fine, exact = counts[row][head]
                values[0] += self.layout.real_tokens[row] - sum(graded) - fine - exact
                for bits, number in ((8, fine), (16, exact)):
                    values[bits] += number
                    keys[bits] += number * self.key_dim
                for grade, number in enumerate(graded):
                    bits = value_bits[row][head][grade]
                    values[bits] = values.get(bits, 0) + number
                    channels = key_counts[row][head][grade]
                    keys[0] += number * (self.key_dim - sum(channels))
                    for width, channel_count in zip(self.layout.widths, channels, strict=True):
                        keys[width] = keys.get(width, 0) + number * channel_count
            result.append({"values": values, "keys": keys})
        return result

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        return {**self.buffers, **self.frame.tensors()}

    def meta(self) -> dict[str, Any]:
        return {**vars(self.layout), "visible_tokens": self.tokens, "visible_real_tokens": self.real_tokens}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> GradedStore:
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()}
        tokens, real_tokens = fields.pop("visible_tokens"), fields.pop("visible_real_tokens")
        names = Frame.__dataclass_fields__
        frame = Frame(**{name: tensors.get(name) for name in names})  # type: ignore[arg-type]
        buffers = {name: tensor for name, tensor in tensors.items() if name not in names}
        store = cls(GradedLayout(**fields), frame, buffers)
        store.tokens, store.real_tokens = tokens, real_tokens
        return store


def normal_keys(keys: Tensor, frame: Frame, row: int, rotary: Rotary | None, shift: int) -> Tensor:
    """Keys (kv_heads, tokens, key_dim) of one row in the frame's units: what the codebook codes, float32."""
    z = keys.float()
    if frame.key_turned is not None:
        z = z - turned_rows(frame.key_turned[row].float(), _require(rotary), keys.shape[1], shift)
    return (z - frame.key_mean[row][:, None].float()) / frame.key_deviation[row][:, None].float()


def normal_values(values: Tensor, frame: Frame, row: int) -> tuple[Tensor, Tensor]:
    """Values (kv_heads, tokens, value_dim) of one row, centred, rotated and divided by their coded magnitude.

    Returns
    -------
    ((kv_heads, tokens, value_dim) float32, (kv_heads, tokens) uint8)
    """
    w = values.float() - frame.value_mean[row][:, None].float()
    w = w @ value_rotation(values.shape[-1], values.device).t()
    unit = frame.value_magnitude[row][:, None]
    ratio = w.square().mean(-1).sqrt().clamp_min(1e-12) / unit
    codes = (ratio.log2() * STEPS + 128).round().clamp(0, 255)
    magnitudes = torch.exp2((codes - 128) / STEPS) * unit
    return w / magnitudes[..., None], codes.to(torch.uint8)


def _magnitudes(codes: Tensor, unit: float) -> Tensor:
    return torch.exp2((codes.float() - 128) / STEPS) * unit


def _code(z: Tensor, width: int) -> Tensor:
    return pack(nearest(z.contiguous(), gaussian_levels(width).to(z.device)), width)


@cache
def _order(n: int, width: int, device: torch.device) -> Tensor:
    return lookup.order(n, width).to(device)


def _require(rotary: Rotary | None) -> Rotary:
    if rotary is None:
        raise ValueError("keys were coded relative to RoPE, but this model's rotary embedding cannot be found")
    return rotary
