"""How long the bit allocators take on CPU.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/solver.py results/solver.json

`allocate` is the published RDKV's (tokens share one table of distortions; a pool is a head), `allocate_at_one_price` ours
(every token has its own distortions; all heads of all layers share one price). Both are checked (never over the budget, at
least 99 % of it used) before they are timed. Wall time, and the process's own CPU time, which other work disturbs less; the
load average says how quiet the machine was. NumPy sorts with the vector instructions of AVX2, AVX-512 or NEON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy
import torch

import kvfold
from kvfold.allocate.knapsack import allocate
from kvfold.allocate.price import allocate_at_one_price
from kvfold.methods.rdkv_published import PUBLISHED_VALUE_ERROR

HEAD_DIM = 128


def timed(solve, repeats: int) -> dict:
    """Milliseconds of several runs after one to warm up."""
    solve()
    times, cpu = [], []
    load = os.getloadavg()[0]
    for _ in range(repeats):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        solve()
        cpu.append((time.process_time() - cpu_begin) * 1e3)
        times.append((time.perf_counter() - begin) * 1e3)
    return {
        "threads": torch.get_num_threads(),
        "median_ms": round(statistics.median(times), 2),
        "least_ms": round(min(times), 2),
        "most_ms": round(max(times), 2),
        "cpu_median_ms": round(statistics.median(cpu), 2),
        "runs": repeats,
        "load_average_1min": round(load, 2),
    }


def used(spent: int, budget: int) -> float:
    """Share of the budget spent; checks it."""
    assert 0.99 * budget <= spent <= budget, (spent, budget)
    return round(spent / budget, 6)


def pools(tokens: int, heads: int, keep: float, repeats: int) -> dict:
    """`allocate`: attention-like weights, widths 0, 2, 4, 8, 16."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(heads, tokens, generator=generator).mul(2).exp()
    cost = [0, *(HEAD_DIM * width // 8 + 4 for width in (2, 4, 8)), 2 * HEAD_DIM]
    error = list(PUBLISHED_VALUE_ERROR.values())
    budget = int(keep * tokens * 2 * HEAD_DIM)
    choice = allocate(weights, error, cost, budget)
    spent = torch.tensor(cost)[choice.long()].sum(-1)
    return {
        "what": "allocate",
        "tokens": tokens,
        "pools": heads,
        "choices": len(cost),
        "keep": keep,
        "used": min(used(int(each), budget) for each in spent),
        **timed(lambda: allocate(weights, error, cost, budget), repeats),
    }


def one_price(layers: int, heads: int, tokens: int, keep: float, repeats: int) -> dict:
    """`allocate_at_one_price`: seven choices as RDKV offers them."""
    generator = torch.Generator().manual_seed(0)
    units = layers * heads
    weights = torch.randn(units, tokens, generator=generator).mul(1.5).exp()
    error = torch.tensor([2.0, 0.4, 0.2, 0.07, 0.015, 0.0002, 0.0])
    distortion = weights[..., None] * error
    distortion[..., 1:6] *= torch.rand(units, tokens, 1, generator=generator) + 0.5
    cost = torch.tensor([0, 38, 56, 80, 120, 264, 514]).expand(units, -1).contiguous()
    budget = int(keep * units * tokens * 4 * HEAD_DIM)
    choice = allocate_at_one_price(distortion, cost, budget)
    return {
        "what": "allocate_at_one_price",
        "layers": layers,
        "heads": heads,
        "tokens": tokens,
        "choices": len(error),
        "keep": keep,
        "used": used(int(cost.gather(1, choice).sum()), budget),
        **timed(lambda: allocate_at_one_price(distortion, cost, budget), repeats),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows += [pools(1 << 17, 8, keep, args.repeats) for keep in (0.25, 0.1)]
    rows.append(one_price(24, 2, 4096, 0.1, args.repeats))
    rows.append(one_price(32, 8, 32768, 0.1, 3))
    result = {
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, CPU",
        "versions": {
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
