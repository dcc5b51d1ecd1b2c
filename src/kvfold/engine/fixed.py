"""A folded cache at fixed addresses: its history as it is, and reserved room for the tokens decoded next.

Nothing here depends on how many tokens were decoded but numbers in device memory, so that one CUDA graph serves every step
until the room is full. What was decoded then goes back to the `FoldedCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvfold.engine import paged
from kvfold.engine.layer import FixedAddresses, NotFixedError
from kvfold.engine.paged import PagedLayer, Paging
from kvfold.hf import FoldedCache, bridge
from kvfold.hf.call import AttentionCall, expand_of
from kvfold.hf.layer import FoldedLayer
from kvfold.hf.segment import Segment
from kvfold.kernels import dense_decode
from kvfold.kernels.reference import attend, merge
from kvfold.ledger import tensors_in
from kvfold.stores.dense import DenseStore


def obstacle(cache: FoldedCache) -> str | None:
    """Why a cache cannot be decoded at fixed addresses as it is now; None if it can."""
    method = cache.method
    if method.needs.gates and not method.pages:
        return f"the gates of {method.name} read every token"
    if method.refolds and not method.pages:
        return f"{method.name} folds the whole cache again for each block"
    devices = {layer.keys.device for layer in cache.folded_layers if layer.keys is not None}
    if len(devices) > 1:
        return "its layers are on several devices"
    for layer in cache.layers:
        if isinstance(layer, FoldedLayer):
            if layer.keys is None or layer.attending_module is None:
                return "the cache holds no prompt yet"
            if any(segment.rows is not None for segment in layer.segments):
                return "batch rows share the rows of a folded prompt"
            if cache.prompt_end is not None and layer.get_seq_length() < cache.prompt_end:
                return "the cache waits for the rest of its prompt"
            if _block(cache, layer) and layer.tail >= 2 * _block(cache, layer):
                return "blocks of generated tokens are due to be folded"
        elif type(layer) is DynamicSlidingWindowLayer:
            if layer.record_past or layer.keys is None:
                return "its sliding layers keep the past"
        elif type(layer) is not LinearAttentionLayer:
            return f"it has layers of type {type(layer).__name__}"
    return paged.obstacle(cache) if method.pages else None


def room(cache: FoldedCache, reserve: int, left: int) -> int:
    """Tokens that can be reserved, of `left` to come: no more than until the method folds a block."""
    if cache.method.pages:
        return left if paged.endless(cache, left) else min(reserve, left)
    wanted = min(reserve, left)
    left_in_block = [
        2 * _block(cache, layer) - layer.tail for layer in cache.folded_layers if _block(cache, layer)
    ]
    return min([wanted, *left_in_block])


def _block(cache: FoldedCache, layer: FoldedLayer) -> int:
    return 0 if layer.recording else cache.method.block


@dataclass
class Slots:
    """Where layers that carry the same number of tokens put the next one, and which of theirs it sees.

    Attributes
    ----------
    carried : int
        Tokens before the first reserved slot.
    window : int or None
    valid : (batch, carried) bool or None
        False for padding; None where there is none.
    index : (1,) int64
    length : (1,) int64
        Slots in use, the new token's with them.
    mask : (batch or 1, 1, 1, capacity) bool
    """

    carried: int
    window: int | None
    valid: Tensor | None
    index: Tensor
    length: Tensor
    mask: Tensor

    @staticmethod
    def of(carried: int, room: int, window: int | None, valid: Tensor | None, device: torch.device) -> Slots:
        """For layers with `carried` tokens and `room` more."""
        index = torch.tensor([carried], device=device)
        rows = 1 if valid is None else len(valid)
        mask = torch.zeros(rows, 1, 1, carried + room, dtype=torch.bool, device=device)
        return Slots(carried, window, valid, index, index + 1, mask)

    @property
    def plain(self) -> bool:
        """Whether a new token sees every slot in use."""
        return self.valid is None and self.window is None

    def move(self, step: Tensor) -> None:
        """To the slot of the next token, `step` tokens after the first reserved one."""
        torch.add(step, self.carried, out=self.index)
        torch.add(self.index, 1, out=self.length)
        slot = torch.arange(self.mask.shape[-1], device=step.device)
        seen = slot <= self.index
        if self.window is not None:
            seen &= slot > self.index - self.window
        self.mask.copy_(seen)
        if self.valid is not None:
            self.mask[..., : self.carried] &= self.valid[:, None, None]


class FixedLayer(FixedAddresses):
    """Tokens of one attention layer that are not folded, with room for more.

    Parameters
    ----------
    source : FoldedLayer or DynamicSlidingWindowLayer
    cache : FixedCache
    slots : Slots
    history : list of Segment
        What comes before the carried tokens.
    """

    def __init__(self, source: Any, cache: FixedCache, slots: Slots, history: list[Segment]):
        super().__init__(source)
        self.keys: Tensor | None
        self.values: Tensor | None
        self.fixed, self.slots, self.history = cache, slots, history
        self.cache = cache.source
        capacity = slots.mask.shape[-1]
        self.keys = _with_room(source.keys, slots.carried, capacity)
        self.values = _with_room(source.values, slots.carried, capacity)
        self._fused = dense_decode.problem(self.keys.device) is None
        self.block = _block(cache.source, source) if isinstance(source, FoldedLayer) else 0
        self.queries: Tensor | None = None
        self.lse: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new token's states to its slot, announce the layer, return all slots."""
        assert self.keys is not None and self.values is not None
        if self._fused:
            dense_decode.append(key_states, value_states, self.keys, self.values, self.slots.index)
        else:
            self.keys.index_copy_(2, self.slots.index, key_states)
            self.values.index_copy_(2, self.slots.index, value_states)
        bridge.announce(self)
        return self.keys, self.values

    @property
    def tail(self) -> int:
        """Slots, used and free: what `update` returns."""
        return self.slots.mask.shape[-1]

    # ---- attention ----

    def attention(
        self,
        base: Callable[..., Any],
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attention of the new token over the history and the slots in use."""
        context, slots = self.context(module, query, kwargs), self.slots
        sinks = kwargs.get("s_aux")
        part = None
        if self.history and slots.plain and sinks is None:
            *others, last = self.history
            parts = [segment.store.attend(query, None, context) for segment in others]
            before = merge(parts) if parts else None
            part = last.store.attend_with_tail(query, key, value, context, before, slots.length)
        if part is None:
            parts = [segment.store.attend(query, None, context) for segment in self.history]
            parts.append(attend(query, key, value, context.scaling, slots.mask, context.softcap))
            part = self.merged(parts, query, sinks)
        output, lse = part
        if self.block:
            self._keep(query, lse)
        return output.transpose(1, 2).contiguous().to(query.dtype), None

    def _keep(self, query: Tensor, lse: Tensor) -> None:
        """Keep the query for when its block is folded."""
        if self.queries is None or self.lse is None:
            room = self.tail - self.slots.carried
            self.queries = query.new_zeros(*query.shape[:2], room, query.shape[3])
            self.lse = lse.new_zeros(*lse.shape[:2], room)
        self.queries.index_copy_(2, self.fixed.step, query)
        self.lse.index_copy_(2, self.fixed.step, lse)

    # ---- giving back ----

    def give_back(self, taken: int, positions: Tensor | None) -> None:
        """Hand `taken` new tokens to the source; `positions` (batch, 1) are the last one's."""
        assert self.keys is not None and self.values is not None
        source, start, stop = self.source, self.slots.carried, self.slots.carried + taken
        if not taken:
            return
        new = self.keys[:, :, start:stop], self.values[:, :, start:stop]
        if not isinstance(source, FoldedLayer):
            source.cumulative_length += taken
            kept = source.sliding_window - 1
            source.keys, source.values = (
                torch.cat([old, more], 2)[:, :, max(old.shape[2] + taken - kept, 0) :].clone()
                for old, more in zip((source.keys, source.values), new, strict=True)
            )
            return
        call = queries = lse = None
        if self.queries is not None and self.lse is not None and stop > self.block:
            first = max(self.block, start)
            queries, lse = self.queries[:, :, first - start : taken], self.lse[:, :, first - start : taken]
            call = self._as_call(stop, positions)
        source.extend(*new, call, queries, lse)

    def let_go(self) -> None:
        """Free the room."""
        self.keys = self.values = self.queries = self.lse = None
        self.history = []

    def _as_call(self, tail: int, positions: Tensor | None) -> AttentionCall:
        """The last step's attention call, as folding sees it."""
        assert self.keys is not None and self._context is not None
        mask = None
        if self.slots.valid is not None:
            mask = torch.nn.functional.pad(self.slots.valid, (0, tail - self.slots.carried), value=True)[
                :, None, None
            ]
        return AttentionCall(
            batch=self.keys.shape[0],
            new=1,
            tail=tail,
            length=self.source.folded_tokens + tail,
            device=self.keys.device,
            mask=mask,
            padding=None,
            position_ids=positions,
            expand=self._context.expand,
            **self._call,
        )


def _with_room(states: Tensor, carried: int, capacity: int) -> Tensor:
    """The last `carried` tokens of some states, and zeros up to `capacity`."""
    room = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    room[:, :, :carried] = states[:, :, states.shape[2] - carried :]
    return room


class FixedCache(Cache):
    """A `FoldedCache` at fixed addresses, for decoding one token a step.

    Parameters
    ----------
    source : FoldedCache
    room : int
        Tokens that can be decoded before it is full.
    mask : (batch, tokens) or None
        The model's mask of the tokens seen so far, 0 for padding.

    Attributes
    ----------
    step : (1,) int64
        Tokens decoded, in device memory. `taken` is what the host knows of it.

    Raises
    ------
    NotFixedError
        The cache cannot be decoded this way; see `obstacle`.
    """

    def __init__(self, source: FoldedCache, room: int, mask: Tensor | None):
        why = obstacle(source)
        if why is not None:
            raise NotFixedError(why)
        super().__init__(layers=[])
        self.source, self.room, self.taken = source, room, 0
        first = source.folded_layers[0]
        assert first.keys is not None
        self.step = torch.zeros(1, dtype=torch.long, device=first.keys.device)
        self._mask = None if mask is None or bool(mask.all()) else mask.bool()
        self._length = first.get_seq_length()
        self._slots: dict[tuple[int, int | None, torch.device], Slots] = {}
        self._before = [
            (tensor, tensor.clone())
            for layer in source.layers
            if isinstance(layer, LinearAttentionLayer)
            for tensor in tensors_in(vars(layer))
        ]
        self.paging = Paging(source, room, self.step) if source.method.pages else None
        self.layers: list[Any] = [self._fixed(layer) for layer in source.layers]
        rooms = (room for layer in self._own for room in (layer.keys, layer.values))
        source.reserved = [room for room in rooms if room is not None]
        if self.paging is not None:
            source.reserved += self.paging.tensors()
            self.paging.release()

    @property
    def _own(self) -> list[FixedLayer]:
        return [layer for layer in self.layers if isinstance(layer, FixedLayer)]

    def _fixed(self, layer: Any) -> Any:
        """One layer at fixed addresses; linear layers' states are already."""
        if isinstance(layer, LinearAttentionLayer):
            return layer
        if self.paging is not None and isinstance(layer, FoldedLayer):
            return PagedLayer(layer, self.paging, self.step)
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        carried, history = layer.keys.shape[2], []
        if isinstance(layer, FoldedLayer):
            history = list(layer.segments)
            if carried > self.room and not _block(self.source, layer):
                # A long exact tail (a prompt too short to fold, many answers) is read where it lies.
                module, states = layer.attending_module, (layer.keys, layer.values)
                if module is not None and expand_of(module) is not None:
                    states = layer.values, layer.keys  # of latents, layers hold (latent, rotary part)
                history.append(Segment(DenseStore(*states, self._valid(carried))))
                carried = 0
        key = (carried, window, layer.keys.device)
        if key not in self._slots:
            self._slots[key] = Slots.of(carried, self.room, window, self._valid(carried), layer.keys.device)
        return FixedLayer(layer, self, self._slots[key], history)

    def _valid(self, tokens: int) -> Tensor | None:
        """Which of the last tokens seen are real, (batch, tokens), or None if all are."""
        if self._mask is None or not tokens:
            return None
        valid = self._mask[:, self._length - tokens : self._length]
        return None if bool(valid.all()) else valid.clone()

    @property
    def full(self) -> bool:
        """Whether no room is left."""
        return self.taken == self.room

    def begin(self) -> None:
        """Make ready for the next token: device work only."""
        for slots in self._slots.values():
            slots.move(self.step)
        if self.paging is not None:
            self.paging.begin(self.step)

    def advance(self) -> None:
        """The token is in: device work only."""
        self.step += 1

    def count(self, capture: bool) -> None:
        """The host's part of a step: count the token, and evict if that is due, as a CUDA graph where there may be one."""
        self.taken += 1
        if self.paging is not None:
            self.paging.count(capture)

    def give_back(self, positions: Tensor | None = None) -> None:
        """Hand the new tokens to the source, which folds a block if one is full; then this cache is spent.

        Parameters
        ----------
        positions : (batch, 1) int64 or None
            RoPE position of the last token decoded.
        """
        bridge.forget()
        layers, self.layers, self.source.reserved = self._own, [], []
        for layer in layers:
            layer.give_back(self.taken, positions)
            layer.let_go()
        if self.paging is not None:
            self.paging.give_back()
        self.source.forget_angles()

    def undo(self) -> None:
        """Forget a step that failed midway: nothing but linear layers' states has changed."""
        bridge.forget()
        for tensor, before in self._before:
            tensor.copy_(before)
        self._before = []
