"""A decode step over records and exact tokens: what surrounds the kernel of `records`, in few launches, and its plain-torch twin.

A query meets records in the basis of their codes, the mean key's logits are added, and what comes out is turned back and merged
with exact tokens. On a GPU: one launch for queries, the records' own, one over exact tokens, one that turns back and merges; and
one more for the mean key of tokens that do not lie in order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.kernels import dense_decode, ragged_decode, records
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.position_bias import (
    MOST_PLANES,
    Circles,
    Turns,
    coarse_pairs,
    position_logits,
    turns,
)
from kvfold.kernels.ragged_decode import Ragged
from kvfold.kernels.records import Records
from kvfold.kernels.reference import Part, merge
from kvfold.kernels.reference import attend as attend_exact
from kvfold.kernels.streams import aside, joined
from kvfold.kernels.turned_biases import Turning, turned_biases

if TYPE_CHECKING:
    from kvfold.stores.base import Rotary


@dataclass(frozen=True)
class Rotations:
    """One matrix for each KV head: what turns a vector is matrix @ vector.

    Attributes
    ----------
    matrices : (n, dim, dim) float32
    which : (kv_heads,) int32
        Index of each head's.
    """

    matrices: Tensor
    which: Tensor

    @property
    def by_head(self) -> Tensor:
        """Of every head, (kv_heads, dim, dim)."""
        return self.matrices[self.which.long()]


@dataclass(frozen=True)
class Basis:
    """How records see queries, and how outputs come back.

    Attributes
    ----------
    scale : (rows, kv_heads, dim) float32
        What rotated queries are multiplied with.
    value_scale : (rows, kv_heads) float32
        What outputs are multiplied with.
    order : (rows, kv_heads, dim) integers, optional
        The query's channel that comes first, second, ...
    turn : Rotations, optional
        Of queries in that order.
    turn_back : Rotations, optional
        Of outputs.
    key_mean : (rows, kv_heads, dim), optional
        Part of every key.
    value_mean : (rows, kv_heads, dim), optional
        Part of every value.
    """

    scale: Tensor
    value_scale: Tensor
    order: Tensor | None = None
    turn: Rotations | None = None
    turn_back: Rotations | None = None
    key_mean: Tensor | None = None
    value_mean: Tensor | None = None


@dataclass(frozen=True)
class Turned:
    """A part of every key that RoPE turns to the token's position.

    Attributes
    ----------
    vector : (rows, kv_heads, dim)
    circles : Circles
        Of `vector`, for the kernels.
    rotary : Rotary
    tokens : int
        Index i is at position i + shift.
    shifts : tuple of int
        Of each row.
    """

    vector: Tensor
    circles: Circles
    rotary: Rotary
    tokens: int
    shifts: tuple[int, ...]


def problem(device: torch.device, dim: int, group: int) -> str | None:
    """Why the kernels cannot be used, or None; `group` is of query heads, and queries, of a KV head."""
    return records.problem(device, dim, group) or dense_decode.problem(device)


def attend(
    query: Tensor,
    coded: Records,
    basis: Basis,
    scaling: float,
    turned: Turned | None = None,
    hidden: Tensor | None = None,
    exact: Exact | Ragged | None = None,
    tail: Exact | None = None,
    before: Part | None = None,
    dtype: torch.dtype = torch.float32,
) -> Part:
    """Attention over records, exact tokens and what came before.

    Parameters
    ----------
    query : (rows, heads, queries, dim)
        Each row its own; at most 16 a KV head. One, if there is a tail.
    coded : Records
    basis : Basis
    scaling : float
    turned : Turned, optional
    hidden : (places,) bool, optional
        Tokens that are not seen, in the order of the records.
    exact : Exact or Ragged, optional
        Exact tokens, as many for each head or not.
    tail : Exact, optional
    before : Part, optional
        Attention over yet other tokens.
    dtype : torch.dtype
        Of the output.

    Returns
    -------
    (output (rows, heads, queries, dim), log-sum-exp (rows, heads, queries) float32)
    """
    rows, heads, queries, dim = query.shape
    group = heads * queries // coded.kv_heads
    kernels, up = _kernels(), max(16, _power(dim))
    query = query.reshape(rows, heads * queries, 1, dim).contiguous()
    exact_part = None
    if exact is not None or tail is not None:
        with aside(query.device):
            exact_part = _exact_partials(query, exact, tail, scaling)
    turned_to = query.new_empty(rows, heads * queries, dim, dtype=torch.float32)
    factors, tables, shifted, planes = query, None, (query, query), 0
    if turned is not None:
        tables, planes = turns(turned.rotary, dim, turned.tokens, 0, query.device), turned.circles.count
        factors = turned_to.new_empty(rows, heads * queries, planes, 2)
        if any(turned.shifts):
            shifted = _shifted(turned, dim, query.device)
    order, turn, back = basis.order, basis.turn, basis.turn_back
    ways: dict[str, Any] = dict(GROUP=group, GROUP_UP=max(16, _power(group)), DIM=dim, DIM_UP=up)
    inside = hidden is None and coded.positions is None and planes <= MOST_PLANES
    kernels.prepare[(-(-max(dim, planes) // CHANNELS), coded.kv_heads, rows)](
        query, turned_to, factors, query if order is None else order, basis.scale,
        *((query, query) if turn is None else (turn.matrices, turn.which)),
        *((query,) * 2 if turned is None else (turned.vector, turned.circles.channels)),
        *shifted, scaling, 1.0 if tables is None else tables.scale,
        ORDER=order is not None, ROTATED=turn is not None, PLANES=planes, REAL=0 if turned is None else turned.circles.real,
        SHIFTED=shifted[0] is not query, EARLY=not INTERPRETED and query.is_cuda, BLOCK=CHANNELS, num_warps=4, **ways,
    )  # fmt: skip
    bias = turning = None
    if turned is not None and tables is not None:
        turning = Turning(turned.circles, factors, _pairs(turned, tables), tables.fine)
        if not inside:
            bias = turned_biases(turning, coded, early=True)
    if hidden is not None:
        if bias is None:
            bias = turned_to.new_zeros(len(hidden), group)
        bias.masked_fill_(hidden[:, None], -torch.inf)
    within = turning if inside else None
    mixed, sums = records.attend(turned_to, coded, 1.0, bias, within, early=True)
    partial, partial_lse = (mixed, sums) if exact_part is None else exact_part
    joined(query.device)
    output = query.new_empty(rows, heads, queries, dim, dtype=dtype)
    lse = sums.new_empty(rows, heads, queries)
    earlier = (mixed, sums) if before is None else tuple(part.contiguous() for part in before)
    key_mean, value_mean = basis.key_mean, basis.value_mean
    if turned is not None and turned.circles.still is not None:
        key_mean = turned.circles.still if key_mean is None else turned.circles.still + key_mean.float()
    kernels.finish[(-(-dim // CHANNELS), coded.kv_heads, rows)](
        mixed, sums, partial, partial_lse, *earlier, query, output, lse, basis.value_scale,
        *((query, query) if back is None else (back.matrices, back.which)),
        query if key_mean is None else key_mean, query if value_mean is None else value_mean,
        0 if exact_part is None else partial.shape[2], scaling,
        ROTATED=back is not None, KEY_MEAN=key_mean is not None, VALUE_MEAN=value_mean is not None,
        BEFORE=before is not None, BLOCK=CHANNELS, num_warps=4, **ways,
    )  # fmt: skip
    return output, lse


def attend_plain(
    query: Tensor,
    coded: Records,
    basis: Basis,
    scaling: float,
    turned: Turned | None = None,
    hidden: Tensor | None = None,
    exact: Exact | None = None,
    tail: Exact | None = None,
    before: Part | None = None,
) -> Part:
    """As `attend`, by plain torch on any device, in float32."""
    rows, dim = query.shape[0], query.shape[3]
    q = query.float().reshape(rows, coded.kv_heads, -1, dim)
    seen = q
    if basis.order is not None:
        seen = q.gather(-1, basis.order.long()[:, :, None].expand_as(q))
    if basis.turn is not None:
        seen = seen @ basis.turn.by_head.transpose(1, 2)
    bias = None
    if turned is not None:
        logits = [
            position_logits(one * scaling, vector, turned.rotary, turned.tokens, shift)
            for one, vector, shift in zip(q, turned.vector.float(), turned.shifts, strict=True)
        ]
        bias = coded.placed(torch.stack(logits).transpose(2, 3))
    if hidden is not None:
        bias = q.new_zeros(len(hidden), q.shape[2]) if bias is None else bias
        bias = bias.masked_fill(hidden[:, None], -torch.inf)
    seen = (seen * basis.scale[:, :, None]).flatten(1, 2)
    output, lse = records.attend_plain(seen, coded, scaling, bias)
    output = output.view(q.shape) * basis.value_scale[..., None, None]
    if basis.turn_back is not None:
        output = output @ basis.turn_back.by_head.transpose(1, 2)
    if basis.value_mean is not None:
        output = output + basis.value_mean[:, :, None].float()
    lse = lse.view(q.shape[:3])
    if basis.key_mean is not None:
        lse = lse + (q @ basis.key_mean.float()[..., None])[..., 0] * scaling
    parts = [(output.view(query.shape), lse.view(query.shape[:3]))]
    for side in (exact, tail):
        if side is not None:
            mask = torch.ones(rows, side.keys.shape[2], dtype=torch.bool, device=query.device)
            mask = mask if side.valid is None else mask & side.valid
            if side.length is not None:
                mask &= torch.arange(side.keys.shape[2], device=query.device) < side.length
            parts.append(attend_exact(query, side.keys, side.values, scaling, mask[:, None, None]))
    return merge([*parts, *([] if before is None else [before])])


def _exact_partials(query: Tensor, exact: Exact | Ragged | None, tail: Exact | None, scaling: float) -> Part:
    """Attention over exact tokens: outputs (rows, heads, splits, dim) and log-sum-exp (rows, heads, splits)."""
    if exact is not None and exact.keys.dtype != query.dtype:
        exact = replace(exact, keys=exact.keys.to(query.dtype), values=exact.values.to(query.dtype))
    if isinstance(exact, Ragged):
        return ragged_decode.attend(query, exact, tail, scaling)
    return dense_decode.partials(query, exact, tail, scaling)


CHANNELS = 16
"""Channels of an output, and planes, that one program makes."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _pairs(turned: Turned, tables: Turns) -> Tensor:
    """`coarse_pairs`, which all layers share."""
    name = ("coarse pairs", len(tables.partner), turned.tokens, tables.fine.device)
    found: Tensor = turned.rotary.shared(name, lambda: coarse_pairs(tables))
    return found


def _shifted(turned: Turned, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (rows, dim) of each row's shift."""

    def make() -> tuple[Tensor, Tensor]:
        own = [turns(turned.rotary, dim, 1, shift, device) for shift in turned.shifts]
        return torch.cat([one.coarse_cos for one in own]), torch.cat([one.coarse_sin for one in own])

    found: tuple[Tensor, Tensor] = turned.rotary.shared(("shifts", dim, turned.shifts, device), make)
    return found


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@cache
def _kernels() -> Any:
    from kvfold.kernels import triton_around_records

    return triton_around_records
