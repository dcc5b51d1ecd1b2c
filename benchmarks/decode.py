"""Decode speed of a folded cache beside the full cache, in one process.

    python benchmarks/decode.py MODEL TEXT results.json [--tokens 2048 4096 7168] [--method rdkv:keep=0.1] [--plain]

For each prompt length: seconds of the exact prefill, of the fold, and of one decoded token, from the full cache
(transformers' DynamicCache, sdpa) and from the folded one, taken in turns so that both meet the same machine. Before it is
timed, the folded cache is checked: its next-token distributions over the text's own continuation must stay near the full
cache's (KL below 0.5 nats). Where others work on the machine, compare the seconds that processors worked. `--plain` also
times the same fold read by plain torch, as without a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvfold
from kvfold.cli.options import build_method
from kvfold.evaluate.prefill import continue_logits, kl_divergence
from kvfold.hf import CACHE_KEYWORD

STEPS, ROUNDS = 8, 5


@torch.no_grad()
def decode(model, cache, token: torch.Tensor) -> tuple[float, float]:
    """Median seconds of one step over `STEPS` greedy steps: of the clock, and of the process on all its processors."""
    seconds, worked = [], []
    for _ in range(STEPS):
        begin, before = time.perf_counter(), time.process_time()
        logits = model(input_ids=token, use_cache=True, **{CACHE_KEYWORD: cache}).logits
        token = logits[:, -1:].argmax(-1)
        if token.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        worked.append(time.process_time() - before)
    return statistics.median(seconds), statistics.median(worked)


@torch.no_grad()
def measure(model, ids: torch.Tensor, following: torch.Tensor, method: str, plain: bool) -> dict:
    """One prompt length."""
    begin = time.perf_counter()
    full = DynamicCache(config=model.config)
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: full})
    prefill = time.perf_counter() - begin
    begin = time.perf_counter()
    folded = kvfold.fold(model, ids, build_method(method, {}, ()))
    fold = time.perf_counter() - begin - prefill
    folded.activate_past_recording()
    expected = model(input_ids=following, use_cache=True, **{CACHE_KEYWORD: full}).logits
    kl = float(kl_divergence(expected.float(), continue_logits(model, folded.fork(), following)).mean())
    if kl > 0.5:
        raise SystemExit(f"the folded cache is wrong: KL {kl:.3f}")
    full.crop(-following.shape[1])
    times: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("full", "folded", *(["plain"] * plain))
    }
    for _ in range(ROUNDS):
        for name, own in times.items():
            cache = full if name == "full" else folded
            os.environ["KVFOLD_CPU_KERNEL"] = "0" if name == "plain" else "1"
            own.append(decode(model, cache, following[:, :1]))
            cache.crop(-STEPS)
    result = {
        "tokens": ids.shape[1],
        "method": method,
        "kl": kl,
        "prefill_seconds": prefill,
        "fold_seconds": fold,
        **{f"{name}_ms": 1e3 * min(own)[0] for name, own in times.items()},
        **{f"{name}_rounds_ms": [1e3 * one for one, _ in own] for name, own in times.items()},
        **{
            f"{name}_processor_ms": 1e3 * statistics.median(one for _, one in own)
            for name, own in times.items()
        },
        "full_bytes": folded.ledger().full_bytes,
        "folded_bytes": folded.ledger().total,
    }
    print(
        f"{result['tokens']:>6} tokens: prefill {prefill:6.1f} s, fold {fold:6.1f} s, one token"
        f" {result['full_ms']:7.1f} ms full, {result['folded_ms']:7.1f} ms folded"
        f" ({result['full_ms'] / result['folded_ms']:.2f}x), KL {kl:.4f}",
        flush=True,
    )
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 7168])
    parser.add_argument("--method", default="rdkv:keep=0.1")
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ids = tokenizer(Path(args.text).read_text(), add_special_tokens=False, return_tensors="pt")["input_ids"]
    rows = [
        measure(model, ids[:, :count], ids[:, count : count + 64], args.method, args.plain)
        for count in args.tokens
    ]
    result = {
        "model": Path(args.model).name,
        "dtype": "bfloat16",
        "hardware": f"CPU, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }
    Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
