"""One query against kept tokens in pages: Triton on a GPU, plain torch elsewhere.

A pool of pages of 16 tokens serves every layer, row and KV head. A block table says which pages are whose; lengths, tables and
the cut into pieces of even work lie in device memory, so that a CUDA graph can replay while heads gain and lose tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.kernels import dense_decode
from kvfold.kernels.dense_decode import MAX_DIM, MAX_GROUP
from kvfold.kernels.reference import Part
from kvfold.kernels.reference import attend as attend_dense

PAGE = 16
"""Tokens of a page."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
problem = dense_decode.problem


@dataclass(frozen=True)
class Paged:
    """The tokens of one layer; a slot is a row's KV head, number row * kv_heads + head.

    Attributes
    ----------
    keys, values : (places, key_dim | value_dim)
        The pool; place page * 16 + i is the i-th token of a page.
    positions : (places,) int32
    log_beta : (places,) float32
    table : (pages,) int32
        Pages, by slot.
    starts : (slots + 1,) int32
        Where the pages of each slot begin in `table`.
    counts : (slots,) int32
        Tokens of each slot.
    pieces : (slots + 1,) int32
        Number of the first piece of each slot: a piece is what one program reads at a time, `span` pages of a slot.
    piece_slots : (all pieces,) int32
        Slot of each piece, less `first_slot`.
    first_slot : int
    most : int
        Pieces of the layer at most.
    span : int
        Pages of a piece, a power of two.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_beta: Tensor
    table: Tensor
    starts: Tensor
    counts: Tensor
    pieces: Tensor
    piece_slots: Tensor
    first_slot: int
    most: int
    span: int

    def places(self, slots: Tensor, index: Tensor) -> Tensor:
        """Where in the pool the `index`-th tokens of slots lie, int64."""
        page = self.starts[slots] + index // PAGE
        return self.table[page.clamp_max(len(self.table) - 1)].long() * PAGE + index % PAGE


def fits(query: Tensor, paged: Paged) -> bool:
    """Whether the kernel serves: shapes and dtypes."""
    dims = paged.keys.shape[1], paged.values.shape[1]
    return (
        query.shape[2] == 1
        and query.dtype == paged.keys.dtype == paged.values.dtype
        and query.dtype in _DTYPES
        and query.shape[3] == dims[0]
        and max(dims) <= MAX_DIM
        and query.shape[0] * query.shape[1] <= MAX_GROUP * len(paged.counts)
    )


def attend(query: Tensor, paged: Paged, scaling: float, softcap: float | None = None) -> Part:
    """Attention of one query a head over all tokens of its slot.

    Parameters
    ----------
    query : (batch, heads, 1, key_dim)
        batch * kv_heads slots, each with the same number of query heads.
    paged : Paged
    scaling : float
    softcap : float, optional

    Returns
    -------
    (output (batch, heads, 1, value_dim) of the query's dtype, log-sum-exp (batch, heads, 1) float32); output 0 and -inf where
    a slot is empty.
    """
    batch, heads, _, dim = query.shape
    slots, value_dim = len(paged.counts), paged.values.shape[1]
    group = batch * heads // slots
    kernels, power = _kernels(), dense_decode._power
    programs = 4
    if query.is_cuda:
        programs = 2 * torch.cuda.get_device_properties(query.device).multi_processor_count
    # As many bytes at a time whatever the dtype: three blocks are in flight, in shared memory.
    block = max(16, 64 * 256 // (power(max(dim, value_dim)) * query.element_size()))
    query = query.contiguous()
    partial = query.new_empty(paged.most * group, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(paged.most * group, dtype=torch.float32)
    output = query.new_empty(batch, heads, 1, value_dim)
    lse = query.new_empty(batch, heads, 1, dtype=torch.float32)
    shape: dict[str, Any] = dict(GROUP=group, VALUE=value_dim, VALUE_UP=power(value_dim))
    kernels.partials[(min(programs, paged.most),)](
        query, paged.keys, paged.values, paged.table, paged.starts, paged.counts, paged.pieces, paged.piece_slots,
        partial, partial_lse, slots, paged.first_slot, scaling, softcap or 0.0,
        ROWS=max(16, power(group)), DIM=dim, DIM_UP=power(dim), PAGE=PAGE, SPAN=paged.span,
        BLOCK=min(paged.span * PAGE, block, 128), CAPPED=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3, **shape,
    )  # fmt: skip
    kernels.finish[(batch * heads,)](
        partial, partial_lse, paged.pieces, output, lse, LOTS=16, num_warps=4, **shape
    )
    return output, lse


def attend_plain(query: Tensor, paged: Paged, scaling: float, softcap: float | None = None) -> Part:
    """As `attend`, in plain torch and float32: waits for the device."""
    batch, heads = query.shape[:2]
    slots = len(paged.counts)
    index = torch.arange(max(int(paged.counts.max()), 1), device=query.device)
    place = paged.places(torch.arange(slots, device=query.device)[:, None], index)
    mask = (index < paged.counts[:, None]).view(batch, -1, 1, len(index))
    keys, values = (
        pool[place].view(batch, -1, len(index), pool.shape[1]) for pool in (paged.keys, paged.values)
    )
    mask = mask.repeat_interleave(batch * heads // slots, 1)
    # Pages hold whatever was there before: a weight of 0 times NaN would be NaN.
    return attend_dense(query, keys.nan_to_num(), values.nan_to_num(), scaling, mask, softcap)


def append(key: Tensor, value: Tensor, paged: Paged, step: Tensor, start: int) -> None:
    """Put one token behind the last of each slot, whose pages must have room; log beta comes later.

    Parameters
    ----------
    key, value : (batch, kv_heads, 1, key_dim | value_dim)
    paged : Paged
    step : (1,) int64 on the device
    start : int
        The token's position is `start` + `step`.
    """
    key, value = (states if states.stride(3) == 1 else states.contiguous() for states in (key, value))
    dim, value_dim, power = key.shape[3], value.shape[3], dense_decode._power
    _kernels().append[(key.shape[1], key.shape[0])](
        key, value, paged.keys, paged.values, paged.positions, paged.table, paged.starts, paged.counts, step, start, *key.stride()[:2], *value.stride()[:2],
        DIM=dim, DIM_UP=power(dim), VALUE=value_dim, VALUE_UP=power(value_dim), PAGE=PAGE, num_warps=1,
    )  # fmt: skip


def append_plain(key: Tensor, value: Tensor, paged: Paged, step: Tensor, start: int) -> None:
    """As `append`, in plain torch."""
    slots = torch.arange(len(paged.counts), device=key.device)
    place = paged.places(slots, paged.counts)
    paged.keys[place] = key.flatten(0, 2).to(paged.keys.dtype)
    paged.values[place] = value.flatten(0, 2).to(paged.values.dtype)
    paged.positions[place] = (step + start).int()
    paged.counts.add_(1)


def move(paged: Paged, gaps: Tensor, sources: Tensor, number: Tensor) -> None:
    """Copy tokens of the pool into gaps, which are none of them.

    Parameters
    ----------
    paged : Paged
    gaps, sources : (n,) int64
        Places; the first `number` of each count.
    number : () int64 on the device
    """
    dim, value_dim, power = paged.keys.shape[1], paged.values.shape[1], dense_decode._power
    programs = 4 * torch.cuda.get_device_properties(gaps.device).multi_processor_count if gaps.is_cuda else 4
    _kernels().move[(programs,)](
        paged.keys, paged.values, paged.positions, paged.log_beta, gaps, sources, number,
        DIM=dim, DIM_UP=power(dim), VALUE=value_dim, VALUE_UP=power(value_dim), num_warps=1,
    )  # fmt: skip


def move_plain(paged: Paged, gaps: Tensor, sources: Tensor, number: Tensor) -> None:
    """As `move`, in plain torch; all n places must differ."""
    counts = torch.arange(len(gaps), device=gaps.device) < number
    sources = torch.where(counts, sources, gaps)
    for pool in (paged.keys, paged.values, paged.positions, paged.log_beta):
        pool[gaps] = pool[sources]


@cache
def _kernels() -> Any:
    from kvfold.kernels import paged_decode_triton

    return paged_decode_triton
