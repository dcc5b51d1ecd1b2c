"""Rows as an evaluation would write them, made from a seed: for the looks of a page, not for its figures."""

from __future__ import annotations

import random

from kvfold.evaluate.results import Cell, Fidelity, Row, Run

FULL_BYTES = 50_000_000
METHODS = {  # loss of score, KL at a tenth of the bytes
    "rdkv": (0.05, 0.014),
    "rdkv-published": (0.5, 0.098),
    "snapkv": (0.6, 0.30),
    "snapkv:bits=4": (0.45, 0.083),
    "adakv": (0.55, 0.24),
    "pyramidkv": (0.62, 0.33),
    "streaming": (0.9, 0.21),
    "random": (0.97, 0.9),
    "tova": (0.7, 0.36),
    "knorm": (0.8, 0.5),
    "keydiff": (0.66, 0.42),
    "expected-attention": (0.4, 0.2),
    "rkv": (0.58, 0.27),
}
FIXED = {
    "kivi:bits=4": (0.3204, 0.01, 0.006),
    "kivi:bits=2": (0.1954, 0.2, 0.18),
    "uniform:bits=4": (0.28, 0.02, 0.011),
    "turboquant:bits=4": (0.266, 0.5, 0.79),
}


def run(name: str = "r1", **changes) -> Run:
    return Run(
        **{
            "id": name,
            "started": "2026-11-29T22:10:00Z",
            "command": "kvfold eval --models Qwen2.5-Coder-0.5B --tasks needle,ruler --budgets keep=0.25,keep=0.1 --samples 10 -o results",
            "hardware": "2 x Intel Xeon, 2 threads",
            "versions": {"python": "3.11.13", "torch": "2.13.0", "transformers": "5.17.0", "kvfold": "0.1.0"},
            "seed": 0,
            "dtype": "bfloat16",
            **changes,
        }
    )


def row(
    method: str = "rdkv",
    budget: str = "keep=0.1",
    sample: int = 0,
    score: float | None = 1.0,
    kl: float | None = 0.01,
    ratio: float = 0.1,
    *,
    run: str = "r1",
    error: str | None = None,
    metric: str = "recall",
    **cell,
) -> Row:
    where = {
        "model": "tiny", "task": "needle", "tokens": 1024, "view": "unseen", "when": "prefill", "format": "plain"
    }  # fmt: skip
    place = Cell(method=method, budget=budget, sample=sample, **{**where, **cell})
    if error is not None:
        return Row(place, run, error=error)
    full = method == "full"
    return Row(
        place,
        run,
        score=score,
        metric=metric,
        higher_is_better=metric != "perplexity",
        fidelity=None if kl is None else Fidelity(0.0 if full else kl, 0.9, 0.1, 2.5 + kl, 2.5, 64),
        prompt_tokens=place.tokens,
        folded_bytes=FULL_BYTES if full else round(ratio * FULL_BYTES),
        full_bytes=FULL_BYTES,
        fold_seconds=0.2,
        decode_seconds=0.03,
        about={"depth": (sample % 5) / 4} if place.task == "needle" else {},
    )


def grid(
    seed: int = 0,
    models=("Qwen2.5-Coder-0.5B", "SmolLM2-135M-Instruct"),
    tasks=("needle", "ruler-vt", "ruler-niah-multikey-1", "perplexity"),
    lengths=(2048, 4096),
    views=("unseen", "in view"),
    samples: int = 10,
    budgets=(0.5, 0.25, 0.1, 0.05),
) -> list[Row]:
    """A whole evaluation: many methods, some of which fail or stop early."""
    rng = random.Random(seed)
    rows = []
    for model in models:
        for view in views:
            for task in tasks:
                for tokens in lengths:
                    for sample in range(samples):
                        where = dict(model=model, view=view, task=task, tokens=tokens, sample=sample)
                        rows += _sample(rng, where, budgets)
    return rows


def _sample(rng: random.Random, where: dict, budgets) -> list[Row]:
    perplexity = where["task"] == "perplexity"
    hard = 0.97 if where["model"].startswith("Qwen") else 0.7
    ease = 0.25 if where["view"] == "in view" else 1.0
    whole = 8.0 if perplexity else float(rng.random() < hard)
    metric = "perplexity" if perplexity else "recall"
    rows = [row("full", "", score=whole, ratio=1.0, kl=0.0, metric=metric, **where)]
    wanted = [
        (m, f"keep={k}", k, loss * (0.1 / k) ** 0.7, kl * (0.1 / k) ** 1.5)
        for m, (loss, kl) in METHODS.items()
        for k in budgets
    ]
    wanted += [(m, "", r, loss, kl) for m, (r, loss, kl) in FIXED.items()]
    for method, budget, ratio, loss, kl in wanted:
        if method == "random" and where["sample"] >= 6:
            continue
        if method == "rkv" and where["tokens"] > 2048:
            rows.append(row(method, budget, error="out of memory: tried to allocate 2.1 GiB", **where))
            continue
        drawn = kl * ease * rng.lognormvariate(0, 0.6)
        kept = whole * float(rng.random() > min(loss * ease, 0.99)) if not perplexity else whole * (1 + drawn)
        one = row(
            method, budget, score=kept, kl=drawn, ratio=ratio * rng.uniform(0.99, 1), metric=metric, **where
        )
        if where["sample"] == 0 and method in ("rdkv", "snapkv", "kivi:bits=4", "kivi:bits=2"):
            one = _with_widths(one, method, ratio, rng)
        rows.append(one)
    return rows


def _with_widths(one: Row, method: str, ratio: float, rng: random.Random) -> Row:
    layers, heads = (24, 2) if one.cell.model.startswith("Qwen") else (30, 3)
    tokens = one.prompt_tokens
    widths = []
    for layer in range(layers):
        row_ = []
        for _ in range(heads):
            if method == "snapkv":
                row_.append({"values": {"16": int(tokens * ratio)}, "keys": {"16": 64}})
            elif method.startswith("kivi"):
                row_.append({"values": {method[-1]: tokens}, "keys": {method[-1]: 64}})
            else:
                share = min(1.0, 4 * ratio * rng.uniform(0.4, 1.6) * (1.5 - layer / layers))
                four = int(tokens * share / 2)
                two = rng.randrange(65)
                row_.append({"values": {"4": four, "8": four // 4}, "keys": {"2": two, "4": 64 - two}})
        widths.append(row_)
    return Row(**{**vars(one), "widths": widths})
