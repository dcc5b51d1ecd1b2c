"""Rotated codes as records, which a GPU's decode kernel reads as they lie."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.codecs import logarithm
from kvfold.codecs.codebook import decode, integer_levels, integers
from kvfold.codecs.fragments import MOST_TILES, TILE, TOKENS, WIDTHS, Coded, RecordFormat, pack_mixed, unpack
from kvfold.codecs.packing import pack as pack_plain
from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.packing import unpack as unpack_plain
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels import around_records, pack_records
from kvfold.kernels.around_records import Basis, Rotations
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.pack_records import Codes, Numbers, Tokens
from kvfold.kernels.record_plan import BOOK
from kvfold.kernels.records import Records, Run, book
from kvfold.kernels.reference import Part
from kvfold.kernels.transfer import sent
from kvfold.stores.base import AttendContext, Store
from kvfold.stores.reading import ReadsRecords
from kvfold.stores.rotated import RotatedLayout, RotatedStore
from kvfold.stores.tokenwise import TokenwiseStore, rotary_for


class RecordedStore(ReadsRecords, RotatedStore):
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
    changing = frozenset({"records"})
    block = 1 << 14
    """More at a time than on a CPU: a block is some hundred launches, whatever its size."""

    @classmethod
    def of(cls, store: RotatedStore) -> RecordedStore | None:
        """The same content as records, or None where records cannot hold it: other widths, groups that are not whole tiles."""
        formats = _formats(store.layout)
        if formats is None or not store.tokens or store.buffers["key_norms"].dtype == torch.bfloat16:
            return None
        if store.buffers["value_norms"].dtype == torch.bfloat16:
            return None
        constants = {name: x for name, x in store.buffers.items() if name not in RotatedStore.per_token}
        by_kernel = pack_records.problem(store.buffers["key_codes"].device) is None
        records = (_packed_by_kernel if by_kernel else _packed)(store, formats)
        return cls(store.layout, {**constants, "records": records.view(store.rows, -1), **_scales(store)})

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

    @staticmethod
    def problem(store: RotatedStore) -> str | None:
        """Why records would not be read by a kernel where the store is; None if they would."""
        device = next(iter(store.buffers.values())).device
        return around_records.problem(device, store.key_dim, 1)

    def for_decoding(self) -> RotatedStore:
        return self if self.problem(self) is None else self.plain()

    def _coded(self, rows: slice, span: slice) -> list[Coded]:
        """Codes and norms (rows, tokens, ...) of each head."""
        first, last = span.start // TOKENS, -(-span.stop // TOKENS)
        own = slice(span.start - first * TOKENS, span.stop - first * TOKENS)
        result = []
        for records, run in zip(self.buffers["records"][rows].split(self._sizes, 1), self._runs, strict=True):
            some = records.unflatten(1, (run.records, -1))[:, first:last]
            coded = unpack(some, run.layout, min(last * TOKENS, self.tokens) - first * TOKENS)
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
        firsts = [self._sinks(row)[1] if self._padded_in_front else 0 for row in range(self.rows)]
        runs = [(replace(run, first=first),) for first in firsts for run in self._runs]
        return Records(self.buffers["records"].view(-1), self.buffers["books"], runs)

    @cached_property
    def _padded_in_front(self) -> bool:
        """Whether what is hidden of a row, its padding and sinks, are its first tokens."""
        return "valid" not in self.buffers or torch.equal(self.buffers["valid"], self._index >= self._starts)

    @property
    def _index(self) -> Tensor:
        return torch.arange(self.tokens, device=self.buffers["records"].device)

    @property
    def _starts(self) -> Tensor:
        """First real token (rows, 1)."""
        starts = [[self.tokens - real] for real in self.real_tokens]
        return torch.tensor(starts, device=self.buffers["records"].device)

    @cached_property
    def _basis(self) -> Basis:
        return Basis(
            scale=self.buffers["key_scale"],
            value_scale=self.buffers["value_scale"],
            order=self.buffers.get("key_order"),
            turn=_rotations(self.layout.keys, False, self.buffers["records"].device),
            turn_back=_rotations(self.layout.values, True, self.buffers["records"].device),
            key_mean=None if self.layout.turned else self.buffers.get("key_mean"),
        )

    @cached_property
    def _exact(self) -> Exact | None:
        """The sinks."""
        if not self.layout.sinks:
            return None
        valid = None
        if min(self.real_tokens) < self.layout.sinks:
            count = torch.tensor(self.real_tokens, device=self.buffers["records"].device)
            valid = torch.arange(self.layout.sinks, device=count.device) < count[:, None]
        return Exact(self.buffers["key_sinks"], self.buffers["value_sinks"], None, valid)

    @property
    def derived(self) -> list[Tensor]:
        exact: Exact | None = vars(self).get("_exact")
        return super().derived + ([] if exact is None or exact.valid is None else [exact.valid])

    def _check(self) -> None:
        super()._check()
        size = sum(self._sizes)
        if self.buffers["records"].shape[1] != size:
            raise ValueError(
                f"records are {self.buffers['records'].shape[1]} bytes a row, the layout says {size}"
            )

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        if rows is not None or not self._served(query, context):
            return super().attend(query, rows, context)
        return self._attend(query, context)

    def attend_records(self, query: Tensor, context: AttendContext) -> Part:
        """As `attend`, by plain torch, but over records as the kernels read them: their twin."""
        return around_records.attend_plain(
            query, self._records, self._basis, context.scaling, **self._around(context)
        )

    def _around(self, context: AttendContext) -> dict[str, Any]:
        """What else `kernels.around_records` attends to."""
        turned = hidden = None
        if "key_mean" in self.buffers and self.layout.turned:
            rotary = rotary_for(True, context.rotary)
            assert rotary is not None
            turned = self._turned_by(rotary, self.buffers["key_mean"], self.tokens, self.layout.shifts)
        if not self._padded_in_front:
            sinks = (self._index >= self._starts) & (self._index < self._starts + self.layout.sinks)
            hidden = pad(~self.buffers["valid"] | sinks, (0, -self.tokens % TOKENS))
            hidden = hidden[:, None].expand(-1, self.kv_heads, -1).flatten()
        return {"turned": turned, "hidden": hidden, "exact": self._exact}

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
        if self.tokens % TOKENS or "valid" in self.buffers or "valid" in following.buffers:
            both = self.plain().join(following.plain())
            return None if both is None else recorded(both)
        if not self._continues(following):
            return None
        pairs = zip(*(one.buffers["records"].split(one._sizes, 1) for one in (self, following)), strict=True)
        records = torch.cat([part for pair in pairs for part in pair], 1)
        real = tuple(a + b for a, b in zip(self.real_tokens, following.real_tokens, strict=True))
        layout = replace(self.layout, tokens=self.tokens + following.tokens, real_tokens=real)
        return RecordedStore(layout, {**self.buffers, "records": records})


def _of(coded: Coded, name: str) -> tuple[Tensor, Tensor]:
    """Codes, and norms (..., n), of keys or values."""
    assert coded.key_norms is not None and coded.magnitudes is not None
    return (coded.keys, coded.key_norms) if name == "key" else (coded.values, coded.magnitudes[..., None])


def recorded(store: RotatedStore) -> RotatedStore:
    """The store as records, if they can hold it; else itself."""
    return RecordedStore.of(store) or store


def recordable(layout: RotatedLayout) -> bool:
    """Whether records can hold such codes."""
    return _formats(layout) is not None


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


def _packed_by_kernel(store: RotatedStore, formats: list[RecordFormat]) -> Tensor:
    """Records (bytes,) of all rows and heads, read from the packed codes as they lie."""
    buffers = {name: store.buffers[name].contiguous() for name in RotatedStore.per_token}
    size = buffers["key_norms"].element_size()
    address = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    stride = {name: buffer.element_size() * buffer.shape[2] for name, buffer in buffers.items()}
    runs = []
    for _ in range(store.rows):
        at = dict(address)
        for layout, *codes in zip(formats, store.layout.keys, store.layout.values, strict=True):
            found: list[list[Codes]] = []
            numbers = []
            for name, code in zip(("key", "value"), codes, strict=True):
                found.append([])
                for width, channels in code.groups:
                    found[-1].append(Codes(at[f"{name}_codes"], stride[f"{name}_codes"], width, channels))
                    at[f"{name}_codes"] += packed_bytes(channels, width)
                for _ in range(code.scales):
                    numbers.append(Numbers(at[f"{name}_norms"], stride[f"{name}_norms"]))
                    at[f"{name}_norms"] += size
            runs.append(Tokens(layout, store.tokens, found[0], found[1][0], numbers))
        address = {name: begin + store.tokens * stride[name] for name, begin in address.items()}
    return pack_records.pack_records(runs, buffers["key_codes"].device)


def _packed(store: RotatedStore, formats: list[RecordFormat]) -> Tensor:
    """As `_packed_by_kernel`, in plain torch."""
    keys, values = (
        _unpacked(store.buffers[f"{name}_codes"], codes)
        for name, codes in (("key", store.layout.keys), ("value", store.layout.values))
    )
    coded, mixed, numbers = (_whole(x).flatten(0, 2) for x in (keys, values, _numbers(store)))
    layouts = formats * store.rows
    return pack_mixed(coded, mixed, numbers, layouts, [-(-store.tokens // TOKENS)] * len(layouts))


def _unpacked(packed: Tensor, codes: tuple[RotatedCode, ...]) -> Tensor:
    """Codes (rows, tokens, heads, dim) uint8 of packed ones (rows, tokens, bytes of all heads), groups alike together."""
    alike: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    byte = 0
    for head, code in enumerate(codes):
        channel = 0
        for width, channels in code.groups:
            alike.setdefault((width, channels), []).append((head, channel, byte))
            channel, byte = channel + channels, byte + packed_bytes(channels, width)
    result = packed.new_empty(*packed.shape[:2], len(codes), codes[0].dim)
    for (width, channels), places in alike.items():
        size = packed_bytes(channels, width)
        some = torch.stack([packed[..., first : first + size] for _, _, first in places], 2)
        for own, (head, channel, _) in zip(
            unpack_plain(some, width, channels).unbind(2), places, strict=True
        ):
            result[:, :, head, channel : channel + channels] = own
    return result


def _numbers(store: RotatedStore) -> Tensor:
    """Norms of each head's key, then its value's, then zeros: (rows, tokens, heads, most)."""
    keys, values = store.buffers["key_norms"], store.buffers["value_norms"]
    most = max(code.scales for code in store.layout.keys) + 1
    columns, first = [], 0
    for head, code in enumerate(store.layout.keys):
        own = [*range(first, first + code.scales), keys.shape[2] + head]
        columns += own + [keys.shape[2] + values.shape[2]] * (most - len(own))
        first += code.scales
    every = torch.cat([keys, values, torch.zeros_like(values[..., :1])], -1)
    index = torch.tensor(columns, device=every.device)
    return every.index_select(-1, index).unflatten(-1, (-1, most))


def _whole(x: Tensor) -> Tensor:
    """Of (rows, tokens, heads, n), the tokens of each head in whole records: (rows, heads, tokens, n)."""
    return pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % TOKENS))


def _scales(store: RotatedStore) -> dict[str, Tensor]:
    """Books, and what whole levels are multiplied with."""
    layout, buffers = store.layout, store.buffers
    books, units, evens, groups, columns = [], [], [], [], []
    column = 0
    for code, value in zip(layout.keys, layout.values, strict=True):
        by_group = code.norms == "group"
        for index, (width, channels) in enumerate(code.groups):
            sphere = by_group or len(code.groups) == 1
            found, unit = _levels(width, channels, sphere, index if by_group else 0)
            books += [found] * (channels // TILE)
            units += [unit] * channels
            evens += [1.0 if by_group else (channels / code.dim) ** 0.5] * channels
            groups += [index] * channels
            columns += [column + (index if by_group else 0)] * channels
        column += code.scales
        (width, channels), *_ = value.groups
        found, unit = _levels(width, channels, True, 0)
        books.append(found)
        units.append(unit)
    heads, dim = len(layout.keys), layout.key_dim
    by_head = torch.tensor(units).view(heads, dim + 1)
    shares = "key_shares" in buffers
    scale = by_head[:, :dim] if shares else by_head[:, :dim] * torch.tensor(evens).view(heads, dim)
    own = torch.tensor([groups, columns]).view(2, heads, dim)
    every = torch.stack(books).view(heads, -1, BOOK), scale, by_head[:, dim], own
    table, scale, value_scale, own = (sent(x.clone(), buffers["key_codes"].device) for x in every)
    if shares:
        scale = scale * buffers["key_shares"].float().gather(2, own[0].expand(store.rows, -1, -1))
    if "key_units" in buffers:
        scale = scale * buffers["key_units"][:, own[1]]
        value_scale = value_scale * buffers["value_units"]
    return {
        "books": table.expand(store.rows, -1, -1, -1).contiguous(),
        "key_scale": scale.expand(store.rows, -1, -1).contiguous(),
        "value_scale": value_scale.expand(store.rows, -1).contiguous(),
    }


@lru_cache(maxsize=256)
def _rotations(codes: tuple[RotatedCode, ...], back: bool, device: torch.device) -> Rotations:
    """To the basis of the heads' codes, or back; each group's in its place."""
    distinct = list(dict.fromkeys(codes))
    matrices = [torch.block_diag(*(rotation for rotation, _ in code.tables(device))) for code in distinct]
    matrices = [matrix.t() if back else matrix for matrix in matrices]
    which = torch.tensor([distinct.index(code) for code in codes], dtype=torch.int32)
    return Rotations(torch.stack(matrices), which.to(device))


@lru_cache(maxsize=1024)
def _levels(width: int, channels: int, on_sphere: bool, group: int) -> tuple[Tensor, float]:
    """A group's book, without levels for width 8, and the unit of its whole levels."""
    dim = channels if on_sphere else None
    whole = integers(width, dim)
    levels = integer_levels(width, dim) if on_sphere else integer_levels(width) / math.sqrt(channels)
    unit = levels[-1] / float(whole[-1])
    return book({} if width == 8 else {width: whole.int().tolist()}, group), float(unit)
