"""Uniform codes: every key and value between its own extremes, nothing evicted; what int4 and int8 caches do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.methods.base import LayerView, Method, check_block
from kvfold.stores.affine import AffineLayout, AffineStore
from kvfold.stores.base import Store
from kvfold.stores.tokenwise import padding_of, shifts_of


@dataclass(frozen=True, kw_only=True)
class Uniform(Method):
    """Affine quantisation per token and group of channels.

    Parameters
    ----------
    bits : int
        Width of keys and values, 1 to 8.
    group : int or None
        Channels of a key or value that share a scale and minimum; None: all of them.
    block_tokens : int
        Generated tokens coded at a time, one block late (0: never).
    """

    name = "uniform"
    paper = "affine codes per token, as int4 and int8 caches have"

    bits: int = 8
    group: int | None = 32
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in range(1, 9):
            raise ValueError(f"bits must be an integer from 1 to 8, got {self.bits!r}")
        if self.group is not None and self.group < 1:
            raise ValueError(f"group must be at least 1 channel, got {self.group}; None makes one of all")
        check_block("block_tokens", self.block_tokens)

    @property
    def shortest(self) -> int:
        return 32

    @property
    def block(self) -> int:
        return self.block_tokens

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        stores: list[Store] = []
        for view in views:
            layout = AffineLayout(
                tokens=view.tokens,
                real_tokens=view.real_tokens,
                shifts=shifts_of(view.positions),
                kv_heads=view.keys.shape[1],
                key_dim=view.keys.shape[-1],
                value_dim=view.values.shape[-1],
                bits=self.bits,
                group=self.group,
            )
            stores.append(AffineStore.encode(view.keys, view.values, layout, padding_of(view.valid)))
        return stores
