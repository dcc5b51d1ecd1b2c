"""A layer that shares the directions of its keys and values with the layer beside it, and keeps their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvfold.stores.base import Rotary
from kvfold.stores.tokenwise import TokenwiseLayout, TokenwiseStore

_SELECTED = WeakTensorKeyDictionary()


class MergedStore(TokenwiseStore):
    """Shared unit vectors, own norms, and the vectors that would not merge as they are.

    Parameters
    ----------
    layout : TokenwiseLayout
        Its `tokens` may be fewer than the buffers hold: a crop hides the others, whose directions another layer may need.
    buffers : mapping of str to Tensor
        "key_directions" and "value_directions" (rows, tokens, kv_heads, dim): the very tensors of the other layer.
        "key_norms" and "value_norms" (rows, tokens, kv_heads). For vectors kept: "key_index" and "value_index" (kept, 3)
        int32 of row, KV head and token, and "kept_keys" and "kept_values" (kept, dim).
    """

    kind = "merged"
    purposes = {
        "key_directions": "shared directions",
        "value_directions": "shared directions",
        "key_norms": "norms",
        "value_norms": "norms",
        "kept_keys": "fp16 rows",
        "kept_values": "fp16 rows",
        "key_index": "positions",
        "value_index": "positions",
        "valid": "positions",
    }
    per_token = frozenset({"key_directions", "value_directions", "key_norms", "value_norms"})
    shared = ("key_directions", "value_directions")

    def _check(self) -> None:
        for name, tensor in self.buffers.items():
            if name in self._by_token and (len(tensor) != self.rows or tensor.shape[1] < self.tokens):
                raise ValueError(
                    f"buffer {name} is {tuple(tensor.shape)}, fewer than the layout's rows or tokens"
                )
        for name in ("key", "value"):
            if len(self.buffers[f"{name}_index"]) != len(self.buffers[f"kept_{name}s"]):
                raise ValueError(f"buffers {name}_index and kept_{name}s disagree")

    def _decode(self, name: str, row: int, span: slice) -> Tensor:
        directions, norms = (
            self.buffers[f"{name}_directions"][row, span],
            self.buffers[f"{name}_norms"][row, span],
        )
        states = (directions.float() * norms.float()[..., None]).transpose(0, 1)
        index = self.buffers[f"{name}_index"]
        inside = (index[:, 0] == row) & (index[:, 2] >= span.start) & (index[:, 2] < span.stop)
        _, head, token = index[inside].long().unbind(1)
        states[head, token - span.start] = self.buffers[f"kept_{name}s"][inside].float()
        return states

    def coded_keys(self, row: int, span: slice) -> Tensor:
        return self._decode("key", row, span)

    def coded_values(self, row: int, span: slice) -> Tensor:
        return self._decode("value", row, span)

    def decode(self, row: int, span: slice, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        return self.coded_keys(row, span), self.coded_values(row, span)

    def crop(self, tokens: int) -> MergedStore:
        gone = self.tokens - tokens
        real = tuple(max(count - gone, 0) for count in self.real_tokens)
        return MergedStore(replace(self.layout, tokens=tokens, real_tokens=real), self.buffers)

    def select(self, rows: Tensor) -> MergedStore:
        chosen = rows.tolist()
        layout = replace(
            self.layout,
            real_tokens=tuple(self.real_tokens[row] for row in chosen),
            shifts=tuple(self.layout.shifts[row] for row in chosen),
        )
        buffers = {}
        for name in self._by_token & self.buffers.keys():
            tensor = self.buffers[name]
            buffers[name] = _select_shared(tensor, chosen) if name in self.shared else tensor[rows]
        for name in ("key", "value"):
            index, kept = self.buffers[f"{name}_index"], self.buffers[f"kept_{name}s"]
            masks = [index[:, 0] == row for row in chosen]
            parts = [
                index[mask].index_fill(1, index.new_zeros(1).long(), new) for new, mask in enumerate(masks)
            ]
            buffers[f"{name}_index"] = torch.cat(parts)
            buffers[f"kept_{name}s"] = torch.cat([kept[mask] for mask in masks])
        return MergedStore(layout, buffers)

    def join(self, following: Any) -> None:
        return None

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> MergedStore:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()
        }
        return cls(TokenwiseLayout(**fields), tensors)


def _select_shared(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor; the same result for every layer that asks for the same rows of it, while one of them lives."""
    known = _SELECTED.get(tensor)
    if known is not None and known[0] == list(rows):
        selected = known[1]()
        if selected is not None:
            return selected
    selected = tensor[torch.tensor(rows, device=tensor.device)]
    _SELECTED[tensor] = list(rows), ref(selected)
    return selected
