"""KL against bytes of methods that code every token: Block-GTQ and its parts, TurboQuant, KIVI, on real text.

    python benchmarks/codes.py MODEL OUT.json TEXT[:FIRST_TOKEN] ...

One prompt of 2,048 tokens of each text, and the next 256 fed one after another as they are. Bytes are all that the folded
cache holds over those of its 16-bit form.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.methods import KIVI, BlockGTQ, Full, TurboQuant

TOKENS, NEXT = 2048, 256
PAPER = {"norm_bits": 16, "score": "sum", "most_widths": None, "bias": "in", "sinks": 0}
METHODS = {
    "Block-GTQ 4": BlockGTQ(bits=4),
    "Block-GTQ 3": BlockGTQ(bits=3),
    "Block-GTQ 2": BlockGTQ(bits=2),
    "3, widths 1 2 3 4 8": BlockGTQ(bits=3, widths=(1, 2, 3, 4, 8)),
    "3, tiles of 16": BlockGTQ(bits=3, tile=16),
    "3, tiles of 16, widths 1 2 3 4 8": BlockGTQ(bits=3, tile=16, widths=(1, 2, 3, 4, 8)),
    "3, one norm a key": BlockGTQ(bits=3, norms="token"),
    "3, score by sums": BlockGTQ(bits=3, score="sum"),
    "3, only the bias out, no sinks": BlockGTQ(bits=3, bias="out", sinks=0),
    "3, heads of a layer share bits": BlockGTQ(bits=3, share="layer"),
    "paper's form 3": BlockGTQ(bits=3, **PAPER),
    "TurboQuant 4, bias out": TurboQuant(bits=4, bias="out"),
    "TurboQuant 3, bias out": TurboQuant(bits=3, bias="out"),
    "TurboQuant 2, bias out": TurboQuant(bits=2, bias="out"),
    "KIVI 4": KIVI(bits=4),
    "KIVI 2": KIVI(bits=2),
}


def main() -> None:
    """Command line."""
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    folder, out, *texts = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rows = []
    for text in texts:
        path, _, first = text.partition(":")
        start = int(first or 0)
        content = Path(path).read_text(encoding="utf-8")[: 12 * (start + TOKENS + NEXT)]
        ids = tokenizer(content, add_special_tokens=False)["input_ids"][start : start + TOKENS + NEXT]
        prompt, after = (torch.tensor([part]) for part in (ids[:TOKENS], ids[TOKENS:]))
        shared = Prefill(model, prompt, list(METHODS.values()))
        full = continue_logits(model, shared.fold(Full()), after)
        for name, method in METHODS.items():
            begun = time.process_time()
            cache = shared.fold(method)
            seconds = time.process_time() - begun
            ledger = cache.ledger()
            kl = float(kl_divergence(full, continue_logits(model, cache, after)).mean())
            row = {"text": Path(path).stem, "first": start, "method": name, "kl": kl}
            row |= {"ratio": ledger.folded_ratio, "bits": 16 * ledger.folded_ratio, "fold_cpu_s": seconds}
            rows.append(row)
            print(f"{row['text']:<16} {name:<34} {kl:.5f} {row['bits']:.3f} bits {seconds:.2f} s", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"kvfold": kvfold.__version__, "python": platform.python_version()}
    result = {"model": Path(folder).name, "dtype": "bfloat16", "versions": versions, "rows": rows}
    Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
