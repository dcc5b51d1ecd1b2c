"""Bytes that a prompt's cache takes, at its peak and afterwards, and the longest context that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache

from kvfold.api import fold
from kvfold.bench.attention import release
from kvfold.bench.peak import peak
from kvfold.bench.setup import FULL, Setup, free_bytes
from kvfold.bench.shapes import token_ids
from kvfold.errors import KvfoldError
from kvfold.hf import CACHE_KEYWORD
from kvfold.ledger import storage_bytes, tensors_in

BESIDE = 0.02
"""Share of free memory left for what decoding needs beside the cache."""


@torch.no_grad()
def memory(setup: Setup) -> Iterator[dict[str, Any]]:
    """Read and fold a real prompt, and measure.

    Yields
    ------
    dict
        For each context, batch and method: "peak_bytes" of the prefill beyond the weights, activations and fold included;
        "live_bytes" that it left by the allocator's count, and "ledger_bytes" by the cache's own; "bytes_per_token" of a row;
        "longest" context of one row that fits beside the weights by these bytes, and whether memory for it could be
        had ("confirmed"; None on a CPU, which promises memory that it does not have).
    """
    model = setup.model
    for tokens, batch in setup.cases():
        setup.check_room(tokens, batch)
        ids = token_ids(setup.config, batch, tokens, setup.device)
        for candidate in setup.everything:
            cache: Any
            # Kernels and work spaces that the first call makes would be counted.
            with suppress(KvfoldError):  # a budget may need a longer prompt
                fold(model, ids[:, : min(tokens, 1024)], candidate.method)
            with peak(setup.device) as found:
                if candidate is FULL:
                    cache = DynamicCache(config=setup.config)
                    model(ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
                else:
                    cache = fold(model, ids, candidate.method)
            ledger = (
                storage_bytes(tensors_in([vars(layer) for layer in cache.layers]))
                if candidate is FULL
                else cache.ledger().total
            )
            del cache
            release(setup.device)
            each = ledger / (tokens * batch)
            longest = int((1 - BESIDE) * free_bytes(setup.device) / each)
            yield {
                "label": candidate.label,
                "context": tokens,
                "batch": batch,
                "peak_bytes": found.most,
                "live_bytes": found.left,
                "ledger_bytes": ledger,
                "bytes_per_token": each,
                "longest": longest,
                "confirmed": _can_be_had(int(longest * each), setup.device),
            }
            release(setup.device)


def _can_be_had(nbytes: int, device: torch.device, pieces: int = 64) -> bool | None:
    """Whether the device gives so much memory, in pieces as layers would ask for it."""
    if device.type != "cuda":
        return None
    held = []
    try:
        held = [torch.empty(-(-nbytes // pieces), dtype=torch.uint8, device=device) for _ in range(pieces)]
    except torch.OutOfMemoryError:
        return False
    finally:
        del held
        release(device)
    return True
