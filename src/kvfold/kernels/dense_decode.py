"""Decode attention over keys and values as they are: flash decoding (split over tokens, merged by log-sum-exp) in Triton.

One launch reads the history and the exact tail after it, whose length lies in device memory so that a CUDA graph can
replay; a second merges the splits. `kernels.reference.attend` and `merge` are the plain twin.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.kernels.reference import Part

MAX_DIM, MAX_GROUP = 256, 64
"""Largest head dimension and number of queries of a KV head."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Exact:
    """Keys and values as they are.

    Attributes
    ----------
    keys, values : (batch, kv_heads, tokens, key_dim | value_dim)
        Any strides, channels next to each other.
    length : (1,) int64 on the device, or None
        Only so many tokens are seen; None: all.
    valid : (batch, tokens) bool, or None
        False where a token is hidden.
    places : (batch, 3) int64 on the device, or None
        Rows in memory of their own, contiguous: how many elements each one's keys and values are from `keys` and `values`,
        which are those of the longest, and its tokens.
    align : int
        Those numbers of elements are multiples of it.
    """

    keys: Tensor
    values: Tensor
    length: Tensor | None = None
    valid: Tensor | None = None
    places: Tensor | None = None
    align: int = 1


@dataclass(frozen=True)
class Tuning:
    """How the launch is cut; see `tuning`."""

    block: int
    warps: int
    stages: int
    programs: int
    """Programs to aim at: blocks of threads that the GPU holds at once."""


def problem(device: torch.device) -> str | None:
    """None if the kernel can run there, else the reason why not."""
    if device.type != "cuda":
        return f"{device.type} has no Triton"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"


def fits(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether shapes and dtypes are such that the kernel serves: one query a head, no expansion to come."""
    return (
        query.shape[2] == 1
        and query.dtype == keys.dtype == values.dtype
        and query.dtype in _DTYPES
        and query.shape[3] == keys.shape[3]
        and max(keys.shape[3], values.shape[3]) <= MAX_DIM
        and query.shape[1] // keys.shape[1] <= MAX_GROUP
        and keys.stride(3) == values.stride(3) == 1
    )


@cache
def tuning(device: torch.device, dtype: torch.dtype, dim: int) -> Tuning:
    """What was fastest on an H200 (benchmarks/engine.py): one program a multiprocessor, its shared memory full of loads."""
    if device.type != "cuda":
        return Tuning(block=16, warps=4, stages=1, programs=4)
    properties = torch.cuda.get_device_properties(device)
    block = max(16, min(128, 64 * 256 // (_power(dim) * dtype.itemsize)))
    memory = getattr(properties, "shared_memory_per_block_optin", 99 << 10) - (16 << 10)
    stages = max(1, min(4, memory // (2 * block * _power(dim) * dtype.itemsize)))
    return Tuning(block=block, warps=4, stages=stages, programs=properties.multi_processor_count)


def attend(
    query: Tensor,
    history: Exact | None,
    tail: Exact | None,
    scaling: float,
    softcap: float | None = None,
    before: Part | None = None,
    tuned: Tuning | None = None,
) -> Part:
    """Attention of one query a head over history, tail and what came before.

    Parameters
    ----------
    query : (batch, heads, 1, key_dim)
    history, tail : Exact or None
        At least one; only the history may have `places`.
    scaling : float
    softcap : float, optional
    before : Part, optional
        Attention over yet other tokens.
    tuned : Tuning, optional

    Returns
    -------
    (output (batch, heads, 1, value_dim) of the query's dtype, log-sum-exp (batch, heads, 1) float32)
    """
    return merged(query, partials(query, history, tail, scaling, softcap, tuned), before)


def merged(query: Tensor, splits_of: Part, before: Part | None = None) -> Part:
    """Merge what `partials` gives, and attention over yet other tokens; returns as `attend`."""
    partial, partial_lse = splits_of
    batch, heads, splits, value_dim = partial.shape
    output = query.new_empty(batch, heads, 1, value_dim)
    lse = query.new_empty(batch, heads, 1, dtype=torch.float32)
    before_output, before_lse = (partial, partial_lse) if before is None else (x.contiguous() for x in before)
    _kernels().finish[(batch * heads,)](
        partial, partial_lse, before_output, before_lse, output, lse, splits,
        SPLITS_UP=_power(splits), VALUE=value_dim, VALUE_UP=_power(value_dim), BEFORE=before is not None, num_warps=4,
    )  # fmt: skip
    return output, lse


def partials(
    query: Tensor,
    history: Exact | None,
    tail: Exact | None,
    scaling: float,
    softcap: float | None = None,
    tuned: Tuning | None = None,
) -> Part:
    """`attend` over history and tail, by splits that are yet to be merged.

    Returns
    -------
    (outputs (batch, heads, splits, value_dim) float32, log-sum-exp (batch, heads, splits) float32)
    """
    first = history or tail
    assert first is not None
    batch, heads, _, dim = query.shape
    kv_heads, value_dim = first.keys.shape[1], first.values.shape[3]
    tuned = tuned or tuning(query.device, query.dtype, max(dim, value_dim))
    splits = max(1, tuned.programs // (batch * kv_heads))
    longest = max(side.keys.shape[2] for side in (history, tail) if side is not None)
    splits = min(splits, max(1, math.ceil(longest / tuned.block)))
    chunk, tail_chunk = _chunk(history, splits, tuned.block), _chunk(tail, splits, tuned.block)
    partial = query.new_empty(batch, heads, splits, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(batch, heads, splits, dtype=torch.float32)
    group = heads // kv_heads
    query = query.contiguous()
    sides: list[Any] = []
    for side in (history, tail):
        keys, values = (side.keys, side.values) if side is not None else (query, query)
        length = side.length if side is not None and side.length is not None else query
        valid = side.valid if side is not None and side.valid is not None else query
        sides += [keys, values, length, valid, *keys.stride()[:3], *values.stride()[:3]]
        sides += [valid.stride(0), 0 if side is None else keys.shape[2]]
    flags = {
        f"{name}{what}": side is not None and part is not None
        for name, side in (("", history), ("TAIL_", tail))
        for what, part in (("LENGTH", side and side.length), ("VALID", side and side.valid))
    }
    placed = history is not None and history.places is not None
    _kernels().partials[(splits, kv_heads, batch)](
        query, partial, partial_lse, *sides, history.places if history and placed else query, splits, chunk, tail_chunk, scaling, softcap or 0.0,
        GROUP=group, ROWS=max(16, _power(group)), DIM=dim, DIM_UP=_power(dim), VALUE=value_dim,
        VALUE_UP=_power(value_dim), BLOCK=tuned.block, CAPPED=softcap is not None, HISTORY=history is not None,
        PLACED=history.align if history and placed else 0, TAIL=tail is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tuned.warps, num_stages=tuned.stages, **flags,
    )  # fmt: skip
    return partial, partial_lse


def append(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> None:
    """Write one token's states to their slot, both in one launch.

    Parameters
    ----------
    key, value : (batch, kv_heads, 1, key_dim | value_dim)
    keys, values : (batch, kv_heads, slots, key_dim | value_dim)
    index : (1,) int64 on the device
    """
    dim, value_dim = keys.shape[3], values.shape[3]
    key, value = (states if states.stride(3) == 1 else states.contiguous() for states in (key, value))
    _kernels().append[(keys.shape[1], keys.shape[0])](
        key, value, keys, values, index, *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        DIM=dim, DIM_UP=_power(dim), VALUE=value_dim, VALUE_UP=_power(value_dim), num_warps=1,
    )  # fmt: skip


def _chunk(side: Exact | None, splits: int, block: int) -> int:
    """Tokens of a side that one split takes."""
    return block if side is None else max(1, math.ceil(side.keys.shape[2] / splits / block)) * block


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length() if n > 1 else 1


@cache
def _kernels() -> Any:
    from kvfold.kernels import dense_decode_triton

    return dense_decode_triton
