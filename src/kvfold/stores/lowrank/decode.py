"""A decode step over a low-rank store on a GPU: one query a head, the rows of a batch in the same launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvfold.kernels import dense_decode, lowrank_choose, lowrank_decode, lowrank_rows
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.lowrank_decode import Decoded
from kvfold.kernels.lowrank_rows import Factors, Row, Rows
from kvfold.kernels.position_bias import Turns, turns
from kvfold.kernels.reference import Part, merge
from kvfold.kernels.streams import aside, joined
from kvfold.stores.base import AttendContext
from kvfold.stores.lowrank.layout import PARTS
from kvfold.stores.tokenwise import rotary_for

if TYPE_CHECKING:
    from kvfold.stores.lowrank.store import LowRankStore

T = TypeVar("T")


def serves(store: LowRankStore, query: Tensor, context: AttendContext) -> bool:
    """Whether the kernels serve: one query a head, heads as they are, nothing cropped."""
    if context.expand is not None or len(query) != store.rows or lowrank_decode.problem(query.device):
        return False
    return _kept(store, ("serves", query.shape, query.dtype), lambda: _fits(store, query))


def _fits(store: LowRankStore, query: Tensor) -> bool:
    return all(
        store.coded(row)[0] + store.coded(row)[1] + one.newest == store.tokens
        and (
            not store.coded(row)[1]
            or lowrank_decode.fits(query, *(_factors(store, row, name) for name in PARTS))
        )
        and dense_decode.fits(query, parts["exact_keys"][None], parts["exact_values"][None])
        and all(part.is_contiguous() for part in parts.values())
        for row, one in enumerate(store.layout.rows)
        for parts in [store.row(row)]
    )


def attend(
    store: LowRankStore,
    query: Tensor,
    context: AttendContext,
    tail: Exact | None = None,
    before: Part | None = None,
) -> Part:
    """Attention of one query a head over tokens in factors, exact ones, a tail and what came before."""
    query, exact = query.contiguous(), _kept(store, "exact", lambda: _exact(store))
    turned = _turns(store, context, query.device)
    with aside(query.device, lowrank_decode.NEAR):
        near = dense_decode.partials(query, exact, tail, context.scaling, context.softcap)
    chosen, some = _chosen(store, query, context)
    # What came before is added in full precision.
    dtype = query.dtype if before is None else torch.float32
    found = (
        query.new_empty(*query.shape[:3], store.value_dim, dtype=dtype),
        query.new_empty(query.shape[:3], dtype=torch.float32),
    )
    coded = [row for row in range(store.rows) if store.coded(row)[1]]
    if len(coded) < store.rows:  # rows too short for factors
        joined(query.device, lowrank_decode.NEAR)
        for into, part in zip(found, dense_decode.merged(query, near), strict=True):
            into.copy_(part)
    decoded = _decoded(store, chosen, some, context)
    for served, reads in ((some, chosen), (tuple(row for row in coded if row not in some), None)):
        for rows in _together(store, served, reads is None):
            name = tuple(row.number for row in rows.rows)
            decoded[name] = lowrank_decode.attend(
                query,
                rows,
                turned,
                near,
                found,
                context.scaling,
                context.softcap,
                chosen=reads,
                chunk=max(store.layout.chunk, 1),
                decoded=decoded.get(name),
            )
    return found if before is None else merge([found, before])


def _chosen(
    store: LowRankStore, query: Tensor, context: AttendContext
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Chunks that rows read, (rows, kv_heads or 1, n) int32, and which rows; the others read all."""
    own = tuple(row for row in range(store.rows) if store.selects(row) and "landmarks" in store.row(row))
    sets = store.kv_heads if store.layout.choice == "head" else 1
    made = query.new_empty(store.rows, sets, store.layout.selected, dtype=torch.int32) if own else None
    for rows in _together(store, own):
        assert made is not None
        lowrank_choose.choose(query, rows, made, context.scaling)
    # Of this layer or, row by row, of the window's first one.
    each = [
        store.choose(row, lambda row=row: made if row in own else None, context)  # type: ignore[misc]
        for row in range(store.rows)
    ]
    known = [one for one in each if one is not None]
    some = tuple(row for row, one in enumerate(each) if one is not None)
    if not known or all(one is known[0] for one in known):
        return (known[0] if known else None), some
    return torch.stack([(known[0] if one is None else one)[row] for row, one in enumerate(each)]), some


def _decoded(
    store: LowRankStore, chosen: Tensor | None, some: tuple[int, ...], context: AttendContext
) -> dict[tuple[int, ...], Decoded | None]:
    """What is decoded of chosen chunks, by rows: its window's first layer decodes for all, and after the last one it is gone."""
    if chosen is None or store.layout.choice != "window" or context.rotary is None:
        return {}
    known: dict[str, Any] = context.rotary.shared("decoded chunks", dict)
    if known.get("chosen") is not chosen:
        if not all("landmarks" in store.row(row) for row in some):
            return {}
        known |= {"chosen": chosen, "left": max(row.layers for row in store.layout.rows), "rows": {}}
    known["left"] -= 1
    found: dict[tuple[int, ...], Decoded | None] = known["rows"]
    if not known["left"]:
        known.clear()
    return found


def _together(store: LowRankStore, rows: tuple[int, ...], whole: bool = False) -> list[Rows]:
    """Rows that the same launches serve; whole ones only as many as the scratch holds."""
    most = lowrank_decode.PIECE if whole else None
    return _kept(
        store,
        (rows, most),
        lambda: lowrank_rows.alike((_row(store, row) for row in rows), store.rows, most),
    )


def _kept(store: LowRankStore, name: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns, made once for a store: no step that a graph replays can be told anew by the host."""
    if name not in store.known:
        store.known[name] = make()
    found: T = store.known[name]
    return found


def derived(store: LowRankStore) -> list[Tensor]:
    """Tables that the store knows, of where rows lie."""
    found = []
    for known in store.known.values():
        if isinstance(known, Exact) and known.places is not None:
            found.append(known.places)
        if isinstance(known, list):
            found += [rows.table for rows in known if rows.align]  # else there is none
    return found


def _row(store: LowRankStore, row: int) -> Row:
    parts = store.row(row)
    keys, values = (_factors(store, row, name) for name in PARTS)
    return Row(
        row,
        keys,
        values,
        start=store.coded(row)[0] + store.layout.rows[row].shift - _shift(store),
        outliers=parts.get("outliers"),
        landmarks=parts.get("landmarks"),
        landmark_scales=parts.get("landmark_scales"),
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


def _exact(store: LowRankStore) -> Exact:
    rows = [store.row(row) for row in range(store.rows)]
    return lowrank_rows.exact([row["exact_keys"] for row in rows], [row["exact_values"] for row in rows])


def _shift(store: LowRankStore) -> int:
    """RoPE position of index 0 in the row where it is the least."""
    return min(row.shift for row in store.layout.rows)


def _turns(store: LowRankStore, context: AttendContext, device: torch.device) -> Turns | None:
    """RoPE's tables for the positions of all rows."""
    rotary, shift = rotary_for(store.layout.turned, context.rotary), _shift(store)
    if rotary is None:
        return None
    count = store.tokens + max(row.shift for row in store.layout.rows) - shift
    name = "16-bit turns", store.key_dim, count, shift, device
    return rotary.shared(
        name, lambda: lowrank_decode.narrow(turns(rotary, store.key_dim, count, shift, device))
    )
