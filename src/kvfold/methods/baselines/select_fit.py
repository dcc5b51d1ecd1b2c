"""Select+Fit: keep the tokens that queries attend to most, then refit their values to the attention they replace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvfold.allocate.budget import Budget
from kvfold.errors import BudgetError
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.fit import Target, ridge_values, targets, zones
from kvfold.stores.base import Kept, Store
from kvfold.stores.weighted import WeightedLayout, WeightedStore


@dataclass(frozen=True, kw_only=True)
class SelectFit(Method):
    """The control of KVSculpt: its queries and its ridge, with keys that stay those of tokens.

    The first `sinks` and newest `window` tokens stay as they are. Of the others, those with the most attention mass keep
    their keys and get the values that best give back the full output.

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget.
    sinks, window : int
        Tokens kept exact at either end; the window's queries are fitted to, each seeing what is before it.
    sampled : int
        Prompt queries turned to positions after the prompt, at most, spread evenly over it. 128 as in the paper; with
        all of them the fit holds for queries other than these, too.
    horizon : int
        Positions after the prompt that they are turned to.
    ridge : float
        Weight of the squared distance that values move, beside squared errors summed over queries.
    ridge_to : "zero" or "own"
        What the ridge draws values to: nothing, as in the paper, or the token's own value.
    """

    name = "select-fit"
    paper = "Select+Fit, the baseline of KVSculpt"
    leaves_tokens = True

    keep: float | None = None
    bits_per_element: float | None = None
    tokens: int | None = None
    sinks: int = 4
    window: int = 32
    sampled: int = 128
    horizon: int = 128
    ridge: float = 1e-3
    ridge_to: Literal["zero", "own"] = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget  # noqa: B018 (raises on a bad budget)
        if self.window < 1 or self.sampled < 1 or self.horizon < 1 or self.sinks < 0:
            raise ValueError("window, sampled and horizon must be at least 1, sinks at least 0")
        if not 0 <= self.ridge < math.inf:
            raise ValueError(f"ridge must be at least 0 and finite, got {self.ridge}")

    @property
    def budget(self) -> Budget:
        """The byte budget."""
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element, tokens=self.tokens)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, sampled=self.sampled, rotary=True)

    @property
    def shortest(self) -> int:
        return self.sinks + self.window

    @property
    def biased(self) -> bool:
        """Whether each kept token has a bias."""
        return False

    def _count(self, real: int, segment: int, key_dim: int, value_dim: int) -> int:
        """Tokens of a head that the budget of a row of `real` tokens pays for."""
        if self.tokens is not None:
            return min(self.tokens, real)
        each = WeightedStore.token_bytes(key_dim, value_dim, segment, self.biased)
        return min((self.budget.bytes(real, 1, key_dim, value_dim) - 4) // each, real)

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        if self._count(tokens, tokens, key_dim, value_dim) <= self.shortest:
            each = WeightedStore.token_bytes(key_dim, value_dim, tokens, self.biased)
            what = (
                f"the budget of a {tokens}-token prompt does not pay for more than its {self.sinks} first and"
                f" {self.window} newest tokens, which stay exact (fewer with a smaller window)"
            )
            least = (self.shortest + 1) * each + 4
            if self.tokens is not None:
                raise BudgetError(f"{what}: at least tokens={self.shortest + 1} is needed")
            raise BudgetError.of(what, least, 2 * tokens * (key_dim + value_dim))

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        return [self._fold_layer(view) for view in views]

    def _fold_layer(self, view: LayerView) -> Store:
        kv_heads, key_dim, value_dim = view.keys.shape[1], view.keys.shape[-1], view.values.shape[-1]
        counts = [
            real if real <= self.shortest else self._count(real, view.tokens, key_dim, value_dim)
            for real in view.real_tokens
        ]

        def heads() -> Iterator[tuple[Target, int]]:
            for row, count in enumerate(counts):
                for target in targets(view, row, self.window, self.horizon):
                    yield target, count

        kept = iter(self._fit_heads(heads))
        rows = [[next(kept) for _ in range(kv_heads)] for _ in counts]
        layout = WeightedLayout(view.tokens, view.real_tokens)
        return WeightedStore.build(layout, rows, view.keys.dtype)

    def _fit_heads(self, heads: Callable[[], Iterator[tuple[Target, int]]]) -> list[Kept]:
        """Fit the KV heads of all rows, each to its count; they are large, so that one at a time is held."""
        return [self._fit(target, count) for target, count in heads()]

    def _fit(self, target: Target, count: int) -> Kept:
        """Fit one KV head."""
        weights = target.weights
        chosen, exact = zones(weights.sum(0), count, self.sinks, self.window)
        if not len(chosen):
            return target.kept(exact)
        index = torch.cat([chosen, exact])
        over_kept = target.logits[:, index].softmax(-1)
        on_chosen, on_exact = over_kept.split([len(chosen), len(exact)], -1)
        wanted = weights @ target.values - on_exact @ target.values[exact]
        own = target.values[chosen]
        fitted = ridge_values(
            on_chosen, wanted, self.ridge, own if self.ridge_to == "own" else torch.zeros_like(own)
        )
        return target.kept(index, torch.cat([fitted, target.values[exact]]))
