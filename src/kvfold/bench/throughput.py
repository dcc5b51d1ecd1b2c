"""Tokens a second under a budget of cache bytes: the fewer bytes a request takes, the more requests a step serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvfold.bench.attention import release
from kvfold.bench.decode import step_times
from kvfold.bench.fill import filled
from kvfold.bench.setup import Setup, free_bytes
from kvfold.errors import KvfoldError


@torch.no_grad()
def throughput(setup: Setup, budget: int) -> Iterator[dict[str, Any]]:
    """Decode with as many requests as the budget holds.

    Parameters
    ----------
    setup : Setup
        Batches are measured too where they fit the budget.
    budget : int
        Bytes of keys and values, in all.

    Yields
    ------
    dict
        For each context, method and batch: "bytes" of a request, "most" requests that fit, "ms" and "step_ms" of a step,
        "tokens_per_second"; at the largest batch, "speedup" over the full cache at its own.

    Raises
    ------
    KvfoldError
        Not one request of the full cache fits, or the device lacks the memory for the budget.
    """
    model = setup.model
    free = free_bytes(setup.device)
    if budget > free:
        raise KvfoldError(f"--budget of {budget:,} bytes: beside the weights {free:,} are free; ask for less")
    for tokens in sorted(setup.contexts):
        full = None
        for candidate in setup.everything:
            one = filled(setup, candidate.method, tokens, 1).ledger().total
            release(setup.device)
            most = budget // one
            about = {"label": candidate.label, "context": tokens, "bytes": one, "most": most}
            if not most:
                if full is None:
                    raise KvfoldError(
                        f"--budget of {budget:,} bytes: one request of {tokens} tokens takes {one:,} as a full cache; give"
                        " more, or a shorter --context"
                    )
                yield about | {"batch": 0, "problem": "no request fits"}
                continue
            for batch in sorted({*(b for b in setup.batches if b < most), most}):
                row: dict[str, Any] = about | {"batch": batch}
                cache = None
                try:
                    cache = filled(setup, candidate.method, tokens, batch)
                    row |= step_times(model, cache, tokens, batch)
                except torch.OutOfMemoryError as error:
                    row["problem"] = f"out of memory: {str(error).splitlines()[0]}"
                    yield row
                    continue
                finally:
                    del cache
                    release(setup.device)
                row["tokens_per_second"] = 1e3 * batch / (row["step_ms"] or row["ms"])
                if batch == most:
                    full = full or row["tokens_per_second"]
                    row["speedup"] = row["tokens_per_second"] / full
                yield row
