"""Caches that hold a long prompt, made without reading it through the whole model."""

from __future__ import annotations

from typing import Any

import torch

from kvfold.api import fold
from kvfold.bench.setup import Setup
from kvfold.bench.shapes import one_layer, random_model, token_ids
from kvfold.hf import FoldedCache
from kvfold.hf.layer import Segment
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


def folded_layer(setup: Setup, method: Method, tokens: int) -> tuple[Store, Any]:
    """One layer's fold of random tokens, of one row, and the rotary embedding it was folded with.

    The layer is the only one of a model of random weights in the config's shape: queries, keys, attention and fold are
    real, and so are the widths that a method gives.
    """
    model = random_model(one_layer(setup.config), setup.dtype, setup.device)
    cache = fold(model, token_ids(model.config, 1, tokens, setup.device), method)
    layer = cache.folded_layers[0]
    if not layer.segments:  # too short to fold
        assert layer.keys is not None and layer.values is not None
        return DenseStore(layer.keys, layer.values), None
    assert layer.attending_module is not None
    return layer.segments[0].store, layer.rotary_of(layer.attending_module)


def layer_stores(
    setup: Setup, method: Method, tokens: int, batch: int, count: int
) -> tuple[list[Store], Any]:
    """`count` stores of `batch` rows, each in memory of its own, and the rotary embedding; one fold's content."""
    if isinstance(method, Full):
        return [DenseStore(*states(setup, batch, tokens)) for _ in range(count)], None
    store, rotary = folded_layer(setup, method, tokens)
    rows = torch.zeros(batch, dtype=torch.long, device=setup.device)
    return [store.select(rows) for _ in range(count)], rotary


def filled(setup: Setup, method: Method, tokens: int, batch: int) -> FoldedCache:
    """A cache of the whole model that has read `tokens` tokens a row.

    All layers and rows hold one layer's fold, each in memory of its own: their bytes and what reading them takes are those
    of a real prompt. A method that folds several layers together folds a prompt that the model itself reads.
    """
    if method.granularity != "layer":
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
