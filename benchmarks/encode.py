"""How long coding takes, and decoding by the portable kernel.

    python benchmarks/encode.py cpu MODEL TEXT OUT.json [--tokens 4096]      Block-GTQ's fold beside the prefill
    python benchmarks/encode.py gpu OUT.json                                 one layer of Llama-3.1-8B's shape

On the CPU process time is given too, which other work disturbs less. On a GPU every result is checked before it is timed,
and nothing may wait for the device while coding. Times there are medians of events with a flush of the L2 cache before
each; "host" is how long the call takes until it returns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

import kvfold
from kvfold.codecs.rotated import RotatedCode

HEADS, GROUP, DIM = 8, 4, 128
MIXED = [  # widths as Block-GTQ gives them: 3 bits on average, other groups in each head
    ((8, 4), (5, 12), (4, 32), (3, 32), (2, 40), (1, 8)),
    ((6, 8), (4, 40), (3, 24), (2, 56)),
    ((5, 16), (4, 28), (3, 24), (2, 60)),
    ((4, 48), (3, 32), (2, 48)),
] * 2
CODES = {
    "K4V4": ([((4, DIM),)] * HEADS, 4),
    "K3V3": ([((3, DIM),)] * HEADS, 3),
    "K2V2": ([((2, DIM),)] * HEADS, 2),
    "K3V3, Block-GTQ's widths": (MIXED, 3),
}


def versions() -> dict:
    found = {"torch": torch.__version__, "kvfold": kvfold.__version__, "python": platform.python_version()}
    for name in ("transformers", "triton"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            continue
    return found


# ---- CPU ----


def fold_time(model, ids, method) -> dict:
    """Wall and process seconds of the prefill alone, and of the fold with it."""

    def timed(run):
        begin, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            run()
        return time.perf_counter() - begin, time.process_time() - cpu

    rounds = [
        (
            timed(lambda: model(ids, logits_to_keep=1)),
            timed(lambda: kvfold.fold(model, ids, method)),
        )
        for _ in range(5)
    ][1:]  # the first one builds codebooks and the C loop
    names = ("prefill_s", "prefill_cpu_s", "fold_s", "fold_cpu_s")
    result = {
        name: round(statistics.median(values), 3)
        for name, values in zip(names, zip(*((*a, *b) for a, b in rounds)))
    }
    result["share"] = round(statistics.median(b[0] / a[0] - 1 for a, b in rounds), 3)
    result["share_cpu"] = round(statistics.median(b[1] / a[1] - 1 for a, b in rounds), 3)
    return result


def cpu(args) -> list[dict]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    text = Path(args.text).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens]
    rows = []
    for bits in (3, 2):
        method = kvfold.BlockGTQ(bits=bits)
        row = {"what": "fold", "model": Path(args.model).name, "tokens": ids.shape[1], "bits": bits}
        rows.append(row | {"threads": torch.get_num_threads()} | fold_time(model, ids, method))
        rows[-1]["load_average_1min"] = round(os.getloadavg()[0], 2)
    return rows


# ---- GPU ----


def attention_of(query, keys, values):
    """In float64, head by head: output and log-sum-exp of query (heads, n, dim)."""
    scores = query.double() @ keys.double().transpose(-1, -2)
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


def made(tokens: int, groups, bits: int):
    generator = torch.Generator("cuda").manual_seed(tokens)
    shape = (1, HEADS, tokens, DIM)
    keys, values = (
        torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(2)
    )
    order = torch.stack([torch.randperm(DIM, generator=generator, device="cuda") for _ in range(HEADS)])
    key_codes = tuple(RotatedCode(one, norms="group") for one in groups)
    return keys, values, order.to(torch.uint8)[None], key_codes, (RotatedCode(((bits, DIM),)),) * HEADS


def coded(keys, values, order, key_codes, value_codes) -> dict:
    from kvfold.codecs import logarithm
    from kvfold.kernels.rotated_encode import encode_heads

    buffers = {}
    for name, x, codes, its in (("key", keys, key_codes, order), ("value", values, value_codes, None)):
        buffers[f"{name}_codes"], norms = encode_heads(x, codes, order=its)
        buffers[f"{name}_units"] = logarithm.unit_of(norms)
        buffers[f"{name}_norms"] = logarithm.encode(norms, buffers[f"{name}_units"][:, None])
    return buffers


def decoded(buffers, name, codes, head):
    """Coordinates (tokens, dim) of one head."""
    from kvfold.codecs import logarithm

    byte, scale = (sum(getattr(code, what) for code in codes[:head]) for what in ("nbytes", "scales"))
    norms = logarithm.decode(buffers[f"{name}_norms"], buffers[f"{name}_units"][:, None])[0]
    code = codes[head]
    packed = buffers[f"{name}_codes"][0, :, byte : byte + code.nbytes]
    return code.decode(packed, norms[:, scale : scale + code.scales])


def milliseconds(run) -> float:
    import triton

    return round(triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median"), 4)


def replayed(run) -> float:
    """Milliseconds inside a CUDA graph, warm cache."""
    import triton

    return round(triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median"), 4)


def host(run) -> float:
    """Milliseconds until the call returns."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return round(statistics.median(times), 3)


def check(states, buffers, attend) -> dict:
    """Codes against plain torch on the CPU, attention against float64."""
    keys, values, order, key_codes, value_codes = states
    few, same = 500, []
    for name, x, codes in (("key", keys, key_codes), ("value", values, value_codes)):
        byte = 0
        for head, code in enumerate(codes):
            part = x[0, head, :few].float()
            if name == "key":
                part = part[:, order[0, head].long()]
            plain = code.encode(part.cpu())[0]
            same.append(
                (buffers[f"{name}_codes"][0, :few, byte : byte + code.nbytes].cpu() == plain).float().mean()
            )
            byte += code.nbytes
    query = torch.randn(1, HEADS, GROUP, DIM, device="cuda") * DIM**-0.5
    output, lse = attend(query, key_codes, value_codes, buffers)
    errors, gaps = [], []
    for head in range(HEADS):
        expected, expected_lse = attention_of(
            query[0, head],
            decoded(buffers, "key", key_codes, head),
            decoded(buffers, "value", value_codes, head),
        )
        errors.append(float((output[0, head] - expected).norm() / expected.norm()))
        gaps.append(float((lse[0, head] - expected_lse).abs().max()))
    assert min(same) > 0.999, min(same)
    assert max(errors) < 2e-3 and max(gaps) < 2e-3, (max(errors), max(gaps))
    return {"same_bytes": round(float(min(same)), 5), "error": max(errors)}


def full_attention(keys, values) -> dict:
    """SDPA's fp16 backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    query = torch.randn(1, HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.float16)
    k, v = keys.half(), values.half()
    result = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            run = lambda: sdpa(query, k, v, enable_gqa=True)  # noqa: E731
            result[f"{name.lower()}_ms"] = milliseconds(run)
            result[f"{name.lower()}_graph_ms"] = replayed(run)
    return result


def gpu(args) -> list[dict]:
    from kvfold.kernels.triton_rotated_decode import attend

    rows = []
    for tokens in (8192, 32768, 131072):
        base = None
        for name, (groups, bits) in CODES.items():
            states = made(tokens, groups, bits)
            if base is None:
                base = full_attention(*states[:2])
                rows.append({"what": "full cache, fp16", "tokens": tokens, **base})
            coded(*states)  # constants are made on the first call
            torch.cuda.set_sync_debug_mode("error")
            buffers = coded(*states)
            torch.cuda.set_sync_debug_mode("default")
            row = {"codes": name, "tokens": tokens, **check(states, buffers, attend)}
            query = torch.randn(1, HEADS, GROUP, DIM, device="cuda") * DIM**-0.5
            encode, read = lambda: coded(*states), lambda: attend(query, *states[3:], buffers)  # noqa: B023
            row |= {"encode_ms": milliseconds(encode), "encode_host_ms": host(encode)}
            row |= {"attend_ms": milliseconds(read), "attend_graph_ms": replayed(read)}
            best = min(base["cudnn_attention_ms"], base["flash_attention_ms"])
            row["times_best_fp16"] = round(best / row["attend_ms"], 2)
            row["megabytes"] = round(sum(t.nbytes for t in buffers.values()) / 1e6, 1)
            rows.append({"what": "codes", **row})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="where", required=True)
    one = commands.add_parser("cpu")
    one.add_argument("model")
    one.add_argument("text")
    one.add_argument("--tokens", type=int, default=4096)
    for command in (one, commands.add_parser("gpu")):
        command.add_argument("out")
    args = parser.parse_args()
    rows = cpu(args) if args.where == "cpu" else gpu(args)
    hardware = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, CPU"
    if args.where == "gpu":
        hardware = torch.cuda.get_device_name()
    result = {"hardware": hardware, "versions": versions(), "rows": rows}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
