"""Decode attention over records beside the full cache, on a Hopper GPU.

    python benchmarks/records.py results.json [--quick]

One layer, one token. Every format and shape is checked first (at 131,072 tokens in all at most): against float64 on the codes,
2e-3 of the norm. Then milliseconds, medians of device events with the L2 cache flushed before each call / inside a CUDA graph of
calls over several caches that together exceed the L2: the kernel, the best fp16 backend of torch's scaled_dot_product_attention,
and a kernel that only reads the records' bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvfold.bench.reading import reader
from kvfold.bench.timing import by_events, copies, in_graph
from kvfold.codecs.codebook import gaussian_levels
from kvfold.codecs.fragments import RecordFormat
from kvfold.kernels import records as kernel
from kvfold.kernels.record_plan import warps_of
from kvfold.kernels.records import Records, Run, attend, attend_plain, book

UNIT = 63 / float(gaussian_levels(4).max())
LEVELS = {width: (gaussian_levels(width) * UNIT).round().int().tolist() for width in (1, 2, 3, 4)}
UNIFORM = {
    width: [round(126 / 15 * code - 63) for code in range(2**width)] if width == 4 else LEVELS[width]
    for width in LEVELS
}
CUDA = torch.device("cuda")
LLAMA, QWEN = (8, 4, 128), (2, 8, 128)  # KV heads, query heads of each, head_dim


def flat(width: int, tiles: int = 8, **kwargs) -> RecordFormat:
    return RecordFormat((width,) * tiles, width, **kwargs)


THREE = (8, 4, 4, 2, 2, 2, 1, 1)  # 3 bits on average
FORMATS = {
    "4-bit codebook": (flat(4), [0] * 8, LEVELS),
    "4-bit uniform": (flat(4), [0] * 8, UNIFORM),
    "3-bit": (flat(3), [0] * 8, LEVELS),
    "2-bit": (flat(2), [0] * 8, LEVELS),
    "2-bit, 8-bit norms": (flat(2, logarithms=True), [0] * 8, LEVELS),
    "keys 8 4 4 2 2 2 1 1, values 3": (RecordFormat(THREE, 3), [0] * 8, LEVELS),
    "the same, 4 norms": (RecordFormat(THREE, 3, 4, logarithms=True), [0, 1, 1, 2, 2, 2, 3, 3], LEVELS),
    "keys 4 4 4 3 3 2 2 2, values 3": (RecordFormat((4, 4, 4, 3, 3, 2, 2, 2), 3), [0] * 8, LEVELS),
    "8-bit": (flat(8), [0] * 8, LEVELS),
}


def make(name: str, shape: tuple[int, int, int], rows: int, tokens: int) -> Records:
    """Random codes (any bits are codes), norms between 0.5 and 1.5."""
    layout, groups, levels = FORMATS[name]
    kv_heads = shape[0]
    count = -(-tokens // 64)
    data = torch.randint(0, 256, (rows * kv_heads, count, layout.nbytes), dtype=torch.uint8, device="cuda")
    size = layout.sizes[0]
    if layout.logarithms:
        numbers = torch.randint(112, 136, (rows * kv_heads, count, size), dtype=torch.uint8, device="cuda")
    else:
        numbers = (
            (torch.rand(rows * kv_heads, count, size // 2, device="cuda") + 0.5).half().view(torch.uint8)
        )
    data[:, :, :size] = numbers
    books = torch.stack([*(book(levels, group) for group in groups), book(levels)]).cuda()
    books = books.expand(rows, kv_heads, -1, -1).contiguous()
    return Records(data.flatten(), books, [(Run(layout, tokens),)] * (rows * kv_heads))


def query_for(shape: tuple[int, int, int], rows: int) -> torch.Tensor:
    kv_heads, group, dim = shape
    return torch.randn(rows, kv_heads * group, dim, device="cuda") / UNIT


def check(name: str, shape: tuple[int, int, int], rows: int, tokens: int) -> float:
    """Largest error of a head's output, relative to its norm, against float64."""
    data, query, scaling = make(name, shape, rows, tokens), query_for(shape, rows), shape[2] ** -0.5
    output, lse = attend_plain(query.double(), data, scaling)
    worst = 0.0
    for _ in range(2):
        found, sums = attend(query, data, scaling)
        error = float(((found - output).norm(dim=-1) / output.norm(dim=-1)).max())
        assert float((sums - lse).abs().max()) < 2e-3, (
            f"{name}: log-sum-exp off by {(sums - lse).abs().max()}"
        )
        worst = max(worst, error)
    assert worst < 2e-3, f"{name} {shape} {rows} x {tokens}: off by {worst}"
    return worst


# ---- time ----

_floors: dict[int, tuple[float, float]] = {}


def both(calls) -> tuple[float, float]:
    return by_events(calls), in_graph(calls)


def full(shape: tuple[int, int, int], rows: int, tokens: int) -> dict[str, tuple[float, float]]:
    kv_heads, group, dim = shape
    query = torch.randn(rows, kv_heads * group, 1, dim, device="cuda", dtype=torch.float16)
    number = copies(4 * rows * kv_heads * tokens * dim, CUDA)
    kept = [
        [torch.randn(rows, kv_heads, tokens, dim, device="cuda", dtype=torch.float16) for _ in range(2)]
        for _ in range(number)
    ]

    def call(backend, key, value):
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    result = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        result[backend.name] = both([lambda kv=kv, b=backend: call(b, *kv) for kv in kept])
    return result


def measure(name: str, shape: tuple[int, int, int], rows: int, tokens: int, read) -> dict:
    first = make(name, shape, rows, tokens)
    kept = [first, *(make(name, shape, rows, tokens) for _ in range(copies(first.data.numel(), CUDA) - 1))]
    query, scaling = query_for(shape, rows), shape[2] ** -0.5
    times = both([lambda data=data: attend(query, data, scaling) for data in kept])
    size = first.data.numel()
    if size not in _floors:
        _floors[size] = both([lambda data=data: read(data.data) for data in kept])
    return {"nbytes": size, "events": times[0], "graph": times[1], "read": _floors[size]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--only", nargs="*", help="formats whose name begins so")
    options = parser.parse_args()
    reason = kernel.problem(torch.device("cuda"))
    if reason:
        raise SystemExit(f"the kernel cannot be used: {reason}")
    read = reader()
    shapes = [(128, sets, warps, 0) for sets in (1, 2) for warps in warps_of(128, sets)]
    with ThreadPoolExecutor() as pool:  # nvcc once a shape, all at once
        list(pool.map(lambda shape: kernel.library_of(*shape), shapes))
    sizes = [(LLAMA, 1, 131072), (LLAMA, 1, 8192), (LLAMA, 8, 32768)]
    if not options.quick:
        sizes += [(LLAMA, 1, 32768), (LLAMA, 1, 524288), (QWEN, 1, 131072), (QWEN, 4, 131072)]
    names = [name for name in FORMATS if not options.only or name.startswith(tuple(options.only))]
    rows = []
    for shape, batch, tokens in sizes:
        kv_heads, group, dim = shape
        print(f"{kv_heads} KV heads x {group}, head_dim {dim}, batch {batch}, {tokens} tokens", flush=True)
        base = full(shape, batch, tokens)
        for backend, times in base.items():
            print(f"  {backend:32} {times[0]:.4f} / {times[1]:.4f}")
        best = [min(times[index] for times in base.values()) for index in range(2)]
        for name in names:
            error = check(name, shape, batch, min(tokens, 131072 // batch))
            row = measure(name, shape, batch, tokens, read)
            row |= {"format": name, "error": error, "full": best, "batch": batch, "tokens": tokens}
            row |= {"kv_heads": kv_heads, "group": group, "head_dim": dim}
            rows.append(row)
            print(
                f"  {name:32} {row['events']:.4f} / {row['graph']:.4f}  x{best[0] / row['events']:.2f} / "
                f"{best[1] / row['graph']:.2f}  floor {row['read'][0] / row['events']:.2f} / "
                f"{row['read'][1] / row['graph']:.2f}  error {error:.1e}",
                flush=True,
            )
            torch.cuda.empty_cache()
        rows += [
            {"format": f"full, {backend}", "events": times[0], "graph": times[1], "batch": batch}
            | {"tokens": tokens, "kv_heads": kv_heads, "group": group, "head_dim": dim}
            for backend, times in base.items()
        ]
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "unit": "ms",
        "rows": rows,
    }
    assert all(math.isfinite(row["events"]) for row in rows)
    options.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
