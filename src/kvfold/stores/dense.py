"""Every token at the model's own precision: the lossless store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvfold.kernels import dense_decode
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.reference import Part, attend, merge
from kvfold.stores.base import AttendContext, Kept, Rotary, Store


class DenseStore(Store):
    """Keys and values of all tokens, unchanged.

    Parameters
    ----------
    keys, values : (rows, kv_heads, tokens, key_dim | value_dim)
    valid : (rows, tokens) bool, or None when no token is padding
    """

    kind = "dense"
    purposes = {"keys": "fp16 rows", "values": "fp16 rows", "valid": "positions"}
    block = 1024

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None = None):
        self.keys, self.values, self.valid = keys.contiguous(), values.contiguous(), valid
        self.kv_heads, self.tokens, self.key_dim = keys.shape[1:]
        self.value_dim = values.shape[-1]
        counts = [self.tokens] * keys.shape[0] if valid is None else valid.sum(-1).tolist()
        self.real_tokens = tuple(int(count) for count in counts)

    def attend(self, query: torch.Tensor, rows: torch.Tensor | None, context: AttendContext) -> Part:
        if rows is None and self._fused(query, context):
            return dense_decode.attend(query, self._exact, None, context.scaling, context.softcap)
        parts = []
        for start in range(0, self.tokens, self.block):
            span = slice(start, start + self.block)
            keys, values = self.keys[:, :, span], self.values[:, :, span]
            mask = None if self.valid is None else self.valid[:, None, None, span]
            if context.expand is not None:
                keys, values = context.expand(keys, values)
            if rows is not None:
                keys, values = keys[rows], values[rows]
                mask = None if mask is None else mask[rows]
            parts.append(attend(query, keys, values, context.scaling, mask, context.softcap))
        return merge(parts)

    def attend_with_tail(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: AttendContext,
        before: Part | None,
        length: torch.Tensor | None = None,
    ) -> Part | None:
        if not self._fused(query, context) or not dense_decode.fits(query, key, value):
            return None
        tail = Exact(key, value, length)
        return dense_decode.attend(query, self._exact, tail, context.scaling, context.softcap, before)

    @property
    def _exact(self) -> Exact:
        return Exact(self.keys, self.values, valid=self.valid)

    def _fused(self, query: torch.Tensor, context: AttendContext) -> bool:
        """Whether the kernel serves: a decode step on a GPU."""
        return (
            query.is_cuda
            and context.expand is None
            and dense_decode.fits(query, self.keys, self.values)
            and dense_decode.problem(query.device) is None
        )

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        positions = torch.arange(self.tokens, device=self.keys.device)
        if self.valid is not None:
            positions = positions[self.valid[row]]
        return Kept(
            positions, self.keys[row, head, positions].float(), self.values[row, head, positions].float()
        )

    def crop(self, tokens: int) -> DenseStore:
        valid = None if self.valid is None else self.valid[:, :tokens].clone()
        return DenseStore(self.keys[:, :, :tokens].clone(), self.values[:, :, :tokens].clone(), valid)

    def select(self, rows: torch.Tensor) -> DenseStore:
        valid = None if self.valid is None else self.valid[rows]
        return DenseStore(self.keys[rows], self.values[rows], valid)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"keys": self.keys, "values": self.values}
        return named if self.valid is None else {**named, "valid": self.valid}

    def meta(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_state(cls, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> DenseStore:
        return cls(tensors["keys"], tensors["values"], tensors.get("valid"))
