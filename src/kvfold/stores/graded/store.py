"""The store of graded tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.codecs.affine import dequantise
from kvfold.kernels.position_bias import turned_rows
from kvfold.kernels.reference import Part
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.graded.attend import RowAttention
from kvfold.stores.graded.encode import encode
from kvfold.stores.graded.frame import Frame, GradedLayout, magnitudes, require, value_rotation
from kvfold.stores.graded.sections import cut, sizes
from kvfold.stores.ragged import RaggedStore, position_dtype

MOST_OF_RECORDS = 1.25
"""Times its bytes that a long store may take as records to be decoded from them."""
SHORT = 2048
"""Tokens of a store (blocks of generated ones) whose records may be as empty as they are."""


class GradedStore(RaggedStore):
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

    counts : list, optional
        "counts" as the host knows them; fetched if not given.

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "graded"
    layout_class = GradedLayout
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

    def __init__(
        self,
        layout: GradedLayout,
        frame: Frame,
        buffers: Mapping[str, Tensor],
        counts: list[list[list[int]]] | None = None,
    ):
        self.layout, self.frame, self.buffers = layout, frame, dict(buffers)
        # To ask a GPU is to wait for it.
        self.counts: list[list[list[int]]] = buffers["counts"].tolist() if counts is None else counts
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads = frame.order.shape[1]
        self.key_dim, self.value_dim = layout.key_dim, layout.value_dim
        self._attention: dict[int, RowAttention] = {}
        self._cut()

    def _cut(self) -> None:
        self._rows = cut(self.layout, self.frame, self.buffers, self.counts, self.block)

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
        return cls(layout, frame, *encode(keys, values, grades, layout, frame, rotary))

    def _again(self) -> GradedStore:
        return type(self)(self.layout, self.frame, self.buffers, self.counts)

    def plain(self) -> GradedStore:
        """The same content in the form that does not hang on a device: itself."""
        return self

    def for_decoding(self) -> Store:
        from kvfold.stores.graded.recorded import RecordedGradedStore

        if RecordedGradedStore.problem(self) is not None:
            return self
        found = RecordedGradedStore.of(self)
        # Few tokens, as of a block of generated ones, fill no records.
        wasteful = found is not None and found.nbytes > MOST_OF_RECORDS * self.nbytes and self.tokens > SHORT
        return self if found is None or wasteful else found

    # ---- attention ----

    def _row(self, row: int) -> RowAttention:
        if row not in self._attention:
            counts = self.buffers["counts"][row]
            self._attention[row] = RowAttention(self.layout, self.frame, row, self._rows[row], counts)
        return self._attention[row]

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        return self._row(row).attend(query, self.tokens, context)

    def attend_with_tail(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttendContext,
        before: Part | None,
        length: Tensor | None = None,
    ) -> Part | None:
        if length is not None or context.expand is not None or query.shape[0] != self.rows:
            return None
        parts = []
        for row in range(self.rows):
            own = None if before is None else (before[0][row], before[1][row])
            tail = key[row], value[row]
            part = self._row(row).in_one(query[row], self.tokens, context, tail, own)
            if part is None:
                return None
            parts.append(part)
        output, lse = (torch.stack(part) for part in zip(*parts, strict=True))
        return output, lse

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        part, frame = self._rows[row], self.frame
        where = part.heads[head]
        device = frame.order.device
        z = torch.zeros(where.coded, self.key_dim, device=device)
        w = torch.zeros(where.coded, self.value_dim, device=device)
        for target, blocks in ((z, part.keys), (w, part.values)):
            for block in blocks:
                own = block.of_head(head)
                for section, values in own.decode() if own.sections else ():
                    columns = slice(section.column, section.column + section.channels)
                    target[section.start : section.stop, columns] = values
        positions = part.buffers["positions"][where.first : where.first + where.tokens].long()
        start = sum(other.coded for other in part.heads[:head])
        size = part.buffers["magnitudes"][start : start + where.coded]
        coded_keys, coded_values = self._restored(row, head, z, w, size, positions[: where.coded], rotary)
        scales = part.buffers["fine_scales"][where.fine]
        fine_keys = dequantise(part.buffers["fine_keys"][where.fine], scales[:, :1], scales[:, 1:2])
        fine_values = dequantise(part.buffers["fine_values"][where.fine], scales[:, 2:3], scales[:, 3:])
        keys = torch.cat([coded_keys, fine_keys, part.buffers["exact_keys"][where.exact].float()])
        values = torch.cat([coded_values, fine_values, part.buffers["exact_values"][where.exact].float()])
        if self.tokens < self.layout.tokens:
            alive = positions < self.tokens
            return Kept(positions[alive], keys[alive], values[alive])
        return Kept(positions, keys, values)

    def _restored(
        self,
        row: int,
        head: int,
        z: Tensor,
        w: Tensor,
        size: Tensor,
        positions: Tensor,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of coded tokens from levels (tokens, dim), keys' in the frame's order, and magnitude codes."""
        frame = self.frame
        keys = torch.empty_like(z)
        keys[:, frame.order[row, head].long()] = z
        keys = keys * frame.key_deviation[row, head].float() + frame.key_mean[row, head].float()
        if frame.key_turned is not None and len(z):
            vector = frame.key_turned[row, head].float()[None]
            turned = turned_rows(vector, require(rotary), self.layout.tokens, self.layout.shifts[row])[0]
            keys += turned[positions]
        w = w * (magnitudes(size) * frame.value_magnitude[row, head])[:, None]
        values = w @ value_rotation(self.value_dim, w.device) + frame.value_mean[row, head].float()
        return keys, values

    def select(self, rows: Tensor) -> GradedStore:
        chosen = rows.tolist()
        buffers = {
            name: torch.cat([self._rows[row].buffers[name] for row in chosen]) if chosen else buffer[:0]
            for name, buffer in self.buffers.items()
            if name != "counts"
        }
        buffers["counts"] = self.buffers["counts"][rows]
        layout = self._layout_of(chosen, "real_tokens", "shifts")
        real = tuple(self.real_tokens[row] for row in chosen)
        return GradedStore(layout, self.frame.select(rows), buffers)._seen(self.tokens, real)

    def join(self, following: Store) -> GradedStore | None:
        if not isinstance(following, GradedStore) or following.frame is not self.frame:
            return None
        following = following.plain()
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
            counts = self.counts[row], following.counts[row]
            mine, theirs = (sizes(layout, self.frame, one, row) for one in counts)
            for name, pieces in parts.items():
                left, right = own.buffers[name], other.buffers[name]
                if name == "positions":
                    left = left.to(position_dtype(tokens))
                    right = right.to(left.dtype) + self.tokens
                pairs = zip(left.split(mine[name]), right.split(theirs[name]), strict=True)
                pieces += [piece for pair in pairs for piece in pair]
        buffers = {name: torch.cat(pieces) for name, pieces in parts.items()}
        buffers["counts"] = self.buffers["counts"] + following.buffers["counts"]
        return GradedStore(layout, self.frame, buffers)

    def widths(self) -> list[dict[str, dict[int, int]]]:
        counts = self.counts
        key_counts, value_bits = self.frame.grades
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

    @classmethod
    def _of(cls, layout: GradedLayout, tensors: Mapping[str, Tensor]) -> GradedStore:
        names = Frame.__dataclass_fields__
        frame = Frame(**{name: tensors.get(name) for name in names})  # type: ignore[arg-type]
        return cls(layout, frame, {name: tensor for name, tensor in tensors.items() if name not in names})
