"""Every token in rotated codes: TurboQuant's, and with several groups of channels Block-GTQ's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.rotated import RotatedCode, stored_norms
from kvfold.kernels.position_bias import position_logits, turned_rows
from kvfold.kernels.rotated_encode import encode_heads
from kvfold.stores.base import AttendContext, Rotary
from kvfold.stores.tokenwise import TokenwiseLayout, TokenwiseStore, rotary_for


@dataclass(frozen=True)
class RotatedLayout(TokenwiseLayout):
    """What is not a tensor.

    Attributes
    ----------
    keys, values : tuple of RotatedCode
        One for each KV head.
    turned : bool
        RoPE turns "key_mean" to each token's position; otherwise it is the same everywhere.
    """

    keys: tuple[RotatedCode, ...] = field(default=())
    values: tuple[RotatedCode, ...] = field(default=())
    turned: bool = False


class RotatedStore(TokenwiseStore):
    """Rotated codes and norms.

    Parameters
    ----------
    layout : RotatedLayout
    buffers : mapping of str to Tensor
        "key_codes" and "value_codes" (rows, tokens, bytes of all heads) uint8; "key_norms" and "value_norms" (rows,
        tokens, norms of all heads). Optional constants: "key_mean" (rows, kv_heads, key_dim), which was taken from keys
        before coding, turned by RoPE to each token's position where the layout says so; "key_order" (rows, kv_heads,
        key_dim) uint8, the channels in the order in which `layout.keys` groups them; "key_shares" (rows, kv_heads,
        groups), each group's share of a key's norm.
    """

    kind = "rotated"
    purposes = {
        "key_codes": "codes",
        "value_codes": "codes",
        "key_norms": "norms",
        "value_norms": "norms",
        "key_mean": "means",
        "key_order": "order",
        "key_shares": "norms",
        "valid": "positions",
    }
    per_token = frozenset({"key_codes", "value_codes", "key_norms", "value_norms"})

    @classmethod
    def encode(
        cls,
        keys: Tensor,
        values: Tensor,
        layout: RotatedLayout,
        extra: Mapping[str, Tensor],
        rotary: Rotary | None = None,
    ) -> RotatedStore:
        """Code keys and values.

        Parameters
        ----------
        keys, values : (rows, kv_heads, tokens, key_dim | value_dim)
        layout : RotatedLayout
        extra : mapping of str to Tensor
            The optional buffers.
        rotary : Rotary or None
            Needed if the mean is turned.
        """
        rotary = rotary_for(layout.turned, rotary)
        if "key_mean" in extra:
            keys = without_constant(keys.float(), extra["key_mean"], rotary, layout.shifts)
        buffers = dict(extra)
        for name, x, codes in (("key", keys, layout.keys), ("value", values, layout.values)):
            order = extra.get(f"{name}_order")
            done = encode_heads(x, codes, extra.get(f"{name}_shares"), order)
            if done is not None:
                buffers[f"{name}_codes"], buffers[f"{name}_norms"] = done[0], stored_norms(done[1])
                continue
            if order is not None:
                x = x.gather(-1, order.long()[:, :, None].expand_as(x))
            coded = []
            for heads, code in _runs(codes):
                shares = extra[f"{name}_shares"][:, None, heads] if f"{name}_shares" in extra else None
                coded.append([part.flatten(2) for part in code.encode(x[:, heads].transpose(1, 2), shares)])
            buffers[f"{name}_codes"] = torch.cat([part[0] for part in coded], -1)
            norms = [part[1] for part in coded]
            wide = any(part.dtype == torch.bfloat16 for part in norms)
            buffers[f"{name}_norms"] = torch.cat([part.bfloat16() if wide else part for part in norms], -1)
        return cls(layout, buffers)

    # ---- blocks of tokens ----

    def _coordinates(self, name: str, row: int, span: slice, codes: tuple[RotatedCode, ...]) -> Tensor:
        """Rotated coordinates (heads, n, coded_dim) of some tokens; heads with a sketch have all of them one."""
        result, byte, norm = [], 0, 0
        packed, norms = self.buffers[f"{name}_codes"][row, span], self.buffers[f"{name}_norms"][row, span]
        for heads, code in _runs(codes):
            count = heads.stop - heads.start
            shares = self.buffers[f"{name}_shares"][row, heads] if f"{name}_shares" in self.buffers else None
            part = packed[:, byte : byte + count * code.nbytes].unflatten(1, (count, -1))
            scales = norms[:, norm : norm + count * code.scales].unflatten(1, (count, -1))
            result.append(code.decode(part, scales, shares).transpose(0, 1))
            byte, norm = byte + count * code.nbytes, norm + count * code.scales
        return torch.cat(result)

    def coded_keys(self, row: int, span: slice) -> Tensor:
        return self._coordinates("key", row, span, self.layout.keys)

    def coded_values(self, row: int, span: slice) -> Tensor:
        return self._coordinates("value", row, span, self.layout.values)

    def query_to_basis(self, row: int, query: Tensor) -> Tensor:
        if "key_order" in self.buffers:
            query = query.gather(-1, self.buffers["key_order"][row].long()[:, None].expand_as(query))
        return torch.cat([code.query(query[heads]) for heads, code in _runs(self.layout.keys)])

    def value_from_basis(self, row: int, value: Tensor) -> Tensor:
        return torch.cat([code.restore(value[heads]) for heads, code in _runs(self.layout.values)])

    def more_logits(self, row: int, query: Tensor, context: AttendContext) -> Tensor | None:
        if "key_mean" not in self.buffers:
            return None
        mean = self.buffers["key_mean"][row].float()
        rotary = rotary_for(self.layout.turned, context.rotary)
        if rotary is None:
            return (query @ mean[..., None]).expand(-1, -1, self.tokens)
        return position_logits(query, mean, rotary, self.tokens, self.layout.shifts[row])

    def decode(self, row: int, span: slice, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        coded = self.coded_keys(row, span)
        keys = torch.cat([code.restore(coded[heads]) for heads, code in _runs(self.layout.keys)])
        if "key_order" in self.buffers:
            order = self.buffers["key_order"][row].long()[:, None].expand_as(keys)
            keys = torch.empty_like(keys).scatter_(-1, order, keys)
        if "key_mean" in self.buffers:
            mean, shift = self.buffers["key_mean"][row], self.layout.shifts[row]
            rotary = rotary_for(self.layout.turned, rotary)
            keys = keys + _turned(mean, rotary, span.stop - span.start, shift + span.start)
        return keys, self.value_from_basis(row, self.coded_values(row, span))

    # ---- content ----

    def widths(self) -> list[dict[str, dict[int, int]]]:
        result = []
        for keys, values in zip(self.layout.keys, self.layout.values, strict=True):
            by_width: dict[int, int] = {}
            for width, channels in keys.groups:
                by_width[width + keys.sketch] = by_width.get(width + keys.sketch, 0) + channels * self.rows
            (width, _), *_ = values.groups
            result.append({"values": {width: sum(self.real_tokens)}, "keys": by_width})
        return result

    def meta(self) -> dict[str, Any]:
        codes = {name: [asdict(code) for code in getattr(self.layout, name)] for name in ("keys", "values")}
        return {**vars(self.layout), **codes}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> RotatedStore:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()
        }
        for name in ("keys", "values"):
            fields[name] = tuple(
                RotatedCode(**{**code, "groups": tuple((w, n) for w, n in code["groups"])})
                for code in meta[name]
            )
        return cls(RotatedLayout(**fields), tensors)


def _runs(codes: tuple[RotatedCode, ...]) -> Iterator[tuple[slice, RotatedCode]]:
    """Consecutive heads that share a code."""
    start = 0
    for code, same in groupby(codes):
        stop = start + len(list(same))
        yield slice(start, stop), code
        start = stop


def without_constant(keys: Tensor, mean: Tensor, rotary: Rotary | None, shifts: Sequence[int]) -> Tensor:
    """Keys (rows, kv_heads, tokens, key_dim) less a constant (rows, kv_heads, key_dim), turned by RoPE if it is given."""
    turned = [_turned(mean[row], rotary, keys.shape[2], shift) for row, shift in enumerate(shifts)]
    return keys - torch.stack(turned)


def _turned(mean: Tensor, rotary: Rotary | None, tokens: int, shift: int) -> Tensor:
    """The mean key (kv_heads, key_dim) at each position, (kv_heads, tokens | 1, key_dim)."""
    return mean.float()[:, None] if rotary is None else turned_rows(mean.float(), rotary, tokens, shift)
