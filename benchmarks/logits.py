"""How far codes of keys move the logits of each layer: Block-GTQ against uniform TurboQuant.

    python benchmarks/logits.py MODEL TEXT results/logits_MODEL.json [--tokens 2048] [--calibrate-on OTHER_TEXT]

A text is read with exact attention. In every layer the keys are coded, packed, unpacked and restored by the methods' own
stores, and the newest queries look at them: an entry is the mean |scaling q . (restored k - k)| over those queries, their
heads and all the keys each may see. Values play no part (they stay at 16 bits). Two comparisons, each with the bias of the
key projection left in the keys (the papers') and taken out (ours), for models that have one:

- paper: Block-GTQ's form in the paper (sum of energies, one norm a group, equal bits a head, Haar rotations).
- ours: what kvfold uses by default.

"nominal" is what a paper counts: bits of the codes. "physical" is every byte of the keys' tensors over the keys, constants
of the layer included. A uniform code has whole widths, so that its error at Block-GTQ's physical bits is read between the
two nearest of them, on a logarithmic scale (its error halves with a bit); "next" is the whole width above, which costs more.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.evaluate.energies import block_energies
from kvfold.methods import BlockGTQ, Full, LayerView, Method, Needs, TurboQuant
from kvfold.stores.base import Store

QUERIES = 64
UNIFORM = (1, 2, 3, 4, 5, 6)
PAPER = dict(
    norms="group",
    norm_bits=16,
    score="sum",
    share="head",
    widths=(1, 2, 3, 4, 5, 6, 7, 8),
    most_widths=None,
    tile=2,
    sinks=0,
    recent=0,
    rotation="haar",
)


def coded(method: Method, view: LayerView) -> tuple[float, float]:
    """Mean absolute error of a layer's logits, and physical bits of a key's channel."""
    (store,) = method.fold([view])
    kept = [store.kept(0, head, view.rotary) for head in range(store.kv_heads)]
    assert all(len(one.positions) == view.tokens for one in kept), "a method that evicts has no such error"
    keys = torch.stack([one.keys[one.positions.argsort()] for one in kept])
    exact, newest = view.keys[0].float(), view.queries[0].float()
    queries, tokens = newest.shape[1], view.tokens
    seen = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    lost = newest.unflatten(0, (len(kept), -1)) @ (keys - exact)[:, None].transpose(-1, -2) * view.scaling
    size = sum(tensor.nbytes for name, tensor in store.tensors().items() if "key" in name)
    return float(lost[:, :, seen].abs().mean()), 8 * size / exact.numel()


def between(uniform: dict[int, tuple[float, float]], bits: float) -> float:
    """A uniform code's error at physical bits between two whole widths."""
    points = sorted((size, math.log(error)) for error, size in uniform.values())
    for (low, before), (high, after) in zip(points, points[1:]):
        if bits <= high:
            return math.exp(before + (after - before) * (bits - low) / (high - low))
    raise ValueError(f"{bits:.2f} bits are more than the widest uniform code's")


def compared(block: tuple[float, float], uniform: dict[int, tuple[float, float]], bits: int) -> dict:
    """Block-GTQ beside uniform codes of as many nominal and as many physical bits."""
    error, size = block
    above = min((one for one in uniform.values() if one[1] >= size), key=lambda one: one[1])
    return {
        "error": error,
        "physical_bits": size,
        "uniform": uniform[bits][0],
        "uniform_physical_bits": uniform[bits][1],
        "uniform_at_physical": between(uniform, size),
        "uniform_next": above[0],
    }


def measured(view: LayerView, bits: Sequence[int], calibrations: dict[str, str | None]) -> dict:
    """One layer: every method at every width."""
    row: dict = {"layer": view.layer_idx, "key_bias": view.key_bias is not None}
    biases = ["in", "out"] if view.key_bias is not None else ["in"]
    for bias in [*biases, *({BlockGTQ.bias} - {"in", "out"})]:
        uniform = {
            width: coded(TurboQuant(bits=width, bias=bias, rotation="haar"), view) for width in UNIFORM
        }
        for width in bits:
            given = dict(bits=width, bias=bias, calibration=calibrations[bias])
            forms = {"paper": PAPER, "ours": {}} if bias in biases else {"ours": {}}
            for form, options in forms.items():
                block = coded(BlockGTQ(**given, **options), view)
                row[f"{form} {width} bias {bias}"] = compared(block, uniform, width)
    return row


def summary(rows: list[dict]) -> list[dict]:
    """Over layers: in how many Block-GTQ errs less, and by how much."""
    result = []
    for case in (key for key in rows[0] if isinstance(rows[0][key], dict)):
        found = [row[case] for row in rows]

        def against(name: str, found: list[dict] = found) -> dict:
            ratios = [one["error"] / one[name] for one in found]
            worst = max(range(len(ratios)), key=ratios.__getitem__)
            return {
                "layers_below": sum(ratio < 1 for ratio in ratios),
                "mean_reduction": 1 - sum(ratios) / len(ratios),
                "worst_layer": rows[worst]["layer"],
                "worst_ratio": ratios[worst],
            }

        result.append(
            {
                "case": case,
                "layers": len(found),
                "error": sum(one["error"] for one in found) / len(found),
                "uniform": sum(one["uniform"] for one in found) / len(found),
                "physical_bits": sum(one["physical_bits"] for one in found) / len(found),
                "nominal": against("uniform"),
                "physical": against("uniform_at_physical"),
                "next": against("uniform_next"),
            }
        )
    return result


@dataclass(frozen=True, kw_only=True)
class Measure(Method):
    """Measures instead of folding, one layer at a time."""

    name = "measure"
    paper = "internal"
    bits: tuple[int, ...]
    calibrations: dict[str, str | None]
    rows: list[dict] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return Needs(window=QUERIES, sampled=BlockGTQ().sampled, rotary=True)

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.rows.extend(measured(view, self.bits, self.calibrations) for view in views)
        return Full().fold(views)


def table(cases: list[dict]) -> str:
    """Summary for people."""
    lines = [
        f"{'case':<18} {'error':>7} {'uniform':>7} {'bits':>5}   nominal bits        physical bits       next whole width"
    ]
    for one in cases:
        parts = []
        for name in ("nominal", "physical", "next"):
            part = one[name]
            below = f"{part['layers_below']}/{one['layers']}"
            parts.append(
                f"{below:>5} {part['mean_reduction']:>4.0%} {part['worst_ratio']:.2f}@{part['worst_layer']:<2}"
            )
        lines.append(
            f"{one['case']:<18} {one['error']:>7.3f} {one['uniform']:>7.3f} {one['physical_bits']:>5.2f}   "
            + "   ".join(parts)
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 2])
    parser.add_argument("--calibrate-on", help="take the energies from this text, not from the prompt")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()

    def read(path: str) -> torch.Tensor:
        return torch.tensor(
            [tokenizer(Path(path).read_text()[: 64 * args.tokens])["input_ids"][: args.tokens]]
        )

    ids = read(args.text)
    calibrations: dict[str, str | None] = dict.fromkeys(("in", "out", "mean"))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if args.calibrate_on:
            for bias in calibrations:
                path = Path(folder) / f"{bias}.safetensors"
                path.write_bytes(block_energies(model, read(args.calibrate_on), bias=bias).to_bytes())
                calibrations[bias] = str(path)
        measure = Measure(bits=tuple(args.bits), calibrations=calibrations)
        kvfold.fold(model, ids, measure)
    cases = summary(measure.rows)
    result = {
        "what": "mean absolute error of pre-softmax logits by layer, keys coded, values exact",
        "model": Path(args.model).name,
        "dtype": "bfloat16",
        "text": Path(args.text).name,
        "tokens": ids.shape[1],
        "queries": QUERIES,
        "calibrated_on": Path(args.calibrate_on).name if args.calibrate_on else "the prompt itself",
        "hardware": f"{platform.processor() or platform.machine()}, CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
        "ours": BlockGTQ().to_dict(),
        "summary": rounded(cases),
        "layers": rounded(measure.rows),
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(table(cases))


def rounded(data):
    """Plain data with floats of four figures."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [rounded(value) for value in data]
    return float(f"{data:.4g}") if isinstance(data, float) else data


if __name__ == "__main__":
    main()
