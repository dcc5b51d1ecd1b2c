"""Decoding with eviction at fixed addresses: what a method keeps lies in pages, and it evicts between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvfold.engine.graph import CaptureError, captured
from kvfold.engine.layer import FixedAddresses
from kvfold.errors import NonFiniteError
from kvfold.hf import FoldedCache, bridge, inputs
from kvfold.hf.call import expand_of
from kvfold.hf.layer import FoldedLayer
from kvfold.hf.segment import Segment
from kvfold.stores.paged import Pages, Tokens
from kvfold.stores.retained import Lot, RetainedStore

logger = logging.getLogger(__name__)


def obstacle(cache: FoldedCache) -> str | None:
    """Why a cache, all else being well, cannot be decoded in pages as it is now; None if it can."""
    shapes = set()
    for layer in cache.folded_layers:
        stores = [segment.store for segment in layer.segments]
        if len(stores) != 1 or not isinstance(stores[0], RetainedStore):
            return "nothing was evicted yet"
        if layer.recording:
            return "new tokens are to stay exact"
        if cache.method.block and layer.tail >= cache.method.block:
            return "an eviction is due"
        module = layer.attending_module
        if module is not None and expand_of(module) is not None:
            return "its latents are expanded before attention"
        shapes.add((stores[0].kv_heads, stores[0].key_dim, stores[0].value_dim))
    return None if len(shapes) == 1 else "its layers differ in shape"


def endless(cache: FoldedCache, left: int) -> bool:
    """Whether `left` tokens more take no more room than one."""
    if not cache.method.block:
        return False
    if not all(isinstance(layer, FoldedLayer | LinearAttentionLayer) for layer in cache.layers):
        return False
    lot = _lot(cache)
    bound = cache.method.most(lot, left)
    return bound is not None and bound == cache.method.most(lot, 1)


def _stores(cache: FoldedCache) -> list[RetainedStore]:
    stores = [layer.segments[0].store for layer in cache.folded_layers]
    return [store for store in stores if isinstance(store, RetainedStore)]


def _lot(cache: FoldedCache) -> Lot:
    stores = _stores(cache)
    first, layers, tail = stores[0], len(stores), cache.folded_layers[0].tail
    real = tuple(count + tail for count in first.real_tokens)
    dims = first.key_dim, first.value_dim
    return Lot(first.tokens + tail, real, first.kv_heads, layers, layers, *dims, first.layout.text)


class Paging:
    """A cache's kept tokens, moved into pages until they are given back.

    Parameters
    ----------
    source : FoldedCache
    room : int
        Tokens that will be decoded at most.
    step : (1,) int64
        Tokens decoded, in device memory.
    """

    def __init__(self, source: FoldedCache, room: int, step: Tensor):
        self.source, self.method = source, source.method
        layers, lot = source.folded_layers, _lot(source)
        self.start = lot.tokens
        self._evicted = False
        ahead = self.method.block or layers[0].tail + room
        held = sum(len(store.buffers["positions"]) for store in _stores(source))
        bound = self.method.most(lot, room) if self.method.block else held
        bound = held + room * lot.heads * len(lot.real_tokens) if bound is None else bound
        tails = []
        for layer in layers:
            assert layer.keys is not None and layer.values is not None
            none = torch.zeros(*layer.keys.shape[:3], 1, device=layer.keys.device)
            gates = none if layer.gates is None else layer.gates
            tails.append(Tokens(layer.keys, layer.values, gates[..., 0]))
        self.pages = Pages(_stores(source), tails, bound, ahead)
        # What the gates have to read is kept until an eviction is due, and then read at once.
        self._given: list[Tensor | None] = [None] * len(layers)
        self._first, self._slot = self.pages.newer, torch.zeros_like(step)
        self._finite = torch.ones((), dtype=torch.bool, device=step.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._refused = False

    def tensors(self) -> list[Tensor]:
        """All memory held, what `remember` has added with it."""
        given = [given for given in self._given if given is not None]
        return [*self.pages.tensors(), self._slot, self._finite, *given]

    def release(self) -> None:
        """Free what the source held: from here on it is here."""
        for layer in self.source.folded_layers:
            assert layer.keys is not None and layer.values is not None
            layer.segments, layer.gates = [], None
            layer.keys, layer.values = layer.keys[:, :, :0].clone(), layer.values[:, :, :0].clone()

    def begin(self, step: Tensor) -> None:
        """Make ready for the token that is `step` tokens after the first: device work only."""
        torch.remainder(step + self._first, self.pages.ahead, out=self._slot)

    def remember(self, number: int, given: Tensor) -> None:
        """Keep what a layer's attention is given (rows, 1, hidden_size) for its gate: device work only, but the first time."""
        kept = self._given[number]
        if kept is None:
            kept = self._given[number] = given.new_zeros(given.shape[0], self.pages.ahead, given.shape[2])
            self.source.reserved.append(kept)
        kept.index_copy_(1, self._slot, given)

    def count(self, capture: bool) -> None:
        """A token is in, in every layer; evict, if that is due.

        Raises
        ------
        NonFiniteError
            The gates gave NaN or infinity.
        """
        pages, method = self.pages, self.method
        pages.read()
        if not method.block or pages.newer < method.block:
            return
        new = pages.newer
        pages.begin_eviction(method.limits(pages.lot))
        if capture and self._evicted and self._graph is None and not self._refused:
            # The first eviction has built kernels and workspaces.
            try:
                self._graph = captured(self._evict, self._slot.device)
            except CaptureError as error:
                self._refused = True
                logger.warning("kvfold evicts without a CUDA graph: %s", error)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._evict()
        self._evicted = True
        pages.end_eviction()
        if not bool(self._finite):
            raise NonFiniteError(
                "the gates of kept tokens hold NaN or infinity; the model overflowed (try bfloat16 or float32)"
            )
        first = self.source.folded_layers[0].layer_idx
        self.source.note(first, pages.folded, new, folded=True, generated=True)

    def _evict(self) -> None:
        self._judge()
        self.pages.evict(self.method.choose)

    def _judge(self) -> None:
        """Let the gates read what is new; device work only."""
        (gate,) = self.method.needs.gates
        layers = self.source.folded_layers
        found = [
            gate(given, layer.layer_idx).to(given.device)
            for given, layer in zip(self._given, layers, strict=True)
            if given is not None
        ]
        if len(found) < len(layers):
            return  # the first step failed midway
        log_beta = torch.stack(found)
        self._finite.copy_(torch.isfinite(log_beta).all())
        self.pages.judge(log_beta)

    def give_back(self) -> None:
        """Give the source what is kept, and the tokens read since the last eviction."""
        self._graph = None
        self._judge()
        for layer, (store, tail) in zip(self.source.folded_layers, self.pages.give_back(), strict=True):
            layer.segments = [Segment(store, generated=self._evicted)]
            layer.folded_tokens, layer.reopen = store.tokens, False
            layer.keys, layer.values = tail.keys, tail.values
            layer.gates = tail.log_beta[..., None] if tail.keys.shape[2] else None


class PagedLayer(FixedAddresses):
    """A layer whose tokens lie in pages.

    Parameters
    ----------
    source : FoldedLayer
    paging : Paging
    step : (1,) int64
        Tokens decoded, in device memory.
    """

    tail = 1
    """What `update` returns: the new token alone."""

    def __init__(self, source: FoldedLayer, paging: Paging, step: Tensor):
        super().__init__(source)
        self.cache, self.paging, self.step = paging.source, paging, step
        self.number = self.cache.folded_layers.index(source)
        self.keys = self.values = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Announce the layer, return the new token's states: attention puts them in."""
        bridge.announce(self)  # type: ignore[arg-type]
        return key_states, value_states

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
        """Put the new token in; its attention over all that is kept."""
        context, paging = self.context(module, query, kwargs), self.paging
        paging.remember(self.number, inputs.given_to(module))
        paging.pages.append(self.number, key, value, self.step, paging.start)
        part = paging.pages.attend(self.number, query, context)
        output, _ = self.merged([part], query, kwargs.get("s_aux"))
        return output.transpose(1, 2).contiguous().to(query.dtype), None
