"""What it costs to calibrate Block-GTQ on another text than the prompt.

    python benchmarks/calibration.py MODEL results/calibration_MODEL.json TEXT OTHER [--tokens 2048]

The start of each text calibrates, and later passages of both are prompts: each is folded with the energies of its own
queries (the default), with those of the start of its own text, and with those of the other. KL(full || folded) in nats over
the text's next tokens, float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.evaluate.energies import block_energies
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.methods import BlockGTQ, Full

AHEAD = 128


def rows(model, passages, files: dict[str, str], bits: list[int]) -> list[dict]:
    """KL of every prompt, width and calibration."""
    result = []
    for name, passage in passages:
        prompt, ahead = passage[:, :-AHEAD], passage[:, -AHEAD:]
        prefill = Prefill(model, prompt, [BlockGTQ(), Full()])
        full = continue_logits(model, prefill.fold(Full()), ahead)
        for width in bits:
            for calibration, path in ({"the prompt": None} | files).items():
                cache = prefill.fold(BlockGTQ(bits=width, calibration=path))
                kl = kl_divergence(full, continue_logits(model, cache, ahead)).mean()
                result.append({"prompt": name, "bits": width, "calibration": calibration, "kl": float(kl)})
                print(result[-1])
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("texts", nargs=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 2])
    parser.add_argument("--passages", type=int, default=2, help="of each text")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    size = args.tokens + AHEAD
    with tempfile.TemporaryDirectory() as folder:
        passages, files = [], {}
        for text in map(Path, args.texts):
            content = text.read_text()[: 16 * size * (args.passages + 1)]
            pieces = torch.tensor([tokenizer(content)["input_ids"]]).split(size, 1)
            path = Path(folder) / f"{text.stem}.safetensors"
            path.write_bytes(block_energies(model, pieces[0][:, : args.tokens], text=text.name).to_bytes())
            files[text.name] = str(path)
            passages += [(text.name, piece) for piece in pieces[1 : args.passages + 1]]
        found = rows(model, passages, files, args.bits)
    means = {
        f"{text}, {width} bits, energies of {calibration}": sum(same) / len(same)
        for text in files
        for width in args.bits
        for calibration in ("the prompt", *files)
        for same in [
            [
                row["kl"]
                for row in found
                if (row["prompt"], row["bits"], row["calibration"]) == (text, width, calibration)
            ]
        ]
    }
    result = {
        "what": "KL(full || folded) in nats over the next tokens, by what told the energies",
        "model": Path(args.model).name,
        "dtype": "float32",
        "tokens": args.tokens,
        "continuation": AHEAD,
        "method": BlockGTQ().to_dict(),
        "hardware": f"{platform.processor() or platform.machine()}, CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
        "mean": {name: round(mean, 5) for name, mean in means.items()},
        "rows": found,
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
