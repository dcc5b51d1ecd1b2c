"""Does it matter that gates share their last projection? The same training for each way to share it, then held-out text.

    python benchmarks/tie_gates.py MODEL --text texts/*.txt -o tie.json

Same seed, texts, number of updates and budget; FlexAttention where there is a GPU. KL(full || folded) over the tokens after each
passage of Persuasion: folded at once to so many tokens a head, one budget for the model, or ":head" one for each head.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from held_out import nll, text_of

from kvfold import make_method
from kvfold.cli.models import load_model
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.methods.dbtrimkv import DBTrimKV
from kvfold.training.data import pack
from kvfold.training.trainer import Figures, TrainConfig, Trainer


@torch.no_grad()
def held_out(model: Any, tokenizer: Any, gates: str, arguments: Any) -> list[dict[str, Any]]:
    """KL and next-token loss of each passage, budget and scope."""
    found = []
    texts = text_of(tokenizer, arguments.length, arguments.passages, model.device)
    for number, (passage, following) in enumerate(texts):
        methods = [
            DBTrimKV(tokens=budget, gates=gates, scope=scope)  # type: ignore[arg-type]
            for budget in arguments.budgets
            for scope in ("model", "head")
        ]
        prefill = Prefill(model, passage, methods)
        exact = continue_logits(model, prefill.fold(make_method("full")), following)[0]
        for method in methods:
            logits = continue_logits(model, prefill.fold(method), following)[0]
            found.append({
                "passage": number, "tokens": method.tokens, "scope": method.scope,
                "kl": float(kl_divergence(exact, logits).mean()),
                "nll": float(nll(logits[:-1], following[0, 1:]).mean()),
                "full nll": float(nll(exact[:-1], following[0, 1:]).mean()),
            })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--ties", nargs="+", default=["all", "none", "layers"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--bias", type=float, default=10.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    model, tokenizer = load_model(arguments.model, dtype="float32", device=arguments.device, quiet=True)
    rows = pack(
        model, tokenizer, [path.read_text(encoding="utf-8") for path in arguments.text], arguments.tokens
    )
    about: dict[str, Any] = {"device": str(model.device), "torch": torch.__version__, "ties": {}}
    began = time.perf_counter()

    def report(figures: Figures) -> None:
        if figures.step % 20 == 0 or figures.step == 1:
            print(f"{time.perf_counter() - began:6.1f}s {json.dumps(asdict(figures))}", flush=True)

    for tie in arguments.ties:
        config = TrainConfig(
            tie=tie, width=arguments.width, bias=arguments.bias, lr=arguments.lr, steps=arguments.steps,
            accumulate=arguments.accumulate, budget=arguments.budget,
        )  # fmt: skip
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = Trainer(model, rows, config)
        gates = trainer.train(report)
        found: dict[str, Any] = {
            "train": asdict(config),
            "backend": trainer.backend,
            "tokens a row": arguments.tokens,
            "weights": sum(parameter.numel() for parameter in gates.gates.parameters()),
            "peak bytes": torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None,
            "history": [asdict(figures) for figures in trainer.history],
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gates.safetensors"
            path.write_bytes(gates.to_bytes())
            found["held out"] = held_out(model, tokenizer, str(path), arguments)
        about["ties"][tie] = found
        arguments.output.write_text(json.dumps(about, indent=1) + "\n")
        for budget in arguments.budgets:
            for scope in ("model", "head"):
                kls = [r["kl"] for r in found["held out"] if (r["tokens"], r["scope"]) == (budget, scope)]
                each = ", ".join(f"{kl:.3f}" for kl in kls)
                print(
                    f"tie {tie:7} {budget:4} tokens, one budget a {scope:5}: {sum(kls) / len(kls):.3f} ({each})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
