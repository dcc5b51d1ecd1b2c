"""SnapKV: keep the tokens that the newest queries attend to (arXiv 2404.14469); optionally coded after selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvfold.allocate.budget import Budget
from kvfold.errors import BudgetError
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.scores import smooth, window_mass
from kvfold.stores.base import Store
from kvfold.stores.trizone import Layout, TriZoneStore


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """The same number of tokens in every KV head: the window itself, and those it attends to most.

    Scores are summed over the window and over the query heads of a KV head (the released code keeps one set of tokens
    a query head, which stores the cache several times over).

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget.
    window : int
        Newest tokens, always kept, whose queries score the rest.
    pool : int
        Kernel of the average over neighbouring tokens.
    bits : int
        16 keeps tokens as they are. 2 to 8: "select, then code", which is what a joint method has to beat: keys per
        channel, values per token.
    group : int or None
        Tokens of a key channel and channels of a value that share a scale, where bits < 16.
    """

    name = "snapkv"
    paper = "SnapKV, arXiv 2404.14469"

    keep: float | None = None
    bits_per_element: float | None = None
    tokens: int | None = None
    window: int = 32
    pool: int = 5
    bits: int = 16
    group: int | None = None

    def __post_init__(self) -> None:
        self.budget  # noqa: B018 (raises on a bad budget)

    @property
    def budget(self) -> Budget:
        """The byte budget."""
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element, tokens=self.tokens)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def shortest(self) -> int:
        return self.window

    def _layout(self, tokens: int, real_tokens: tuple[int, ...], key_dim: int, value_dim: int) -> Layout:
        return Layout(
            value_widths=(self.bits,) if self.bits == 16 else (self.bits, 16),
            key_widths=(self.bits,) if self.bits == 16 else (self.bits, 16),
            value_group=self.group,
            key_group=self.group,
            tokens=tokens,
            real_tokens=real_tokens,
            key_dim=key_dim,
            value_dim=value_dim,
        )

    def _count(self, layout: Layout, real: int) -> int:
        """Tokens of a head that the budget pays for."""
        if self.tokens is not None:
            return min(self.tokens * 16 // self.bits, real)
        budget = self.budget.bytes(real, 1, layout.key_dim, layout.value_dim) - layout.fixed_bytes(1)

        def size(count: int) -> int:
            return count * layout.value_bytes(self.bits) + layout.key_bytes(self.bits, layout.key_dim, count)

        low, high = 0, real
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if size(middle) <= budget else (low, middle - 1)
        return low

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        layout = self._layout(tokens, (tokens,), key_dim, value_dim)
        if self._count(layout, tokens) < 1:
            least = (
                layout.fixed_bytes(1)
                + layout.value_bytes(self.bits)
                + layout.key_bytes(self.bits, key_dim, 1)
            )
            raise BudgetError(
                f"the budget does not pay for one token: at least keep={least / (2 * tokens * (key_dim + value_dim)):.4f}"
            )

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        stores: list[Store] = []
        for view in views:
            layout = self._layout(view.tokens, view.real_tokens, view.keys.shape[-1], view.values.shape[-1])
            mass = window_mass(view, self.window, normalise=False)
            scores = smooth(mass, view.valid, self.pool, reflect=False)
            scores[..., -self.window :] = torch.inf
            scores = scores.masked_fill(~view.valid, -torch.inf)
            value_bits = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
            key_bits = torch.full(
                (*scores.shape[:2], layout.key_dim), self.bits, dtype=torch.uint8, device=scores.device
            )
            for row, real in enumerate(view.real_tokens):
                if real <= self.shortest:
                    value_bits[row] = view.valid[row] * layout.value_widths[-1]
                    key_bits[row] = layout.key_widths[-1]
                    continue
                for head in range(scores.shape[1]):
                    count = min(self._count(layout, real), int(view.valid[row, head].sum()))
                    value_bits[row, head, scores[row, head].topk(count).indices] = self.bits
            stores.append(TriZoneStore.encode(view.keys, view.values, value_bits, key_bits, layout))
        return stores
