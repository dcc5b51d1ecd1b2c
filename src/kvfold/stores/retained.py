"""Kept tokens that can be judged again: beside keys and values, how fast each may be forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.kernels.reference import Part, attend, merge
from kvfold.stores.base import AttendContext
from kvfold.stores.weighted import WeightedLayout, WeightedStore

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Lot:
    """Of which rows, heads and layers tokens compete.

    Attributes
    ----------
    tokens : int
        Logical tokens seen.
    real_tokens : tuple of int
        Of each row.
    kv_heads, layers : int
    folding_layers : int
        Of the whole model.
    key_dim, value_dim : int
        The largest of the layers'.
    text : tuple of int
        Of each row, tokens that its budget does not count; empty: none.
    """

    tokens: int
    real_tokens: tuple[int, ...]
    kv_heads: int
    layers: int
    folding_layers: int
    key_dim: int
    value_dim: int
    text: tuple[int, ...] = ()

    @property
    def heads(self) -> int:
        """KV heads of a row, all layers together."""
        return self.layers * self.kv_heads


@dataclass(frozen=True)
class Entries:
    """Every token that may be kept: what an eviction chooses from.

    Attributes
    ----------
    positions : (n,) int64
        Logical index, from the first token of all.
    log_beta : (n,) float32
    slots : (n,) int64
        (Layer * rows + row) * kv_heads + head.
    alive : (n,) bool
        False where there is no token.
    tokens : () int64
        Logical tokens seen.
    padding : (rows,) int64
        Of each row, before its first token.
    limits : (rows,) int64
        What `Method.limits` says.
    kv_heads, heads : int
        Of a layer, and of all layers together.
    """

    positions: Tensor
    log_beta: Tensor
    slots: Tensor
    alive: Tensor
    tokens: Tensor
    padding: Tensor
    limits: Tensor
    kv_heads: int
    heads: int


@dataclass(frozen=True)
class RetainedLayout(WeightedLayout):
    """What is not a tensor.

    Attributes
    ----------
    text : tuple of int
        Of each row, tokens that its budget does not count; empty: none.
    """

    text: tuple[int, ...] = ()

    def of_rows(self, rows: Sequence[int]) -> Self:
        return replace(super().of_rows(rows), text=tuple(self.text[row] for row in rows if self.text))


class RetainedStore(WeightedStore):
    """A weighted store whose tokens each carry "log_beta" (kept,) float32.

    Every buffer is exactly as long as what is kept: heads that keep little take little, and nothing is rounded up to pages.
    """

    kind = "retained"
    purposes = {**WeightedStore.purposes, "log_beta": "retention"}

    layout: RetainedLayout

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        layout = RetainedLayout(meta["tokens"], tuple(meta["real_tokens"]), tuple(meta.get("text", ())))
        return cls(layout, tensors)

    @staticmethod
    def entry_bytes(key_dim: int, value_dim: int, tokens: int) -> int:
        """Bytes of one kept token of a segment of `tokens`."""
        return WeightedStore.token_bytes(key_dim, value_dim, tokens, bias=False) + torch.float32.itemsize

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        if query.device.type == "cpu" or (rows is None and self._fused(query, context)):
            return super().attend(query, rows, context)
        return self.attend_padded(query, rows, context)

    def attend_padded(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        """As `attend`: all rows and heads at once, as long as the longest, which waits for no transfer from a GPU."""
        counts = self.buffers["counts"].long()
        starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        if rows is not None:
            counts, starts = counts[rows], starts[rows]
        longest = max((len(segment["keys"]) for segment in self._heads), default=0)
        last = max(len(self.buffers["keys"]) - 1, 0)
        parts = []
        for start in range(0, max(longest, 1), self.block):
            place = torch.arange(start, min(start + self.block, longest), device=query.device)
            index = (starts[..., None] + place).clamp_max(last)
            keys, values = self.buffers["keys"][index], self.buffers["values"][index]
            mask = (place < counts[..., None]).repeat_interleave(query.shape[1] // self.kv_heads, 1)[
                :, :, None
            ]
            if context.expand is not None:
                keys, values = context.expand(keys, values)
            parts.append(attend(query, keys, values, context.scaling, mask, context.softcap))
        return merge(parts)
