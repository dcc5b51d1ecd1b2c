"""What retention gates are worth on text they have not seen, beside other methods at the same bytes.

    python benchmarks/held_out.py MODEL -o OUT.json                     # the package's gates for SmolLM2
    python benchmarks/held_out.py MODEL -o OUT.json --gates gates.safetensors

Passages of Persuasion, which ships with kvfold. "scoring" reads a passage in chunks and evicts after each, as while
generating; "folded" folds it at once; both then read the tokens that follow. Called again it goes on: a cell is measured once.
KL is that to the full cache, in nats a token, "nll" the next-token loss: of the passage (scoring) or of what follows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold import Method, make_method
from kvfold.cli.models import load_model
from kvfold.errors import BudgetError
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence
from kvfold.evaluate.tasks.text import load as open_text
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.methods.dbtrimkv import DBTrimKV

RIVALS = ("snapkv", "adakv", "rkv", "expected-attention", "streaming-llm", "rdkv")
NEXT = 128
"""Tokens read after a passage."""


def text_of(
    tokenizer: Any, length: int, passages: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Passages (1, length), spread evenly, and the tokens after each (1, NEXT)."""
    words = "".join(open_text().words)
    ids = torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"], device=device)
    for number in range(1, passages + 1):
        start = number * (len(ids) - length - NEXT) // (passages + 1)
        passage, following = ids[None, start : start + length + NEXT].split([length, NEXT], 1)
        yield passage, following


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Next-token losses (tokens,) of logits (tokens, vocabulary)."""
    return -logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


@torch.no_grad()
def scoring(model: Any, passage: Tensor, method: DBTrimKV, full: Tensor, chunk: int) -> dict[str, Any]:
    """Loss and KL over a passage (1, tokens) read in chunks with an eviction after each, and the cache it leaves."""
    cache = FoldedCache(method, model.config, prompt_tokens=passage.shape[1])
    cache.watch(model)
    kl, losses = [], []
    for start in range(0, passage.shape[1], chunk):
        part = passage[:, start : start + chunk]
        logits = model(part, use_cache=True, **{CACHE_KEYWORD: cache}).logits[0].float()
        kl.append(kl_divergence(full[start : start + chunk].float(), logits))
        targets = passage[0, start + 1 : start + chunk + 1]
        losses.append(nll(logits[: len(targets)], targets))
    return {"kl": float(torch.cat(kl).mean()), "nll": float(torch.cat(losses).mean()), "cache": cache}


@torch.no_grad()
def of_passage(
    model: Any,
    passage: Tensor,
    following: Tensor,
    gates: str,
    budgets: list[int],
    chunk: int,
    names: list[str],
    known: set[Any],
) -> Iterator[dict[str, Any]]:
    """Cells of one passage (1, tokens) and the tokens after it that are not known yet."""
    length = passage.shape[1]
    ours = [
        DBTrimKV(tokens=budget, gates=gates, scope=scope) for budget in budgets for scope in ("model", "head")
    ]  # type: ignore[arg-type]
    rivals = {name: make_method(name, keep=0.1) for name in names}
    evicting = [method for method in ours if method.scope == "model"]
    wanted = [("scoring", _name(m), m.tokens) for m in evicting] + [
        ("folded", _name(m), m.tokens) for m in ours
    ]
    wanted += [("folded", name, budget) for budget in budgets for name in names]
    if known.issuperset(wanted):
        return
    prefill = Prefill(model, passage, [*ours, *rivals.values()])
    exact = continue_logits(model, prefill.fold(make_method("full")), following)[0]

    def after(cache: FoldedCache) -> dict[str, float]:
        ratio = cache.ledger().folded_ratio
        logits = continue_logits(model, cache, following)[0]
        kl = float(kl_divergence(exact, logits).mean())
        return {"ratio": ratio, "kl": kl, "nll": float(nll(logits[:-1], following[0, 1:]).mean())}

    if ("folded", "full", None) not in known:
        yield {
            "way": "folded",
            "method": "full",
            "tokens": None,
            "nll": float(nll(exact[:-1], following[0, 1:]).mean()),
        }
    for budget in budgets:
        keep = None
        methods: list[Method] = [method for method in ours if method.tokens == budget]
        for method in [*methods, *rivals.values()]:
            cell = "folded", _name(method), budget
            if keep is not None and cell in known:
                continue
            try:
                cache = prefill.fold(method if method in ours else replace(method, keep=keep))  # type: ignore[call-arg]
                figures: dict[str, Any] = after(cache)
                keep = keep or figures["ratio"]
            except BudgetError as error:
                figures = {"error": str(error)}
            if cell not in known:
                yield dict(zip(("way", "method", "tokens"), cell)) | figures
    del prefill
    full = None
    for method in evicting:
        cell = "scoring", _name(method), method.tokens
        if cell in known:
            continue
        if full is None:
            full = model(passage, use_cache=False).logits[0]
            if ("scoring", "full", None) not in known:
                loss = float(nll(full[:-1], passage[0, 1:]).mean())
                yield {"way": "scoring", "method": "full", "tokens": None, "nll": loss}
        figures = scoring(model, passage, replace(method, chunks=True), full, min(chunk, length))
        figures["after"] = after(figures.pop("cache"))
        yield dict(zip(("way", "method", "tokens"), cell)) | figures


def _name(method: Method) -> str:
    return method.name + (":head" if getattr(method, "scope", "") == "head" else "")


def held_out(
    model: Any,
    tokenizer: Any,
    gates: str,
    budgets: list[int],
    lengths: list[int],
    passages: int,
    chunk: int,
    rivals: list[str],
    known: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Cells that are not among those `known`."""
    for length in lengths:
        for number, (passage, following) in enumerate(text_of(tokenizer, length, passages, model.device)):
            had = {
                (row["way"], row["method"], row["tokens"])
                for row in known
                if (row["length"], row["passage"]) == (length, number)
            }
            for row in of_passage(model, passage, following, gates, budgets, chunk, rivals, had):
                yield {"length": length, "passage": number, **row}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--gates", default="smollm2-135m-instruct")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--rivals", nargs="*", default=RIVALS)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    a = parser.parse_args()
    model, tokenizer = load_model(a.model, dtype=a.dtype, device=a.device, quiet=True)
    rows = json.loads(a.output.read_text()) if a.output.exists() else []
    for row in held_out(
        model, tokenizer, a.gates, a.budgets, a.lengths, a.passages, a.chunk, list(a.rivals), list(rows)
    ):
        print(json.dumps(row), flush=True)
        rows.append(row)
        a.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
