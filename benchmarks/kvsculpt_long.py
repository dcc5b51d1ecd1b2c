"""A long prompt distilled in pieces, beside rivals at equal bytes: needles, KL, seconds, peak memory.

    python benchmarks/kvsculpt_long.py MODEL TEXT OUT.json [--tokens 32000] [--keep .1] [--chunk 4096]
        [--sampled 2048] [--forms NAME...] [--seconds 90]

One document with five numbers in it; it is read and folded before the questions, which each method is asked from the same
fold. KL(full || folded) is that over the text's next 128 tokens. "more >> 4 bits" distils to as many more tokens as make its
coded bytes those of --keep. After --seconds no further method is begun.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.peak import peak
from kvfold.cli.models import load_model
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.evaluate.runner import hardware, versions
from kvfold.hf.cache import FoldedCache
from kvfold.methods import RDKV, AttentionMatching, BlockGTQ, Full, KVSculpt, Method, SnapKV
from kvfold.prompt import prompt_of, tokens_of

NEEDLES = {
    "Lisbon": "4815162",
    "Oslo": "7391405",
    "Nairobi": "2608437",
    "Lima": "9153728",
    "Hanoi": "3047986",
}
NEXT, ANSWER = 128, 10
MORE = 3.6
"""Tokens coded to 4 bits, their scales counted, in the bytes of one at 16."""
FORMS: dict[str, Callable[[argparse.Namespace], Method]] = {
    "full": lambda args: Full(),
    "kvsculpt": lambda args: sculpt(args),
    "snapkv": lambda args: SnapKV(keep=args.keep),
    "rdkv": lambda args: RDKV(keep=args.keep),
    "fixed keys, more >> 4 bits": lambda args: sculpt(args, MORE, steps=0) >> code(args, 4),
    "kvsculpt, more >> 4 bits": lambda args: sculpt(args, MORE) >> code(args, 4),
    "blockgtq, 2 bits": lambda args: code(args, 2),
    "kvsculpt >> 4 bits": lambda args: sculpt(args) >> code(args, 4),
    "fixed keys": lambda args: sculpt(args, steps=0),
    "attention-matching": lambda args: AttentionMatching(keep=args.keep),
    "kvsculpt, cascade": lambda args: sculpt(args, cascade=True),
}


def sculpt(args: argparse.Namespace, times: float = 1, **options: Any) -> KVSculpt:
    return KVSculpt(keep=min(times * args.keep, 1), chunk=args.chunk, sampled=args.sampled, **options)


def code(args: argparse.Namespace, bits: int) -> BlockGTQ:
    return BlockGTQ(bits=bits, sampled=args.sampled)


def document(tokenizer: Any, text: str, tokens: int) -> tuple[str, str]:
    """Text with the needles at 10, 30, ... 90 % of the depth, and the text after it."""
    characters = tokens * len(text[:20000]) // len(tokens_of(tokenizer, text[:20000]))
    while len(tokens_of(tokenizer, text[:characters])) > tokens:
        characters = int(0.99 * characters)
    paragraphs = text[:characters].rpartition("\n")[0].split("\n")
    for number, (city, value) in reversed([*enumerate(NEEDLES.items())]):
        at = len(paragraphs) * (2 * number + 1) // (2 * len(NEEDLES))
        paragraphs.insert(at, f"The secret number of {city} is {value}.")
    return "\n".join(paragraphs), text[characters:]


def answer(model: Any, tokenizer: Any, cache: FoldedCache, question: list[int]) -> str:
    """Greedy answer to a question from a fork of the cache."""
    cache, step, found = cache.fork(), question, []
    for _ in range(ANSWER):
        logits = continue_logits(model, cache, torch.tensor([step], device=model.device))
        step = [int(logits[0, -1].argmax())]
        found += step
    return str(tokenizer.decode(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=32000)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--sampled", type=int, default=2048)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    begun = time.monotonic()
    model, tokenizer = load_model(args.model)
    room = args.tokens - 40 * len(NEEDLES)
    text, after = document(tokenizer, args.text.read_text(encoding="utf-8"), room)
    prefix, template = prompt_of(tokenizer, text, chat=True)
    prompt = torch.tensor([tokens_of(tokenizer, prefix)], device=model.device)
    following = torch.tensor([tokens_of(tokenizer, after[: 10 * NEXT])[:NEXT]], device=model.device)
    questions = {
        city: tokens_of(
            tokenizer,
            template.first(f"What is the secret number of {city}?") + f"The secret number of {city} is",
        )
        for city in NEEDLES
    }
    methods = {name: FORMS[name](args) for name in ("full", *args.forms)}
    exact = Prefill(model, prompt, list(methods.values()))
    print(f"{prompt.shape[1]} tokens, read {time.monotonic() - begun:.1f} s after the start", flush=True)
    rows: list[dict[str, Any]] = []
    reference: Tensor | None = None
    for name, method in methods.items():
        if time.monotonic() - begun > args.seconds:
            break
        start = time.perf_counter()
        try:
            with peak(model.device) as most:
                cache = exact.fold(method)
        except torch.OutOfMemoryError as error:
            rows.append({"method": name, "error": str(error).split("\n")[0]})
            print(rows[-1], flush=True)
            continue
        seconds = time.perf_counter() - start
        logits = continue_logits(model, cache.fork(), following)
        reference = logits if reference is None else reference
        answers = {city: answer(model, tokenizer, cache, question) for city, question in questions.items()}
        stores = [layer.segments[0].store for layer in cache.folded_layers]
        rows.append(
            {
                "method": name,
                "bytes": sum(store.nbytes for store in stores) / sum(store.full_bytes for store in stores),
                "kl": float(kl_divergence(reference, logits).mean()),
                "found": sum(NEEDLES[city] in said for city, said in answers.items()),
                "seconds": seconds,
                "peak_mib": most.most / 2**20,
                "answers": answers,
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "answers"}, flush=True)
        about = {"model": Path(args.model).name, "dtype": str(model.dtype), "tokens": prompt.shape[1]}
        about |= {"keep": args.keep, "chunk": args.chunk, "sampled": args.sampled}
        about |= {"hardware": hardware(model.device.type), **versions(), "needles": len(NEEDLES)}
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
