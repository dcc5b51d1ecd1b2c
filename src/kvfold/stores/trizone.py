"""TriZone: tokens and key channels of mixed widths, packed, one ragged segment for each row and KV head.

RDKV, section on the packed layout: zone A holds tokens whose values have 1 to 8 bits, zone B those at 16, and zone C, the
exact tail, is the cache layer's own. A segment's tokens are sorted by value width and then by position, its key
channels by key width, so that every width is one contiguous block of codes. Keys share the order of the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.affine import quantise
from kvfold.codecs.packing import pack, packed_bytes, unpack
from kvfold.kernels.reference import Part, soft_cap
from kvfold.stores.base import AttendContext, Kept, Rotary, Store, attend_expanded


@dataclass(frozen=True)
class Layout:
    """Everything about a TriZone store that is not a tensor.

    Attributes
    ----------
    value_widths, key_widths : tuple of int
        The widths in use above 0, ascending; 16 means stored as it is.
    value_group, key_group : int or None
        Channels (of a value) and kept tokens (of a key channel) that share a scale and minimum; None: all of them.
    tokens : int
    real_tokens : tuple of int
    key_dim, value_dim : int
    """

    value_widths: tuple[int, ...]
    key_widths: tuple[int, ...]
    value_group: int | None
    key_group: int | None
    tokens: int
    real_tokens: tuple[int, ...]
    key_dim: int
    value_dim: int

    def value_groups(self) -> list[slice]:
        """Channel ranges that share a scale."""
        step = self.value_group or self.value_dim
        return [slice(start, min(start + step, self.value_dim)) for start in range(0, self.value_dim, step)]

    def key_groups(self, tokens: int) -> int:
        """Scales of one key channel over `tokens` kept tokens."""
        if not tokens:
            return 0
        return -(-tokens // min(tokens, self.key_group or tokens))

    def value_bytes(self, width: int) -> int:
        """Bytes that one token's value row and its position take at a width (0: evicted)."""
        if width == 0:
            return 0
        position = position_dtype(self.tokens).itemsize
        if width == 16:
            return 2 * self.value_dim + position
        return packed_bytes(self.value_dim, width) + 4 * len(self.value_groups()) + position

    def key_bytes(self, width: int, channels: int, tokens: int) -> int:
        """Bytes of `channels` key channels of one width over `tokens` kept tokens."""
        if width == 0 or not channels:
            return 0
        if width == 16:
            return 2 * channels * tokens
        return tokens * packed_bytes(channels, width) + 4 * channels * self.key_groups(tokens)

    def fixed_bytes(self, heads: int) -> int:
        """Bytes of one row that do not depend on the allocation: channel order and counts."""
        return heads * (self.key_dim + 4 * (len(self.value_widths) + len(self.key_widths)))


def position_dtype(tokens: int) -> torch.dtype:
    """Smallest dtype that holds a logical index below `tokens`."""
    return torch.int16 if tokens <= 1 << 15 else torch.int32


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


class TriZoneStore(Store):
    """Packed tokens of mixed widths.

    Parameters
    ----------
    layout : Layout
    buffers : mapping of str to Tensor
        "positions" (kept,) int16 or int32; "value_counts" (rows, kv_heads, value widths) and "key_counts" (rows,
        kv_heads, key widths) int32; "order" (rows, kv_heads, key_dim) uint8; for each value width w "values_w"
        (tokens of that width, bytes) with "value_scale_w" and "value_minimum_w" (tokens, groups); for each key width
        w "keys_w" (bytes,) uint8; "key_scale" and "key_minimum" flat. Width 16 holds the 16-bit dtype itself.
        All are segment-major: row 0 head 0, row 0 head 1, ...

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "trizone"
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
        cursor = dict.fromkeys(buffers, 0)

        def take(name: str, count: int) -> Tensor:
            start = cursor[name]
            cursor[name] += count
            if cursor[name] > buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is shorter than the counts say")
            return buffers[name][start : start + count]

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
        for name, used in cursor.items():
            if name not in ("order", "value_counts", "key_counts") and used != buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is longer than the counts say")
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
        rows, heads = keys.shape[:2]
        device = keys.device
        half = keys.dtype if keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
        meta = (
            torch.bfloat16 if keys.dtype == torch.bfloat16 and _beyond_half(keys, values) else torch.float16
        )
        # Stable sort: by width, then by position; evicted tokens and dropped channels come first and are cut off.
        token_order = torch.sort(value_bits, dim=-1, stable=True).indices
        channel_order = torch.sort(key_bits, dim=-1, stable=True).indices
        value_counts = torch.stack([(value_bits == width).sum(-1) for width in layout.value_widths], -1).int()
        key_counts = torch.stack([(key_bits == width).sum(-1) for width in layout.key_widths], -1).int()
        dropped = key_counts.sum(-1)
        parts: dict[str, list[Tensor]] = {"positions": [], "key_scale": [], "key_minimum": []}
        for width in layout.value_widths:
            coded = [f"value_scale_{width}", f"value_minimum_{width}"] if width < 16 else []
            parts |= {name: [] for name in [f"values_{width}", *coded]}
        parts |= {f"keys_{width}": [] for width in layout.key_widths}
        orders = []
        for row in range(rows):
            for head in range(heads):
                kept = int(value_counts[row, head].sum())
                tokens = (
                    token_order[row, head, layout.tokens - kept :] if kept else token_order[row, head, :0]
                )
                parts["positions"].append(tokens)
                start = 0
                for width, count in zip(layout.value_widths, value_counts[row, head].tolist(), strict=True):
                    x = values[row, head, tokens[start : start + count]]
                    start += count
                    if width == 16:
                        parts["values_16"].append(x.to(half))
                        continue
                    coded_x = quantise(x.float(), width, layout.value_group, meta)
                    parts[f"values_{width}"].append(pack(coded_x.codes, width))
                    parts[f"value_scale_{width}"].append(coded_x.scale)
                    parts[f"value_minimum_{width}"].append(coded_x.minimum)
                used = int(dropped[row, head])
                channels = (
                    channel_order[row, head, layout.key_dim - used :]
                    if used
                    else channel_order[row, head, :0]
                )
                rest = channel_order[row, head, : layout.key_dim - used]
                orders.append(torch.cat([channels, rest]))
                k = keys[row, head, tokens].float()
                start = 0
                for width, count in zip(layout.key_widths, key_counts[row, head].tolist(), strict=True):
                    x = k[:, channels[start : start + count]]
                    start += count
                    if width == 16:
                        parts["keys_16"].append(x.to(half).flatten())
                        continue
                    coded_k = quantise(x.t().contiguous(), width, layout.key_group, meta)
                    parts[f"keys_{width}"].append(pack(coded_k.codes.t().contiguous(), width).flatten())
                    parts["key_scale"].append(coded_k.scale.t().flatten())
                    parts["key_minimum"].append(coded_k.minimum.t().flatten())
        buffers = {name: torch.cat(pieces) for name, pieces in parts.items() if pieces}
        for name in ("key_scale", "key_minimum"):
            buffers.setdefault(name, torch.empty(0, dtype=meta, device=device))
        buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
        buffers["order"] = torch.stack(orders).view(rows, heads, -1).to(torch.uint8)
        buffers["value_counts"], buffers["key_counts"] = value_counts, key_counts
        return cls(layout, buffers)

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        batch, heads, queries, _ = query.shape
        sources = list(range(batch)) if rows is None else rows.tolist()
        output = lse = None
        for row in sorted(set(sources)):
            index = [position for position, source in enumerate(sources) if source == row]
            # (heads, batch rows that share this store row x queries, dim): more queries for the same tokens.
            q = query[index].float().transpose(0, 1).flatten(1, 2)
            out, part_lse = self._attend_row(row, q, context)
            if output is None or lse is None:
                output = out.new_zeros(batch, heads, queries, out.shape[-1])
                lse = out.new_full((batch, heads, queries), -torch.inf)
            output[index] = out.view(heads, len(index), queries, -1).transpose(0, 1)
            lse[index] = part_lse.view(heads, len(index), queries).transpose(0, 1)
        assert output is not None and lse is not None
        return output, lse

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of query (heads, n, query_dim) over one row's segments."""
        if context.expand is not None:
            return attend_expanded(self.kept(row, 0, context.rotary), query, context)
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

    def crop(self, tokens: int) -> TriZoneStore:
        """Hide what lies at or after `tokens`; scales shared with kept tokens keep the bytes in place."""
        other = TriZoneStore(self.layout, self.buffers)
        gone = self.tokens - tokens
        other.tokens = tokens
        other.real_tokens = tuple(max(count - gone, 0) for count in self.real_tokens)
        return other

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
        layout = self._layout_of(chosen)
        other = TriZoneStore(layout, buffers)
        other.tokens = self.tokens
        other.real_tokens = tuple(self.real_tokens[row] for row in chosen)
        return other

    def _layout_of(self, rows: Sequence[int]) -> Layout:
        fields = {**vars(self.layout)}
        fields["real_tokens"] = tuple(self.layout.real_tokens[row] for row in rows)
        return Layout(**fields)

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

    def meta(self) -> dict[str, Any]:
        return {**vars(self.layout), "visible_tokens": self.tokens, "visible_real_tokens": self.real_tokens}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> TriZoneStore:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()
        }
        tokens, real_tokens = fields.pop("visible_tokens"), fields.pop("visible_real_tokens")
        store = cls(Layout(**fields), tensors)
        store.tokens, store.real_tokens = tokens, real_tokens
        return store


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


def _beyond_half(*tensors: Tensor) -> bool:
    limit = torch.finfo(torch.float16).max
    return any(bool((tensor.abs() > limit).any()) for tensor in tensors if tensor.numel())
