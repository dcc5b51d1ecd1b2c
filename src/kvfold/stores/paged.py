"""Kept tokens of every layer in one pool of pages: what decoding adds to and evicts from in place.

A page of 16 tokens belongs to one slot, which is one KV head of one row in one layer. All slots draw on the same pool, so that
a head that wins tokens takes the pages of one that lost them, whatever its layer, and the pool never grows. Between evictions
a slot has pages for all that will come, so that a step allocates nothing; an eviction fills the gaps it makes with each
slot's last tokens, and moves nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.kernels import paged_decode
from kvfold.kernels.paged_decode import PAGE, Paged
from kvfold.kernels.reference import Part
from kvfold.stores.base import AttendContext
from kvfold.stores.retained import Entries, Lot, RetainedLayout, RetainedStore
from kvfold.stores.trizone import position_dtype


@dataclass(frozen=True)
class Tokens:
    """Tokens of one layer that are not in a store yet, each seen by all slots.

    Attributes
    ----------
    keys, values : (rows, kv_heads, n, key_dim | value_dim)
    log_beta : (rows, kv_heads, n) float32
    """

    keys: Tensor
    values: Tensor
    log_beta: Tensor


class Pages:
    """Kept tokens of all layers that fold, and room for those decoded next.

    Parameters
    ----------
    stores : sequence of RetainedStore
        One a layer, all of the same rows, heads and dimensions.
    tails : sequence of Tokens
        One a layer: what comes after its store, in the dtype of the pool.
    tokens : int
        Entries that the pool must hold at most, beside what was read since the last eviction.
    ahead : int
        Tokens from one eviction to the next, those in `tails` with them.

    Attributes
    ----------
    layers : list of Paged
        The pool as each layer's attention reads it.
    folded : int
        Logical tokens that the last eviction saw.
    newer : int
        Tokens read since.
    real_tokens : tuple of int
        Of each row, `newer` with them.
    """

    def __init__(self, stores: Sequence[RetainedStore], tails: Sequence[Tokens], tokens: int, ahead: int):
        first, tail = stores[0], tails[0]
        rows, heads, device = first.rows, first.kv_heads, tail.keys.device
        self.kv_heads, self.ahead = heads, ahead
        self.folded, self.newer = first.tokens, tail.keys.shape[2]
        self.real_tokens = tuple(count + self.newer for count in first.real_tokens)
        self._text = first.layout.text
        slots = len(stores) * rows * heads
        held = torch.cat([store.buffers["counts"].flatten().to(device) for store in stores])
        self._most = max(tokens, int(held.sum()))
        # Of each slot, all pages but the last are full.
        count = (self._most + slots * (ahead + PAGE - 1)) // PAGE
        self._keys = tail.keys.new_zeros(count * PAGE, first.key_dim)
        self._values = tail.keys.new_zeros(count * PAGE, first.value_dim)
        self._positions = torch.zeros(count * PAGE, dtype=torch.int32, device=device)
        self._log_beta = torch.zeros(count * PAGE, device=device)
        self._table = torch.arange(count, dtype=torch.int32, device=device)
        self._starts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._kept, self._counts = held, held.clone()
        self._tokens = torch.tensor(self.folded + self.newer, device=device)
        self._padding = self._tokens - torch.tensor(self.real_tokens, device=device)
        self._limits = torch.zeros_like(self._padding)
        self._known = torch.tensor(self.newer, device=device)
        self._fused = paged_decode.problem(device) is None
        span = max(4, min(32, count // len(stores) // _processors(device)))
        span = 1 << int(math.log2(span))
        self._pieces = torch.zeros_like(self._starts)
        self._piece_slots = torch.zeros(count // span + slots, dtype=torch.int32, device=device)
        size = rows * heads
        self.layers = [
            Paged(
                self._keys, self._values, self._positions, self._log_beta, self._table,
                self._starts[start : start + size + 1], self._counts[start : start + size],
                self._pieces[start : start + size + 1], self._piece_slots, start, count // span + size, span,
            )
            for start in range(0, slots, size)
        ]  # fmt: skip
        self._share()
        for layer, store, tokens_ in zip(self.layers, stores, tails, strict=True):
            self._fill(layer, store, tokens_)

    def tensors(self) -> list[Tensor]:
        """All memory held."""
        pool = [self._keys, self._values, self._positions, self._log_beta]
        tables = [self._table, self._starts, self._kept, self._counts, self._pieces, self._piece_slots]
        return pool + tables + [self._tokens, self._padding, self._limits, self._known]

    def _places(self, slots: Tensor, index: Tensor) -> Tensor:
        """Where in the pool the `index`-th tokens of slots of all layers lie, int64."""
        return replace(self.layers[0], starts=self._starts).places(slots, index)

    # ---- a step ----

    def append(self, layer: int, key: Tensor, value: Tensor, step: Tensor, start: int) -> None:
        """Put one token in: device work only (see `kernels.paged_decode.append`)."""
        put = paged_decode.append if self._fused else paged_decode.append_plain
        put(key, value, self.layers[layer], step, start)

    def attend(self, layer: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of one query a head over all tokens of a layer; on a GPU device work only."""
        paged = self.layers[layer]
        fused = self._fused and paged_decode.fits(query, paged)
        attend = paged_decode.attend if fused else paged_decode.attend_plain
        return attend(query, paged, context.scaling, context.softcap)

    def read(self, tokens: int = 1) -> None:
        """Count tokens that every layer has appended."""
        self.newer += tokens
        self.real_tokens = tuple(count + tokens for count in self.real_tokens)

    # ---- an eviction ----

    @property
    def lot(self) -> Lot:
        """Of what the pool holds tokens."""
        layers, dims = len(self.layers), (self._keys.shape[1], self._values.shape[1])
        return Lot(
            self.folded + self.newer, self.real_tokens, self.kv_heads, layers, layers, *dims, self._text
        )

    def begin_eviction(self, limits: Sequence[int]) -> None:
        """Tell the device what the host knows of the eviction that comes."""
        self._tokens.fill_(self.folded + self.newer)
        self._limits.copy_(torch.tensor(limits))

    def judge(self, log_beta: Tensor) -> None:
        """Say how fast tokens read since the last eviction may be forgotten: device work only.

        Parameters
        ----------
        log_beta : (layers, rows, kv_heads, ahead) float32
            Those of `tails` are known already, and those of tokens that were not read yet do not count.
        """
        new = torch.arange(self.ahead, device=log_beta.device)
        slots = torch.arange(len(self._kept), device=log_beta.device)
        place = self._places(slots[:, None], self._kept[:, None] + new)
        self._log_beta[place] = torch.where(
            new < self._known, self._log_beta[place], log_beta.view(place.shape)
        )

    def evict(self, choose: Callable[[Entries], Tensor]) -> None:
        """Evict all but what `choose` says, (n,) bool, and make room for `ahead` tokens more in every slot: device work only.

        It is shown every place that a slot has, in the order of slots; `Entries.alive` tells which hold a token.
        """
        slot, index, place, alive = self._order(self._counts)
        chosen = choose(
            Entries(
                self._positions[place].long(), self._log_beta[place], slot, alive,
                self._tokens, self._padding, self._limits, self.kv_heads, self.kv_heads * len(self.layers),
            )
        )  # fmt: skip
        kept = torch.zeros_like(self._counts).index_add_(0, slot, chosen.int())
        inside = index < kept[slot]
        gap, moved = alive & ~chosen & inside, chosen & ~inside
        # A slot has as many gaps before its new end as tokens to keep after it, and both are in the order of slots.
        gaps, sources = (place[mask.argsort(descending=True, stable=True)] for mask in (gap, moved))
        move = paged_decode.move if self._fused else paged_decode.move_plain
        move(self.layers[0], gaps, sources, gap.sum())
        if self._keys.dtype == torch.float32:
            # What a store keeps has 16 bits.
            for pool in (self._keys, self._values):
                pool.copy_(pool.half())
        self._counts.copy_(kept)
        self._kept.copy_(kept)
        self._known.zero_()
        self._share()

    def end_eviction(self) -> None:
        """Count the eviction; waits for the device.

        Raises
        ------
        ValueError
            More was chosen than the pool was made for.
        """
        self.folded, self.newer = self.folded + self.newer, 0
        total = int(self._kept.sum())
        if total > self._most:
            raise ValueError(f"{total} tokens were chosen, and the pool has room for {self._most}")

    def _order(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slot, number in it and place in the pool of every token by the table, int64, and which of them `counts` has; (n,) each."""
        slot, index = self._pages_of(self._starts)
        offset = torch.arange(PAGE, device=slot.device)
        known = slot.clamp_max(len(counts) - 1)
        index = index[:, None] * PAGE + offset
        alive = (index < counts[known][:, None]) & (slot == known)[:, None]
        place = self._table[:, None].long() * PAGE + offset
        return known.repeat_interleave(PAGE), index.flatten(), place.flatten(), alive.flatten()

    def _pages_of(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Slot (their number: none) and number in it of each page of a table; (pages,) int64 each."""
        pages = torch.arange(len(self._table), dtype=torch.int32, device=self._table.device)
        slot = torch.searchsorted(starts[1:], pages, right=True)
        return slot, pages.long() - starts[slot]

    def _share(self) -> None:
        """Give every slot pages for what it keeps and `ahead` tokens more: its own first, then free ones."""
        needed = torch.nn.functional.pad((self._kept + self.ahead + PAGE - 1) // PAGE, (0, 1))
        had = torch.nn.functional.pad(self._starts.diff(), (0, 1))
        stays = torch.minimum(needed, had)
        slot, index = self._pages_of(self._starts)
        own = index < stays[slot]
        self._starts[1:] = needed[:-1].cumsum(0)
        slot, index = self._pages_of(self._starts)
        kept = index < stays[slot]
        # Those that stay keep their order, and so do free ones.
        self._table[kept.argsort(stable=True)] = self._table[own.argsort(stable=True)]
        span = self.layers[0].span
        self._pieces[1:] = ((needed[:-1] + span - 1) // span).cumsum(0)
        pieces = torch.arange(len(self._piece_slots), dtype=torch.int32, device=slot.device)
        self._piece_slots.copy_(torch.searchsorted(self._pieces[1:], pieces, right=True))

    # ---- to and from stores ----

    def _fill(self, layer: Paged, store: RetainedStore, tail: Tokens) -> None:
        device = self._keys.device
        counts = store.buffers["counts"].flatten().to(device).long()
        held = len(store.buffers["positions"])
        slots = torch.arange(len(counts), device=device)
        slot = slots.repeat_interleave(counts, output_size=held)
        index = torch.arange(held, device=device) - (counts.cumsum(0) - counts)[slot]
        place = layer.places(slot, index)
        pools = {
            "keys": self._keys,
            "values": self._values,
            "positions": self._positions,
            "log_beta": self._log_beta,
        }
        for name, pool in pools.items():
            pool[place] = store.buffers[name].to(device, pool.dtype)
        new = torch.arange(self.newer, device=device)
        place = layer.places(slots[:, None], counts[:, None] + new)
        self._keys[place] = tail.keys.flatten(0, 1).to(self._keys.dtype)
        self._values[place] = tail.values.flatten(0, 1).to(self._values.dtype)
        self._log_beta[place] = tail.log_beta.flatten(0, 1)
        self._positions[place] = (self.folded + new).int()
        layer.counts.add_(self.newer)

    def give_back(self) -> list[tuple[RetainedStore, Tokens]]:
        """Stores of what the last eviction left, and the tokens read since; of each layer."""
        rows = len(self.real_tokens)
        real = tuple(count - self.newer for count in self.real_tokens)
        layout = RetainedLayout(self.folded, real, self._text)
        half = self._keys.dtype if self._keys.dtype != torch.float32 else torch.float16
        slot, _, place, old = self._order(self._kept)
        slot, place = slot[old], place[old]
        # By slot, then position.
        order = self._positions[place].argsort(stable=True)
        order = order[slot[order].argsort(stable=True)]
        sizes = self._kept.view(len(self.layers), -1).sum(1).tolist()
        new = torch.arange(self.newer, device=place.device)
        found = []
        for number, (layer, places) in enumerate(zip(self.layers, place[order].split(sizes), strict=True)):
            counts = self._kept.view(len(self.layers), rows, self.kv_heads)[number]
            store = RetainedStore(
                layout,
                {
                    "counts": counts.clone(),
                    "keys": self._keys[places].to(half),
                    "values": self._values[places].to(half),
                    "positions": self._positions[places].to(position_dtype(self.folded)),
                    "log_beta": self._log_beta[places],
                },
            )
            slots = torch.arange(counts.numel(), device=place.device)
            places = layer.places(slots[:, None], counts.flatten()[:, None] + new).view(
                rows, self.kv_heads, -1
            )
            tail = Tokens(self._keys[places], self._values[places], self._log_beta[places])
            found.append((store, tail))
        return found


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
