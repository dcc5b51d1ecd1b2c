"""What layers share: one factorisation of a window of layers against one of each layer, at equal bytes.

    python benchmarks/windows.py MODEL TEXT results/windows_MODEL.json [--tokens 2048] [--layers 4]

Keys before RoPE and values of a text, (tokens, kv_heads * head_dim) a layer. A window's factors are A (tokens, rank) and B (rank,
layers * width), a layer's own A (tokens, rank) and B (rank, width); both store as many numbers, so that the window's rank is
higher. The error is the squared Frobenius norm of what the best factors of that rank leave, over that of the states: singular
values tell it. Controls: the same window with the rows of every layer shuffled on their own, so that layers share no tokens, and
windows of layers as far apart as the model allows. (At equal rank, as the paper compares, a window stores fewer numbers: whether
sharing pays is only told at equal bytes.) "less mean": of states less each layer's mean, which `XKV` takes out first.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers
from torch import Tensor

from kvfold.cli.models import load_model
from kvfold.evaluate.prefill import Prefill
from kvfold.methods import XKV

SIZES = (2, 4, 8, 16)


def left(states: Tensor) -> Tensor:
    """Share of the squared norm that the best rank 0, 1, ... leaves."""
    narrow = states if states.shape[0] >= states.shape[1] else states.T
    energy = torch.linalg.eigvalsh(narrow.T.double() @ narrow.double()).flip(0).clamp(min=0)
    return 1 - torch.cat([energy.new_zeros(1), energy.cumsum(0)]) / energy.sum()


def error_at(left_of: Tensor, rank: int) -> float:
    return float(left_of[min(rank, len(left_of) - 1)].clamp(min=0))


def window(states: list[Tensor], generator: torch.Generator) -> list[dict[str, float]]:
    """Errors of a window at each size of its bytes: each layer its own, joint, joint of shuffled rows."""
    tokens, width = states[0].shape
    energies = [float(x.double().square().sum()) for x in states]
    alone = [left(x) for x in states]
    joint = left(torch.cat(states, 1))
    shuffled = left(torch.cat([x[torch.randperm(tokens, generator=generator)] for x in states], 1))
    found = []
    for size in SIZES:
        rank = max(tokens * width // (size * (tokens + width)), 1)
        joint_rank = len(states) * rank * (tokens + width) // (tokens + len(states) * width)
        own = sum(error_at(x, rank) * energy for x, energy in zip(alone, energies, strict=True))
        found.append(
            {
                "size": size,
                "own": own / sum(energies),
                "window": error_at(joint, joint_rank),
                "shuffled": error_at(shuffled, joint_rank),
                "rank": rank,
                "window_rank": joint_rank,
            }
        )
    return found


def compared(states: list[Tensor], layers: int) -> list[dict]:
    """Every window of neighbours, and every one of layers far apart."""
    generator = torch.Generator().manual_seed(0)
    apart = len(states) // layers
    kinds = {
        "neighbours": [list(range(at, at + layers)) for at in range(len(states) - layers + 1)],
        "far apart": [list(range(at, at + apart * layers, apart))[:layers] for at in range(apart)],
    }
    return [
        {"kind": kind, "layers": own, **row}
        for kind, windows in kinds.items()
        for own in windows
        for row in window([states[i] for i in own], generator)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, quiet=True)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    ids = torch.tensor([ids[: arguments.tokens]], device=model.device)
    views = Prefill(model, ids, [XKV(keep=0.5, metric="plain")]).views
    keys = [
        view.keys[0] if view.rotary is None else view.rotary.unrotate(view.keys[0], view.positions[0])
        for view in views
    ]
    parts = {
        part: [x.transpose(0, 1).flatten(1).float() for x in states]
        for part, states in (("keys", keys), ("values", [view.values[0] for view in views]))
    }
    parts |= {f"{part} less mean": [x - x.mean(0) for x in states] for part, states in parts.items()}
    rows = [
        {"part": part, **row} for part, states in parts.items() for row in compared(states, arguments.layers)
    ]
    about = {
        "model": Path(arguments.model).name,
        "text": arguments.text.name,
        "tokens": ids.shape[1],
        "layers": arguments.layers,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(about, indent=1) + "\n")
    print(f"{'':29}{'size':>5}{'own':>8}{'window':>8}{'shuffled':>9}  windows below own")
    for part in parts:
        for kind in ("neighbours", "far apart"):
            for size in SIZES:
                found = [r for r in rows if (r["part"], r["kind"], r["size"]) == (part, kind, size)]
                means = [sum(r[name] for r in found) / len(found) for name in ("own", "window", "shuffled")]
                below = sum(r["window"] < r["own"] for r in found)
                print(
                    f"{part:17}{kind:12}{size:5}"
                    + "".join(f"{mean:{8 + (i == 2)}.3f}" for i, mean in enumerate(means))
                    + f"  {below}/{len(found)}"
                )


if __name__ == "__main__":
    main()
