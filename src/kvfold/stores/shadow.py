"""Low-rank keys read a few chunks at a time: landmarks choose chunks, their keys are rebuilt and rotated, values are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.kernels.reference import Part, merge, soft_cap, softmax_part
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.sixteen import narrow
from kvfold.stores.tokenwise import attend_rows, rotary_for
from kvfold.stores.trizone import position_dtype


@dataclass(frozen=True)
class ShadowLayout:
    """What is not a tensor.

    Attributes
    ----------
    tokens : int
        Logical length; a crop leaves the buffers as they are and hides what lies beyond.
    real_tokens : tuple of int
    firsts : tuple of int
        Logical index of each row's first real token.
    shifts : tuple of int
        RoPE position minus logical index, for each row.
    kv_heads, key_dim, value_dim : int
    chunk : int
        Tokens that share a landmark.
    selected : int
        Chunks that a query reads beside outliers and newest tokens.
    turned : bool
        Factors and basis are of keys before RoPE.
    """

    tokens: int
    real_tokens: tuple[int, ...]
    firsts: tuple[int, ...]
    shifts: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    selected: int
    turned: bool


class OfRow(dict[str, str]):
    """Purposes by tensor name without the row that it ends with."""

    def __missing__(self, name: str) -> str:
        stem, _, row = name.rpartition(".")
        if not stem or not row.isdigit():
            raise KeyError(name)
        return self[stem]


class ShadowStore(Store):
    """ShadowKV's cache of one layer.

    Attention is over every query's own choice: the chunks whose landmarks get the most of a softmax over landmarks,
    taking the largest of the query heads of a KV head, with outlier chunks and the newest tokens.

    Parameters
    ----------
    layout : ShadowLayout
    buffers : mapping of str to Tensor
        For each row r, with n tokens in chunks and L chunks that are no outliers: "factors.r" (n, rank) and "basis.r"
        (kv_heads, rank, key_dim), whose product is the keys (before RoPE); "landmarks.r" (kv_heads, L, key_dim) and
        "landmark_chunks.r" (kv_heads, L); "outlier_keys.r" (kv_heads, outliers, chunk, key_dim) and "outlier_chunks.r";
        "local_keys.r" (kv_heads, newest, key_dim); "values.r" (kv_heads, real tokens, value_dim).

    Raises
    ------
    ValueError
        Buffers and layout disagree.
    """

    kind = "shadow"
    purposes = OfRow(
        factors="token factors",
        basis="bases",
        landmarks="landmarks",
        landmark_chunks="positions",
        outlier_keys="fp16 rows",
        outlier_chunks="positions",
        local_keys="fp16 rows",
        values="offloadable values",
    )

    def __init__(self, layout: ShadowLayout, buffers: Mapping[str, Tensor]):
        self.layout, self.buffers = layout, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads, self.key_dim, self.value_dim = layout.kv_heads, layout.key_dim, layout.value_dim
        self._rows = [
            {stem: self.buffers[f"{stem}.{row}"] for stem in self.purposes} for row in range(self.rows)
        ]
        for row, parts in enumerate(self._rows):
            inside, local = len(parts["factors"]), parts["local_keys"].shape[1]
            chunks = parts["landmark_chunks"].shape[1] + parts["outlier_chunks"].shape[1]
            if inside != chunks * layout.chunk or parts["values"].shape[1] != inside + local:
                raise ValueError(f"row {row}: factors, chunks, local_keys and values disagree on the tokens")

    # ---- encoding ----

    @staticmethod
    def encode_row(
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        rotary: Rotary | None,
        *,
        rank: int,
        chunk: int,
        local_chunks: int,
        outlier_chunks: int,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """One row's buffers, named without the row.

        Parameters
        ----------
        keys, values : (kv_heads, tokens, key_dim | value_dim)
            Real tokens, keys after RoPE.
        positions : (tokens,) int64
            RoPE positions.
        rotary : Rotary or None
        rank, chunk, local_chunks, outlier_chunks : int
        dtype : torch.dtype
            Of 16-bit states.
        """
        heads, tokens, dim = keys.shape
        chunks = max(tokens // chunk - local_chunks, 0)
        inside = chunks * chunk
        old = keys[:, :inside].float()
        plain = old if rotary is None or not inside else rotary.unrotate(old, positions[:inside])
        flat = plain.transpose(0, 1).reshape(inside, heads * dim).double()
        # The leading right singular vectors, from the smaller Gram matrix.
        _, vectors = torch.linalg.eigh(flat.t() @ flat)
        vectors = vectors.flip(-1)[:, : min(rank, inside, heads * dim)]
        grouped = old.view(heads, chunks, chunk, dim)
        marks = grouped.mean(2)
        alike = torch.nn.functional.cosine_similarity(marks[:, :, None], grouped, dim=-1).amin(-1)
        order = alike.sort(stable=True, dim=-1).indices
        outliers = order[:, :outlier_chunks].sort(-1).values
        others = order[:, outlier_chunks:].sort(-1).values
        number = position_dtype(tokens)

        def chosen(x: Tensor, index: Tensor) -> Tensor:
            return x[torch.arange(heads, device=x.device)[:, None], index]

        return {
            "factors": narrow(flat @ vectors, dtype),
            "basis": narrow(vectors.t().reshape(-1, heads, dim).transpose(0, 1), dtype),
            "landmarks": narrow(chosen(marks, others), dtype),
            "landmark_chunks": others.to(number),
            "outlier_keys": narrow(chosen(grouped, outliers), dtype),
            "outlier_chunks": outliers.to(number),
            "local_keys": narrow(keys[:, inside:], dtype),
            "values": narrow(values, dtype),
        }

    # ---- attention ----

    @property
    def chooses(self) -> bool:
        return True

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        return attend_rows(query, rows, lambda row, q: self._attend_row(row, q, context))

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        heads, count, dim = query.shape
        q = query.view(self.kv_heads, -1, count, dim) * context.scaling
        limit = max(1, (1 << 24) // max(self.tokens * q.shape[1], 1))
        outputs, lses = [], []
        for start in range(0, count, limit):
            part = q[:, :, start : start + limit]
            wanted = self._choose(row, part)
            found = [
                self._attend_head(row, head, part[head], wanted[head], context)
                for head in range(self.kv_heads)
            ]
            outputs.append(torch.stack([output for output, _ in found]))
            lses.append(torch.stack([lse for _, lse in found]))
        output, lse = torch.cat(outputs, 2), torch.cat(lses, 2)
        return output.view(heads, count, -1), lse.view(heads, count)

    def _choose(self, row: int, query: Tensor) -> Tensor:
        """Which landmarks' chunks each query (kv_heads, group, n, key_dim) reads: (kv_heads, n, landmarks) bool."""
        marks = self._rows[row]["landmarks"].float()
        share = (query @ marks[:, None].transpose(-1, -2)).softmax(-1).amax(1)
        count = min(self.layout.selected, marks.shape[1])
        return torch.zeros_like(share, dtype=torch.bool).scatter_(-1, share.topk(count).indices, True)

    def _attend_head(
        self, row: int, head: int, query: Tensor, wanted: Tensor, context: AttendContext
    ) -> Part:
        """Attention of query (group, n, key_dim) over the chunks wanted (n, landmarks), outliers and newest tokens."""
        parts, chunk = self._rows[row], self.layout.chunk
        inside = len(parts["factors"])
        some = wanted.any(0).nonzero().flatten()
        index = self._tokens_of(parts["landmark_chunks"][head][some])
        keys = self._rebuild(row, head, index, context.rotary)
        mask = wanted[:, some].repeat_interleave(chunk, -1)
        near = torch.cat(
            [
                self._tokens_of(parts["outlier_chunks"][head]),
                torch.arange(inside, inside + parts["local_keys"].shape[1], device=index.device),
            ]
        )
        exact = torch.cat([parts["outlier_keys"][head].flatten(0, 1), parts["local_keys"][head]]).float()
        found = []
        for where, its_keys, visible in ((index, keys, mask), (near, exact, None)):
            scores = soft_cap(query @ its_keys.t(), context.softcap)
            hidden = where + self.layout.firsts[row] >= self.tokens
            if visible is not None:
                hidden = hidden | ~visible
            scores = scores.masked_fill(hidden, -torch.inf)
            found.append(softmax_part(scores, parts["values"][head, where].float()))
        return merge(found)

    def _tokens_of(self, chunks: Tensor) -> Tensor:
        """Tokens of chunks, counted from the row's first."""
        inner = torch.arange(self.layout.chunk, device=chunks.device)
        return (chunks.long()[:, None] * self.layout.chunk + inner).flatten()

    def _rebuild(self, row: int, head: int, index: Tensor, rotary: Rotary | None) -> Tensor:
        """Keys (n, key_dim) of tokens, rotated to their positions."""
        parts = self._rows[row]
        keys = parts["factors"][index].float() @ parts["basis"][head].float()
        rotary = rotary_for(self.layout.turned, rotary)
        if rotary is None or not len(index):
            return keys
        return rotary.rotate(keys, index + self.layout.firsts[row] + self.layout.shifts[row])

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        """All tokens, of which `attend` reads some."""
        parts = self._rows[row]
        index = torch.arange(len(parts["factors"]), device=parts["factors"].device)
        keys = self._rebuild(row, head, index, rotary)
        keys[self._tokens_of(parts["outlier_chunks"][head])] = (
            parts["outlier_keys"][head].flatten(0, 1).float()
        )
        keys = torch.cat([keys, parts["local_keys"][head].float()])
        positions = torch.arange(len(keys), device=keys.device) + self.layout.firsts[row]
        alive = positions < self.tokens
        return Kept(positions[alive], keys[alive], parts["values"][head].float()[alive])

    def widths(self) -> list[dict[str, dict[int, int]]]:
        """Of a key, each head's share of the factors, which all heads read, counts as 16-bit channels."""
        stored = sum(
            min(round(parts["factors"].shape[1] / self.kv_heads), self.key_dim) for parts in self._rows
        )
        each = {
            "values": {16: sum(self.real_tokens)},
            "keys": {16: stored, 0: self.key_dim * self.rows - stored},
        }
        return [each for _ in range(self.kv_heads)]

    def crop(self, tokens: int) -> ShadowStore:
        gone = self.tokens - tokens
        real = tuple(max(count - gone, 0) for count in self.real_tokens)
        return ShadowStore(replace(self.layout, tokens=tokens, real_tokens=real), self.buffers)

    def select(self, rows: Tensor) -> ShadowStore:
        chosen = rows.tolist()
        fields: dict[str, Any] = {
            name: tuple(getattr(self.layout, name)[row] for row in chosen)
            for name in ("real_tokens", "firsts", "shifts")
        }
        buffers = {
            f"{stem}.{new}": tensor if chosen.index(row) == new else tensor.clone()
            for new, row in enumerate(chosen)
            for stem, tensor in self._rows[row].items()
        }
        return ShadowStore(replace(self.layout, **fields), buffers)

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    def meta(self) -> dict[str, Any]:
        return dict(vars(self.layout))

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ShadowStore:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()
        }
        return cls(ShadowLayout(**fields), tensors)
