"""The control: fold nothing away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.methods.base import LayerView, Method
from kvfold.stores.base import Store
from kvfold.stores.dense import DenseStore


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Every token at the model's own precision, read through the same store path as any method."""

    name = "full"
    paper = "lossless control"

    block_tokens: int = 0
    """Generated tokens moved into the store at a time (0: they stay in the tail)."""

    @property
    def block(self) -> int:
        return self.block_tokens

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        stores: list[Store] = []
        for view in views:
            valid = view.valid[:, 0]
            stores.append(DenseStore(view.keys, view.values, None if bool(valid.all()) else valid.clone()))
        return stores
