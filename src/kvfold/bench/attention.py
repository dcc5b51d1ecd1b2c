"""One layer's attention, one token: folded caches beside every way torch has for the full one, and beside their bytes' floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.bench.fill import layer_stores, states
from kvfold.bench.reading import floor
from kvfold.bench.setup import FULL, Setup
from kvfold.bench.timing import Times, by_kernel, copies, timed
from kvfold.hf.support import cache_shape, text_config
from kvfold.stores.base import AttendContext, Rotary, Store

TOLERANCE = 2e-3
"""Largest distance of a head's output from float64, relative to its norm, beside the rounding of a 16-bit output."""

BACKENDS = {
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query (batch, heads, 1, dim), keys and values (batch, kv_heads, tokens, dim) to (batch, heads, 1, dim)."""


@torch.no_grad()
def attention(setup: Setup) -> Iterator[dict[str, Any]]:
    """Time one layer.

    Yields
    ------
    dict
        For each context, batch and way: "label", "kind" ("baseline" or "method"), of a method the "store" that it made, "ms" as a decode loop runs it, "single_ms"
        and "graph_ms" (see `Times`), "bytes", "error" against float64, "floor_ms" of reading the bytes, "times_floor", "speedup"
        over the best baseline, on a GPU milliseconds of its "kernels"; or "problem", where there is no right result to time.
    """
    shape, config = cache_shape(setup.config), text_config(setup.config)
    scaling = shape.key_dim**-0.5
    for tokens, batch in setup.cases():
        one = 2 * batch * shape.kv_heads * tokens * shape.key_dim * setup.dtype.itemsize
        setup.check_room(tokens, batch, layers=1, copies=2 + copies(one, setup.device))
        query = torch.randn(
            batch,
            config.num_attention_heads,
            1,
            shape.key_dim,
            device=setup.device,
            dtype=setup.dtype,
        )
        about = {"context": tokens, "batch": batch}
        best = torch.inf
        for row in _baselines(setup, query, tokens, batch):
            best = min(best, row.get("ms", torch.inf))
            yield about | row
        for candidate in setup.everything:
            context = AttendContext(scaling)
            count = copies(one if candidate is FULL else one // 4, setup.device)
            stores, rotary = layer_stores(setup, candidate.method, tokens, batch, count)
            context = AttendContext(scaling, rotary=rotary)
            calls = [partial(store.attend, query, None, context) for store in stores]
            error = _distance(calls[0]()[0], query, stores[0], scaling, rotary)
            row = {"label": candidate.label, "kind": "method", "store": stores[0].kind, "error": error}
            if not error < TOLERANCE + _rounding(calls[0]()[0]):
                row["problem"] = f"wrong by {error:.1e}: not timed"
            else:
                row |= _figures(timed(calls, setup.device)) | _floor(stores, setup.device)
                row |= {"times_floor": row["ms"] / row["floor_ms"], "speedup": best / row["ms"]}
                if setup.device.type == "cuda":
                    row["kernels"] = by_kernel(calls[0])
            yield about | row
            del stores, calls
            release(setup.device)


def _baselines(setup: Setup, query: Tensor, tokens: int, batch: int) -> Iterator[dict[str, Any]]:
    one = states(setup, batch, tokens)
    nbytes = sum(x.nbytes for x in one)
    kept = [one, *(states(setup, batch, tokens) for _ in range(copies(nbytes, setup.device) - 1))]
    scaling = query.shape[-1] ** -0.5
    expected = [_exact(query[row], one[0][row], one[1][row], scaling) for row in _checked(batch)]
    for label, attend in _ways(setup.device, batch).items():
        row: dict[str, Any] = {"label": label, "kind": "baseline", "bytes": nbytes}
        try:
            found = attend(query, *one)
            error = max(
                _relative(found[row], exact) for row, exact in zip(_checked(batch), expected, strict=True)
            )
            row["error"] = error
            if not error < TOLERANCE + _rounding(found):
                raise RuntimeError(f"wrong by {error:.1e}: not timed")
            row |= _figures(timed([partial(attend, query, *own) for own in kept], setup.device))
        except RuntimeError as problem:  # a backend need not take the shape, dtype or device
            row["problem"] = str(problem).strip().splitlines()[0][:160]
        yield row
    del kept, one
    release(setup.device)


def _ways(device: torch.device, batch: int) -> dict[str, Attend]:
    """Attention over a full cache by others."""

    def sdpa(backend: SDPBackend) -> Attend:
        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        return attend

    ways = {label: sdpa(backend) for label, backend in BACKENDS.items()}
    if device.type == "cuda" and batch == 1 and (flashinfer := _flashinfer()) is not None:
        ways["flashinfer"] = flashinfer
    return ways


def _flashinfer() -> Attend | None:
    try:
        from flashinfer import single_decode_with_kv_cache
    except ImportError:
        return None

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = single_decode_with_kv_cache(
            query[0, :, 0], keys[0], values[0], kv_layout="HND", use_tensor_cores=True
        )
        return found[None, :, None]

    return attend


def _figures(times: Times) -> dict[str, Any]:
    found = {"ms": times.best, "single_ms": times.single, "graph_ms": times.graph}
    return found if times.reason is None else found | {"reason": times.reason}


def _floor(stores: list[Store], device: torch.device) -> dict[str, Any]:
    """Bytes of a store, and what only reading as many takes."""
    size = max(stores[0].nbytes // 16, 1) * 16
    read = floor(device)
    buffers = [torch.ones(size, dtype=torch.uint8, device=device) for _ in stores]
    times = timed([partial(read, buffer) for buffer in buffers], device)
    return {"bytes": stores[0].nbytes, "floor_ms": times.best}


# ---- results, before anything is timed ----


def _checked(batch: int) -> list[int]:
    """Rows that are checked."""
    return sorted({0, batch - 1})


def _exact(query: Tensor, keys: Tensor, values: Tensor, scaling: float, bias: Tensor | None = None) -> Tensor:
    """Attention in float64, of query (heads, 1, dim) over (kv_heads, tokens, dim), as plainly as may be."""
    parts = []
    for own, key, value in zip(query.double().chunk(len(keys)), keys, values, strict=True):
        logits = own @ key.double().T * scaling
        logits = logits if bias is None else logits + bias.double()
        parts.append(torch.softmax(logits, -1) @ value.double())
    return torch.cat(parts)


def _distance(found: Tensor, query: Tensor, store: Store, scaling: float, rotary: Rotary | None) -> float:
    """Largest relative distance of any head's output from float64 on what the store holds, dequantised."""
    worst = 0.0
    group = query.shape[1] // store.kv_heads
    for row in _checked(len(query)):
        for head in range(store.kv_heads):
            kept = store.kept(row, head, rotary)
            own = slice(head * group, (head + 1) * group)
            exact = (
                _exact(query[row, own], kept.keys[None], kept.values[None], scaling, kept.bias)
                if len(kept.positions)
                else torch.zeros_like(found[row, own], dtype=torch.float64)
            )
            worst = max(worst, _relative(found[row, own], exact))
    return worst


def _relative(found: Tensor, exact: Tensor) -> float:
    norm = exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found.double() - exact).norm(dim=-1) / norm).max())


def _rounding(found: Tensor) -> float:
    return torch.finfo(found.dtype).eps if found.dtype.itemsize == 2 else 0.0


def release(device: torch.device) -> None:
    """Give freed memory back to the device, so that the next buffers find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
