"""Train a model's retention gates in a given time, and measure what they are worth on text they have not seen.

    python benchmarks/gate_texts.py *.deb -o texts        # which packages: see there
    python benchmarks/train_gates.py MODEL --text texts/*.txt --seconds 300 -o gates/

Written to the folder: gates.safetensors, history.jsonl (the losses of every step), figures.json (tokens/s and peak memory of
each way to attend, held-out figures as `held_out.py` says), and the state of the run: called again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from held_out import RIVALS, held_out

from kvfold.cli.models import load_model
from kvfold.training.data import pack
from kvfold.training.trainer import Figures, TrainConfig, Trainer


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
    gates_file, a = str(folder / "gates.safetensors"), arguments
    about["held out"] = []
    for row in held_out(
        model, tokenizer, gates_file, a.budgets, a.lengths, a.passages, a.chunk, list(RIVALS), []
    ):
        print(json.dumps(row), flush=True)
        about["held out"].append(row)
    (folder / "figures.json").write_text(json.dumps(about, indent=1))
    print(f"done in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
