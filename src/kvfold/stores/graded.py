"""Graded tokens: each kept token belongs to a grade, and a grade sets the width of every channel.

A grade fixes a width for each key channel and one width for the value. Keys are coded relative to one vector turned by
RoPE to each position (the mean key before RoPE, which holds a key bias) and to each channel's mean and deviation; values
relative to their mean, rotated, with one 8-bit magnitude a token. Codes index the Lloyd-Max codebook of N(0, 1), so no
scale is stored for a group of tokens. Two more grades take sinks and outliers, which no shared frame fits: "fine" tokens
have 8 bits between their own extremes, "exact" ones stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.affine import dequantise, quantise
from kvfold.codecs.codebook import encode as nearest
from kvfold.codecs.codebook import gaussian_levels
from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.rotation import hadamard
from kvfold.kernels import graded_cpu
from kvfold.kernels.position_bias import position_logits, turned_rows, turns
from kvfold.kernels.reference import Part, soft_cap, softmax_lse
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
        chosen: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        return Frame(**{"key_turned": None, **chosen})


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


class _Section(NamedTuple):
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


class _Block(NamedTuple):
    """Sections of one width whose codes follow each other."""

    codes: Tensor
    """View (bytes,)"""
    sections: list[_Section]

    def decode(self) -> Iterator[tuple[_Section, Tensor]]:
        """Each section with its values (tokens, channels) float32, by one look-up for all."""
        shapes = [(section.stop - section.start, section.channels) for section in self.sections]
        return zip(self.sections, lookup.values(self.codes, self.sections[0].width, shapes), strict=True)

    def of_head(self, head: int) -> _Block:
        """The sections of one head only, which follow each other too."""
        before = sum(section.nbytes for section in self.sections if section.head < head)
        chosen = [section for section in self.sections if section.head == head]
        return _Block(self.codes[before : before + sum(section.nbytes for section in chosen)], chosen)


class _Head(NamedTuple):
    """Where one head's tokens lie in its row's buffers: coded ones first, then fine, then exact."""

    first: int
    coded: int
    fine: slice
    exact: slice

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return self.coded + self.fine.stop - self.fine.start + self.exact.stop - self.exact.start


class _Row(NamedTuple):
    """Views of one row."""

    buffers: dict[str, Tensor]
    """The row's part of every buffer but the counts"""
    heads: list[_Head]
    keys: list[_Block]
    values: list[_Block]


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
        "exact_values" (exact, dim). All by row, then (codes only) by width, widest first, then by head, grade and
        position.

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
    block = 1 << 16
    """Bytes of codes decoded at a time."""

    def __init__(self, layout: GradedLayout, frame: Frame, buffers: Mapping[str, Tensor]):
        self.layout, self.frame, self.buffers = layout, frame, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads = frame.order.shape[1]
        self.key_dim, self.value_dim = layout.key_dim, layout.value_dim
        self._rows = self._cut()
        self._loops: dict[int, graded_cpu.RowLoop] = {}

    def _cut(self) -> list[_Row]:
        """Views of each row; checks that every buffer is used to its last element."""
        layout, buffers = self.layout, self.buffers
        if len(layout.shifts) != len(layout.real_tokens) or len(buffers["counts"]) != len(layout.real_tokens):
            raise ValueError("counts, shifts and real_tokens disagree on the number of rows")
        cursor = {name: 0 for name in buffers if name != "counts"}

        def take(name: str, count: int) -> Tensor:
            start = cursor[name]
            cursor[name] += count
            if cursor[name] > buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is shorter than the counts say")
            return buffers[name][start : start + count]

        key_counts, value_bits = self.frame.key_counts.tolist(), self.frame.value_bits.tolist()
        rows = []
        for row, counts in enumerate(buffers["counts"].tolist()):
            starts = dict(cursor)
            sections = _key_sections(layout.widths, counts, key_counts[row])
            keys = self._blocks(take("key_codes", sum(section.nbytes for section in sections)), sections)
            sections = _value_sections(layout.value_dim, counts, value_bits[row])
            values = self._blocks(take("value_codes", sum(section.nbytes for section in sections)), sections)
            heads = []
            first = fine = exact = 0
            for *graded, fine_count, exact_count in counts:
                coded = sum(graded)
                heads.append(
                    _Head(first, coded, slice(fine, fine + fine_count), slice(exact, exact + exact_count))
                )
                first += coded + fine_count + exact_count
                fine, exact = fine + fine_count, exact + exact_count
            take("positions", first)
            take("magnitudes", first - fine - exact)
            for name in ("fine_keys", "fine_values", "fine_scales"):
                take(name, fine)
            for name in ("exact_keys", "exact_values"):
                take(name, exact)
            parts = {name: buffers[name][start : cursor[name]] for name, start in starts.items()}
            rows.append(_Row(parts, heads, keys, values))
        for name, used in cursor.items():
            if used != buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is longer than the counts say")
        return rows

    def _blocks(self, codes: Tensor, sections: list[_Section]) -> list[_Block]:
        """Sections of one width together, as many as one look-up may take."""
        blocks: list[_Block] = []
        pieces: list[_Section] = []
        begin = size = 0

        def flush() -> None:
            nonlocal begin, size, pieces
            if pieces:
                blocks.append(_Block(codes[begin : begin + size], pieces))
            begin, size, pieces = begin + size, 0, []

        for section in sections:
            step = max(1, self.block // section.row_bytes)
            for start in range(section.start, section.stop, step):
                piece = section._replace(start=start, stop=min(start + step, section.stop))
                if pieces and (pieces[-1].width != piece.width or size + piece.nbytes > self.block):
                    flush()
                pieces.append(piece)
                size += piece.nbytes
        flush()
        return blocks

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
        rows, _, tokens = grades.shape
        count = frame.value_bits.shape[-1]
        half = keys.dtype if keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
        counts = torch.stack([(grades == grade).sum(-1) for grade in range(1, count + 3)], -1).int()
        sorted_tokens = torch.sort(grades, dim=-1, stable=True).indices
        key_counts, value_bits = frame.key_counts.tolist(), frame.value_bits.tolist()
        meta = torch.bfloat16 if frame.key_mean.dtype == torch.bfloat16 else torch.float16
        names = ["positions", "key_codes", "value_codes", "magnitudes"]
        names += ["fine_keys", "fine_values", "fine_scales", "exact_keys", "exact_values"]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        host_counts = counts.tolist()
        for row in range(rows):
            z = normal_keys(keys[row], frame, row, rotary, layout.shifts[row])
            w, magnitudes = normal_values(values[row], frame, row)
            chosen = []
            for head, head_counts in enumerate(host_counts[row]):
                index = sorted_tokens[row, head, tokens - sum(head_counts) :]
                chosen.append(index)
                parts["positions"].append(index)
                coded, fine, exact = index.split([sum(head_counts[:-2]), *head_counts[-2:]])
                parts["magnitudes"].append(magnitudes[head, coded])
                key = quantise(keys[row, head, fine].float(), 8, meta_dtype=meta)
                value = quantise(values[row, head, fine].float(), 8, meta_dtype=meta)
                parts["fine_keys"].append(key.codes)
                parts["fine_values"].append(value.codes)
                parts["fine_scales"].append(
                    torch.cat([key.scale, key.minimum, value.scale, value.minimum], 1)
                )
                parts["exact_keys"].append(keys[row, head, exact].to(half))
                parts["exact_values"].append(values[row, head, exact].to(half))
            order = frame.order[row].long()
            for section in _key_sections(layout.widths, host_counts[row], key_counts[row]):
                index = chosen[section.head][section.start : section.stop, None]
                channels = order[section.head, section.column : section.column + section.channels]
                parts["key_codes"].append(_code(z[section.head, index, channels], section.width))
            for section in _value_sections(layout.value_dim, host_counts[row], value_bits[row]):
                index = chosen[section.head][section.start : section.stop]
                parts["value_codes"].append(_code(w[section.head, index], section.width))
        empty = keys.new_zeros(0, dtype=torch.uint8)
        buffers = {name: torch.cat(pieces) if pieces else empty for name, pieces in parts.items()}
        buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
        buffers["counts"] = counts
        return cls(layout, frame, buffers)

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        batch, heads, queries, _ = query.shape
        sources = list(range(batch)) if rows is None else rows.tolist()
        if batch == 1:
            output, lse = self._attend_row(sources[0], query[0], context)
            return output[None], lse[None]
        output = query.new_empty(batch, heads, queries, 0, dtype=torch.float32)
        lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
        for row in sorted(set(sources)):
            index = [position for position, source in enumerate(sources) if source == row]
            q = query[index].transpose(0, 1).flatten(1, 2)
            out, part = self._attend_row(row, q, context)
            if not output.shape[-1]:
                output = out.new_empty(batch, heads, queries, out.shape[-1])
            output[index] = out.view(heads, len(index), queries, -1).transpose(0, 1)
            lse[index] = part.view(heads, len(index), queries).transpose(0, 1)
        return output, lse

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of query (heads, n, query_dim) over one row."""
        if context.expand is not None:
            return attend_expanded(self.kept(row, 0, context.rotary), query.float(), context)
        found = self._loop_row(row, query, context)
        if found is not None:
            return found
        heads, count, dim = query.shape
        q = query.float().reshape(self.kv_heads, -1, dim) * context.scaling
        limit = max(1, (1 << 24) // max(self.layout.tokens, 1))
        parts = [
            self._attend_some(row, q[:, start : start + limit], context)
            for start in range(0, q.shape[1], limit)
        ]
        output, lse = (
            parts[0] if len(parts) == 1 else (torch.cat(part, 1) for part in zip(*parts, strict=True))
        )
        return output.view(heads, count, self.value_dim), lse.view(heads, count)

    def attend_with_tail(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttendContext, before: Part | None
    ) -> Part | None:
        if context.expand is not None or query.shape[0] != self.rows:
            return None
        found = []
        for row in range(self.rows):
            own = None if before is None else (before[0][row], before[1][row])
            part = self._loop_row(row, query[row], context, (key[row], value[row]), own)
            if part is None:
                return None
            found.append(part)
        if len(found) == 1:
            return found[0][0][None], found[0][1][None]
        return torch.stack([part[0] for part in found]), torch.stack([part[1] for part in found])

    def _loop_row(
        self,
        row: int,
        query: Tensor,
        context: AttendContext,
        tail: tuple[Tensor, Tensor] | None = None,
        before: Part | None = None,
    ) -> Part | None:
        """As `_attend_row`, by the C loop where it serves; see `graded_cpu.RowLoop.attend`."""
        if query.device.type != "cpu" or graded_cpu.available():
            return None
        if row not in self._loops:
            frame = {name: tensor[row] for name, tensor in self.frame.tensors().items()}
            counts, buffers = self.buffers["counts"][row], self._rows[row].buffers
            rotation = value_rotation(self.value_dim, query.device)
            self._loops[row] = graded_cpu.RowLoop(self.layout.widths, counts, frame, buffers, rotation)
        around = None
        if self.frame.key_turned is not None:
            tokens, shift = self.layout.tokens, self.layout.shifts[row]
            around = turns(_require(context.rotary), self.key_dim, tokens, shift, query.device)
        return self._loops[row].attend(
            query, around, self.tokens, context.scaling, context.softcap, tail, before
        )

    def _attend_some(self, row: int, q: Tensor, context: AttendContext) -> Part:
        """As `_attend_row` for scaled queries grouped by KV head (kv_heads, n, key_dim)."""
        frame, part = self.frame, self._rows[row]
        scores = self._scores(row, q, context.rotary)
        weights, lses, coded = [], [], []
        for head, logits in zip(part.heads, scores, strict=True):
            logits = soft_cap(logits, context.softcap)
            visible = head.tokens
            if self.tokens < self.layout.tokens:
                hidden = part.buffers["positions"][head.first : head.first + head.tokens] >= self.tokens
                visible -= int(hidden.sum())
                logits = logits.masked_fill(hidden, -torch.inf)
            if visible:
                weight, lse = softmax_lse(logits)
            else:
                weight, lse = torch.zeros_like(logits), logits.new_full((len(logits),), -torch.inf)
            weights.append(weight)
            lses.append(lse)
            coded.append(weight[:, : head.coded].sum(1, keepdim=True))
        output = self._mixed(part, weights) * frame.value_magnitude[row][:, None, None]
        output = output @ value_rotation(self.value_dim, q.device)
        output += torch.stack(coded) * frame.value_mean[row][:, None].float()
        output += self._plain(part, weights)
        return output, torch.stack(lses)

    def _scores(self, row: int, q: Tensor, rotary: Rotary | None) -> list[Tensor]:
        """Logits (n, kept) of each head."""
        frame, part = self.frame, self._rows[row]
        constant = q @ frame.key_mean[row].float()[..., None]
        turned = self._turned(row, q, rotary)
        if turned is not None:
            turned += constant
        positions = part.buffers["positions"].int()
        fine_keys, exact_keys = part.buffers["fine_keys"].float(), part.buffers["exact_keys"].float()
        scale, minimum = part.buffers["fine_scales"][:, :2].float().t()
        scores = []
        for index, head in enumerate(part.heads):
            logits = q.new_empty(q.shape[1], head.tokens)
            if turned is None:
                logits[:, : head.coded] = constant[index]
            else:
                where = positions[head.first : head.first + head.coded]
                logits[:, : head.coded] = turned[index].index_select(1, where)
            own = logits[:, head.coded :]
            if head.fine.stop > head.fine.start:
                fine = own[:, : head.fine.stop - head.fine.start]
                torch.mul(q[index] @ fine_keys[head.fine].t(), scale[head.fine], out=fine)
                fine += q[index].sum(1, keepdim=True) * minimum[head.fine]
            if head.exact.stop > head.exact.start:
                own[:, head.fine.stop - head.fine.start :] = q[index] @ exact_keys[head.exact].t()
            scores.append(logits)
        order = frame.order[row].long()[:, None].expand(-1, q.shape[1], -1)
        scaled = (q * frame.key_deviation[row][:, None].float()).gather(2, order).unbind()
        for block in part.keys:
            for section, z in block.decode():
                channels = scaled[section.head].narrow(1, section.column, section.channels)
                scores[section.head].narrow(1, section.start, len(z)).addmm_(channels, z.t())
        return scores

    def _turned(self, row: int, q: Tensor, rotary: Rotary | None) -> Tensor | None:
        """Logits (kv_heads, n, tokens) of the turned vector at every position."""
        if self.frame.key_turned is None:
            return None
        vector, tokens, shift = (
            self.frame.key_turned[row].float(),
            self.layout.tokens,
            self.layout.shifts[row],
        )
        return position_logits(q, vector, _require(rotary), tokens, shift)

    def _mixed(self, part: _Row, weights: list[Tensor]) -> Tensor:
        """Coded values mixed by weights (n, kept) of each head, still rotated, in units of the magnitude.

        The weights of coded tokens are multiplied by their magnitudes in place.
        """
        magnitudes = _magnitudes(part.buffers["magnitudes"])
        output = weights[0].new_zeros(len(weights), len(weights[0]), self.value_dim)
        mixed = output.unbind()
        start = 0
        for head, weight in zip(part.heads, weights, strict=True):
            weight[:, : head.coded] *= magnitudes[start : start + head.coded]
            start += head.coded
        for block in part.values:
            for section, w in block.decode():
                mixed[section.head].addmm_(weights[section.head].narrow(1, section.start, len(w)), w)
        return output

    def _plain(self, part: _Row, weights: list[Tensor]) -> Tensor:
        """Fine and exact values mixed by weights (n, kept) of each head."""
        fine_values, exact_values = part.buffers["fine_values"].float(), part.buffers["exact_values"].float()
        scale, minimum = part.buffers["fine_scales"][:, 2:].float().t()
        output = weights[0].new_zeros(len(weights), len(weights[0]), self.value_dim)
        for mixed, head, weight in zip(output, part.heads, weights, strict=True):
            fine = weight[:, head.coded : head.tokens - (head.exact.stop - head.exact.start)]
            if fine.shape[1]:
                mixed.addmm_(fine * scale[head.fine], fine_values[head.fine])
                mixed += (fine @ minimum[head.fine])[:, None]
            if head.exact.stop > head.exact.start:
                mixed.addmm_(weight[:, head.coded + fine.shape[1] :], exact_values[head.exact])
        return output

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        part, frame = self._rows[row], self.frame
        where = part.heads[head]
        order = frame.order[row, head].long()
        z = torch.zeros(where.coded, self.key_dim, device=order.device)
        w = torch.zeros(where.coded, self.value_dim, device=order.device)
        for target, blocks in ((z, part.keys), (w, part.values)):
            for block in blocks:
                own = block.of_head(head)
                for section, values in own.decode() if own.sections else ():
                    columns = slice(section.column, section.column + section.channels)
                    target[section.start : section.stop, columns] = values
        coded_keys = torch.empty_like(z)
        coded_keys[:, order] = z
        coded_keys = coded_keys * frame.key_deviation[row, head].float() + frame.key_mean[row, head].float()
        positions = part.buffers["positions"][where.first : where.first + where.tokens].long()
        if frame.key_turned is not None and where.coded:
            vector = frame.key_turned[row, head].float()[None]
            turned = turned_rows(vector, _require(rotary), self.layout.tokens, self.layout.shifts[row])[0]
            coded_keys += turned[positions[: where.coded]]
        start = sum(other.coded for other in part.heads[:head])
        magnitudes = _magnitudes(part.buffers["magnitudes"][start : start + where.coded])
        w *= (magnitudes * frame.value_magnitude[row, head])[:, None]
        coded_values = w @ value_rotation(self.value_dim, order.device) + frame.value_mean[row, head].float()
        scales = part.buffers["fine_scales"][where.fine]
        fine_keys = dequantise(part.buffers["fine_keys"][where.fine], scales[:, :1], scales[:, 1:2])
        fine_values = dequantise(part.buffers["fine_values"][where.fine], scales[:, 2:3], scales[:, 3:])
        keys = torch.cat([coded_keys, fine_keys, part.buffers["exact_keys"][where.exact].float()])
        values = torch.cat([coded_values, fine_values, part.buffers["exact_values"][where.exact].float()])
        if self.tokens < self.layout.tokens:
            alive = positions < self.tokens
            return Kept(positions[alive], keys[alive], values[alive])
        return Kept(positions, keys, values)

    def crop(self, tokens: int) -> GradedStore:
        """Hide what lies at or after `tokens`; the bytes stay."""
        other = GradedStore(self.layout, self.frame, self.buffers)
        gone = self.tokens - tokens
        other.tokens = tokens
        other.real_tokens = tuple(max(count - gone, 0) for count in self.real_tokens)
        return other

    def select(self, rows: Tensor) -> GradedStore:
        chosen = rows.tolist()
        buffers = {
            name: torch.cat([self._rows[row].buffers[name] for row in chosen]) if chosen else buffer[:0]
            for name, buffer in self.buffers.items()
            if name != "counts"
        }
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

    def join(self, following: Store) -> GradedStore | None:
        if not isinstance(following, GradedStore) or following.frame is not self.frame:
            return None
        shifts = tuple(shift + self.tokens for shift in self.layout.shifts)
        whole = self.tokens == self.layout.tokens and following.tokens == following.layout.tokens
        if not whole or following.layout.shifts != shifts:
            return None
        tokens = self.tokens + following.tokens
        layout = replace(
            self.layout,
            tokens=tokens,
            real_tokens=tuple(a + b for a, b in zip(self.real_tokens, following.real_tokens, strict=True)),
        )
        parts: dict[str, list[Tensor]] = {name: [] for name in self.buffers if name != "counts"}
        for row, (own, other) in enumerate(zip(self._rows, following._rows, strict=True)):
            sizes, other_sizes = self._sizes(row), following._sizes(row)
            for name, pieces in parts.items():
                left, right = own.buffers[name], other.buffers[name]
                if name == "positions":
                    left = left.to(position_dtype(tokens))
                    right = right.to(left.dtype) + self.tokens
                pairs = zip(left.split(sizes[name]), right.split(other_sizes[name]), strict=True)
                pieces += [piece for pair in pairs for piece in pair]
        buffers = {name: torch.cat(pieces) for name, pieces in parts.items()}
        buffers["counts"] = self.buffers["counts"] + following.buffers["counts"]
        return GradedStore(layout, self.frame, buffers)

    def _sizes(self, row: int) -> dict[str, list[int]]:
        """Elements of each piece of a row's buffers that one head and grade own, in the order they are stored in."""
        counts = self.buffers["counts"][row].tolist()
        channels, bits = self.frame.key_counts[row].tolist(), self.frame.value_bits[row].tolist()
        heads = list(zip(counts, channels, bits, strict=True))
        keys = [
            count * packed_bytes(by_width[index], width)
            for index, width in enumerate(self.layout.widths)
            for head_counts, head_channels, _ in heads
            for count, by_width in zip(head_counts, head_channels)
        ]
        values = [
            count * packed_bytes(self.value_dim, width) * (own == width)
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
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()
        }
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


def _key_sections(
    widths: tuple[int, ...], counts: list[list[int]], channels: list[list[list[int]]]
) -> list[_Section]:
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
                    sections.append(_Section(width, head, start, start + count, column, by_width[index]))
                start += count
    return sections


def _value_sections(dim: int, counts: list[list[int]], bits: list[list[int]]) -> list[_Section]:
    """Value codes of one row in the order they are stored in; bits (heads, grades)."""
    sections = []
    for width in range(8, 0, -1):
        for head, (head_counts, head_bits) in enumerate(zip(counts, bits, strict=True)):
            start = 0
            for count, own in zip(head_counts, head_bits):
                if count and own == width:
                    sections.append(_Section(width, head, start, start + count, 0, dim))
                start += count
    return sections


@cache
def _magnitude_table(device: torch.device) -> Tensor:
    return torch.exp2((torch.arange(256, device=device) - 128) / STEPS)


def _magnitudes(codes: Tensor) -> Tensor:
    return _magnitude_table(codes.device).index_select(0, codes.int())


def _code(z: Tensor, width: int) -> Tensor:
    """Codes of (tokens, channels), packed and flat."""
    return lookup.pack(nearest(z.contiguous(), gaussian_levels(width).to(z.device)), width).flatten()


def _require(rotary: Rotary | None) -> Rotary:
    if rotary is None:
        raise ValueError(
            "keys were coded relative to RoPE, but this model's rotary embedding cannot be found"
        )
    return rotary
