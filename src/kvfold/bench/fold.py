"""What folding a prompt costs beside reading it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache

from kvfold.api import fold as fold_prompt
from kvfold.bench.attention import release
from kvfold.bench.peak import peak
from kvfold.bench.setup import FULL, Setup
from kvfold.bench.shapes import full_bytes, token_ids
from kvfold.bench.timing import seconds
from kvfold.errors import KvfoldError
from kvfold.hf import CACHE_KEYWORD
from kvfold.hf.cache import folds_late
from kvfold.hf.support import text_config
from kvfold.ledger import storage_bytes
from kvfold.methods.base import Method


@torch.no_grad()
def fold(setup: Setup, rounds: int = 2) -> Iterator[dict[str, Any]]:
    """Read a prompt with and without folding it, and compare.

    Yields
    ------
    dict
        For each context, batch and method: "prefill_seconds" of the full cache, "seconds" with folding, "fold_seconds" the
        difference (observing attention included) and "share" of the prefill; "scratch_bytes" that folding took at its peak beside
        exact keys and values and the new store, "layer_bytes" of one layer's keys and values, and "above_layers": what folding
        took and the exact layers that it waited for, in layers, which is the peak above the folded cache.

    Raises
    ------
    KvfoldError
        There is no method but the full cache, or not the memory.
    """
    others = setup.everything[1:]
    if not others:
        raise KvfoldError("--method full: it folds nothing; give another")
    model = setup.model
    layers = text_config(setup.config).num_hidden_layers

    for tokens, batch in setup.cases():
        setup.check_room(tokens, batch)
        ids = token_ids(setup.config, batch, tokens, setup.device)

        def read(method: Method | None, ids: torch.Tensor = ids) -> Any:
            if method is not None:
                return fold_prompt(model, ids, method)
            cache = DynamicCache(config=setup.config)
            return model(ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})

        ways: dict[str, Method | None] = {FULL.label: None, **{c.label: c.method for c in others}}
        times: dict[str, list[float]] = {label: [] for label in ways}
        for method in ways.values():  # kernels are built on the first call
            with suppress(KvfoldError):  # a budget may need a longer prompt
                read(method, ids[:, : min(tokens, 1024)])
        for _ in range(rounds):  # in turns, so that all meet the same machine
            for label, method in ways.items():
                times[label].append(seconds(lambda method=method: read(method), setup.device))  # type: ignore[misc]
                release(setup.device)
        prefill = min(times[FULL.label])
        about = {"context": tokens, "batch": batch, "prefill_seconds": prefill}
        layer = batch * full_bytes(setup.config, tokens, setup.dtype) // layers
        for candidate in others:
            whole = min(times[candidate.label])
            scratch, exact = _held(setup, candidate.method, ids)
            yield about | {
                "label": candidate.label,
                "seconds": whole,
                "fold_seconds": whole - prefill,
                "share": (whole - prefill) / prefill,
                "scratch_bytes": scratch,
                "layer_bytes": layer,
                "above_layers": exact + scratch / layer,
            }
            release(setup.device)


def _held(setup: Setup, method: Method, ids: torch.Tensor) -> tuple[int, int]:
    """The most bytes that any call of the method's `fold` held beside what it was given and what it returned, and exact layers."""
    watched = copy.copy(method)
    worst, exact = 0, 1

    def watch(views: Any) -> Any:
        nonlocal worst, exact
        with peak(setup.device) as found:
            stores = method.fold(views)
        new = storage_bytes([tensor for store in stores for tensor in store.tensors().values()])
        worst = max(worst, found.most - new)
        exact = max(exact, len(views) + (len(views) == 1 and folds_late(views[0])))
        return stores

    object.__setattr__(watched, "fold", watch)  # methods are frozen; this one is nobody else's
    fold_prompt(setup.model, ids, watched)
    return max(worst, 0), exact
