"""A whole decode step by kvfold's engine, folded against full, beside transformers' own loop and beside what the bytes allow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.bench.attention import release
from kvfold.bench.fill import filled, states
from kvfold.bench.reading import bandwidth
from kvfold.bench.setup import FULL, Setup
from kvfold.bench.shapes import read_bytes
from kvfold.bench.timing import replayed
from kvfold.engine import Decoding, Engine, stream
from kvfold.errors import KvfoldError
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.hf.support import text_config

TOLERANCE = {2: 0.05, 4: 1e-3}
"""Largest relative distance of the graph's logits from those of the same steps run one by one, by bytes of the dtype."""
WARM, STEPS, REPLAYS = 4, 16, 20


@torch.no_grad()
def decode(setup: Setup, stock: bool = True) -> Iterator[dict[str, Any]]:
    """Time decode steps.

    Yields
    ------
    dict
        For each context, batch and method: "ms" of a token as it is streamed, "step_ms" of the CUDA graph alone where there is
        one, else "reason"; "bytes" of the cache and "weight_bytes" that a token reads; "floor_ms" of both at the bandwidth
        measured here and "share" of it that the step reaches; "speedup" over the full cache in the same engine; or "problem", where
        a cache does not fit the GPU. The label "stock" is `model.generate` with a DynamicCache.
    """
    model = setup.model
    weights, speed = read_bytes(model), bandwidth(setup.device)
    for tokens, batch in setup.cases():
        full = None
        for candidate in setup.everything:
            row: dict[str, Any] = {"label": candidate.label, "context": tokens, "batch": batch}
            cache = None
            try:
                if candidate is FULL:
                    setup.check_room(tokens, batch)
                cache = filled(setup, candidate.method, tokens, batch)
                row["bytes"] = size = cache.ledger().total
                row |= step_times(model, cache, tokens, batch)
            except (KvfoldError, torch.OutOfMemoryError) as problem:
                if setup.device.type != "cuda":  # other machines have no error for it
                    raise
                yield row | {"problem": str(problem).splitlines()[0]}
                del cache
                release(setup.device)
                continue
            best = row["step_ms"] or row["ms"]
            full = best if candidate is FULL else full
            floor = 1e3 * (weights + size) / speed
            row |= {"weight_bytes": weights, "floor_ms": floor, "share": floor / best}
            yield row if full is None else row | {"speedup": full / best}
            del cache
            release(setup.device)
        if stock and full is not None:
            yield {"label": "stock", "context": tokens, "batch": batch, **_stock(setup, tokens, batch)}
            release(setup.device)


@torch.no_grad()
def step_times(model: Any, cache: FoldedCache, tokens: int, batch: int) -> dict[str, Any]:
    """Milliseconds of a step from a cache that has read `tokens`; its logits are checked first.

    Raises
    ------
    RuntimeError
        The graph's logits are not those of the model's forward pass or, where roundings decide what is read, of the same step
        run without a graph.
    """
    ids = torch.ones(batch, tokens + 1, dtype=torch.long, device=model.device)
    reference = cache.fork()
    decoding = _decoding(model, cache, ids)
    read = [ids[:, -1], next(decoding), next(decoding)]
    last = next(decoding)  # with a graph, the first that it made
    step = decoding.step
    logits = None if step is None else step.logits
    if step is not None and logits is not None and _chooses(reference):
        error = _distance(model, logits, step.again(read[-1]))
    else:
        error = _error(model, reference, read, last, logits)
    del reference
    for _ in range(WARM):
        next(decoding)
    _settle(model)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        next(decoding)
        _settle(model)
        times.append(1e3 * (time.perf_counter() - begin))
    step = decoding.step
    graph = None if step is None else step.graph
    found = {
        "ms": median(times),
        "step_ms": None if graph is None else replayed(graph, REPLAYS),
        "error": error,
        "reason": decoding.reason,
    }
    decoding.close()
    return found


def _error(
    model: Any, cache: FoldedCache, read: list[Tensor], following: Tensor, logits: Tensor | None
) -> float:
    """Relative distance of logits from those of the same tokens read one by one; without a graph, tokens must be equal."""
    for token in read:
        expected = model(input_ids=token[:, None], use_cache=True, **{CACHE_KEYWORD: cache}).logits[:, -1]
    if logits is None:
        if not torch.equal(expected.argmax(-1), following):
            raise RuntimeError("decoding gave other tokens than the model's forward pass: nothing was timed")
        return 0.0
    return _distance(model, logits, expected)


def _distance(model: Any, logits: Tensor, expected: Tensor) -> float:
    error = float((logits.float() - expected.float()).norm() / expected.float().norm())
    if not error < TOLERANCE[model.dtype.itemsize]:
        raise RuntimeError(
            f"logits of the CUDA graph are off by {error:.1e} of their norm: nothing was timed"
        )
    return error


def _chooses(cache: FoldedCache) -> bool:
    """Whether what is read depends on roundings, which a graph's fused operations have others of than the model's."""
    return any(segment.store.chooses for layer in cache.folded_layers for segment in layer.segments)


def _decoding(model: Any, cache: FoldedCache, ids: Tensor) -> Decoding:
    return stream(
        model,
        ids,
        cache,
        attention_mask=torch.ones_like(ids),  # whatever the token that pads
        do_sample=False,
        max_new_tokens=WARM + STEPS + REPLAYS + 4,  # a replay moves on too
        engine=Engine(fuse=model.device.type == "cuda"),
    )


def _settle(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


class _Clock:
    """A streamer of `generate` that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        value.cpu()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


@torch.no_grad()
def _stock(setup: Setup, tokens: int, batch: int, count: int = 6) -> dict[str, Any]:
    """`model.generate` from a DynamicCache of `tokens`."""
    if batch > 1:
        # transformers' streamers take one row.
        return {"problem": "transformers streams one row at a time"}
    cache = DynamicCache(config=setup.config)
    for index in range(text_config(setup.config).num_hidden_layers):
        cache.update(*states(setup, batch, tokens), index)
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    ids = torch.ones(batch, tokens + 1, dtype=torch.long, device=setup.device)
    clock = _Clock()
    setup.model.generate(
        ids,
        **{CACHE_KEYWORD: cache},
        attention_mask=torch.ones_like(ids),
        streamer=clock,
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
    )
    # The prompt is put first, then the token after it.
    times = [1e3 * (after - before) for before, after in zip(clock.times[2:], clock.times[3:])]
    return {"ms": median(times), "step_ms": None, "bytes": size}
