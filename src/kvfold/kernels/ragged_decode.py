"""Decode attention over heads of unequal lengths, each token with a bias or none: flash decoding in Triton.

Every head is cut into splits of one length, so that a long head keeps no GPU waiting; splits of the exact tail run beside
them, and a second launch merges all by log-sum-exp. Which split is which head's is found out on the device from the
counts. `stores.weighted.WeightedStore` in plain torch is the twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.kernels.dense_decode import MAX_DIM, MAX_GROUP, Exact, Tuning, problem, tuning
from kvfold.kernels.reference import Part

__all__ = ["MAX_SLOTS", "Ragged", "attend", "fits", "problem", "tuning"]

MAX_SLOTS = 1024
"""Rows times KV heads, at most."""


@dataclass(frozen=True)
class Ragged:
    """Keys and values of all heads, one after the other.

    Attributes
    ----------
    keys, values : (kept, key_dim | value_dim)
        Contiguous; by row, then KV head.
    bias : (kept,) or None
        Added to the logits of a token.
    counts : (rows, kv_heads) int32
        Tokens of each head.
    sizes : tuple of int
        The same on the host, flat.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    counts: Tensor
    sizes: tuple[int, ...]


def fits(query: Tensor, kept: Ragged) -> bool:
    """Whether shapes and dtypes are such that the kernel serves: one query a head, of the dtype that is stored."""
    rows, kv_heads = kept.counts.shape
    return (
        query.shape[0] == rows
        and query.shape[2] == 1
        and query.dtype == kept.keys.dtype == kept.values.dtype
        and query.shape[3] == kept.keys.shape[1]
        and max(kept.keys.shape[1], kept.values.shape[1]) <= MAX_DIM
        and query.shape[1] // kv_heads <= MAX_GROUP
        and rows * kv_heads <= MAX_SLOTS
    )


def attend(
    query: Tensor,
    kept: Ragged,
    tail: Exact | None,
    scaling: float,
    softcap: float | None = None,
    before: Part | None = None,
    tuned: Tuning | None = None,
) -> Part:
    """Attention of one query a head over what its head keeps, an exact tail and what came before.

    Parameters
    ----------
    query : (rows, heads, 1, key_dim)
    kept : Ragged
    tail : Exact or None
        (rows, kv_heads, tokens, dim); without `valid`.
    scaling : float
    softcap : float, optional
    before : Part, optional
        Attention over yet other tokens.
    tuned : Tuning, optional

    Returns
    -------
    (output (rows, heads, 1, value_dim) of the query's dtype, log-sum-exp (rows, heads, 1) float32)
    """
    kernels = _kernels()
    rows, heads, _, dim = query.shape
    slots, value_dim = len(kept.sizes), kept.values.shape[1]
    group = heads * rows // slots
    tuned = tuned or tuning(query.device, query.dtype, max(dim, value_dim))
    chunk = _chunk(sum(kept.sizes), slots, tuned)
    parts = [-(-size // chunk) for size in kept.sizes]
    ends = 0 if tail is None else max(1, math.ceil(tail.keys.shape[2] / chunk))
    programs = sum(parts) + slots * ends
    query = query.contiguous()
    partial = query.new_empty(programs, group, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(programs, group, dtype=torch.float32)
    bias = query if kept.bias is None else kept.bias
    tail_keys, tail_values = (query, query) if tail is None else (tail.keys, tail.values)
    length = query if tail is None or tail.length is None else tail.length
    output = query.new_empty(rows, heads, 1, value_dim)
    lse = query.new_empty(rows, heads, 1, dtype=torch.float32)
    if programs:
        kernels.partials[(programs,)](
            query, partial, partial_lse, kept.keys, kept.values, bias, kept.counts,
            tail_keys, tail_values, length, *tail_keys.stride()[:3], *tail_values.stride()[:3],
            0 if tail is None else tail.keys.shape[2], slots, sum(parts), ends, chunk, scaling, softcap or 0.0,
            KV_HEADS=kept.counts.shape[1], SLOTS_UP=_power(slots), GROUP=group, ROWS=max(16, _power(group)),
            DIM=dim, DIM_UP=_power(dim), VALUE=value_dim, VALUE_UP=_power(value_dim), BLOCK=tuned.block,
            CAPPED=softcap is not None, BIAS=kept.bias is not None, TAIL=tail is not None,
            LENGTH=tail is not None and tail.length is not None,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=tuned.warps, num_stages=tuned.stages,
        )  # fmt: skip
    before_output, before_lse = (partial, partial_lse) if before is None else (x.contiguous() for x in before)
    kernels.finish[(rows * heads,)](
        partial, partial_lse, kept.counts, before_output, before_lse, output, lse, slots, sum(parts), ends, chunk,
        SLOTS_UP=_power(slots), GROUP=group, PARTS_UP=_power(max([ends, *parts])), VALUE=value_dim,
        VALUE_UP=_power(value_dim), TAIL=tail is not None, BEFORE=before is not None, num_warps=4,
    )  # fmt: skip
    return output, lse


def _chunk(tokens: int, slots: int, tuned: Tuning) -> int:
    """Tokens of a split: such that all splits, the last of each head and a tail's too, run at once."""
    whole = max(tuned.programs - 2 * slots, tuned.programs // 2, 1)
    return max(1, math.ceil(tokens / whole / tuned.block)) * tuned.block


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


@cache
def _kernels() -> Any:
    from kvfold.kernels import ragged_decode_triton

    return ragged_decode_triton
