"""Graded tokens as records, which a GPU's decode kernel reads as they lie.

A grade of a head is a run of records of one format: a width for each tile of 16 channels, one for values, a magnitude a token.
`codecs.codebook.common_levels` have one unit at every width, so a head's queries meet all its grades with one scale a channel.
Exact tokens stay rows beside them, another number for each head. Fine tokens, which `RDKV(tile=16)` does not make, have no
record: a minimum and a scale of each token's own are not a norm, and no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.codebook import COMMON_UNIT, common_levels, decode
from kvfold.codecs.fragments import MOST_TILES, TILE, TOKENS, WIDTHS, Coded, RecordFormat, pack_mixed, unpack
from kvfold.kernels.position_bias import position_logits
from kvfold.kernels.records import BOOK, MOST_GROUP, Records, Run, attend, book
from kvfold.kernels.reference import Part, merge, softmax_part
from kvfold.kernels.reference import attend as attend_exact
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.graded.frame import require, value_rotation
from kvfold.stores.graded.sections import key_sections, value_sections
from kvfold.stores.graded.store import GradedStore
from kvfold.stores.ragged import position_dtype

PER_TOKEN = ("records", "positions", "exact_positions", "exact_keys", "exact_values")


class RecordedGradedStore(GradedStore):
    """A `GradedStore` whose codes and magnitudes are records.

    Parameters
    ----------
    layout : GradedLayout
    frame : Frame
    buffers : mapping of str to Tensor
        "counts" as in `GradedStore`, no token fine; "records" (bytes,) uint8, by row, head and grade; "positions" (slots,) int32,
        one for each place that a record has, 0 where there is no token; "exact_keys" and "exact_values" (exact, dim) by row and head,
        "exact_positions" (exact,) and "exact_starts" (rows * kv_heads + 1,) int32: the first row of each. And what follows from the
        frame: "books" (rows, kv_heads, tiles + 1, 32) uint8, "key_scale" (rows, kv_heads, key_dim) float32, what queries are
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
        "exact_starts": "order",
    }

    @classmethod
    def of(cls, store: GradedStore) -> RecordedGradedStore | None:
        """The same content as records, or None where records cannot hold it: fine tokens, other widths, parts of tiles."""
        counts = store.buffers["counts"].tolist()
        runs = _runs(store, counts)
        if runs is None:
            return None
        names = ("keys", "values", "magnitudes", *PER_TOKEN[1:])
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for row, (part, row_counts) in enumerate(zip(store._rows, counts, strict=True)):
            keys, values = _codes(store, row, row_counts)
            parts["keys"].append(keys)
            parts["values"].append(values)
            parts["magnitudes"].append(part.buffers["magnitudes"])
            for where in part.heads:
                positions = part.buffers["positions"][where.first : where.first + where.tokens].int()
                coded, exact = positions.split([where.coded, where.tokens - where.coded])
                parts["positions"].append(coded)
                parts["exact_positions"].append(exact)
                parts["exact_keys"].append(part.buffers["exact_keys"][where.exact])
                parts["exact_values"].append(part.buffers["exact_values"][where.exact])
        every = [run for own in runs for run in own]
        slots, count = _slots(every, store.frame.order.device), TOKENS * sum(run.records for run in every)
        buffers = {name: torch.cat(pieces) for name, pieces in parts.items()}
        for name in ("keys", "values", "magnitudes", "positions"):
            own = buffers[name]
            buffers[name] = own.new_zeros(count, *own.shape[1:]).index_copy_(0, slots, own)
        coded = Coded(buffers.pop("keys"), buffers.pop("values"), None, buffers.pop("magnitudes"))
        buffers["records"] = pack_mixed(coded, [run.layout for run in every], [run.records for run in every])
        buffers["counts"] = store.buffers["counts"]
        whole = cls(store.layout, store.frame, {**buffers, **_constants(store, counts)})
        return whole._seen(store.tokens, store.real_tokens)

    def plain(self) -> GradedStore:
        """The store that this one was made of."""
        layout, frame, counts = self.layout, self.frame, self._counts
        key_counts, value_bits = frame.key_counts.tolist(), frame.value_bits.tolist()
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
        self._counts: list[list[list[int]]] = self.buffers["counts"].tolist()
        runs = _runs(self, self._counts)
        if runs is None:
            raise ValueError("the counts and widths of a recorded store are none that records can hold")
        self._runs = runs
        every = [run for own in runs for run in own]
        exact = sum(head[-1] for row in self._counts for head in row)
        expected = {
            "records": sum(run.nbytes for run in every),
            "positions": TOKENS * sum(run.records for run in every),
            "exact_positions": exact,
            "exact_keys": exact,
            "exact_values": exact,
            "exact_starts": len(runs) + 1,
        }
        for name, size in expected.items():
            if self.buffers[name].shape[0] != size:
                raise ValueError(f"{name} has {self.buffers[name].shape[0]} entries, the counts say {size}")
        slots = (TOKENS * sum(run.records for run in own) for own in runs)
        self._first_slot = [*accumulate(slots, initial=0)]
        self._first_exact = [*accumulate((head[-1] for row in self._counts for head in row), initial=0)]

    @cached_property
    def _records(self) -> Records:
        return Records(self.buffers["records"], self.buffers["books"], self._runs)

    def _slots_of(self, row: int, head: int) -> slice:
        index = row * self.kv_heads + head
        return slice(self._first_slot[index], self._first_slot[index + 1])

    def _exact(self, row: int, head: int) -> slice:
        index = row * self.kv_heads + head
        return slice(self._first_exact[index], self._first_exact[index + 1])

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        together = query.shape[1] // self.kv_heads * query.shape[2]
        ordinary = rows is None and context.expand is None and context.softcap is None
        if not ordinary or together > MOST_GROUP:
            return super().attend(query, rows, context)
        return self.attend_records(query, context)

    def attend_with_tail(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttendContext,
        before: Part | None,
        length: Tensor | None = None,
    ) -> Part | None:
        return None

    def attend_records(self, query: Tensor, context: AttendContext) -> Part:
        """As `attend`, by `kernels.records`: every row its own queries, no cap, at most 16 queries a KV head."""
        frame = self.frame
        q = query.float().reshape(self.rows, self.kv_heads, -1, self.key_dim) * context.scaling
        coded = (
            q.gather(-1, frame.order.long()[:, :, None].expand_as(q)) * self.buffers["key_scale"][:, :, None]
        )
        output, lse = attend(coded.flatten(1, 2), self._records, 1.0, self._bias(q, context))
        output, lse = output.view(q.shape), lse.view(q.shape[:-1])
        output = output * self.buffers["value_scale"][..., None, None]
        output = output @ value_rotation(self.value_dim, q.device) + frame.value_mean[:, :, None].float()
        output, lse = merge([(output, lse), self._exact_part(q)])
        return output.view(*query.shape[:3], -1), lse.view(query.shape[:3])

    def _bias(self, query: Tensor, context: AttendContext) -> Tensor:
        """What is added to logits (rows, kv_heads * n, slots): the means', and -inf for what `crop` hid."""
        frame = self.frame
        constant = query @ frame.key_mean.float()[..., None]
        bias = query.new_zeros(*query.shape[:3], max(self._records.slots)) + constant
        for row in range(self.rows):
            turned = None
            if frame.key_turned is not None:
                vector, rotary = frame.key_turned[row].float(), require(context.rotary)
                shift = self.layout.shifts[row]
                turned = position_logits(query[row], vector, rotary, self.layout.tokens, shift)
            for head in range(self.kv_heads):
                positions = self.buffers["positions"][self._slots_of(row, head)]
                own = bias[row, head, :, : len(positions)]
                if turned is not None:
                    own += turned[head].index_select(1, positions)
                if self.tokens < self.layout.tokens:
                    own.masked_fill_(positions >= self.tokens, -torch.inf)
        return bias.flatten(1, 2)

    def _exact_part(self, query: Tensor) -> Part:
        """Attention of scaled queries (rows, kv_heads, n, dim) over the exact tokens of their heads."""
        output, lse = torch.zeros_like(query), query.new_full(query.shape[:-1], -torch.inf)
        for row in range(self.rows):
            for head in range(self.kv_heads):
                own = self._exact(row, head)
                if own.start == own.stop:
                    continue
                logits = query[row, head] @ self.buffers["exact_keys"][own].float().t()
                if self.tokens < self.layout.tokens:
                    hidden = self.buffers["exact_positions"][own] >= self.tokens
                    logits.masked_fill_(hidden, -torch.inf)
                values = self.buffers["exact_values"][own].float()
                output[row, head], lse[row, head] = softmax_part(logits, values)
        return output, lse

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
        buffers["exact_starts"] = _exact_starts([self._counts[row] for row in chosen], rows.device)
        layout = self._layout_of(chosen, "real_tokens", "shifts")
        real = tuple(self.real_tokens[row] for row in chosen)
        return RecordedGradedStore(layout, self.frame.select(rows), buffers)._seen(self.tokens, real)

    def join(self, following: Store) -> GradedStore | None:
        if not isinstance(following, GradedStore):
            return None
        if isinstance(following, RecordedGradedStore):
            following = following.plain()
        both = self.plain().join(following)
        return None if both is None else recorded(both)


def recorded(store: GradedStore) -> GradedStore:
    """The store as records, if they can hold it; else itself."""
    return RecordedGradedStore.of(store) or store


def _runs(store: GradedStore, counts: list[list[list[int]]]) -> list[tuple[Run, ...]] | None:
    """Grades of each row and head that hold tokens; None where records cannot be."""
    layout, dim = store.layout, store.key_dim
    if dim != store.value_dim or dim % TILE or dim > TILE * MOST_TILES or not store.rows:
        return None
    key_counts, value_bits = store.frame.key_counts.tolist(), store.frame.value_bits.tolist()
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
    """Where the tokens of runs lie among the places of their records, (tokens,) int64."""
    firsts = accumulate((TOKENS * run.records for run in runs), initial=0)
    pieces = [torch.arange(first, first + run.tokens) for first, run in zip(firsts, runs)]
    return torch.cat([torch.arange(0), *pieces]).to(device)


def _codes(store: GradedStore, row: int, counts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Codes of one row's coded tokens, head by head: (tokens, dim) uint8, of keys in the frame's order, and of values."""
    layout, buffers = store.layout, store._rows[row].buffers
    sections = (
        ("key_codes", key_sections(layout.widths, counts, store.frame.key_counts[row].tolist())),
        ("value_codes", value_sections(layout.value_dim, counts, store.frame.value_bits[row].tolist())),
    )
    firsts = list(accumulate((sum(head[:-2]) for head in counts), initial=0))
    result = []
    for name, own in sections:
        codes, begin = buffers[name].new_zeros(firsts[-1], layout.key_dim), 0
        for one in own:
            tokens = slice(firsts[one.head] + one.start, firsts[one.head] + one.stop)
            packed = buffers[name][begin : begin + one.nbytes].view(-1, one.row_bytes)
            codes[tokens, one.column : one.column + one.channels] = lookup.unpack(
                packed, one.width, one.channels
            )
            begin += one.nbytes
        result.append(codes)
    return result[0], result[1]


def _constants(store: GradedStore, counts: list[list[list[int]]]) -> dict[str, Tensor]:
    """What follows from the frame and the counts."""
    frame, device = store.frame, store.frame.order.device
    levels = {width: (common_levels(width) / COMMON_UNIT).int().tolist() for width in WIDTHS if width < 8}
    tiles = store.key_dim // TILE
    return {
        "books": book(levels).to(device).expand(store.rows, store.kv_heads, tiles + 1, BOOK).contiguous(),
        "key_scale": frame.key_deviation.float().gather(2, frame.order.long()) * COMMON_UNIT,
        "value_scale": frame.value_magnitude * COMMON_UNIT,
        "exact_starts": _exact_starts(counts, device),
    }


def _exact_starts(counts: list[list[list[int]]], device: torch.device) -> Tensor:
    starts = accumulate((head[-1] for row in counts for head in row), initial=0)
    return torch.tensor(list(starts), dtype=torch.int32, device=device)


@cache
def _levels(width: int, device: torch.device) -> Tensor:
    return common_levels(width).to(device)
