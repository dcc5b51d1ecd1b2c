"""One exact prefill, folded by any number of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from kvfold.api import check_calibration, prefill, token_hash
from kvfold.hf.again import Again
from kvfold.hf.cache import FoldedCache
from kvfold.hf.layer import FoldedLayer
from kvfold.hf.support import CACHE_KEYWORD, check_supported
from kvfold.methods.base import Gate, LayerView, Method, Needs
from kvfold.methods.full import Full
from kvfold.stores.base import Store


@dataclass(frozen=True, kw_only=True)
class _Recorder(Method):
    """Keeps what prefill hands to a method instead of folding it."""

    name = "recorder"
    paper = "internal"
    wants: Needs = field(default_factory=Needs)
    views: list[LayerView] = field(default_factory=list)

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model"

    @property
    def needs(self) -> Needs:
        return self.wants

    @property
    def shortest(self) -> int:
        return 0

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        # The views share the stores' memory, so that the exact prompt is there once.
        self.views.extend(views)
        return Full().fold(views)


class Prefill:
    """The exact cache of a prompt, and all that any of `methods` needs to see of it.

    Parameters
    ----------
    model : transformers causal language model
    input_ids : (batch, tokens) int64
    methods : sequence of Method
        Those that will be asked to fold.
    attention_mask : (batch, tokens), optional

    Attributes
    ----------
    logits : (batch, vocabulary)
        Next-token logits after the prompt.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        methods: Sequence[Method],
        attention_mask: torch.Tensor | None = None,
    ):
        check_supported(model)
        for method in methods:
            check_calibration(model, method)
        self.model, self.tokens, self._input_ids = model, input_ids.shape[1], input_ids
        needs = [method.needs for method in methods]
        sampled = {need.sampled for need in needs if need.sampled}
        wants = Needs(
            window=max(need.window for need in needs),
            all_queries=any(need.all_queries for need in needs),
            # Samples of different sizes are different queries: take them all, and give each method its own.
            sampled=self.tokens if len(sampled) > 1 else max(sampled, default=0),
            rotary=any(need.rotary for need in needs),
            text=any(need.text for need in needs),
            gates=tuple(dict.fromkeys(gate for need in needs for gate in need.gates)),
        )
        recorder = _Recorder(wants=wants)
        self._exact = FoldedCache(recorder, model.config, prompt_tokens=self.tokens)
        self._exact.watch(model)
        self._exact.prompt_hash = token_hash(input_ids)
        self.logits = prefill(model, self._exact, input_ids, attention_mask)
        self.views, self._gates = recorder.views, wants.gates

    def fold(self, method: Method) -> FoldedCache:
        """The prompt's cache as `kvfold.fold(model, input_ids, method)` makes it, without running the model."""
        cache = FoldedCache(method, self.model.config, prompt_tokens=self.tokens)
        cache.watch(self.model)
        cache.prompt_hash = self._exact.prompt_hash
        cache.again = Again(self.model, self._input_ids) if method.needs.again else None
        layers = cache.folded_layers
        for index, source in enumerate(self._exact.fork().layers):
            layer = cache.layers[index]
            if isinstance(layer, FoldedLayer) and isinstance(source, FoldedLayer):
                layer.identity, layer.module = source.identity, source.module
            else:
                cache.layers[index] = source
        views = [_seen(view, method.needs, self._gates) for view in self.views]
        for layer, view in zip(layers, views, strict=True):
            keys, values = (view.values, view.keys) if view.expand is not None else (view.keys, view.values)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.gates = keys, values, view.gates
        real = max(self.views[0].real_tokens)
        if real <= method.shortest:
            cache.note(layers[0].layer_idx, self.tokens, real, folded=False, generated=False)
            return cache
        for layer, view in zip(layers, views, strict=True):
            cache.fold_layer(layer, view)
        cache.again = None
        return cache


def _seen(view: LayerView, needs: Needs, gates: Sequence[Gate]) -> LayerView:
    """Of what was collected for every method, what a prefill for this one alone would have collected."""
    view = replace(
        view,
        rotary=view.rotary if needs.rotary else None,
        key_bias=view.key_bias if needs.rotary else None,
    )
    view.queries = view.queries[:, :, -needs.window :] if needs.window and view.queries is not None else None
    if view.gates is not None:
        own = [gates.index(gate) for gate in needs.gates]
        view.gates = view.gates[..., own] if own else None
    if not needs.all_queries:
        view.mass = view.seen_by = None
    if not needs.sampled:
        view.sampled = view.sampled_index = None
    elif view.sampled is not None and view.sampled_index is not None:
        stride = -(-view.tokens // needs.sampled)
        chosen = view.sampled_index % stride == 0
        view.sampled, view.sampled_index = view.sampled[:, :, chosen], view.sampled_index[chosen]
    return view


@torch.no_grad()
def continue_logits(model: Any, cache: FoldedCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits (batch, tokens, vocabulary) float32 of given tokens after a cache, which then holds them too.

    The tokens stay exact in the cache's tail.
    """
    cache.expect(cache.get_seq_length())
    cache.activate_past_recording()
    return model(input_ids=ids, use_cache=True, **{CACHE_KEYWORD: cache}).logits.float()


def kl_divergence(full: torch.Tensor, folded: torch.Tensor) -> torch.Tensor:
    """KL(full || folded) of next-token distributions from logits (..., vocabulary), in nats; (...) float32."""
    reference = full.log_softmax(-1)
    return (reference.exp() * (reference - folded.log_softmax(-1))).sum(-1)
