"""A whole decode step of the engine beside transformers' own loop and beside what the bytes allow, on a GPU.

    python benchmarks/engine.py results.json [--model llama-8b qwen-3b] [--tokens 8192 32768 131072] [--batch 1]
                                             [--fuse] [--stock] [--attention] [--products] [--profile]

Models have the true shape and random weights; the cache is filled with random keys and values, so nothing need be read.
The floor is (weights that a token reads + keys and values) / the bandwidth measured here. Before a step is timed, the
graph's logits are checked against plain attention (`kernels.reference`) over the same cache.
`--attention` times one layer's attention by every backend that also gives its log-sum-exp, `--products` its projections.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

import kvfold
from kvfold.engine import Engine, stream
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.hf.layer import Segment
from kvfold.kernels import dense_decode, matvec
from kvfold.kernels.dense_decode import Exact, Tuning
from kvfold.kernels.matvec import Cut
from kvfold.kernels.reference import attend
from kvfold.stores.dense import DenseStore

LONG = 1 << 20
MODELS = {
    "llama-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=LONG, eos_token_id=None, bos_token_id=None,
    ),
    "qwen-3b": Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, max_position_embeddings=LONG, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None,
    ),
}  # fmt: skip
DTYPE = torch.bfloat16


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * timed(lambda: target.copy_(source), 10))


def timed(run, repeats: int) -> float:
    """Median milliseconds."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def random_model(name: str):
    """The model with random weights, made on the GPU."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(MODELS[name], dtype=DTYPE, attn_implementation="sdpa")
    return model.eval()


def states(config, batch: int, tokens: int) -> list[torch.Tensor]:
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    return [torch.randn(batch, heads, tokens, dim, device="cuda", dtype=DTYPE) for _ in range(2)]


def full_cache(config, batch: int, tokens: int) -> FoldedCache:
    """A cache that has read `tokens` random ones, none folded away."""
    cache = FoldedCache(kvfold.Full(), config)
    for layer in cache.folded_layers:
        keys, values = states(config, batch, tokens)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        layer.segments, layer.folded_tokens = [Segment(DenseStore(keys, values))], tokens
    return cache


def read_bytes(model) -> int:
    """Weights that one token reads: all but the embedding table, where that is not also the output's."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)


def wall(tokens, count: int) -> float:
    """Median milliseconds between tokens, as the one who streams them sees it."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        next(tokens)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


@torch.no_grad()
def stock(model, batch: int, tokens: int, count: int = 5) -> float:
    """transformers' loop: DynamicCache, sdpa, every operation launched by Python."""
    cache = DynamicCache(config=model.config)
    for index in range(model.config.num_hidden_layers):
        cache.update(*states(model.config, batch, tokens), index)
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")

    def steps():
        nonlocal token
        while True:
            output = model(input_ids=token, use_cache=True, **{CACHE_KEYWORD: cache})
            token = output.logits[:, -1:].argmax(-1)
            yield token

    loop = steps()
    wall(loop, 2)
    return wall(loop, count)


@torch.no_grad()
def distances(model, cache: FoldedCache, tokens: torch.Tensor, found: torch.Tensor) -> tuple[float, ...]:
    """Relative distance of the graph's logits from plain attention over the same cache in one forward pass.

    And that of plain attention token by token, which is what rounding to bfloat16 does.
    """
    fits, dense_decode.fits = dense_decode.fits, lambda *states: False
    try:
        once, bit_by_bit = cache.fork(), cache.fork()
        plain = model(input_ids=tokens, use_cache=True, **{CACHE_KEYWORD: once}).logits[:, -1].float()
        for token in tokens.unbind(1):
            other = model(input_ids=token[:, None], use_cache=True, **{CACHE_KEYWORD: bit_by_bit}).logits[
                :, -1
            ]
    finally:
        dense_decode.fits = fits
    return tuple(float((plain - logits.float()).norm() / plain.norm()) for logits in (found, other))


def measure(model, name: str, batch: int, tokens: int, args, speed: float) -> dict:
    """One shape and length."""
    config = model.config
    cache = full_cache(config, batch, tokens)
    ids = torch.zeros(batch, tokens + 1, dtype=torch.long, device="cuda")
    kv = cache.ledger().total
    result = {
        "model": name,
        "batch": batch,
        "tokens": tokens,
        "kv_bytes": kv,
        "weight_bytes": read_bytes(model),
    }
    result["floor_ms"] = 1e3 * (kv + result["weight_bytes"]) / speed
    for label, engine in (("graph", Engine()), ("graph_fused", Engine(fuse=True))):
        if engine.fuse and not args.fuse:
            continue
        fork = cache.fork()
        began = time.perf_counter()
        decoding = stream(model, ids, fork, engine=engine, do_sample=False, max_new_tokens=128)
        read = [ids[:, -1], next(decoding), next(decoding)]
        result[f"{label}_begin_s"] = time.perf_counter() - began
        step = decoding.step
        assert decoding.reason is None and step is not None, decoding.reason
        next(decoding)  # the first that the graph made
        error, rounding = distances(model, cache, torch.stack(read, 1), step.logits.clone())
        result |= {f"{label}_logits_error": error, "rounding": rounding}
        assert error < max(2 * rounding, 0.01), (error, rounding)
        wall(decoding, 3)
        result[f"{label}_token_ms"] = wall(decoding, 25)
        result[f"{label}_ms"] = timed(step.graph.replay, 20)
        if args.profile:
            profile(step.graph.replay, Path(args.out).with_name(f"profile_{name}_{tokens}_{label}.txt"))
        decoding.close()
        del decoding, step, fork
        torch.cuda.empty_cache()
    del cache
    torch.cuda.empty_cache()
    if args.stock:
        result["stock_token_ms"] = stock(model, batch, tokens)
        torch.cuda.empty_cache()
    best = min(result.get("graph_fused_ms", torch.inf), result["graph_ms"])
    result["times_floor"] = best / result["floor_ms"]
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}), flush=True)
    return result


def profile(run, path: Path) -> None:
    """Time by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    path.write_text(
        found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90)
    )


@torch.no_grad()
def attention(tokens: int, config, batch: int) -> list[dict]:
    """One layer's attention by each backend, in a CUDA graph over enough buffers to defeat the L2 cache."""
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    one = 2 * batch * config.num_key_value_heads * tokens * dim * 2
    buffers = [states(config, batch, tokens) for _ in range(max(2, -(-400_000_000 // one)))]
    query = torch.randn(batch, heads, 1, dim, device="cuda", dtype=DTYPE)
    tail = states(config, batch, 256)
    length = torch.tensor([128], device="cuda")
    scale = dim**-0.5
    ops = torch.ops.aten

    def sdpa(backend):
        def run(keys, values):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        return run

    def tuned(block, warps, stages, programs):
        choice = Tuning(block, warps, stages, programs)
        return lambda k, v: dense_decode.attend(query, Exact(k, v), None, scale, tuned=choice)[0]

    def whole(keys, values):
        return dense_decode.attend(query, Exact(keys, values), Exact(*tail, length), scale)[0]

    ways = {
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn with lse": lambda k, v: ops._scaled_dot_product_cudnn_attention(
            query, k, v, None, True, scale=scale
        )[0],
        "flash with lse": lambda k, v: ops._scaled_dot_product_flash_attention(query, k, v, scale=scale)[0],
        "kvfold": lambda k, v: dense_decode.attend(query, Exact(k, v), None, scale)[0],
        "kvfold with tail": whole,
    }
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for cut in ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3)):
        for each in (1, 2):
            ways["kvfold " + "/".join(map(str, (*cut, each)))] = tuned(*cut, each * sms)
    expected, _ = attend(query, *buffers[0], scale)
    rows = []
    for label, run in ways.items():
        row = {"way": label, "tokens": tokens, "batch": batch, "bytes": one}
        try:
            found = run(*buffers[0])
            error = float((found.float() - expected).norm() / expected.norm())
            if "tail" not in label and error > 5e-3:
                raise RuntimeError(f"wrong by {error:.1e}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for keys, values in buffers:
                    run(keys, values)
            row |= {"ms": timed(graph.replay, 10) / len(buffers), "error": error}
        except Exception as problem:  # a backend may not take the shape
            row["problem"] = str(problem).splitlines()[0][:120]
        rows.append(row)
    good = sorted((row for row in rows if "ms" in row), key=lambda row: row["ms"])
    named = [row for row in rows if "/" not in row["way"]]
    for row in named + [row for row in good if "/" in row["way"]][:4]:
        print(
            f"{tokens:>7} x {batch} {row['way']:<24} {row.get('ms', 0):.4f} {row.get('problem', '')}",
            flush=True,
        )
    return rows


@torch.no_grad()
def products(config) -> list[dict]:
    """Each of a layer's matrices by one vector, in a CUDA graph over enough matrices to defeat the L2 cache."""
    hidden, heads = config.hidden_size, config.num_key_value_heads
    dim = hidden // config.num_attention_heads
    shapes = {
        "query, output": (hidden, hidden),
        "key, value": (heads * dim, hidden),
        "gate": (config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    cuts = [
        Cut(*c) for c in itertools.product((4, 8, 16), (512, 1024), (4, 8), (1, 3)) if c[0] * c[1] <= 8192
    ]
    rows = []
    for label, shape in shapes.items():
        count = max(4, -(-400_000_000 // (2 * shape[0] * shape[1])))
        weights = [torch.randn(shape, device="cuda", dtype=DTYPE) * 0.02 for _ in range(count)]
        x = torch.randn(1, 1, shape[1], device="cuda", dtype=DTYPE)
        ways = {"linear": torch.nn.functional.linear, "kvfold": matvec.linear}
        ways |= {f"kvfold {cut}": partial(matvec.linear, cut=cut) for cut in cuts}
        if label == "gate":
            ways["gated, two matrices"] = partial(matvec.gated, up=weights[0], activation="silu")
        expected = x.double() @ weights[0].double().T
        for way, run in ways.items():
            found = run(x, weights[0])
            if not way.startswith("gated"):
                assert (found.double() - expected).norm() / expected.norm() < 4e-3, way
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for weight in weights:
                    run(x, weight)
            milliseconds = timed(graph.replay, 10) / count
            size = weights[0].nbytes
            rows.append({"matrix": label, "way": way, "ms": milliseconds, "TB_s": size / milliseconds / 1e9})
        own = sorted((row for row in rows if row["matrix"] == label), key=lambda row: row["ms"])
        named = [row for row in own if "Cut" not in row["way"]]
        for row in named + [row for row in own if "Cut" in row["way"]][:4]:
            print(f"{label:<14} {row['way']:<60} {1e3 * row['ms']:.2f} us {row['TB_s']:.2f} TB/s", flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--model", nargs="+", default=["llama-8b"], choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    speed = bandwidth()
    print(f"copy bandwidth {speed / 1e12:.2f} TB/s", flush=True)
    torch.cuda.empty_cache()
    result = {
        "hardware": torch.cuda.get_device_name(),
        "dtype": "bfloat16",
        "bandwidth": speed,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
        "steps": [],
        "attention": [],
        "products": [],
    }
    for name in args.model:
        for tokens in args.tokens if args.attention else ():
            result["attention"] += attention(tokens, MODELS[name], args.batch)
            torch.cuda.empty_cache()
            Path(args.out).write_text(json.dumps(result, indent=1))
        if args.products:
            result["products"] += products(MODELS[name])
            Path(args.out).write_text(json.dumps(result, indent=1))
        if args.attention or args.products:
            continue
        model = random_model(name)
        for tokens in args.tokens:
            result["steps"].append(measure(model, name, args.batch, tokens, args, speed))
            Path(args.out).write_text(json.dumps(result, indent=1))
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
