"""Caches that hold a long prompt, made without reading it through the whole model."""

from __future__ import annotations

from typing import Any

import torch

from kvfold.api import fold
from kvfold.bench.setup import Setup
from kvfold.bench.shapes import few_layers, random_model, token_ids
from kvfold.hf import FoldedCache
from kvfold.hf.segment import Segment
from kvfold.hf.support import cache_shape, text_config
from kvfold.methods import Full
from kvfold.methods.base import Method
from kvfold.stores.base import Store
from kvfold.stores.dense import DenseStore


def states(setup: Setup, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values (batch, kv_heads, tokens, head_dim)."""
    shape = cache_shape(setup.config)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, shape.kv_heads, tokens, dim, device=setup.device, dtype=setup.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )


def folded_layers(setup: Setup, method: Method, tokens: int, count: int = 1) -> tuple[list[Store], Any]:
    """Some layers' fold of random tokens, of one row, and the rotary embedding it was folded with.

    The layers are all that a model of random weights in the config's shape has: queries, keys, attention and fold are
    real, and so are the widths that a method gives.
    """
    model = random_model(few_layers(setup.config, count), setup.dtype, setup.device)
    cache = fold(model, token_ids(model.config, 1, tokens, setup.device), method)
    layers = cache.folded_layers
    if not layers[0].segments:  # too short to fold
        return [DenseStore(layer.keys, layer.values) for layer in layers], None  # type: ignore[arg-type]
    assert layers[0].attending_module is not None
    return [layer.segments[0].store for layer in layers], layers[0].rotary_of(layers[0].attending_module)


def layer_stores(
    setup: Setup, method: Method, tokens: int, batch: int, count: int
) -> tuple[list[Store], Any]:
    """`count` stores of `batch` rows, each in memory of its own, and the rotary embedding; one fold's content.

    Layers that a method folds together hold the fold of as many, and share what that shares.
    """
    if isinstance(method, Full):
        return [DenseStore(*states(setup, batch, tokens)) for _ in range(count)], None
    rows = torch.zeros(batch, dtype=torch.long, device=setup.device)
    ends = [number + 1 for number in range(count) if method.complete(number, count)]
    made: dict[int, list[Store]] = {}
    found: list[Store] = []
    for start, end in zip([0, *ends], ends):
        if end - start not in made:
            made[end - start], rotary = folded_layers(setup, method, tokens, end - start)
        stores = [store.select(rows) for store in made[end - start]]
        found += stores if len(stores) == 1 else _copied(stores)
    return found, rotary


def _copied(stores: list[Store]) -> list[Store]:
    """Layers folded together in memory of their own; what they share they go on sharing."""
    memory: dict[int, torch.Tensor] = {}
    copied = []
    for store in stores:
        tensors = store.tensors()
        for tensor in tensors.values():
            if id(tensor) not in memory:
                memory[id(tensor)] = tensor.clone()
        own = {name: memory[id(tensor)] for name, tensor in tensors.items()}
        copied.append(type(store).from_state(own, store.meta()))
    return copied


def filled(setup: Setup, method: Method, tokens: int, batch: int) -> FoldedCache:
    """A cache of the whole model that has read `tokens` tokens a row.

    All layers and rows hold one layer's fold (or one window's, where a method folds several layers together), each in
    memory of its own: their bytes and what reading them takes are those of a real prompt. A method that folds the whole
    model at once folds a prompt that the model itself reads.
    """
    if method.granularity == "model":
        return fold(setup.model, token_ids(setup.config, batch, tokens, setup.device), method)
    cache = FoldedCache(method, setup.config, prompt_tokens=tokens)
    cache.watch(setup.model)
    stores, _ = layer_stores(setup, method, tokens, batch, text_config(setup.config).num_hidden_layers)
    for layer, store in zip(cache.folded_layers, stores, strict=True):
        keys, values = states(setup, batch, 0)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layer.segments, layer.folded_tokens = [Segment(store)], tokens
    return cache
