"""Choose tokens, then store them: what every rival that evicts has in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.allocate.budget import Budget
from kvfold.errors import BudgetError
from kvfold.methods.base import LayerView, Method
from kvfold.stores.base import Store
from kvfold.stores.trizone import Layout, TriZoneStore


@dataclass(frozen=True, kw_only=True)
class Selection(Method):
    """Each KV head keeps its highest-scoring tokens, as many as the budget pays for, with all their bytes counted.

    A rival is a score (`scores`), and, where heads or layers differ, how many tokens each head keeps at a capacity
    (`counts`) and how many bytes a layer gets (`share`). Of equal scores the newest token is kept. Prompts of at most
    32 tokens pass through, and generated tokens stay exact, unless the rival says otherwise.

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget: share of the prompt's 16-bit bytes, bits per element, or fp16 tokens per head (payload only). See
        `kvfold.allocate.budget.Budget`.
    bits : int
        16 keeps the chosen tokens as they are. 2 to 8: "select, then code", which buys several times as many tokens and
        is what a method that evicts and codes at once has to beat: keys per channel, values per token.
    group : int or None
        Kept tokens of a key channel, and channels of a value, that share a scale, where bits < 16; None: all of them.

    Raises
    ------
    ValueError
        The budget, `bits` or `group` is out of range.
    """

    leaves_tokens = True

    keep: float | None = None
    bits_per_element: float | None = None
    tokens: int | None = None
    bits: int = 16
    group: int | None = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget  # noqa: B018 (raises on a bad budget)
        if self.bits not in (2, 3, 4, 5, 6, 7, 8, 16):
            raise ValueError(f"bits must be 2 to 8, or 16 for no coding, got {self.bits}")
        if self.group is not None and self.group < 1:
            raise ValueError(f"group must be at least 1, or none for one scale, got {self.group}")

    @property
    def budget(self) -> Budget:
        """The byte budget."""
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element, tokens=self.tokens)

    @property
    def shortest(self) -> int:
        return 32

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        layout = self._layout(tokens, (tokens,), key_dim, value_dim)
        least = kv_heads * (layout.fixed_bytes(1) + self.head_bytes(layout, 1))
        if self.budget.counts_metadata and self.budget.bytes(tokens, kv_heads, key_dim, value_dim) < least:
            what = f"the budget does not pay for one token of a {tokens}-token prompt"
            raise BudgetError.of(what, least, 2 * tokens * kv_heads * (key_dim + value_dim))

    # ---- what a rival is ----

    @abstractmethod
    def scores(self, view: LayerView) -> Tensor:
        """How much each token is worth.

        Returns
        -------
        (batch, kv_heads, tokens) float32
            inf: kept before all others. What stands where `view.valid` is False does not matter.
        """

    def counts(self, scores: Tensor) -> Callable[[int], list[int]]:
        """How many tokens each head keeps, by capacity: here the same number.

        Parameters
        ----------
        scores : (kv_heads, tokens) float32
            Of one row; -inf where there is no token.

        Returns
        -------
        callable
            Tokens for each head, never more than it has, given a capacity in tokens per head; none at 0.
        """
        present = (scores > -torch.inf).sum(-1).tolist()
        return lambda capacity: [min(capacity, count) for count in present]

    def share(self, view: LayerView, row: int, layout: Layout) -> int:
        """Bytes for the tokens of one row of a layer (for their payload, with a budget in tokens): here an equal part."""
        heads = view.keys.shape[1]
        total = self.budget.bytes(view.real_tokens[row], heads, layout.key_dim, layout.value_dim)
        return total - layout.fixed_bytes(heads) if self.budget.counts_metadata else total

    # ---- folding ----

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

    def head_bytes(self, layout: Layout, tokens: int) -> int:
        """Bytes of a head that keeps so many tokens (of their payload, with a budget in tokens)."""
        if not self.budget.counts_metadata:
            return math.ceil(tokens * self.bits * (layout.key_dim + layout.value_dim) / 8)
        return tokens * layout.value_bytes(self.bits) + layout.key_bytes(self.bits, layout.key_dim, tokens)

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        return [self._fold_layer(view) for view in views]

    def _fold_layer(self, view: LayerView) -> TriZoneStore:
        layout = self._layout(view.tokens, view.real_tokens, view.keys.shape[-1], view.values.shape[-1])
        scores = self.scores(view).masked_fill(~view.valid, -torch.inf)
        order = ranking(scores)
        value_bits = torch.zeros(scores.shape, dtype=torch.uint8, device=scores.device)
        key_bits = torch.full_like(value_bits[..., :1], self.bits).repeat(1, 1, layout.key_dim)
        for row, real in enumerate(view.real_tokens):
            if real <= self.shortest and not view.generated:
                value_bits[row] = view.valid[row] * 16
                key_bits[row] = 16
                continue
            share = self.share(view, row, layout)
            if share < 0:
                raise BudgetError(
                    "the budget is smaller than the metadata; raise keep, or fold more tokens at once"
                )
            for head, count in enumerate(self._fitting(self.counts(scores[row]), share, layout)):
                value_bits[row, head, order[row, head, :count]] = self.bits
        return TriZoneStore.encode(view.keys, view.values, value_bits, key_bits, layout)

    def _fitting(self, counts: Callable[[int], list[int]], share: int, layout: Layout) -> list[int]:
        """Tokens of each head at the largest capacity whose bytes fit."""
        low, high = 0, layout.tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = sum(self.head_bytes(layout, count) for count in counts(middle)) <= share
            low, high = (middle, high) if fits else (low, middle - 1)
        return counts(low)


def ranking(scores: Tensor) -> Tensor:
    """Index of tokens from the highest score (..., tokens) to the lowest, the newest of equal ones first."""
    return scores.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)


def sink_tokens(view: LayerView, sinks: int) -> Tensor:
    """The first real tokens of each row, (batch, kv_heads, tokens) bool; none where a folded segment precedes."""
    if view.previous is not None:
        return torch.zeros_like(view.valid)
    return view.valid & (view.valid.cumsum(-1) <= sinks)


def mean_over_group(x: Tensor, view: LayerView) -> Tensor:
    """Average (batch, heads, tokens) over the heads that share a KV head."""
    batch, kv_heads, tokens = view.valid.shape
    return x.reshape(batch, kv_heads, -1, tokens).mean(2)
