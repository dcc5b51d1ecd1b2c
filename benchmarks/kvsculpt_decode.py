"""Time of one token's attention over ragged heads, as a pilot shares a budget among them, beside the full cache's.

    python benchmarks/kvsculpt_decode.py OUT.json

One layer of Llama-3.1-8B's shape (32 heads, 8 KV heads, head_dim 128, bf16), a tenth of 32K and 128K tokens, with and without
biases (Attention Matching) and the exact tail in the same launches; checked against plain torch before it is timed. Needs
a GPU.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.bench.timing import copies, timed
from kvfold.stores import WeightedStore
from kvfold.stores.base import AttendContext
from kvfold.stores.weighted import WeightedLayout

HEADS, KV_HEADS, DIM = 32, 8, 128
SHARES = (2.3, 1.6, 1.2, 1.0, 0.8, 0.5, 0.35, 0.25)
"""Of the tokens of a head, to each of the KV heads."""
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def ragged(tokens: int, biased: bool) -> WeightedStore:
    """A tenth of the tokens."""
    each = tokens / 10 * 4 * DIM / (4 * DIM + 4 + 2 * biased)
    sizes = [int(each * share * KV_HEADS / sum(SHARES)) for share in SHARES]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE)

    buffers = {
        "counts": torch.tensor([sizes], dtype=torch.int32, device=DEVICE),
        "positions": torch.zeros(sum(sizes), dtype=torch.int32, device=DEVICE),
        "keys": draw(sum(sizes), DIM),
        "values": draw(sum(sizes), DIM),
    }
    if biased:
        buffers["bias"] = draw(sum(sizes))
    return WeightedStore(WeightedLayout(tokens, (tokens,)), buffers)


def full(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """cuDNN over the full cache."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def rows(tokens: int) -> list[dict[str, Any]]:
    """What is measured at one length."""
    found, context = [], AttendContext(DIM**-0.5)
    query, *tail = (
        torch.randn(1, heads, n, DIM, device=DEVICE, dtype=DTYPE)
        for heads, n in ((HEADS, 1), (KV_HEADS, 256), (KV_HEADS, 256))
    )
    length = torch.tensor([100], device=DEVICE)

    def measure(what: str, calls: list[Any], nbytes: int) -> None:
        times = timed(calls, DEVICE)
        row = {"tokens": tokens, "what": what, "us": 1e3 * times.best, "single_us": 1e3 * times.single}
        found.append(row | {"bytes": nbytes})
        print(found[-1], flush=True)

    exact = [
        [torch.randn(1, KV_HEADS, tokens, DIM, device=DEVICE, dtype=DTYPE) for _ in "kv"] for _ in range(3)
    ]
    measure("sdpa cudnn", [partial(full, query, *own) for own in exact], 2 * exact[0][0].nbytes)
    del exact
    for biased in (False, True):
        name, one = f"ragged{' biased' if biased else ''}", ragged(tokens, biased)
        stores = [one, *(ragged(tokens, biased) for _ in range(copies(one.nbytes, DEVICE) - 1))]
        plain, _ = one.attend_plain(query, None, context)
        output, _ = one.attend(query, None, context)
        error = float((output.float() - plain).norm() / plain.norm())
        if not error < 5e-3:
            raise RuntimeError(f"{name}: wrong by {error:.1e}, not timed")
        measure(name, [partial(store.attend, query, None, context) for store in stores], one.nbytes)
        tails = [partial(store.attend_with_tail, query, *tail, context, None, length) for store in stores]
        measure(f"{name} with tail", tails, one.nbytes)
        measure(f"{name} plain", [partial(one.attend_plain, query, None, context)], one.nbytes)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    results = [row for tokens in (32768, 131072) for row in rows(tokens)]
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with open(sys.argv[1], "w", encoding="utf-8") as handle:
        json.dump(about | {"rows": results}, handle, indent=1)
