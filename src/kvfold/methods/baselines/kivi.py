"""KIVI: every token, keys coded by channel and values by token, recent tokens exact (arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvfold.methods.base import LayerView, Method, check_block
from kvfold.stores.base import Store
from kvfold.stores.trizone import Layout, TriZoneStore


@dataclass(frozen=True, kw_only=True)
class KIVI(Method):
    """Uniform asymmetric codes in groups, nothing evicted.

    Parameters
    ----------
    bits : int
        Width of keys and values.
    group : int
        Tokens of a key channel, and channels of a value, that share a scale.
    residual : int
        Newest tokens kept exact, and generated tokens coded at a time. (The released code lets the keys' residual run
        from 0 to this length and holds the values' at it; here both are coded in blocks.)

    Raises
    ------
    ValueError
        An option is out of range.
    """

    name = "kivi"
    paper = "KIVI, arXiv 2402.02750"

    bits: int = 4
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in range(1, 9):
            raise ValueError(f"bits must be an integer from 1 to 8, got {self.bits!r}")
        if self.group < 1:
            raise ValueError(f"group must be at least 1 token, got {self.group}")
        check_block("residual", self.residual)

    @property
    def shortest(self) -> int:
        return self.residual + self.group

    @property
    def block(self) -> int:
        return self.residual

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        stores: list[Store] = []
        for view in views:
            tokens = view.tokens
            if not view.generated:
                # What is left of the prompt stays in the exact tail.
                tokens = (tokens - self.residual) // self.group * self.group
            lost = view.tokens - tokens
            layout = Layout(
                value_widths=(self.bits,),
                key_widths=(self.bits,),
                value_group=self.group,
                key_group=self.group,
                tokens=tokens,
                real_tokens=tuple(max(count - lost, 0) for count in view.real_tokens),
                key_dim=view.keys.shape[-1],
                value_dim=view.values.shape[-1],
            )
            bits = view.valid[:, :, :tokens].to(torch.uint8) * self.bits
            key_bits = torch.full(
                (*bits.shape[:2], layout.key_dim), self.bits, dtype=torch.uint8, device=bits.device
            )
            stores.append(
                TriZoneStore.encode(
                    view.keys[:, :, :tokens], view.values[:, :, :tokens], bits, key_bits, layout
                )
            )
        return stores
