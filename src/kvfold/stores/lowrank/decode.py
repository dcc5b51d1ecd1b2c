"""A decode step over a low-rank store on a GPU: one query a head, rows of a batch beside each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.kernels import dense_decode, lowrank_decode
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.lowrank_decode import Factors
from kvfold.kernels.position_bias import Turns, turns
from kvfold.kernels.reference import Part, merge
from kvfold.kernels.streams import aside, joined
from kvfold.stores.base import AttendContext
from kvfold.stores.lowrank.layout import PARTS
from kvfold.stores.tokenwise import rotary_for

if TYPE_CHECKING:
    from kvfold.stores.lowrank.store import LowRankStore

STREAMS = 4
"""Rows of a batch that a GPU reads at a time."""


def serves(store: LowRankStore, query: Tensor, context: AttendContext) -> bool:
    """Whether the kernels serve: one query a head, heads as they are, nothing cropped."""
    if context.expand is not None or len(query) != store.rows or lowrank_decode.problem(query.device):
        return False
    return all(
        store.coded(row)[0] + store.coded(row)[1] + one.newest == store.tokens
        and lowrank_decode.fits(query, *(_factors(store, row, name) for name in PARTS))
        and dense_decode.fits(query, parts["exact_keys"][None], parts["exact_values"][None])
        for row, one in enumerate(store.layout.rows)
        for parts in [store.row(row)]
    )


def _factors(store: LowRankStore, row: int, name: str) -> Factors:
    parts = store.row(row)
    return Factors(
        parts[f"{name}_factors"],
        parts.get(f"{name}_norms"),
        getattr(store.layout.rows[row], name).code,
        parts[f"{name}_basis"],
        parts.get(f"{name}_scales"),
        parts.get(f"{name}_mean"),
    )


def attend(
    store: LowRankStore,
    query: Tensor,
    context: AttendContext,
    tail: Exact | None = None,
    before: Part | None = None,
) -> Part:
    """Attention of one query a head over tokens in factors, exact ones, a tail and what came before."""
    device, found = query.device, []
    sides = [[_factors(store, row, name) for name in PARTS] for row in range(store.rows)]
    turned = [_turns(store, row, context, device) for row in range(store.rows)]
    for keys, values in sides:
        lowrank_decode.prepare(keys, values, bool(store.layout.chunk))
    # Rows are beside each other where they read little; all tokens of one fill the GPU.
    streams = STREAMS if store.layout.selected else 1
    for row, ((keys, values), turns_of) in enumerate(zip(sides, turned, strict=True)):
        one = slice(row, row + 1)
        after = tail and replace(tail, keys=tail.keys[one], values=tail.values[one])
        earlier = before and (before[0][one], before[1][one])
        with aside(device, row % streams):
            found.append(_decode_row(store, row, query[one], keys, values, turns_of, context, after, earlier))
    for number in range(min(streams, store.rows)):
        joined(device, number)
    if len(found) == 1:
        return found[0]
    return torch.cat([output for output, _ in found]), torch.cat([lse for _, lse in found])


def _decode_row(
    store: LowRankStore,
    row: int,
    query: Tensor,
    keys: Factors,
    values: Factors,
    turned: Turns | None,
    context: AttendContext,
    tail: Exact | None,
    before: Part | None,
) -> Part:
    parts, device, aside_number = store.row(row), query.device, STREAMS + row % STREAMS
    with aside(device, aside_number):
        exact = Exact(parts["exact_keys"][None], parts["exact_values"][None])
        near = dense_decode.partials(query, exact, tail, context.scaling, context.softcap)
        basis = lowrank_decode.key_basis(keys)
    chosen = store.choose(row, partial(_recommended, store, row, query, context), context)
    joined(device, aside_number)
    far = lowrank_decode.attend(
        query,
        keys,
        values,
        turned,
        store.coded(row)[0],
        context.scaling,
        context.softcap,
        chosen=chosen,
        chunk=max(store.layout.chunk, 1),
        outliers=parts.get("outliers"),
        basis=basis,
        near=near if before is None else None,
        stream=aside_number,
    )
    return far if before is None else dense_decode.merged(query, near, merge([far, before]))


def _turns(store: LowRankStore, row: int, context: AttendContext, device: torch.device) -> Turns | None:
    rotary, shift = rotary_for(store.layout.turned, context.rotary), store.layout.rows[row].shift
    if rotary is None:
        return None
    name = "16-bit turns", store.key_dim, store.tokens, shift, device
    return rotary.shared(
        name, lambda: lowrank_decode.narrow(turns(rotary, store.key_dim, store.tokens, shift, device))
    )


def _recommended(store: LowRankStore, row: int, query: Tensor, context: AttendContext) -> Tensor | None:
    """Chunks that one query (1, heads, 1, key_dim) reads, (kv_heads or 1, n) int32."""
    parts = store.row(row)
    if "landmarks" not in parts:
        return None
    sets = store.kv_heads if store.layout.choice == "head" else 1
    return lowrank_decode.choose(
        query,
        parts["landmarks"],
        parts["landmark_scales"],
        parts["outliers"],
        context.scaling,
        store.layout.selected,
        sets,
    )
