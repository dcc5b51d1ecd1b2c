"""The store of packed tokens of mixed widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codecs.packing import packed_bytes, unpack
from kvfold.kernels.reference import Part, soft_cap
from kvfold.stores.base import AttendContext, Kept, Rotary
from kvfold.stores.ragged import Cursor, RaggedStore
from kvfold.stores.trizone.encode import encode
from kvfold.stores.trizone.layout import Layout


@dataclass(frozen=True)
class _Section:
    """One width of one segment: rows are tokens."""

    width: int
    size: int
    """Value section: tokens. Key section: channels."""
    codes: Tensor
    scale: Tensor | None
    minimum: Tensor | None


@dataclass(frozen=True)
class _Segment:
    """Views of one (row, head)."""

    positions: Tensor
    order: Tensor
    keys: list[_Section]
    values: list[_Section]


class TriZoneStore(RaggedStore):
    """Packed tokens of mixed widths.

    Parameters
    ----------
    layout : Layout
    buffers : mapping of str to Tensor
        "positions" (kept,) int16 or int32; "value_counts" (rows, kv_heads, value widths) and "key_counts" (rows,
        kv_heads, key widths) int32; "order" (rows, kv_heads, key_dim) uint8 or int16; for each value width w "values_w"
        (tokens of that width, bytes) with "value_scale_w" and "value_minimum_w" (tokens, groups); for each key width
        w "keys_w" (bytes,) uint8; "key_scale" and "key_minimum" flat. Width 16 holds the 16-bit dtype itself.
        All are segment-major: row 0 head 0, row 0 head 1, ...

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "trizone"
    layout_class = Layout
    purposes = {
        "positions": "positions",
        "value_counts": "order",
        "key_counts": "order",
        "order": "order",
        "key_scale": "scales",
        "key_minimum": "minima",
        **{
            f"values_{width}": "fp16 rows" if width == 16 else "codes"
            for width in (1, 2, 3, 4, 5, 6, 7, 8, 16)
        },
        **{
            f"keys_{width}": "fp16 rows" if width == 16 else "codes" for width in (1, 2, 3, 4, 5, 6, 7, 8, 16)
        },
        **{f"value_scale_{width}": "scales" for width in range(1, 9)},
        **{f"value_minimum_{width}": "minima" for width in range(1, 9)},
    }
    block = 4096
    """Tokens dequantised at a time."""

    def __init__(self, layout: Layout, buffers: Mapping[str, Tensor]):
        self.layout, self.buffers = layout, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads = buffers["order"].shape[1]
        self.key_dim, self.value_dim = layout.key_dim, layout.value_dim
        self._value_counts: list[list[list[int]]] = buffers["value_counts"].tolist()
        self._key_counts: list[list[list[int]]] = buffers["key_counts"].tolist()
        self._segments = self._cut()

    # ---- layout ----

    def _cut(self) -> list[list[_Segment]]:
        """Views of each segment; checks that every buffer is used to its last element."""
        layout, buffers = self.layout, self.buffers
        if len(self._value_counts) != len(layout.real_tokens):
            raise ValueError("counts and real_tokens disagree on the number of rows")
        counts = ("order", "value_counts", "key_counts")
        cursor = Cursor({name: buffer for name, buffer in buffers.items() if name not in counts})
        take = cursor.take
        rows = []
        for row, (value_counts, key_counts) in enumerate(
            zip(self._value_counts, self._key_counts, strict=True)
        ):
            segments = []
            for head in range(self.kv_heads):
                kept = sum(value_counts[head])
                groups = layout.key_groups(kept)
                values, keys = [], []
                for width, count in zip(layout.value_widths, value_counts[head], strict=True):
                    coded = width < 16
                    values.append(
                        _Section(
                            width,
                            count,
                            take(f"values_{width}", count),
                            take(f"value_scale_{width}", count) if coded else None,
                            take(f"value_minimum_{width}", count) if coded else None,
                        )
                    )
                for width, count in zip(layout.key_widths, key_counts[head], strict=True):
                    coded = width < 16
                    row_bytes = packed_bytes(count, width) if coded else count
                    keys.append(
                        _Section(
                            width,
                            count,
                            take(f"keys_{width}", kept * row_bytes).view(kept, row_bytes),
                            take("key_scale", groups * count).view(groups, count) if coded else None,
                            take("key_minimum", groups * count).view(groups, count) if coded else None,
                        )
                    )
                segments.append(
                    _Segment(
                        take("positions", kept),
                        buffers["order"][row, head],
                        [section for section in keys if section.size],
                        [section for section in values if section.size],
                    )
                )
            rows.append(segments)
        cursor.finish()
        return rows

    @classmethod
    def encode(
        cls,
        keys: Tensor,
        values: Tensor,
        value_bits: Tensor,
        key_bits: Tensor,
        layout: Layout,
    ) -> TriZoneStore:
        """Quantise and pack.

        Parameters
        ----------
        keys, values : (rows, kv_heads, tokens, key_dim | value_dim)
        value_bits : (rows, kv_heads, tokens) uint8
            Width of each token's value, 0 to evict it.
        key_bits : (rows, kv_heads, key_dim) uint8
            Width of each key channel, 0 to drop it.
        layout : Layout
        """
        return cls(layout, encode(keys, values, value_bits, key_bits, layout))

    def _again(self) -> TriZoneStore:
        return TriZoneStore(self.layout, self.buffers)

    # ---- attention ----

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of query (heads, n, query_dim) over one row's segments."""
        heads, count, dim = query.shape
        q = query.reshape(self.kv_heads, -1, dim) * context.scaling
        outputs, lses = [], []
        limit = max(1, (1 << 24) // max(self.tokens, 1))
        for start in range(0, q.shape[1], limit):
            part = q[:, start : start + limit]
            pieces = []
            for head, segment in enumerate(self._segments[row]):
                scores = self._logits(segment, part[head])
                scores = self._masked(soft_cap(scores, context.softcap), segment)
                peak = (
                    scores.amax(-1, keepdim=True)
                    if scores.shape[1]
                    else scores.new_full((len(scores), 1), -torch.inf)
                )
                safe = peak.clamp_min(torch.finfo(peak.dtype).min)
                weights = torch.exp(scores - safe)
                mass = weights.sum(-1, keepdim=True)
                tiny = torch.finfo(mass.dtype).tiny
                pieces.append(
                    (self._mix(segment, weights) / mass.clamp_min(tiny), (mass.log() + safe).squeeze(-1))
                )
            outputs.append(torch.stack([piece[0] for piece in pieces]))
            lses.append(torch.stack([piece[1] for piece in pieces]))
        return (
            torch.cat(outputs, 1).view(heads, count, self.value_dim),
            torch.cat(lses, 1).view(heads, count),
        )

    def _masked(self, scores: Tensor, segment: _Segment) -> Tensor:
        """Hide tokens that were cropped off."""
        if segment.positions.shape[0] and self.tokens < self.layout.tokens:
            return scores.masked_fill(segment.positions >= self.tokens, -torch.inf)
        return scores

    def _logits(self, segment: _Segment, query: Tensor) -> Tensor:
        """query (n, key_dim), already scaled, against every kept key of a segment: (n, kept)."""
        kept = segment.positions.shape[0]
        scores = query.new_zeros(query.shape[0], kept)
        ordered = query[:, segment.order.long()]
        column = 0
        for section in segment.keys:
            q = ordered[:, column : column + section.size]
            column += section.size
            for start in range(0, kept, self.block):
                stop = min(start + self.block, kept)
                if section.scale is None or section.minimum is None:
                    scores[:, start:stop].addmm_(q, section.codes[start:stop].float().t())
                    continue
                codes = unpack(section.codes[start:stop], section.width, section.size).float()
                if section.scale.shape[0] == 1:
                    scale, minimum = section.scale[0].float(), section.minimum[0].float()
                    scores[:, start:stop].addmm_(q * scale, codes.t()).add_((q @ minimum)[:, None])
                    continue
                step = self.layout.key_group or kept
                groups = slice(start // step, -(-stop // step))
                scale, minimum = section.scale[groups].float(), section.minimum[groups].float()
                short = -(stop - start) % step
                codes = torch.nn.functional.pad(codes, (0, 0, 0, short)).view(-1, step, section.size)
                # (groups, step, n): each group's scale goes onto the query, not onto the codes.
                part = codes @ (q[None] * scale[:, None]).transpose(1, 2) + (minimum @ q.t())[:, None]
                scores[:, start:stop] += part.flatten(0, 1)[: stop - start].t()
        return scores

    def _mix(self, segment: _Segment, weights: Tensor) -> Tensor:
        """weights (n, kept) times the values of a segment: (n, value_dim)."""
        output = weights.new_zeros(weights.shape[0], self.value_dim)
        column = 0
        for section in segment.values:
            for start in range(0, section.size, self.block):
                stop = min(start + self.block, section.size)
                w = weights[:, column + start : column + stop]
                if section.scale is None or section.minimum is None:
                    output.addmm_(w, section.codes[start:stop].float())
                    continue
                codes = unpack(section.codes[start:stop], section.width, self.value_dim).float()
                scale, minimum = section.scale[start:stop].float(), section.minimum[start:stop].float()
                offset = w @ minimum
                for group, channels in enumerate(self.layout.value_groups()):
                    part = output[:, channels]
                    part.addmm_(w * scale[:, group], codes[:, channels]).add_(offset[:, group : group + 1])
            column += section.size
        return output

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        segment = self._segments[row][head]
        count = segment.positions.shape[0]
        device = segment.positions.device
        keys = torch.zeros(count, self.key_dim, device=device)
        column = 0
        for section in segment.keys:
            channels = segment.order[column : column + section.size].long()
            column += section.size
            keys[:, channels] = _restore_key(section, count, self.layout.key_group)
        values = torch.cat(
            [_restore_value(section, self.layout) for section in segment.values]
            or [torch.zeros(0, self.value_dim, device=device)]
        )
        positions = segment.positions.long()
        if self.tokens < self.layout.tokens:
            alive = positions < self.tokens
            positions, keys, values = positions[alive], keys[alive], values[alive]
        return Kept(positions, keys, values)

    def select(self, rows: Tensor) -> TriZoneStore:
        chosen = rows.tolist()
        names = [name for name in self.buffers if name not in ("order", "value_counts", "key_counts")]
        pieces: dict[str, list[Tensor]] = {name: [] for name in names}
        for row in chosen:
            for segment in self._segments[row]:
                pieces["positions"].append(segment.positions)
                for section in segment.values:
                    pieces[f"values_{section.width}"].append(section.codes)
                    if section.scale is not None and section.minimum is not None:
                        pieces[f"value_scale_{section.width}"].append(section.scale)
                        pieces[f"value_minimum_{section.width}"].append(section.minimum)
                for section in segment.keys:
                    pieces[f"keys_{section.width}"].append(section.codes.flatten())
                    if section.scale is not None and section.minimum is not None:
                        pieces["key_scale"].append(section.scale.flatten())
                        pieces["key_minimum"].append(section.minimum.flatten())
        buffers = {
            name: torch.cat(parts) if parts else self.buffers[name][:0] for name, parts in pieces.items()
        }
        for name in ("order", "value_counts", "key_counts"):
            buffers[name] = self.buffers[name][rows]
        real = tuple(self.real_tokens[row] for row in chosen)
        return TriZoneStore(self._layout_of(chosen, "real_tokens"), buffers)._seen(self.tokens, real)

    def widths(self) -> list[dict[str, dict[int, int]]]:
        result = []
        for head in range(self.kv_heads):
            values = dict.fromkeys(self.layout.value_widths, 0)
            keys = dict.fromkeys(self.layout.key_widths, 0)
            for row in range(self.rows):
                for width, count in zip(self.layout.value_widths, self._value_counts[row][head], strict=True):
                    values[width] += count
                for width, count in zip(self.layout.key_widths, self._key_counts[row][head], strict=True):
                    keys[width] += count
            evicted = sum(self.layout.real_tokens) - sum(values.values())
            pruned = self.rows * self.key_dim - sum(keys.values())
            result.append({"values": {0: evicted, **values}, "keys": {0: pruned, **keys}})
        return result

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    @classmethod
    def _of(cls, layout: Layout, tensors: Mapping[str, Tensor]) -> TriZoneStore:
        return cls(layout, tensors)


def _restore_key(section: _Section, tokens: int, group: int | None) -> Tensor:
    if section.scale is None or section.minimum is None:
        return section.codes.float()
    codes = unpack(section.codes, section.width, section.size).float()
    step = min(tokens, group or tokens)
    if not tokens:
        return codes
    scale = section.scale.float().repeat_interleave(step, 0)[:tokens]
    return codes * scale + section.minimum.float().repeat_interleave(step, 0)[:tokens]


def _restore_value(section: _Section, layout: Layout) -> Tensor:
    if section.scale is None or section.minimum is None:
        return section.codes.float()
    values = unpack(section.codes, section.width, layout.value_dim).float()
    for group, channels in enumerate(layout.value_groups()):
        scale, minimum = (
            section.scale[:, group : group + 1].float(),
            section.minimum[:, group : group + 1].float(),
        )
        values[:, channels] = values[:, channels] * scale + minimum
    return values
