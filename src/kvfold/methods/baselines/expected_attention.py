"""ExpectedAttention: keep what queries to come are expected to attend to (arXiv 2510.00636)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.methods.base import LayerView, Needs
from kvfold.methods.baselines.adakv import adaptive_counts, check_floor
from kvfold.methods.baselines.select import Selection, sink_tokens

POSITIONS = 64
"""Positions turned at a time."""


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Selection):
    """Future queries as a Gaussian: the prompt's own, before RoPE, turned by the average rotation of what follows.

    The expectation of exp(q . k) is then exp(mean . k + k . covariance . k / 2); a token's score is its softmax over
    tokens, averaged over the query heads of a KV head, times the norm of its value.

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    horizon : int
        Positions after the prompt over which the rotation is averaged.
    sinks : int
        First tokens of the context: always kept, and their queries left out.
    sampled : int
        Queries at most, spread evenly over the prompt, that mean and covariance are taken from (all in the paper).
    covariance : bool
        Use the covariance, not the mean alone.
    value_norm : bool
        Weigh by the norm of the value.
    epsilon : float
        Added to the expected attention before that (the paper's experiments use 0.02, its code's default is 0).
    floor : float or None
        Let the heads of a layer compete as in AdaKV, with this floor; None: the same number of tokens in each.
    """

    name = "expected-attention"
    paper = "Expected Attention, arXiv 2510.00636"

    horizon: int = 512
    sinks: int = 4
    sampled: int = 4096
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    floor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon < 1 or self.sampled < 1:
            raise ValueError("horizon and sampled must be at least 1")
        if self.sinks < 0 or not 0 <= self.epsilon < math.inf:
            raise ValueError(
                f"sinks and epsilon must be at least 0 and finite, got {self.sinks} and {self.epsilon}"
            )
        check_floor(self.floor or 0)

    @property
    def needs(self) -> Needs:
        return Needs(sampled=self.sampled, rotary=True)

    def counts(self, scores: Tensor) -> Callable[[int], list[int]]:
        return super().counts(scores) if self.floor is None else adaptive_counts(scores, self.floor)

    def scores(self, view: LayerView) -> Tensor:
        sinks = sink_tokens(view, self.sinks)
        rows = [self._row_scores(view, row, sinks[row]) for row in range(len(sinks))]
        return torch.stack(rows).masked_fill(sinks, torch.inf)

    def _row_scores(self, view: LayerView, row: int, sinks: Tensor) -> Tensor:
        """Scores of one row, (kv_heads, tokens); what stands at sinks does not matter."""
        others = view.valid[row] & ~sinks
        if not others.any():
            return others.float()
        keys, values = view.keys[row : row + 1], view.values[row : row + 1]
        if view.expand is not None:
            keys, values = view.expand(keys, values)
        keys, values = keys[0].float(), values[0].float()
        mean, covariance = self.future_queries(view, row, sinks)
        mean = mean.unflatten(0, (len(keys), -1)) * view.scaling
        logits = mean @ keys.transpose(1, 2)
        if self.covariance:
            covariance = covariance.unflatten(0, (len(keys), -1)) * view.scaling**2
            logits += ((keys[:, None] @ covariance) * keys[:, None]).sum(-1) / 2
        attention = logits.masked_fill(~others[:, None], -torch.inf).softmax(-1)
        if self.value_norm:
            attention = (attention + self.epsilon) * values.norm(dim=-1)[:, None]
        kv_heads, tokens = others.shape
        return attention.reshape(kv_heads, -1, tokens).mean(1)

    def future_queries(self, view: LayerView, row: int, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (heads, query_dim) and covariance (heads, query_dim, query_dim) of queries after the prompt's end."""
        assert view.sampled is not None and view.sampled_index is not None
        chosen = (view.valid[row] & ~sinks).any(0)[view.sampled_index]
        query, index = view.sampled[row][:, chosen].float(), view.sampled_index[chosen]
        turned, rotary = view.keys.shape[-1], view.rotary
        if rotary is not None:
            plain = rotary.unrotate(query[..., -turned:], view.positions[row, index])
            query = torch.cat([query[..., :-turned], plain], -1)
        number = max(len(index), 1)
        mean = query.sum(1) / number
        centred = query - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / number
        if rotary is not None:
            turn = torch.eye(query.shape[-1], device=query.device)
            basis = torch.eye(turned, device=query.device)[:, None]
            ahead = view.positions[row, -1] + 1 + torch.arange(self.horizon, device=query.device)
            total = sum(
                rotary.rotate(basis.expand(-1, len(part), -1), part).sum(1) for part in ahead.split(POSITIONS)
            )
            # A row is where the average rotation takes that unit vector.
            turn[-turned:, -turned:] = total / self.horizon
            mean, covariance = mean @ turn, turn.T @ covariance @ turn
        return mean, covariance
