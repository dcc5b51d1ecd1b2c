"""Rotated codes as records, which a GPU's decode kernel reads as they lie."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvfold.codecs import logarithm
from kvfold.codecs.codebook import decode, integers
from kvfold.codecs.fragments import MOST_TILES, TILE, WIDTHS, Coded, RecordFormat, pack, unpack
from kvfold.codecs.packing import pack as pack_plain
from kvfold.codecs.packing import unpack as unpack_plain
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.records import Records, Run, attend, book, problem
from kvfold.kernels.reference import Part, merge, softmax_part
from kvfold.stores.base import AttendContext, Store
from kvfold.stores.rotated import RotatedLayout, RotatedStore
from kvfold.stores.tokenwise import TokenwiseStore


class RecordedStore(RotatedStore):
    """A `RotatedStore` whose codes and norms are records; attention of few queries is one launch over all rows.

    Parameters
    ----------
    layout : RotatedLayout
    buffers : mapping of str to Tensor
        Those of `RotatedStore`, but for codes and norms: "records" (rows, bytes) uint8, every head's after the other. And what
        follows from the layout and the norms' units: "books" (rows, kv_heads, tiles + 1, 32) uint8, "key_scale" (rows, kv_heads,
        key_dim) and "value_scale" (rows, kv_heads) float32, what whole levels are multiplied with.
    """

    kind = "recorded"
    purposes = {
        **{name: use for name, use in RotatedStore.purposes.items() if name not in RotatedStore.per_token},
        "records": "codes",
        "books": "codebooks",
        "key_scale": "scales",
        "value_scale": "scales",
    }
    per_token = frozenset()

    @classmethod
    def of(cls, store: RotatedStore) -> RecordedStore | None:
        """The same content as records, or None where records cannot hold it: other widths, groups that are not whole tiles."""
        formats = _formats(store.layout)
        if formats is None or not store.tokens or store.buffers["key_norms"].dtype == torch.bfloat16:
            return None
        if store.buffers["value_norms"].dtype == torch.bfloat16:
            return None
        constants = {name: x for name, x in store.buffers.items() if name not in RotatedStore.per_token}
        keys, values = (
            _unpacked(store.buffers[f"{name}_codes"], store.buffers[f"{name}_norms"], codes)
            for name, codes in (("key", store.layout.keys), ("value", store.layout.values))
        )
        records = [
            pack(Coded(key, value, norms, sizes[..., 0]), layout).flatten(1)
            for (key, norms), (value, sizes), layout in zip(keys, values, formats, strict=True)
        ]
        scales = _scales(store)
        return cls(store.layout, {**constants, "records": torch.cat(records, 1), **scales})

    def plain(self) -> RotatedStore:
        """The store that this one was made of."""
        buffers = {name: x for name, x in self.buffers.items() if name in RotatedStore.purposes}
        coded = self._coded(slice(None), slice(0, self.tokens))
        for name, codes in (("key", self.layout.keys), ("value", self.layout.values)):
            packed, norms = [], []
            for code, own in zip(codes, coded, strict=True):
                found, scales = _of(own, name)
                parts = found.split([channels for _, channels in code.groups], -1)
                packed += [
                    pack_plain(part, width) for part, (width, _) in zip(parts, code.groups, strict=True)
                ]
                norms.append(scales)
            buffers[f"{name}_codes"], buffers[f"{name}_norms"] = torch.cat(packed, -1), torch.cat(norms, -1)
        return RotatedStore(self.layout, buffers)

    def to(self, device: torch.device | str) -> Store:
        """A copy on another GPU, or in the plain form anywhere else: records serve none but GPUs."""
        return super().to(device) if torch.device(device).type == "cuda" else self.plain().to(device)

    def _coded(self, rows: slice, span: slice) -> list[Coded]:
        """Codes and norms (rows, tokens, ...) of each head."""
        first, last = span.start // 64, -(-span.stop // 64)
        own = slice(span.start - first * 64, span.stop - first * 64)
        result = []
        for records, run in zip(self.buffers["records"][rows].split(self._sizes, 1), self._runs, strict=True):
            some = records.unflatten(1, (run.records, -1))[:, first:last]
            coded = unpack(some, run.layout, min(last * 64, self.tokens) - first * 64)
            parts = (coded.keys, coded.values, coded.key_norms, coded.magnitudes)
            result.append(Coded(*(part[:, own] for part in parts if part is not None)))
        return result

    @cached_property
    def _runs(self) -> list[Run]:
        """Of one row."""
        formats = _formats(self.layout)
        assert formats is not None
        return [Run(layout, self.tokens) for layout in formats]

    @property
    def _sizes(self) -> list[int]:
        return [run.nbytes for run in self._runs]

    @cached_property
    def _records(self) -> Records:
        runs = [(run,) for run in self._runs] * self.rows
        return Records(self.buffers["records"].view(-1), self.buffers["books"], runs)

    def _check(self) -> None:
        super()._check()
        size = sum(self._sizes)
        if self.buffers["records"].shape[1] != size:
            raise ValueError(
                f"records are {self.buffers['records'].shape[1]} bytes a row, the layout says {size}"
            )

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        together = query.shape[1] // self.kv_heads * query.shape[2]
        ordinary = rows is None and context.expand is None and context.softcap is None
        if not ordinary or problem(query.device, self.key_dim, together) is not None:
            return super().attend(query, rows, context)
        return self.attend_records(query, context)

    def attend_records(self, query: Tensor, context: AttendContext) -> Part:
        """As `attend`, by `kernels.records`: every row its own queries, no cap, at most 16 queries a KV head."""
        batch, heads, queries, dim = query.shape
        q = query.float().reshape(batch, self.kv_heads, -1, dim) * context.scaling
        coded = q
        if "key_order" in self.buffers:
            coded = q.gather(-1, self.buffers["key_order"].long()[:, :, None].expand_as(q))
        coded = torch.cat([code.query(coded[:, at : at + 1]) for at, code in enumerate(self.layout.keys)], 1)
        coded = coded * self.buffers["key_scale"][:, :, None]
        output, lse = attend(coded.flatten(1, 2), self._records, 1.0, self._bias(q, context))
        output, lse = output.view(q.shape), lse.view(q.shape[:-1])
        output = output * self.buffers["value_scale"][..., None, None]
        if self.layout.sinks:
            output, lse = merge([(output, lse), self._sink_part(q)])
        output = torch.cat(
            [code.restore(output[:, at : at + 1]) for at, code in enumerate(self.layout.values)], 1
        )
        return output.view(batch, heads, queries, dim), lse.view(batch, heads, queries)

    def _bias(self, query: Tensor, context: AttendContext) -> Tensor | None:
        """What is added to logits (rows, kv_heads * n, slots): the mean key's, and -inf for padding and sinks."""
        more = [self.more_logits(row, own, context) for row, own in enumerate(query)]
        valid = self.buffers.get("valid")
        if more[0] is None and valid is None and not self.layout.sinks:
            return None
        shape = (*query.shape[:3], -(-self.tokens // 64) * 64)
        bias = query.new_zeros(shape)
        for row, (own, one) in enumerate(zip(bias, more, strict=True)):
            if one is not None:
                own[..., : self.tokens] = one
            own[..., slice(*self._sinks(row))] = -torch.inf
        if valid is not None:
            bias[..., : self.tokens].masked_fill_(~valid[:, None, None], -torch.inf)
        return bias.flatten(1, 2)

    def _sink_part(self, query: Tensor) -> Part:
        """Attention over the sinks, values still rotated."""
        keys, values = self.buffers["key_sinks"].float(), self.buffers["value_sinks"].float()
        logits = query @ keys.transpose(2, 3)
        for row, own in enumerate(logits):
            first, stop = self._sinks(row)
            own[..., stop - first :] = -torch.inf
        turned = [code.rotate(values[:, at : at + 1]) for at, code in enumerate(self.layout.values)]
        return softmax_part(logits, torch.cat(turned, 1))

    # ---- by the plain form ----

    def _coordinates(self, name: str, row: int, span: slice, codes: tuple[RotatedCode, ...]) -> Tensor:
        result, column = [], 0
        for head, (code, own) in enumerate(zip(codes, self._coded(slice(row, row + 1), span), strict=True)):
            found, norms = (part[0] for part in _of(own, name))
            if self.layout.norm_bits == 8:
                units = self.buffers[f"{name}_units"][row, column : column + code.scales]
                norms = logarithm.decode(norms, units)
            shares = self.buffers[f"{name}_shares"][row, head] if f"{name}_shares" in self.buffers else None
            levels = [
                decode(part, table)
                for part, (_, table) in zip(
                    found.split([channels for _, channels in code.groups], -1),
                    code.tables(found.device),
                    strict=True,
                )
            ]
            result.append(code._scaled(levels, norms.float(), shares))
            column += code.scales
        return torch.stack(result)

    def _coded_parts(
        self, row: int, query: Tensor, valid: Tensor | None, context: AttendContext
    ) -> list[Part]:
        return TokenwiseStore._parts(self, row, query, valid, context)

    def crop(self, tokens: int) -> RotatedStore:  # type: ignore[override]
        return recorded(self.plain().crop(tokens))

    def join(self, following: Store) -> RotatedStore | None:  # type: ignore[override]
        if not isinstance(following, RecordedStore):
            return None
        both = self.plain().join(following.plain())
        return None if both is None else recorded(both)


def _of(coded: Coded, name: str) -> tuple[Tensor, Tensor]:
    """Codes, and norms (..., n), of keys or values."""
    assert coded.key_norms is not None and coded.magnitudes is not None
    return (coded.keys, coded.key_norms) if name == "key" else (coded.values, coded.magnitudes[..., None])


def recorded(store: RotatedStore) -> RotatedStore:
    """The store as records, if they can hold it; else itself."""
    return RecordedStore.of(store) or store


def _formats(layout: RotatedLayout) -> list[RecordFormat] | None:
    """The record of each head, None where one cannot be."""
    if layout.key_dim != layout.value_dim or layout.key_dim > TILE * MOST_TILES:
        return None
    formats = []
    for key, value in zip(layout.keys, layout.values, strict=True):
        tiles = all(channels % TILE == 0 for _, channels in key.groups)
        widths = {width for code in (key, value) for width, _ in code.groups}
        if key.sketch or value.sketch or not tiles or not widths <= {*WIDTHS} or len(value.groups) > 1:
            return None
        by_tile = tuple(width for width, channels in key.groups for _ in range(channels // TILE))
        (value_width, _), *_ = value.groups
        formats.append(RecordFormat(by_tile, value_width, key.scales, True, layout.norm_bits == 8))
    return formats


def _unpacked(packed: Tensor, norms: Tensor, codes: tuple[RotatedCode, ...]) -> list[tuple[Tensor, Tensor]]:
    """Codes (rows, tokens, dim) and norms (rows, tokens, n) of each head."""
    result = []
    for code, own, scales in zip(
        codes,
        packed.split([code.nbytes for code in codes], -1),
        norms.split([code.scales for code in codes], -1),
        strict=True,
    ):
        sizes = [width * channels // 8 for width, channels in code.groups]
        parts = zip(own.split(sizes, -1), code.groups, strict=True)
        result.append((torch.cat([unpack_plain(part, *group) for part, group in parts], -1), scales))
    return result


def _scales(store: RotatedStore) -> dict[str, Tensor]:
    """Books, and what whole levels are multiplied with."""
    layout, buffers = store.layout, store.buffers
    device = buffers["key_codes"].device
    books, keys, values = [], [], []
    column = 0
    for head, (code, value) in enumerate(zip(layout.keys, layout.values, strict=True)):
        own, scales = [], []
        for index, (_, channels) in enumerate(code.groups):
            group = index if code.norms == "group" else 0
            levels, unit = _levels(code, index, device)
            own += [book(levels, group)] * (channels // TILE)
            scale = unit.expand(store.rows)
            if code.norms == "token":
                even = scale.new_tensor((channels / code.dim) ** 0.5)
                scale = scale * (
                    buffers["key_shares"][:, head, index].float() if "key_shares" in buffers else even
                )
            if "key_units" in buffers:
                scale = scale * buffers["key_units"][:, column + group]
            scales.append(scale[:, None].expand(-1, channels))
        column += code.scales
        levels, unit = _levels(value, 0, device)
        own.append(book(levels))
        books.append(torch.stack(own))
        keys.append(torch.cat(scales, 1))
        values.append(
            unit * buffers["value_units"][:, head] if "value_units" in buffers else unit.expand(store.rows)
        )
    return {
        "books": torch.stack(books).to(device).expand(store.rows, -1, -1, -1).contiguous(),
        "key_scale": torch.stack(keys, 1),
        "value_scale": torch.stack(values, 1),
    }


def _levels(code: RotatedCode, index: int, device: torch.device) -> tuple[dict[int, list[int]], Tensor]:
    """Whole levels of a group by its width, none for width 8, and their unit ()."""
    width, channels = code.groups[index]
    on_sphere = code.norms == "group" or len(code.groups) == 1
    whole = integers(width, channels if on_sphere else None)
    unit = code.tables(device)[index][1][-1] / float(whole[-1])
    return {} if width == 8 else {width: whole.int().tolist()}, unit
