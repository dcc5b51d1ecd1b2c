"""Graded tokens as records, which a GPU's decode kernel reads as they lie.

A grade of a head is a run of records of one format: a width for each tile of 16 channels, one for values, a magnitude a token.
`codecs.codebook.common_levels` have one unit at every width, so a head's queries meet all its grades with one scale a channel.
Exact tokens stay rows beside them, another number for each head. Fine tokens, which `RDKV(tile=16)` does not make, have no
record: a minimum and a scale of each token's own are not a norm, and no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.codebook import COMMON_UNIT, common_levels, decode
from kvfold.codecs.fragments import MOST_TILES, TILE, TOKENS, WIDTHS, Coded, RecordFormat, pack_mixed, unpack
from kvfold.kernels import around_records, pack_records
from kvfold.kernels.around_records import Basis, Rotations
from kvfold.kernels.pack_records import Codes, Numbers, Tokens
from kvfold.kernels.ragged_decode import Ragged
from kvfold.kernels.record_plan import BOOK
from kvfold.kernels.records import Records, Run, book
from kvfold.kernels.reference import Part, merge, softmax_part
from kvfold.kernels.reference import attend as attend_exact
from kvfold.kernels.transfer import sent
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.graded.frame import GradedLayout, require, value_rotation
from kvfold.stores.graded.sections import Section, key_sections, value_sections
from kvfold.stores.graded.store import GradedStore
from kvfold.stores.ragged import position_dtype
from kvfold.stores.reading import ReadsRecords

PER_TOKEN = ("records", "positions", "exact_positions", "exact_keys", "exact_values")


class RecordedGradedStore(ReadsRecords, GradedStore):
    """A `GradedStore` whose codes and magnitudes are records.

    Parameters
    ----------
    layout : GradedLayout
    frame : Frame
    buffers : mapping of str to Tensor
        "counts" as in `GradedStore`, no token fine; "records" (bytes,) uint8, by row, head and grade; "positions" (slots,) int32,
        one for each place that a record has, 0 where there is no token; "exact_keys" and "exact_values" (exact, dim) by row and head,
        "exact_positions" (exact,) int32. And what follows from the frame: "books" (rows, kv_heads, tiles + 1, 32) uint8, "key_scale" (rows, kv_heads, key_dim) float32, what queries are
        multiplied with in the frame's order, and "value_scale" (rows, kv_heads) float32.

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "recorded-graded"
    purposes = {
        **GradedStore.purposes,
        "records": "codes",
        "books": "codebooks",
        "key_scale": "scales",
        "value_scale": "scales",
        "exact_positions": "positions",
    }

    @classmethod
    def of(cls, store: GradedStore) -> RecordedGradedStore | None:
        """The same content as records, or None where records cannot hold it: fine tokens, other widths, parts of tiles."""
        runs = _runs(store, store.counts)
        if runs is None:
            return None
        every, buffers = [run for own in runs for run in own], store.buffers
        device, sizes = buffers["positions"].device, []
        for row in store.counts:
            for head in row:
                sizes += [sum(head[:-2]), head[-1]]
        positions = buffers["positions"].int().split(sizes)
        by_kernel = pack_records.problem(device) is None
        records = _packed_by_kernel(store, runs) if by_kernel else _packed(store, every)
        made = {
            "records": records,
            "positions": _in_slots(torch.cat([*positions[::2]]), every),
            "exact_positions": torch.cat([*positions[1::2]]),
            **{name: buffers[name] for name in ("exact_keys", "exact_values", "counts")},
            **_constants(store),
        }
        whole = cls(store.layout, store.frame, made, store.counts)
        return whole._seen(store.tokens, store.real_tokens)

    def plain(self) -> GradedStore:
        """The store that this one was made of."""
        layout, frame, counts = self.layout, self.frame, self.counts
        key_counts, value_bits = frame.grades
        names = ("positions", "key_codes", "value_codes", "magnitudes", "exact_keys", "exact_values")
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for row in range(self.rows):
            heads = [self._coded(row, head) for head in range(self.kv_heads)]
            for head, own in enumerate(heads):
                exact = self._exact(row, head)
                parts["positions"] += [
                    self._positions(row, head),
                    self.buffers["exact_positions"][exact],
                ]
                assert own.magnitudes is not None
                parts["magnitudes"].append(own.magnitudes)
                for name in ("exact_keys", "exact_values"):
                    parts[name].append(self.buffers[name][exact])
            for one in key_sections(layout.widths, counts[row], key_counts[row]):
                codes = heads[one.head].keys[one.start : one.stop, one.column : one.column + one.channels]
                parts["key_codes"].append(lookup.pack(codes, one.width).flatten())
            for one in value_sections(layout.value_dim, counts[row], value_bits[row]):
                codes = heads[one.head].values[one.start : one.stop]
                parts["value_codes"].append(lookup.pack(codes, one.width).flatten())
        empty = self.buffers["records"][:0]
        buffers = {name: torch.cat(pieces) if pieces else empty for name, pieces in parts.items()}
        buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
        for name in ("fine_keys", "fine_values"):
            buffers[name] = empty.new_zeros(0, layout.key_dim)
        meta = torch.bfloat16 if frame.key_mean.dtype == torch.bfloat16 else torch.float16
        buffers["fine_scales"] = empty.new_zeros(0, 4, dtype=meta)
        buffers["counts"] = self.buffers["counts"]
        return GradedStore(layout, frame, buffers)._seen(self.tokens, self.real_tokens)

    def to(self, device: torch.device | str) -> Store:
        """A copy on another GPU, or in the plain form anywhere else: records serve none but GPUs."""
        return super().to(device) if torch.device(device).type == "cuda" else self.plain().to(device)

    def _cut(self) -> None:
        runs = _runs(self, self.counts)
        if runs is None:
            raise ValueError("the counts and widths of a recorded store are none that records can hold")
        self._runs = runs
        every = [run for own in runs for run in own]
        exact = sum(head[-1] for row in self.counts for head in row)
        expected = {
            "records": sum(run.nbytes for run in every),
            "positions": TOKENS * sum(run.records for run in every),
            "exact_positions": exact,
            "exact_keys": exact,
            "exact_values": exact,
        }
        for name, size in expected.items():
            if self.buffers[name].shape[0] != size:
                raise ValueError(f"{name} has {self.buffers[name].shape[0]} entries, the counts say {size}")
        slots = (TOKENS * sum(run.records for run in own) for own in runs)
        self._first_slot = [*accumulate(slots, initial=0)]
        self._first_exact = [*accumulate((head[-1] for row in self.counts for head in row), initial=0)]

    @staticmethod
    def problem(store: GradedStore) -> str | None:
        """Why records would not be read by a kernel where the store is; None if they would."""
        return around_records.problem(store.frame.order.device, store.key_dim, 1)

    def for_decoding(self) -> Store:
        return self if self.problem(self) is None else self.plain()

    @cached_property
    def _records(self) -> Records:
        buffers = self.buffers
        return Records(buffers["records"], buffers["books"], self._runs, buffers["positions"])

    @cached_property
    def _basis(self) -> Basis:
        frame, buffers = self.frame, self.buffers
        return Basis(
            scale=buffers["key_scale"],
            value_scale=buffers["value_scale"],
            order=frame.order,
            turn_back=_turn_back(self.value_dim, self.kv_heads, frame.order.device),
            key_mean=frame.key_mean,
            value_mean=frame.value_mean,
        )

    @cached_property
    def _exact_tokens(self) -> Ragged:
        keys, values = self.buffers["exact_keys"], self.buffers["exact_values"]
        sizes = tuple(head[-1] for row in self.counts for head in row)
        bias = None
        if self.tokens < self.layout.tokens:
            gone = self.buffers["exact_positions"] >= self.tokens
            bias = torch.zeros(len(keys), device=keys.device).masked_fill_(gone, -torch.inf)
        return Ragged(keys, values, bias, self.buffers["counts"][..., -1].contiguous(), sizes)

    @property
    def derived(self) -> list[Tensor]:
        exact: Ragged | None = vars(self).get("_exact_tokens")
        own = [] if exact is None else [exact.counts]
        return super().derived + own + ([] if exact is None or exact.bias is None else [exact.bias])

    def _slots_of(self, row: int, head: int) -> slice:
        index = row * self.kv_heads + head
        return slice(self._first_slot[index], self._first_slot[index + 1])

    def _exact(self, row: int, head: int) -> slice:
        index = row * self.kv_heads + head
        return slice(self._first_exact[index], self._first_exact[index + 1])

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        if rows is not None or not self._served(query, context):
            return super().attend(query, rows, context)
        if query.shape[2] > 1:  # what reads exact tokens has one query a head
            coded = self._attend(query, context, exact=None)
            return merge([coded, self._exact_part(query, context)])
        return self._attend(query, context)

    def attend_records(self, query: Tensor, context: AttendContext) -> Part:
        """As `attend`, by plain torch, but over records as the kernels read them: their twin."""
        around = self._around(context) | {"exact": None}
        coded = around_records.attend_plain(query, self._records, self._basis, context.scaling, **around)
        return merge([coded, self._exact_part(query, context)])

    def _around(self, context: AttendContext) -> dict[str, Any]:
        """What else `kernels.around_records` attends to."""
        turned = hidden = None
        layout, vector = self.layout, self.frame.key_turned
        if vector is not None:
            turned = self._turned_by(require(context.rotary), vector, layout.tokens, layout.shifts)
        if self.tokens < layout.tokens:
            hidden = self.buffers["positions"] >= self.tokens
        return {"turned": turned, "hidden": hidden, "exact": self._exact_tokens}

    def _exact_part(self, query: Tensor, context: AttendContext) -> Part:
        """Attention of queries (rows, heads, n, dim) over the exact tokens of their heads, by plain torch."""
        grouped = query.float().reshape(self.rows, self.kv_heads, -1, self.key_dim) * context.scaling
        exact, output = self._exact_tokens, torch.zeros_like(grouped)
        lse = grouped.new_full(grouped.shape[:-1], -torch.inf)
        for row in range(self.rows):
            for head in range(self.kv_heads):
                own = self._exact(row, head)
                logits = grouped[row, head] @ exact.keys[own].float().t()
                if exact.bias is not None:
                    logits += exact.bias[own]
                output[row, head], lse[row, head] = softmax_part(logits, exact.values[own].float())
        return output.view(query.shape), lse.view(query.shape[:3])

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Head by head over decoded tokens: for what the kernel does not take."""
        parts = []
        for head, own in enumerate(query.unflatten(0, (self.kv_heads, -1))):
            kept = self.kept(row, head, context.rotary)
            states = kept.keys[None, None], kept.values[None, None]
            parts.append(attend_exact(own[None], *states, context.scaling, None, context.softcap))
        output, lse = (torch.cat(part, 1)[0] for part in zip(*parts, strict=True))
        return output, lse

    # ---- content ----

    def _coded(self, row: int, head: int) -> Coded:
        """Codes and magnitudes of one head's tokens, grade by grade."""
        index = row * self.kv_heads + head
        begin = sum(run.nbytes for own in self._runs[:index] for run in own)
        found = []
        for run in self._runs[index]:
            records = self.buffers["records"][begin : begin + run.nbytes].view(run.records, -1)
            found.append(unpack(records, run.layout, run.tokens))
            begin += run.nbytes
        none = self.buffers["records"].new_zeros(0, self.key_dim)
        keys, values = (
            torch.cat([none, *(c.keys for c in found)]),
            torch.cat([none, *(c.values for c in found)]),
        )
        sizes = [c.magnitudes for c in found if c.magnitudes is not None]
        return Coded(keys, values, None, torch.cat([none[:, 0], *sizes]))

    def _positions(self, row: int, head: int) -> Tensor:
        """Of coded tokens, (tokens,) int32."""
        slots = self.buffers["positions"][self._slots_of(row, head)]
        return slots.index_select(0, _slots(self._runs[row * self.kv_heads + head], slots.device))

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        coded, exact = self._coded(row, head), self._exact(row, head)
        z, w = (torch.zeros(codes.shape, device=codes.device) for codes in (coded.keys, coded.values))
        start = 0
        for run in self._runs[row * self.kv_heads + head]:
            tokens = slice(start, start + run.tokens)
            for tile, width in enumerate(run.layout.key_widths):
                channels = slice(TILE * tile, TILE * (tile + 1))
                if width:
                    z[tokens, channels] = decode(coded.keys[tokens, channels], _levels(width, z.device))
            w[tokens] = decode(coded.values[tokens], _levels(run.layout.value_width, w.device))
            start += run.tokens
        positions = self._positions(row, head).long()
        assert coded.magnitudes is not None
        keys, values = self._restored(row, head, z, w, coded.magnitudes, positions, rotary)
        positions = torch.cat([positions, self.buffers["exact_positions"][exact].long()])
        keys = torch.cat([keys, self.buffers["exact_keys"][exact].float()])
        values = torch.cat([values, self.buffers["exact_values"][exact].float()])
        alive = positions < self.tokens
        return Kept(positions[alive], keys[alive], values[alive])

    def select(self, rows: Tensor) -> GradedStore:
        chosen = rows.tolist()
        heads = self.kv_heads
        first_byte = [*accumulate((sum(run.nbytes for run in own) for own in self._runs), initial=0)]
        firsts = {"records": first_byte, "positions": self._first_slot}
        buffers = {}
        for name in PER_TOKEN:
            at, buffer = firsts.get(name, self._first_exact), self.buffers[name]
            pieces = [buffer[at[row * heads] : at[(row + 1) * heads]] for row in chosen]
            buffers[name] = torch.cat([buffer[:0], *pieces])
        for name in ("counts", "books", "key_scale", "value_scale"):
            buffers[name] = self.buffers[name][rows]
        layout = self._layout_of(chosen, "real_tokens", "shifts")
        real = tuple(self.real_tokens[row] for row in chosen)
        return RecordedGradedStore(layout, self.frame.select(rows), buffers)._seen(self.tokens, real)

    def join(self, following: Store) -> GradedStore | None:
        both = self.plain().join(following)
        return None if both is None else recorded(both)


def recorded(store: GradedStore) -> GradedStore:
    """The store as records, if they can hold it; else itself."""
    return RecordedGradedStore.of(store) or store


def recorded_bytes(layout: GradedLayout, heads: int) -> tuple[int, int]:
    """Bytes that records take beside the plain form's, where they are full: of a token, and of one row's heads."""
    books, scales = BOOK * (layout.key_dim // TILE + 1), 4 * layout.key_dim + 4
    return 4 - position_dtype(layout.tokens).itemsize, heads * (books + scales)


def _runs(store: GradedStore, counts: list[list[list[int]]]) -> list[tuple[Run, ...]] | None:
    """Grades of each row and head that hold tokens; None where records cannot be."""
    layout, dim = store.layout, store.key_dim
    if dim != store.value_dim or dim % TILE or dim > TILE * MOST_TILES or not store.rows:
        return None
    key_counts, value_bits = store.frame.grades
    result = []
    for row, row_counts in enumerate(counts):
        for head, (*graded, fine, _) in enumerate(row_counts):
            runs = []
            for grade, tokens in enumerate(graded):
                if not tokens:
                    continue
                channels, bits = key_counts[row][head][grade], value_bits[row][head][grade]
                used = {bits, *(width for width, n in zip(layout.widths, channels, strict=True) if n)}
                if any(n % TILE for n in channels) or not used <= {*WIDTHS}:
                    return None
                by_tile = [width for width, n in zip(layout.widths, channels) for _ in range(n // TILE)]
                by_tile += [0] * (dim // TILE - len(by_tile))
                runs.append(Run(RecordFormat(tuple(by_tile), bits, 0, True, True), tokens))
            if fine:
                return None
            result.append(tuple(runs))
    return result


def _slots(runs: Sequence[Run], device: torch.device) -> Tensor:
    """Where the tokens of runs lie among the places of their records, (tokens,) int64; nothing waits for the device."""
    gap, gaps = 0, []
    for run in runs:
        gaps.append([gap, run.tokens])
        gap += TOKENS * run.records - run.tokens
    table = torch.tensor(gaps, dtype=torch.int64).view(-1, 2)
    table = sent(table, device)
    count = sum(run.tokens for run in runs)
    before = table[:, 0].repeat_interleave(table[:, 1], output_size=count)
    return before + torch.arange(count, device=device)


def _in_slots(x: Tensor, runs: Sequence[Run]) -> Tensor:
    """What each token of runs has, at its place in their records; 0 where there is no token."""
    places = x.new_zeros(TOKENS * sum(run.records for run in runs), *x.shape[1:])
    return places.index_copy_(0, _slots(runs, x.device), x)


def _packed_by_kernel(store: GradedStore, runs: list[tuple[Run, ...]]) -> Tensor:
    """Records (bytes,) of all runs of each row and head, read from the packed codes as they lie."""
    found = []
    for index, (row, counts) in enumerate(zip(store._rows, store.counts, strict=True)):
        places: tuple[dict[tuple[int, int], list[Codes]], ...] = ({}, {})
        for of, name, sections in zip(places, ("key_codes", "value_codes"), row.sections, strict=True):
            address = row.buffers[name].data_ptr()
            for one in sections:
                codes = Codes(address, one.row_bytes, one.width, one.channels, one.width in lookup.NEIGHBOURS)
                of.setdefault((one.head, one.start), []).append(codes)
                address += one.nbytes
        magnitude = row.buffers["magnitudes"].data_ptr()
        for head in range(len(counts)):
            start = 0
            for run in runs[index * len(counts) + head]:
                keys, (values,) = places[0].get((head, start), ()), places[1][head, start]
                found.append(Tokens(run.layout, run.tokens, keys, values, [Numbers(magnitude, 1)]))
                start, magnitude = start + run.tokens, magnitude + run.tokens
    return pack_records.pack_records(found, store.frame.order.device)


def _packed(store: GradedStore, runs: list[Run]) -> Tensor:
    """As `_packed_by_kernel`, in plain torch."""
    rows = [_codes(store, row, counts) for row, counts in enumerate(store.counts)]
    keys, values = (_in_slots(torch.cat(part), runs) for part in zip(*rows, strict=True))
    sizes = _in_slots(store.buffers["magnitudes"], runs)[:, None]
    return pack_mixed(keys, values, sizes, [run.layout for run in runs], [run.records for run in runs])


def _codes(store: GradedStore, row: int, counts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Codes of one row's coded tokens, head by head: (tokens, dim) uint8, of keys in the frame's order, and of values."""
    layout, buffers = store.layout, store._rows[row].buffers
    key_counts, value_bits = store.frame.grades[0][row], store.frame.grades[1][row]
    sections = (
        ("key_codes", key_sections(layout.widths, counts, key_counts)),
        ("value_codes", value_sections(layout.value_dim, counts, value_bits)),
    )
    firsts = list(accumulate((sum(head[:-2]) for head in counts), initial=0))
    result = []
    for name, own in sections:
        codes, begin = buffers[name].new_zeros(firsts[-1], layout.key_dim), 0
        for width, group in groupby(own, key=attrgetter("width")):
            some = list(group)
            size = sum(one.nbytes for one in some)
            for one, piece in zip(some, _unpacked(buffers[name][begin : begin + size], width, some)):
                tokens = slice(firsts[one.head] + one.start, firsts[one.head] + one.stop)
                codes[tokens, one.column : one.column + one.channels] = piece
            begin += size
        result.append(codes)
    return result[0], result[1]


def _unpacked(packed: Tensor, width: int, sections: list[Section]) -> list[Tensor]:
    """Codes (tokens, channels) of sections that follow each other, of whole tiles."""
    if width in lookup.NEIGHBOURS:  # rows that are whole bytes: one step for all
        codes = lookup.unpack(packed[None], width, len(packed) * 8 // width)[0]
        parts = codes.split([(one.stop - one.start) * one.channels for one in sections])
        return [part.view(-1, one.channels) for part, one in zip(parts, sections)]
    parts = packed.split([one.nbytes for one in sections])
    return [
        lookup.unpack(part.view(-1, one.row_bytes), width, one.channels) for part, one in zip(parts, sections)
    ]


def _constants(store: GradedStore) -> dict[str, Tensor]:
    """What follows from the frame."""
    frame, tiles = store.frame, store.key_dim // TILE
    shape = store.rows, store.kv_heads, tiles + 1, BOOK
    return {
        "books": _book(frame.order.device).expand(shape).contiguous(),
        "key_scale": frame.key_deviation.float().gather(2, frame.order.long()) * COMMON_UNIT,
        "value_scale": frame.value_magnitude * COMMON_UNIT,
    }


@cache
def _turn_back(dim: int, heads: int, device: torch.device) -> Rotations:
    """Of values, the same for every store."""
    rotation = value_rotation(dim, device).t()[None].contiguous()
    return Rotations(rotation, torch.zeros(heads, dtype=torch.int32, device=device))


@cache
def _book(device: torch.device) -> Tensor:
    levels = {width: (common_levels(width) / COMMON_UNIT).int().tolist() for width in WIDTHS if width < 8}
    return book(levels).to(device)


@cache
def _levels(width: int, device: torch.device) -> Tensor:
    return common_levels(width).to(device)
