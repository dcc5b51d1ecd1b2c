"""Train a model's retention gates in a given time, and measure what they are worth on text they have not seen.

    python benchmarks/gate_texts.py *.deb -o texts        # which packages: see there
    python benchmarks/train_gates.py MODEL --text texts/*.txt --seconds 300 -o gates/

Written to the folder: gates.safetensors, history.jsonl (the losses of every step), figures.json (tokens/s and peak memory of
each way to attend, held-out figures), and the state of the run: called again, it goes on. Held out is Persuasion, which ships
with kvfold. "scoring" reads a passage in chunks and evicts after each, as while generating; "folded" folds a passage at once,
then reads the next tokens: all methods at the bytes that DBTrimKV takes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kvfold import Method, fold, make_method
from kvfold.cli.models import load_model
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.evaluate.tasks.text import load as open_text
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.methods.dbtrimkv import DBTrimKV
from kvfold.training.data import pack
from kvfold.training.trainer import Figures, TrainConfig, Trainer

RIVALS = ("snapkv", "adakv", "streaming-llm", "rkv", "expected-attention")
NEXT = 128
"""Tokens read after a passage that was folded."""


def memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def speeds(model: Any, rows: torch.Tensor, config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Seconds of an update and peak memory, by way to attend."""
    found = {}
    for backend in ("blocks", "flex") if model.device.type == "cuda" else ("blocks",):
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(model.device)
        try:
            trainer = Trainer(model, rows, replace(config, steps=3), backend=backend)
            trainer.train()
        except Exception as error:  # What a compiler raises is told, and the other way is taken.
            found[backend] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        first, last = trainer.history[0], trainer.history[-1]
        seconds = (last.seconds - first.seconds) / 2
        tokens = config.batch * config.accumulate * rows.shape[1]
        found[backend] = {
            "seconds": seconds,
            "tokens a second": tokens / seconds,
            "peak bytes": memory(model.device),
            "kl, capacity": [first.kl, first.capacity],
        }
    return found


@torch.no_grad()
def scoring(
    model: Any, ids: torch.Tensor, method: DBTrimKV, full: torch.Tensor, chunk: int
) -> dict[str, float]:
    """Next-token loss and KL(full || evicted) over a passage read in chunks with eviction after each."""
    cache = FoldedCache(method, model.config, prompt_tokens=ids.shape[1])
    cache.watch(model)
    kl = nll = 0.0
    for start in range(0, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        logits = model(part, use_cache=True, **{CACHE_KEYWORD: cache}).logits[0].float()
        kl += float(kl_divergence(full[start : start + chunk].float(), logits).sum())
        targets = ids[0, start + 1 : start + chunk + 1]
        nll -= float(logits[: len(targets)].log_softmax(-1).gather(1, targets[:, None]).sum())
    return {"kl": kl / ids.shape[1], "nll": nll / (ids.shape[1] - 1), "bytes": cache.ledger().total}


@torch.no_grad()
def held_out(
    model: Any, tokenizer: Any, gates: str, budgets: list[int], arguments: Any
) -> list[dict[str, Any]]:
    """Figures of passages of Persuasion."""
    words = "".join(open_text().words)
    ids = torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])
    found = []
    for length in arguments.lengths:
        for number in range(arguments.passages):
            start = (number + 1) * (len(ids) - length - NEXT) // (arguments.passages + 1)
            passage = ids[None, start : start + length].to(model.device)
            following = ids[None, start + length : start + length + NEXT].to(model.device)
            about = {"length": length, "passage": number}
            full = model(passage, use_cache=False).logits[0]
            loss = -full[:-1].float().log_softmax(-1).gather(1, passage[0, 1:, None]).mean()
            found.append({**about, "way": "scoring", "method": "full", "nll": float(loss)})
            for budget in budgets:
                method = DBTrimKV(tokens=budget, gates=gates, chunks=True)
                figures = scoring(model, passage, method, full, arguments.chunk)
                found.append({**about, "way": "scoring", "method": "dbtrimkv", "tokens": budget, **figures})
                print(json.dumps(found[-1]), flush=True)
            for budget in budgets:
                ours = DBTrimKV(tokens=budget, gates=gates)
                keep = budget / length * 1.05
                methods = [ours, replace(ours, scope="head")]
                methods += [make_method(name, keep=keep) for name in RIVALS]
                prefill = Prefill(model, passage, methods)
                exact = continue_logits(model, prefill.fold(make_method("full")), following)
                caches = {_name(method): prefill.fold(method) for method in methods}
                # What it costs that later chunks no longer see what went.
                chunked = replace(ours, chunks=True)
                caches["dbtrimkv:chunks"] = fold(model, passage, chunked, chunk_size=arguments.chunk)
                for name, cache in caches.items():
                    ratio = cache.ledger().folded_ratio
                    logits = continue_logits(model, cache, following)
                    kl = float(kl_divergence(exact, logits).mean())
                    figures = {"tokens": budget, "ratio": ratio, "kl": kl}
                    found.append({**about, "way": "folded", "method": name, **figures})
                    print(json.dumps(found[-1]), flush=True)
    return found


def _name(method: Method) -> str:
    return method.name + (":head" if getattr(method, "scope", "") == "head" else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=Path("gates"))
    parser.add_argument("--seconds", type=float, default=300, help="for training; steps follow from it")
    parser.add_argument("--steps", type=int, help="instead of --seconds")
    parser.add_argument("--most", type=int, default=600, help="steps at most")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096])
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    defaults = asdict(TrainConfig(width=128, bias=10.0, lr=2e-3, accumulate=4))
    for name, value in defaults.items():
        if name != "steps":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device, quiet=True)
    texts = [path.read_text(encoding="utf-8") for path in arguments.text]
    rows = pack(model, tokenizer, texts, arguments.tokens)
    config = TrainConfig(**{name: getattr(arguments, name) for name in defaults if name != "steps"}, steps=1)
    print(f"{len(rows)} rows of {arguments.tokens} tokens, {time.perf_counter() - began:.0f} s", flush=True)

    plan = folder / "plan.json"
    if plan.exists():
        about = json.loads(plan.read_text())
    else:
        found = speeds(model, rows, config)
        best = min((f["seconds"], name) for name, f in found.items() if "seconds" in f)
        agreed = [f["kl, capacity"] for f in found.values() if "seconds" in f]
        near = all(abs(a - b) <= 0.02 * abs(b) + 1e-5 for one in agreed for a, b in zip(one, agreed[0]))
        name = best[1] if near else "blocks"
        steps = arguments.steps or int(arguments.seconds / found[name]["seconds"])
        about = {"speeds": found, "backend": name, "steps": max(min(steps, arguments.most), 1)}
        about["device"] = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
        about["torch"] = torch.__version__
        plan.write_text(json.dumps(about, indent=1))
    print(json.dumps(about), flush=True)

    config = replace(config, steps=about["steps"])
    trainer = Trainer(model, rows, config, folder=folder, save_every=25, backend=about["backend"])

    def report(figures: Figures) -> None:
        if figures.step % 10 == 0 or figures.step < 4:
            print(json.dumps(asdict(figures)), flush=True)

    gates = trainer.train(report)
    gates.facts["model"] = Path(arguments.model).name
    gates.facts["texts"] = [path.name for path in arguments.text]
    (folder / "gates.safetensors").write_bytes(gates.to_bytes())
    lines = [json.dumps(asdict(figures)) for figures in trainer.history]
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    about["train seconds"] = trainer.history[-1].seconds
    (folder / "figures.json").write_text(json.dumps(about, indent=1))
    about["held out"] = held_out(
        model, tokenizer, str(folder / "gates.safetensors"), arguments.budgets, arguments
    )
    (folder / "figures.json").write_text(json.dumps(about, indent=1))
    print(f"done in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
