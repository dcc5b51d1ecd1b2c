"""One decode step over a window that xKV folded, all tokens or chosen chunks, beside attention over the full cache; on a GPU.

    python benchmarks/xkv_decode.py OUT.json [--tokens 65536 131072] [--repeats 30] [--cases 0 3 6]

Four layers of Llama-3.1-8B's shape, bfloat16, with random keys and values whose components decay as those of Qwen 1.5B's
windows do (docs/xkv.md), folded by `XKV`. Times are microseconds a layer of a CUDA graph of the window's four, the GPU's
caches emptied before each replay; before it is timed, a step is compared with the store's plain path. 64 exact tokens
follow, 40 of which are seen.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from kvfold.bench.timing import by_kernel
from kvfold.hf.rotary import rotary_of
from kvfold.kernels import dense_decode, lowrank_choose
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.reference import attend, merge
from kvfold.methods import XKV
from kvfold.methods.base import LayerView
from kvfold.stores.base import AttendContext

HEADS, KV_HEADS, DIM, LAYERS, SEEN = 32, 8, 128, 4, 40
SCALING = DIM**-0.5
CONFIG = LlamaConfig(
    hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, num_hidden_layers=1,
    max_position_embeddings=131072,
    rope_parameters=dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0,
        original_max_position_embeddings=8192,
    ),
)  # fmt: skip
SOME = dict(sparse_budget=2048, chunk=8, outlier_chunks=48)
PAPER = dict(
    key_rank=512, value_rank=768, widths=(16,), basis_bits=16, metric="plain", centre=False, sinks=0, recent=0
)
FEW = dict(keep=0.125, key_rank=512)
"""An eighth of the channels that the window's keys have."""
CASES = {
    "chosen, 512 key components": dict(FEW, **SOME),
    "chosen, 1,024 key components": dict(keep=0.125, key_rank=1024, **SOME),
    "chosen, as many as pay": dict(keep=0.125, **SOME),
    "chosen by the window, 512": dict(FEW, choice="window", **SOME),
    "chosen by each KV head, 512": dict(FEW, choice="head", **SOME),
    "chosen, paper's factors": dict(PAPER, **SOME),
    "all, 512 key components": FEW,
    "all, as many as pay": dict(keep=0.125),
    "all, paper's factors": PAPER,
}


def window(tokens: int, rotary) -> list[LayerView]:
    """Four layers that are maps of the same decaying features; keys have a bias, and queries look for some of them."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    size = torch.arange(1, LAYERS * KV_HEADS * DIM + 1, device="cuda").float()
    noise = draw(tokens, len(size))
    features = [(noise * size**-power).bfloat16() for power in (1.0, 0.8)]
    positions = torch.arange(tokens, device="cuda")
    index = torch.arange(0, tokens, tokens // 256, device="cuda")[:256]
    views = []
    for layer in range(LAYERS):
        keys, values = (
            (part @ draw(len(size), KV_HEADS * DIM).bfloat16()).view(tokens, KV_HEADS, DIM).transpose(0, 1)
            for part in features
        )
        keys = 2 * keys + 2 * draw(KV_HEADS, 1, DIM).bfloat16()
        keys = torch.cat([rotary.rotate(one, positions) for one in keys.split(1)]).bfloat16()
        sampled = keys[:, index].repeat_interleave(HEADS // KV_HEADS, 0) * 0.3
        views.append(
            LayerView(
                keys=keys[None].contiguous(), values=values[None].contiguous(),
                valid=torch.ones(1, KV_HEADS, tokens, dtype=torch.bool, device="cuda"), real_tokens=(tokens,),
                positions=positions[None], scaling=SCALING, sampled=(sampled + draw(*sampled.shape).bfloat16())[None],
                sampled_index=index, rotary=rotary, layer_idx=layer, num_layers=LAYERS,
            )
        )  # fmt: skip
    return views


class Clock:
    """Times CUDA graphs with the GPU's caches emptied."""

    def __init__(self, repeats: int):
        self.repeats, self.other = repeats, torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def __call__(self, run) -> float:
        """Median microseconds a layer."""
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.other.zero_()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / LAYERS)
        return median(times)


def full(views, queries, clock: Clock) -> dict[str, float]:
    """Attention over all exact tokens."""
    times = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            times[name] = clock(
                lambda: [
                    scaled_dot_product_attention(query, view.keys, view.values, enable_gqa=True)
                    for view, query in zip(views, queries, strict=True)
                ]
            )
    times["kvfold"] = clock(
        lambda: [
            dense_decode.attend(query, Exact(view.keys, view.values), None, SCALING)
            for view, query in zip(views, queries, strict=True)
        ]
    )
    return times


def decode(stores, queries, tail: Exact, context: AttendContext) -> list:
    """A step of every layer."""
    return [
        store.attend_with_tail(query, tail.keys, tail.values, context, None, tail.length)
        for store, query in zip(stores, queries, strict=True)
    ]


def error(stores, queries, step, tail: Exact, rotary) -> tuple[float, float]:
    """Largest relative distance of a layer's output from the plain path's over the same chunks, and the least part of their
    shares of landmarks that chosen chunks have of the best ones'.

    Chunks of nearly equal shares hold tokens of very unequal weight: the plain path's own choice tells nothing of attention.
    """
    keys, values = (x[:, :, :SEEN] for x in (tail.keys, tail.values))
    made, choose = [], lowrank_choose.choose
    with patch.object(lowrank_choose, "choose", lambda *given: (made.append(given[2]), choose(*given))):
        outputs = step()
    errors, parts, chosen = [], [1.0], iter(made)
    mask = None
    for store, query, output in zip(stores, queries, outputs, strict=True):
        if store.layout.chunk and "landmarks.0" in store.buffers:
            grouped = query[0].float().view(KV_HEADS, -1, 1, DIM) * SCALING
            shares, own = store.shares(0, grouped), next(chosen)[0].long()
            mask = torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, own[:, None], True)
            best = shares.topk(own.shape[-1]).values.sum(-1)
            parts.append(float(((shares * mask).sum(-1) / best).min()))
        context = AttendContext(SCALING, rotary=rotary)
        with patch.object(type(store), "choose", lambda *given, mask=mask: mask):
            one, lse = store._attend_row(0, query[0].float(), context)
        expected = merge([(one[None], lse[None]), attend(query, keys, values, SCALING)])[0]
        errors.append(float((output[0].float() - expected).norm() / expected.norm()))
    return max(errors), min(parts)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--cases", type=int, nargs="+", default=range(len(CASES)), help="only these, counted from 0"
    )
    arguments = parser.parse_args()
    clock = Clock(arguments.repeats)
    with torch.device("meta"):
        module = LlamaAttention(CONFIG, 0)
    rotary = rotary_of(module, torch.device("cuda"))
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    for tokens in arguments.tokens:
        views = window(tokens, rotary)
        queries = [view.sampled[:, :, -3:-2].contiguous() for view in views]
        states = torch.randn(2, 1, KV_HEADS, 64, DIM, device="cuda").bfloat16()
        tail = Exact(states[0], states[1], torch.tensor([SEEN], device="cuda"))
        times = full(views, queries, clock)
        found["rows"].append({"tokens": tokens, "case": "full", "us": times})
        print(tokens, {name: round(us, 1) for name, us in times.items()}, flush=True)
        for name, options in (list(CASES.items())[case] for case in arguments.cases):
            torch.cuda.synchronize()
            start = time.perf_counter()
            stores = XKV(**{"split": False, "solver": "subspace", **options}).fold(views)
            torch.cuda.synchronize()
            folding = time.perf_counter() - start
            context = AttendContext(SCALING, rotary=rotary)
            step = partial(decode, stores, queries, tail, context)
            assert all(output is not None for output in step()), "the kernels do not serve"
            worst, share = error(stores, queries, step, tail, rotary)
            assert worst < 1e-2 and share > 0.98, (name, worst, share)
            held = {t.data_ptr(): t.nbytes for store in stores for t in store.tensors().values()}
            row = {
                "tokens": tokens,
                "case": name,
                "options": options,
                "bytes": sum(held.values()) / sum(store.full_bytes for store in stores),
                "ranks": [getattr(stores[0].layout.rows[0], part).rank for part in ("key", "value")],
                "fold_seconds": folding,
                "error": worst,
                "share_of_best": share,
                "us": clock(step),
                "kernels": {name[:40]: 1e3 * ms / LAYERS for name, ms in by_kernel(step).items()},
            }
            found["rows"].append(row)
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")
            print(
                f"{tokens:7} {name:28} bytes {row['bytes']:.3f} ranks {row['ranks']} error {worst:.0e}"
                f" fold {folding:.2f} s {row['us']:7.1f} us {min(times.values()) / row['us']:.2f}x",
                flush=True,
            )
        del views, stores
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
