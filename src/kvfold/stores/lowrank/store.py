"""Keys before RoPE and values as factors: one row a token, which the layers of a window share, times each layer's basis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from kvfold.kernels import dense_decode
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.reference import Part, merge, soft_cap, softmax_part
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.lowrank import decode, latent
from kvfold.stores.lowrank.layout import PARTS, Factor, LowRankLayout, LowRankRow, landmark_code, vector_code
from kvfold.stores.shadow import OfRow
from kvfold.stores.tokenwise import attend_rows, rotary_for


class LowRankStore(Store):
    """One layer's part of a factorised window.

    Attention rebuilds keys a tile of tokens at a time, turns them to their positions and forgets them; values are never
    rebuilt: weights times token factors is a short vector, which meets the basis once a call. With `chunk`, a query
    reads only the chunks that its product with their mean key recommends.

    Parameters
    ----------
    layout : LowRankLayout
    buffers : mapping of str to Tensor
        For each row r, with n tokens in factors: "key_factors.r" and "value_factors.r" (n, bytes) uint8 with "key_norms.r"
        and "value_norms.r" (n, groups), or (n, rank) in 16 bits; "key_basis.r" and "value_basis.r" (kv_heads, rank, dim)
        in 16 bits, or 8-bit codes (kv_heads, rank, bytes) with "key_scales.r" and "value_scales.r" (kv_heads, rank, 1);
        "exact_keys.r" and "exact_values.r" (kv_heads, sinks + newest + tokens of outliers, dim). Optional: "key_mean.r"
        (before RoPE) and "value_mean.r" (kv_heads, dim), which were taken out of tokens in factors. With `chunk` also
        "outliers.r" (kv_heads, outliers) and, where this layer chooses, "landmarks.r" (kv_heads, chunks, bytes) with
        "landmark_scales.r".

    Raises
    ------
    ValueError
        Buffers and layout disagree.

    References
    ----------
    xKV (arXiv 2503.18893).
    """

    kind = "lowrank"
    purposes = OfRow(
        key_factors="token factors",
        value_factors="token factors",
        key_norms="norms",
        value_norms="norms",
        key_basis="bases",
        value_basis="bases",
        key_scales="scales",
        value_scales="scales",
        key_mean="means",
        value_mean="means",
        exact_keys="fp16 rows",
        exact_values="fp16 rows",
        landmarks="landmarks",
        landmark_scales="landmarks",
        outliers="positions",
    )
    tile = 2048
    """Tokens rebuilt at a time."""

    def __init__(self, layout: LowRankLayout, buffers: Mapping[str, Tensor]):
        self.layout, self.buffers = layout, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads, self.key_dim, self.value_dim = layout.kv_heads, layout.key_dim, layout.value_dim
        self.known: dict[Hashable, Any] = {}
        """Of the kernels (`decode`): what they serve, and where rows lie"""
        self._rows: list[dict[str, Tensor]] = [{} for _ in layout.rows]
        for name, tensor in self.buffers.items():
            stem, _, number = name.rpartition(".")
            self._rows[int(number)][stem] = tensor
        for index, (row, parts) in enumerate(zip(layout.rows, self._rows, strict=True)):
            self._check(index, row, parts)

    def _check(self, number: int, row: LowRankRow, parts: Mapping[str, Tensor]) -> None:
        counts = {len(parts[f"{part}_factors"]) for part in PARTS}
        counts |= {len(parts[f"{part}_norms"]) for part in PARTS if f"{part}_norms" in parts}
        if len(counts) != 1:
            raise ValueError(f"row {number}: factors and norms disagree on the tokens")
        exact = (
            row.sinks
            + row.newest
            + (parts["outliers"].shape[1] * self.layout.chunk if self.layout.chunk else 0)
        )
        for part in PARTS:
            factor: Factor = getattr(row, part)
            width = factor.rank if factor.code is None else factor.code.nbytes
            shapes = parts[f"{part}_factors"].shape[1:], parts[f"{part}_basis"].shape[:2]
            if shapes != ((width,), (self.kv_heads, factor.rank)):
                raise ValueError(f"row {number}: {part} factors and basis do not fit the layout's rank")
            if parts[f"exact_{part}s"].shape[1] != exact:
                raise ValueError(f"row {number}: exact_{part}s are not those of {exact} tokens")

    # ---- parts of a row ----

    def factors(self, row: int, name: str, index: slice | Tensor = slice(None)) -> Tensor:
        """Coordinates (n, rank) float32 of tokens, counted from the first one in factors; name is "key" or "value"."""
        code = getattr(self.layout.rows[row], name).code
        parts = self._rows[row]
        stored = parts[f"{name}_factors"][index]
        if code is None:
            return stored.float()
        coordinates: Tensor = code.decode(stored, parts[f"{name}_norms"][index])
        return coordinates

    def basis(self, row: int, name: str) -> Tensor:
        """Basis (kv_heads, rank, dim) float32 that those coordinates are of."""
        parts = self._rows[row]
        stored = parts[f"{name}_basis"]
        if f"{name}_scales" not in parts:
            return stored.float()
        code = vector_code(self.key_dim if name == "key" else self.value_dim)
        return code.rotate_back(code.decode(stored, parts[f"{name}_scales"]))

    def landmarks(self, row: int) -> Tensor:
        """Mean keys of chunks, (kv_heads, chunks, key_dim) float32."""
        parts = self._rows[row]
        code = landmark_code(self.key_dim)
        return code.rotate_back(code.decode(parts["landmarks"], parts["landmark_scales"]))

    def mean(self, row: int, name: str) -> Tensor:
        """What was taken out of those tokens before, (kv_heads, 1, dim) float32."""
        parts, dim = self._rows[row], self.key_dim if name == "key" else self.value_dim
        if f"{name}_mean" in parts:
            return parts[f"{name}_mean"].float()[:, None]
        return torch.zeros(self.kv_heads, 1, dim, device=parts["key_factors"].device)

    def shared(self, row: int) -> tuple[Tensor, Tensor]:
        """The tensors by which layers of one window are known: they have the same ones."""
        return self._rows[row]["key_factors"], self._rows[row]["value_factors"]

    def row(self, row: int) -> dict[str, Tensor]:
        """A row's buffers, named without it."""
        return dict(self._rows[row])

    def coded(self, row: int) -> tuple[int, int]:
        """First logical index in factors, and how many tokens are."""
        return self.layout.rows[row].first + self.layout.rows[row].sinks, len(self._rows[row]["key_factors"])

    def rebuilt(
        self, row: int, basis: Tensor, index: Tensor, rotary: Rotary | None, heads: slice = slice(None)
    ) -> Tensor:
        """Keys (heads, n, key_dim) of some tokens in factors, turned to their positions."""
        keys = self.factors(row, "key", index) @ basis + self.mean(row, "key")[heads]
        rotary = rotary_for(self.layout.turned, rotary)
        if rotary is None or not len(index):
            return keys
        return rotary.rotate(keys, index + self.coded(row)[0] + self.layout.rows[row].shift)

    def near(self, row: int) -> Tensor:
        """Logical indices (kv_heads | 1, exact) of exact tokens."""
        start, count = self.coded(row)
        one = self.layout.rows[row]
        device = self._rows[row]["exact_keys"].device
        near = torch.cat(
            [
                torch.arange(one.first, start, device=device),
                torch.arange(start + count, start + count + one.newest, device=device),
            ]
        )[None]
        if not self.layout.chunk:
            return near
        outliers = start + self.tokens_of(self._rows[row]["outliers"])
        return torch.cat([near.expand(self.kv_heads, -1), outliers], 1)

    def tokens_of(self, chunks: Tensor) -> Tensor:
        """Tokens (..., chunks * chunk) of chunks (..., chunks), counted from the first one in factors."""
        inner = torch.arange(self.layout.chunk, device=chunks.device)
        return (chunks.long()[..., None] * self.layout.chunk + inner).flatten(-2)

    def hidden(self, row: int, index: Tensor, heads: slice) -> Tensor | None:
        """Which tokens in factors are cropped or outliers, (heads | 1, 1, 1, n) bool, or None."""
        start, count = self.coded(row)
        hidden = None
        if start + count > self.tokens:
            hidden = (index + start >= self.tokens)[None]
        if self.layout.chunk and self._rows[row]["outliers"].numel():
            exact = torch.zeros(self.kv_heads, count, dtype=torch.bool, device=index.device)
            exact.scatter_(1, self.tokens_of(self._rows[row]["outliers"]), True)
            exact = exact[heads][:, index]
            hidden = exact if hidden is None else hidden | exact
        return None if hidden is None else hidden[:, None, None]

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        if rows is None and query.is_cuda and decode.serves(self, query, context):
            return decode.attend(self, query, context)
        return attend_rows(query, rows, lambda row, q: self._attend_row(row, q, context))

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        heads, count, dim = query.shape
        limit = max(1, (1 << 24) // max(heads * min(self.tile, self.tokens), 1))
        outputs, lses = [], []
        for start in range(0, count, limit):
            part = query[:, start : start + limit]
            if context.expand is not None:
                output, lse = latent.attend(self, row, part, context)
            else:
                grouped = part.reshape(self.kv_heads, -1, part.shape[1], dim) * context.scaling
                output, lse = (x.flatten(0, 1) for x in self._attend_some(row, grouped, context, start))
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs, 1), torch.cat(lses, 1)

    def _attend_some(self, row: int, query: Tensor, context: AttendContext, name: int) -> Part:
        """Attention of scaled queries (kv_heads, group, n, key_dim) over what they choose, or all."""
        key_basis, value_basis = (self.basis(row, part) for part in PARTS)
        chosen = self.choose(row, partial(self._own_choice, row, query), context, name)
        if chosen is None:
            far = self._far(row, query, key_basis, context, slice(None), None)
        else:
            step = self.kv_heads if len(chosen) == 1 else 1
            groups = [slice(start, start + step) for start in range(0, self.kv_heads, step)]
            found = [
                self._far(row, query[heads], key_basis[heads], context, heads, wanted)
                for heads, wanted in zip(groups, chosen, strict=True)
            ]
            far = torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])
        far = far[0] @ value_basis[:, None] + self.mean(row, "value")[:, None], far[1]
        parts = self._rows[row]
        scores = soft_cap(
            query @ parts["exact_keys"].float()[:, None].transpose(-1, -2), context.softcap
        ).masked_fill((self.near(row) >= self.tokens)[:, None, None], -torch.inf)
        return merge([far, softmax_part(scores, parts["exact_values"].float()[:, None])])

    def _far(
        self,
        row: int,
        query: Tensor,
        basis: Tensor,
        context: AttendContext,
        heads: slice,
        wanted: Tensor | None,
    ) -> Part:
        """Attention over tokens in factors; the output (heads, group, n, rank) is in coordinates of the value basis.

        wanted (n, chunks) bool: what each query reads.
        """
        found = []
        for index in self.tiles(row, wanted):
            keys = self.rebuilt(row, basis, index, context.rotary, heads)
            scores = soft_cap(query @ keys[:, None].transpose(-1, -2), context.softcap)
            hidden = self.hidden(row, index, heads)
            if wanted is not None:
                unread = ~wanted[:, index // self.layout.chunk]
                hidden = unread if hidden is None else hidden | unread
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            found.append(softmax_part(scores, self.factors(row, "value", index)))
        return merge(found)

    def tiles(self, row: int, wanted: Tensor | None) -> Iterator[Tensor]:
        """Tokens in factors, some at a time: all, or those in a chunk that any query wants."""
        parts = self._rows[row]
        index = torch.arange(len(parts["key_factors"]), device=parts["key_factors"].device)
        if wanted is not None:
            # One query wants as many as any: which they are is told without waiting for the device.
            one = len(wanted) == 1
            some = (
                wanted[0].byte().topk(self.layout.selected).indices
                if one
                else wanted.any(0).nonzero().flatten()
            )
            index = self.tokens_of(some)
        yield from index.split(self.tile) if len(index) else (index,)

    def attend_with_tail(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttendContext,
        before: Part | None,
        length: Tensor | None = None,
    ) -> Part | None:
        fits = query.is_cuda and dense_decode.fits(query, key, value)
        if not fits or not decode.serves(self, query, context):
            return None
        return decode.attend(self, query, context, Exact(key, value, length), before)

    # ---- selection ----

    @property
    def chooses(self) -> bool:
        return any(self.selects(row) for row in range(self.rows))

    def selects(self, row: int) -> bool:
        """Whether a query reads only some of the row's chunks."""
        _, count = self.coded(row)
        return 0 < self.layout.selected * self.layout.chunk < count

    def choose(
        self, row: int, choose: Callable[[], Tensor | None], context: AttendContext, name: Hashable = None
    ) -> Tensor | None:
        """What this layer or the window's first one chose for the queries called `name`; None for all chunks."""
        if not self.selects(row):
            return None
        if self.layout.choice != "window" or context.rotary is None:
            return choose()
        # Layers of a window know each other by the factors that they share. What the first one says anew at every step
        # holds for the others, so that a step that is replayed needs nobody to forget the last.
        factors = self._rows[row]["key_factors"].data_ptr()
        chosen: dict[str, Tensor | None] = context.rotary.shared(("chunks", factors, row, name), dict)
        if "landmarks" in self._rows[row]:
            chosen["last"] = choose()
        return chosen.get("last")

    def _own_choice(self, row: int, query: Tensor) -> Tensor | None:
        """Chunks that each query (kv_heads, group, n, key_dim) reads: (kv_heads or 1, n, chunks) bool."""
        if "landmarks" not in self._rows[row]:
            return None
        shares = self.shares(row, query)
        best = shares.topk(min(self.layout.selected, shares.shape[-1])).indices
        return torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, best, True)

    def shares(self, row: int, query: Tensor) -> Tensor:
        """What scaled queries (kv_heads, group, n, key_dim) give chunks of their softmax over landmarks: (kv_heads or 1, n, chunks)."""
        marks = self.landmarks(row)
        scores = query @ marks[:, None].transpose(-1, -2)
        outliers = torch.zeros(marks.shape[:2], dtype=torch.bool, device=marks.device)
        outliers.scatter_(1, self._rows[row]["outliers"].long(), True)
        shares = scores.masked_fill(outliers[:, None, None], -torch.inf).softmax(-1).sum(1)
        return shares if self.layout.choice == "head" else shares.sum(0, keepdim=True)

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        """All tokens, of which `attend` may read some."""
        parts, one = self._rows[row], self.layout.rows[row]
        _, count = self.coded(row)
        index = torch.arange(count, device=parts["key_factors"].device)
        own = slice(head, head + 1)
        keys = self.rebuilt(row, self.basis(row, "key")[own], index, rotary, own)[0]
        values = self.factors(row, "value") @ self.basis(row, "value")[head] + self.mean(row, "value")[head]
        near = self.near(row)
        near = (near[head] if len(near) > 1 else near[0]) - one.first
        both = []
        for coded, exact in ((keys, parts["exact_keys"]), (values, parts["exact_values"])):
            states = coded.new_zeros(one.sinks + count + one.newest, coded.shape[-1])
            states[one.sinks : one.sinks + count] = coded
            states[near] = exact[head].float()
            both.append(states)
        positions = torch.arange(len(both[0]), device=index.device) + one.first
        alive = positions < self.tokens
        return Kept(positions[alive], both[0][alive], both[1][alive])

    def widths(self) -> list[dict[str, dict[int, int]]]:
        """Components are those of all heads of the window: each head counts its share of them."""
        keys: dict[int, int] = {}
        values: dict[int, int] = {}
        for row, real in zip(self.layout.rows, self.real_tokens, strict=True):
            sharing = row.layers * self.kv_heads
            for width, count in row.key.groups:
                keys[width] = keys.get(width, 0) + round(count / sharing)
            keys[0] = keys.get(0, 0) + max(self.key_dim - round(row.key.rank / sharing), 0)
            bits = sum(width * count for width, count in row.value.groups) / (sharing * self.value_dim)
            coded = min(max(real - row.sinks - row.newest, 0), real)
            for width, count in ((max(round(bits), 1), coded), (16, real - coded)):
                values[width] = values.get(width, 0) + count
        keys, values = ({w: n for w, n in counts.items() if n} for counts in (keys, values))
        return [{"values": dict(values), "keys": dict(keys)} for _ in range(self.kv_heads)]

    def crop(self, tokens: int) -> LowRankStore:
        gone = self.tokens - tokens
        real = tuple(max(count - gone, 0) for count in self.real_tokens)
        return LowRankStore(replace(self.layout, tokens=tokens, real_tokens=real), self.buffers)

    def to(self, device: torch.device | str) -> LowRankStore:
        moved = {
            name: copied(tensor, torch.device(device), partial(tensor.to, device))
            for name, tensor in self.buffers.items()
        }
        return LowRankStore(self.layout, moved)

    def select(self, rows: Tensor) -> LowRankStore:
        chosen = rows.tolist()
        layout = replace(
            self.layout,
            real_tokens=tuple(self.real_tokens[row] for row in chosen),
            rows=tuple(self.layout.rows[row] for row in chosen),
        )
        buffers = {
            f"{stem}.{new}": tensor if chosen.index(row) == new else copied(tensor, new, tensor.clone)
            for new, row in enumerate(chosen)
            for stem, tensor in self._rows[row].items()
        }
        return LowRankStore(layout, buffers)

    # ---- state ----

    @property
    def derived(self) -> list[Tensor]:
        return decode.derived(self)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    def meta(self) -> dict[str, Any]:
        return asdict(self.layout)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> LowRankStore:
        def factor(saved: Mapping[str, Any]) -> Factor:
            return Factor(**{**saved, "groups": tuple((width, count) for width, count in saved["groups"])})

        rows = tuple(
            LowRankRow(**{**row, **{part: factor(row[part]) for part in PARTS}}) for row in meta["rows"]
        )
        fields = {**meta, "rows": rows, "real_tokens": tuple(meta["real_tokens"])}
        return cls(LowRankLayout(**fields), tensors)


_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def copied(tensor: Tensor, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """The copy of that name, made once while it lives: layers that share a tensor then share its copy."""
    known = _copies.setdefault(tensor, {})
    found = known[name]() if name in known else None
    if found is None:
        found = make()
        known[name] = TensorWeakRef(found)
    return found
