"""Greedy tokens after a folded prompt, to compare one machine with another: first without a reference, then with its file.

    python benchmarks/same_tokens.py MODEL TEXT cpu.json --device cpu
    python benchmarks/same_tokens.py MODEL TEXT cuda.json --device cuda --reference cpu.json

float32 without TF32. Where tokens differ, the gap between both tokens' logits at the first one tells whether it is rounding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import kvfold
from kvfold.cli.models import load_model
from kvfold.evaluate.runner import hardware, versions
from kvfold.hf import CACHE_KEYWORD
from kvfold.prompt import tokens_of

METHODS = {
    "full": kvfold.Full(),
    "blockgtq 3 bits": kvfold.BlockGTQ(bits=3, tile=16, widths=(1, 2, 3, 4, 8)),
    "rdkv .1": kvfold.RDKV(keep=0.1, tile=16),
}


@torch.no_grad()
def gap(model: Any, ids: torch.Tensor, method: kvfold.Method, found: list[int], known: list[int]) -> str:
    """What the model says of both tokens where they first differ."""
    at = next(i for i, (one, other) in enumerate(zip(found, known, strict=True)) if one != other)
    cache = kvfold.fold(model, ids, method)
    for token in [int(ids[0, -1]), *found[:at]]:
        step = torch.tensor([[token]], device=ids.device)
        logits = model(step, use_cache=True, **{CACHE_KEYWORD: cache}).logits[0, -1].float()
    between = float(logits[found[at]] - logits[known[at]])
    return f"token {at} differs: logits {between:.2e} apart, of a spread of {float(logits.std()):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    known = json.loads(arguments.reference.read_text()) if arguments.reference else {}
    torch.backends.cuda.matmul.allow_tf32 = False
    model, tokenizer = load_model(arguments.model, dtype="float32", device=arguments.device)
    ids = torch.tensor([tokens_of(tokenizer, arguments.text.read_text())[: arguments.prompt]])
    ids = ids.to(model.device)
    rows: dict[str, list[int]] = {}
    for name, method in METHODS.items():
        cache = kvfold.fold(model, ids, method)
        store = cache.folded_layers[0].segments[0].store.kind
        decoding = kvfold.stream(
            model, torch.cat([ids, ids[:, -1:]], 1), cache, max_new_tokens=arguments.tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        rows[name] = [int(token) for token in decoding]
        line = f"{name}: {len(rows[name])} tokens from a {store} store"
        if known:
            other = known["tokens"][name]
            same = rows[name] == other
            line += ", the same" if same else ", " + gap(model, ids, method, rows[name], other)
        print(line, flush=True)
    about = {"device": hardware(), "versions": versions(), "prompt": arguments.prompt, "tokens": rows}
    arguments.output.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
