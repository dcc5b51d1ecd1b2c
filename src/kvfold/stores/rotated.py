"""Every token in rotated codes: TurboQuant's, and with several groups of channels Block-GTQ's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.codecs import logarithm
from kvfold.codecs.rotated import RotatedCode, stored_norms
from kvfold.kernels import rotated_cpu
from kvfold.kernels.position_bias import position_logits, turned_rows, turns
from kvfold.kernels.reference import Part, soft_cap, softmax_part
from kvfold.kernels.rotated_encode import encode_heads, in_spans
from kvfold.kernels.transfer import sent
from kvfold.kernels.triton_rotated_table import serves
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
    sinks : int
        First real tokens of each row that are there exactly too, and attended to instead of their codes.
    norm_bits : int
        16, or 8 for norms as logarithms.
    """

    keys: tuple[RotatedCode, ...] = field(default=())
    values: tuple[RotatedCode, ...] = field(default=())
    turned: bool = False
    sinks: int = 0
    norm_bits: Literal[8, 16] = 16


class RotatedStore(TokenwiseStore):
    """Rotated codes and norms.

    Parameters
    ----------
    layout : RotatedLayout
    buffers : mapping of str to Tensor
        "key_codes" and "value_codes" (rows, tokens, bytes of all heads) uint8; "key_norms" and "value_norms" (rows,
        tokens, norms of all heads). With norms as logarithms also "key_units" and "value_units" (rows, norms of all heads)
        float32, and with sinks "key_sinks" and "value_sinks" (rows, kv_heads, sinks, key_dim | value_dim). Optional
        constants: "key_mean" (rows, kv_heads, key_dim), which was taken from keys
        before coding, turned by RoPE to each token's position where the layout says so; "key_order" (rows, kv_heads,
        key_dim) uint8 or int16, the channels in the order in which `layout.keys` groups them; "key_shares" (rows, kv_heads,
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
        "key_units": "norms",
        "value_units": "norms",
        "key_sinks": "fp16 rows",
        "value_sinks": "fp16 rows",
        "valid": "positions",
    }
    per_token = frozenset({"key_codes", "value_codes", "key_norms", "value_norms"})
    _loop: rotated_cpu.StoreLoop | None = None

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
            The optional buffers; also the units of norms, where they are to be those of an earlier segment, and what has been
            coded already (see `coded`).
        rotary : Rotary or None
            Needed if the mean is turned.
        """
        buffers = {**extra, **_exact_sinks(keys, values, layout)}
        rotary = rotary_for(layout.turned, rotary)
        if "key_codes" not in buffers:
            buffers |= coded("key", keys, layout.keys, layout.norm_bits, buffers, rotary, layout.shifts)
        if "value_codes" not in buffers:
            buffers |= coded("value", values, layout.values, layout.norm_bits, buffers)
        return cls(layout, buffers)

    def for_decoding(self) -> RotatedStore:
        from kvfold.stores.recorded import RecordedStore

        return RecordedStore.of(self) or self if RecordedStore.problem(self) is None else self

    @property
    def derived(self) -> list[Tensor]:
        return [] if self._loop is None else list(self._loop.derived)

    # ---- blocks of tokens ----

    def _coordinates(self, name: str, row: int, span: slice, codes: tuple[RotatedCode, ...]) -> Tensor:
        """Rotated coordinates (heads, n, coded_dim) of some tokens; heads with a sketch have all of them one."""
        result, byte, norm = [], 0, 0
        packed, norms = self.buffers[f"{name}_codes"][row, span], self.buffers[f"{name}_norms"][row, span]
        if self.layout.norm_bits == 8:
            norms = logarithm.decode(norms, self.buffers[f"{name}_units"][row])
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

    def _sinks(self, row: int) -> tuple[int, int]:
        """First token that is there exactly, and the one after the last."""
        first = self.tokens - self.real_tokens[row]
        return first, first + min(self.layout.sinks, self.real_tokens[row])

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        found = self._in_one(row, query, context)
        return super()._attend_row(row, query, context) if found is None else found

    def attend_with_tail(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttendContext,
        before: Part | None,
        length: Tensor | None = None,
    ) -> Part | None:
        if length is not None or query.shape[0] != self.rows:
            return None
        parts = []
        for row in range(self.rows):
            own = None if before is None else (before[0][row], before[1][row])
            part = self._in_one(row, query[row], context, (key[row], value[row]), own)
            if part is None:
                return None
            parts.append(part)
        output, lse = (torch.stack(part) for part in zip(*parts, strict=True))
        return output, lse

    def _in_one(
        self,
        row: int,
        query: Tensor,
        context: AttendContext,
        tail: tuple[Tensor, Tensor] | None = None,
        before: Part | None = None,
    ) -> Part | None:
        """Attention of query (heads, n, key_dim) over a row, a tail and what came before, by the C loop where it serves."""
        if self._loop is None:
            self._loop = rotated_cpu.StoreLoop(self.layout.keys, self.layout.values, self.buffers)
        if context.expand is not None or not self._loop.serves(query):
            return None
        if tail is not None and not tail[0].dtype == tail[1].dtype == query.dtype:
            return None
        around = None
        if "key_mean" in self.buffers and self.layout.turned:
            rotary = rotary_for(True, context.rotary)
            assert rotary is not None
            around = turns(rotary, self.key_dim, self.tokens, self.layout.shifts[row], query.device)
        sinks = self._sinks(row) if self.layout.sinks else (0, 0)
        return self._loop.attend(row, query, context.scaling, context.softcap, sinks, around, tail, before)

    def _parts(self, row: int, query: Tensor, valid: Tensor | None, context: AttendContext) -> list[Part]:
        if not self.layout.sinks:
            return self._coded_parts(row, query, valid, context)
        first, stop = self._sinks(row)
        index = torch.arange(self.tokens, device=query.device)
        coded = (index < first) | (index >= stop)
        parts = self._coded_parts(row, query, coded if valid is None else valid & coded, context)
        keys, values = (
            self.buffers[name][row, :, : stop - first].float() for name in ("key_sinks", "value_sinks")
        )
        values = torch.cat([code.rotate(values[heads]) for heads, code in _runs(self.layout.values)])
        return [*parts, softmax_part(soft_cap(query @ keys.transpose(1, 2), context.softcap), values)]

    def _coded_parts(
        self, row: int, query: Tensor, valid: Tensor | None, context: AttendContext
    ) -> list[Part]:
        keys, values = self.layout.keys, self.layout.values
        if not all(serves(query.device, codes, query.shape[1]) for codes in (keys, values)):
            return super()._parts(row, query, valid, context)
        from kvfold.kernels import triton_rotated_decode

        more = self.more_logits(row, query, context)
        own = {name: tensor[row : row + 1] for name, tensor in self.buffers.items()}
        if valid is not None:
            own["valid"] = valid[None]
        output, lse = triton_rotated_decode.attend(
            self.query_to_basis(row, query)[None],
            keys,
            values,
            own,
            more=None if more is None else more[None],
            softcap=context.softcap,
        )
        return [(output[0], lse[0])]

    def decode(self, row: int, span: slice, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        coded = self.coded_keys(row, span)
        keys = torch.cat([code.restore(coded[heads]) for heads, code in _runs(self.layout.keys)])
        if "key_order" in self.buffers:
            order = self.buffers["key_order"][row].long()[:, None].expand_as(keys)
            keys = torch.empty_like(keys).scatter_(-1, order, keys)
        if "key_mean" in self.buffers:
            mean, shift = self.buffers["key_mean"][row], self.layout.shifts[row]
            rotary = rotary_for(self.layout.turned, rotary)
            keys = keys + _turned(mean, rotary, self.tokens, shift, span)
        values = self.value_from_basis(row, self.coded_values(row, span))
        first, stop = self._sinks(row)
        inside = slice(max(first, span.start), min(stop, span.stop))
        if inside.start < inside.stop:
            to, taken = (slice(inside.start - at, inside.stop - at) for at in (span.start, first))
            keys[:, to] = self.buffers["key_sinks"][row, :, taken].float()
            values[:, to] = self.buffers["value_sinks"][row, :, taken].float()
        return keys, values

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
            fields[name] = tuple(RotatedCode.from_dict(code) for code in meta[name])
        return cls(RotatedLayout(**fields), tensors)


def coded(
    name: Literal["key", "value"],
    x: Tensor,
    codes: tuple[RotatedCode, ...],
    norm_bits: Literal[8, 16],
    extra: Mapping[str, Tensor],
    rotary: Rotary | None = None,
    shifts: Sequence[int] = (),
) -> dict[str, Tensor]:
    """The buffers of keys or of values that hold codes and norms.

    Parameters
    ----------
    name : "key" or "value"
    x : (rows, kv_heads, tokens, dim)
    codes : tuple of RotatedCode
        One for each KV head.
    norm_bits : 8 or 16
    extra : mapping of str to Tensor
        As for `RotatedStore.encode`.
    rotary : Rotary or None
        Given if the mean is turned.
    shifts : sequence of int
        RoPE position of each row's index 0, if there is a mean.
    """
    order, shares = extra.get(f"{name}_order"), extra.get(f"{name}_shares")
    taken = extra.get(f"{name}_mean"), rotary, shifts
    done = encode_heads(x, codes, shares, order, *taken)
    if done is None:
        done = in_spans(partial(_encode, codes=codes, shares=shares, order=order), x, *taken)
    packed, norms = done
    if norm_bits == 16:
        return {f"{name}_codes": packed, f"{name}_norms": stored_norms(norms)}
    unit = extra.get(f"{name}_units")
    if unit is None:
        unit = logarithm.unit_of(norms if "valid" not in extra else norms.where(extra["valid"][..., None], 0))
    return {
        f"{name}_codes": packed,
        f"{name}_norms": logarithm.encode(norms, unit[:, None]),
        f"{name}_units": unit,
    }


def _runs(codes: tuple[RotatedCode, ...]) -> Iterator[tuple[slice, RotatedCode]]:
    """Consecutive heads that share a code."""
    start = 0
    for code, same in groupby(codes):
        stop = start + len(list(same))
        yield slice(start, stop), code
        start = stop


def _exact_sinks(keys: Tensor, values: Tensor, layout: RotatedLayout) -> dict[str, Tensor]:
    """The first real tokens of each row in 16 bits; rows of fewer repeat their last one."""
    if not layout.sinks:
        return {}
    first = layout.tokens - torch.tensor(layout.real_tokens)
    index = sent((first[:, None] + torch.arange(layout.sinks)).clamp_max(layout.tokens - 1), keys.device)
    found = {}
    for name, x in (("key_sinks", keys), ("value_sinks", values)):
        exact = x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))
        wide = exact.dtype == torch.float32 and float(exact.abs().max()) > torch.finfo(torch.float16).max
        dtype = torch.bfloat16 if wide else torch.float16 if exact.dtype == torch.float32 else exact.dtype
        found[name] = exact.to(dtype)
    return found


def _encode(
    x: Tensor, codes: tuple[RotatedCode, ...], shares: Tensor | None, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `encode_heads`, code by code in plain torch."""
    if order is not None:
        x = x.gather(-1, order.long()[:, :, None].expand_as(x))
    coded = []
    for heads, code in _runs(codes):
        own = None if shares is None else shares[:, None, heads]
        coded.append([part.flatten(2) for part in code.encode(x[:, heads].transpose(1, 2), own)])
    packed, norms = zip(*coded, strict=True)
    return torch.cat(packed, -1), torch.cat([part.float() for part in norms], -1)


def _turned(mean: Tensor, rotary: Rotary | None, tokens: int, shift: int, span: slice) -> Tensor:
    """The mean key (kv_heads, key_dim) at each position of the span, (kv_heads, n | 1, key_dim)."""
    mean = mean.float()
    return mean[:, None] if rotary is None else turned_rows(mean, rotary, tokens, shift, span)
