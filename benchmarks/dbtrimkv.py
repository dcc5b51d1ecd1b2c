"""DBTrimKV while it generates: time of a step, memory, and what evictions take, beside the full cache in the same engine.

    python benchmarks/dbtrimkv.py OUT.json

A model of random weights in a known shape (Llama-3.1-8B, 4 layers), random gates whose betas differ, greedy tokens. "full" is a
cache of so many tokens; "dbtrimkv" really generates them after a prompt of 1,024. An eviction is timed from one wait for the
device to the next, its host part with it. --seconds ends the generation of each batch early; what was reached is told.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvfold import DBTrimKV, Full
from kvfold.bench.attention import release
from kvfold.bench.decode import step_times
from kvfold.bench.fill import filled
from kvfold.bench.setup import Setup
from kvfold.bench.shapes import config_of, full_bytes, token_ids
from kvfold.engine import Engine, stream
from kvfold.engine.paged import Paging
from kvfold.hf.support import cache_shape
from kvfold.methods.gates import GateConfig, RetentionGates, TrainedGates
from kvfold.stores.base import AttendContext

WARM = 96
"""Tokens before times count: prefill, compilation, capture of step and eviction."""


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def random_gates(config: Any, path: Path) -> str:
    """Write gates of betas between about 0.9 and 0.9999, and of no model in particular."""
    layers = tuple(range(config.num_hidden_layers))
    shape = GateConfig(layers, config.hidden_size, cache_shape(config).kv_heads, bias=6.0)
    gates = RetentionGates(shape, torch.Generator().manual_seed(0)).requires_grad_(False)
    for name, parameter in gates.named_parameters():
        if name.endswith("weight"):
            parameter.mul_(4)
    path.write_bytes(TrainedGates(gates, "").to_bytes())
    return str(path)


def timed_evictions(device: torch.device) -> list[float]:
    """From now on, the seconds of each eviction."""
    found: list[float] = []
    count = Paging.count

    def timed(self: Paging, capture: bool) -> None:
        due = self.pages.newer + 1 == self.method.block
        if due:
            settle(device)
        begin = time.perf_counter()
        count(self, capture)
        if due:
            settle(device)
            found.append(time.perf_counter() - begin)

    Paging.count = timed  # type: ignore[method-assign]
    return found


def replayed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Milliseconds of one replay."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / times


def attention(config: Any, batch: int, paging: Paging) -> dict[str, Any]:
    """Microseconds of one layer's attention: the pages, and SDPA over caches of so many tokens; checked first."""
    device, shape = paging.pages.tensors()[0].device, cache_shape(config)
    draw = {"device": device, "dtype": torch.bfloat16}
    query = torch.randn(batch, config.num_attention_heads, 1, shape.key_dim, **draw)
    context = AttendContext(shape.key_dim**-0.5)

    def micro(run: Any) -> float:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                run()
        return 1e3 * replayed(graph, 5) / 50

    found: dict[str, Any] = {"paged": [], "tokens": []}
    for number, layer in enumerate(paging.pages.layers):
        found["paged"].append(micro(lambda number=number: paging.pages.attend(number, query, context)))
        found["tokens"].append(int(layer.counts.sum()))
    for tokens in (paging.method.tokens, 32768):
        keys, values = (
            torch.randn(batch, shape.kv_heads, tokens, dim, **draw)
            for dim in (shape.key_dim, shape.value_dim)
        )
        found[f"sdpa {tokens}"] = micro(
            lambda k=keys, v=values: scaled_dot_product_attention(query, k, v, enable_gqa=True)
        )
        del keys, values
    return found


def full(setup: Setup, tokens: int, batch: int) -> dict[str, Any]:
    cache = filled(setup, Full(), tokens, batch)
    times = step_times(setup.model, cache, tokens, batch)
    return {"label": "full", "batch": batch, "tokens": tokens, "bytes": cache.ledger().total, **times}


def evicting(
    setup: Setup,
    method: DBTrimKV,
    batch: int,
    prompt: int,
    seconds: float,
    engine: Engine,
    evictions: list[float],
) -> Iterator[dict[str, Any]]:
    """Figures at each of the setup's contexts, as far as the seconds go; then those of graphs and attention alone."""
    device, config, left = setup.device, setup.config, list(setup.contexts)
    ids = token_ids(config, batch, prompt, device)
    # Replays of the step alone write tokens too, after the last context's.
    most = left[-1] + method.buffer + 8
    decoding = stream(setup.model, ids, method, engine=engine, do_sample=False, max_new_tokens=most)
    times: list[float] = []
    began = last = time.perf_counter()
    for number, _ in enumerate(decoding, 1):
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if number == WARM:
            evictions.clear()
            began, times = now, []
        if left[0] > number and now - began < seconds:
            continue
        settle(device)
        assert decoding.step is not None and decoding.step.fixed.paging is not None
        paging = decoding.step.fixed.paging
        counts = torch.stack([layer.counts for layer in paging.pages.layers])
        yield {
            "label": "dbtrimkv", "batch": batch, "tokens": prompt + number, "generated": number,
            "ms": 1e3 * median(times[-256:]), "mean_ms": 1e3 * (now - began) / len(times),
            "eviction_ms": 1e3 * median(evictions[-64:]), "eviction_share": sum(evictions) / (now - began),
            "evictions": len(evictions), "bytes": decoding.cache.ledger().total, "reason": decoding.reason,
            "full_bytes": batch * full_bytes(config, prompt + number, setup.dtype),
            "allocated": torch.cuda.memory_allocated() if device.type == "cuda" else None,
            "longest": int(counts.max()), "shortest": int(counts.min()),
        }  # fmt: skip
        last = time.perf_counter()
        if left[0] <= number:
            left.pop(0)
        if not left or now - began >= seconds:
            break
    step = decoding.step
    if step is not None and step.graph is not None and step.fixed.paging is not None:
        paging, pages = step.fixed.paging, step.fixed.paging.pages
        # A fresh eviction has room for `buffer` replays, which put one token in again and again.
        pages.begin_eviction(method.limits(pages.lot))
        paging._evict()
        pages.end_eviction()
        row = {"label": "alone", "batch": batch, "step_ms": replayed(step.graph, method.buffer - 2)}
        if paging._graph is not None:
            row["eviction_ms"] = replayed(paging._graph, 5)
        yield {**row, "attention_us": attention(config, batch, paging)}
    decoding.close()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0], help="of each batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graph", default="auto", choices=("auto", "dry"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = config_of(arguments.shape, arguments.layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setup = Setup(config, (), tuple(arguments.contexts), tuple(arguments.batches), dtype, device)
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "shape": arguments.shape, "layers": arguments.layers, "tokens": arguments.tokens, "rows": [],
    }  # fmt: skip
    evictions = timed_evictions(device)

    def tell(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        about["rows"].append(row)
        arguments.output.write_text(json.dumps(about, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        path = random_gates(config, Path(folder) / "gates.safetensors")
        method = DBTrimKV(tokens=arguments.tokens, gates=path)
        for number, batch in enumerate(arguments.batches):
            for tokens in arguments.contexts:
                tell(full(setup, tokens, batch))
                release(device)
            seconds = arguments.seconds[min(number, len(arguments.seconds) - 1)]
            engine = Engine(graph=arguments.graph, fuse=device.type == "cuda")  # as the full cache is timed
            for row in evicting(setup, method, batch, arguments.prompt, seconds, engine, evictions):
                tell(row)
            release(device)
    print(f"\n{'':10}{'batch':>6}{'tokens':>8}{'ms':>9}{'MB':>9}{'eviction ms':>13}{'share':>8}")
    for row in about["rows"]:
        if "bytes" in row:
            print(
                f"{row['label']:10}{row['batch']:>6}{row['tokens']:>8}{row['ms']:>9.3f}"
                f"{row['bytes'] / 1e6:>9.1f}{row.get('eviction_ms', 0):>13.3f}{row.get('eviction_share', 0):>8.2%}"
            )


if __name__ == "__main__":
    main()
