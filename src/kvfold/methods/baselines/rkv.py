"""R-KV: keep what is attended to and is not said twice (arXiv 2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvfold.kernels.reference import soft_cap
from kvfold.methods.base import LayerView, Needs, check_block
from kvfold.methods.baselines.select import Selection, mean_over_group
from kvfold.methods.scores import keys_for_scores, smooth

ROWS = 256
"""Rows of the similarity matrix at a time."""


@dataclass(frozen=True, kw_only=True)
class RKV(Selection):
    """Importance minus redundancy, for the prompt and for blocks of generated tokens.

    Importance is the softmax of the window's logits, the largest of a KV head's query heads, averaged over the window
    and max-pooled. Redundancy is the softmax of a key's mean cosine similarity to the others; each token exempts the
    newest of those that are similar to it.

    Where this differs from the paper: it holds one cache of a fixed size and judges all its tokens again every 128
    steps. Here stores never change, so a block of generated tokens is judged once, by itself, 128 tokens late, and gets
    the same budget of its own as the prompt (`tokens`: that many in each block). Its importance is the attention
    received from all queries of the block after it, averaged over query heads.

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    window : int
        Newest tokens of the prompt, always kept, whose queries tell importance (the paper's alpha).
    pool : int
        Neighbouring tokens of which the largest importance counts.
    weight : float
        Of importance against redundancy (the paper's lambda; its code's class default is 0.07).
    similar : float
        Cosine above which two tokens say the same.
    block_tokens : int
        Generated tokens folded at a time, one block late (0: never).
    """

    name = "rkv"
    paper = "R-KV, arXiv 2505.24133"

    window: int = 8
    pool: int = 7
    weight: float = 0.1
    similar: float = 0.5
    block_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(
                f"window must be at least 1 and pool odd, got window={self.window}, pool={self.pool}"
            )
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must lie between 0 and 1, got {self.weight}")
        if not -1 <= self.similar <= 1:
            raise ValueError(f"similar is a cosine, from -1 to 1, got {self.similar}")
        check_block("block_tokens", self.block_tokens)

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def shortest(self) -> int:
        return self.window

    @property
    def block(self) -> int:
        return self.block_tokens

    def scores(self, view: LayerView) -> Tensor:
        importance = smooth(self.importance(view), view.valid, self.pool, "max", reflect=False)
        scores = self.weight * importance - (1 - self.weight) * self.redundancy(view)
        if not view.generated:
            scores[..., -self.window :] = torch.inf
        return scores

    def importance(self, view: LayerView) -> Tensor:
        """Attention paid to each token before the window, (batch, kv_heads, tokens) float32."""
        if view.generated:
            assert view.mass is not None
            return view.mass / view.mass.sum(-1, keepdim=True).clamp_min(1e-30)
        assert view.queries is not None
        keys = keys_for_scores(view).float()
        query = view.queries[:, :, -self.window :].float().unflatten(1, (keys.shape[1], -1))
        logits = soft_cap(query @ keys[:, :, None].transpose(-1, -2) * view.scaling, view.softcap).amax(2)
        before = view.valid[:, :, None].clone()
        before[..., -self.window :] = False
        # A row no longer than the window has nothing to judge, and is kept whole.
        weights = logits.masked_fill(~before, -torch.inf).softmax(-1).nan_to_num(0)
        return mean_over_group(weights.mean(2), view)

    def redundancy(self, view: LayerView) -> Tensor:
        """How much each token repeats others, (batch, kv_heads, tokens) float32 that sums to 1."""
        unit = normalize(keys_for_scores(view).float(), dim=-1) * view.valid[..., None]
        index = torch.arange(view.tokens, device=unit.device)
        total = torch.zeros(unit.shape[:3], device=unit.device)
        for rows in index.split(ROWS):
            cosine = unit[:, :, rows] @ unit.transpose(-1, -2)
            cosine.masked_fill_(rows[:, None] == index, 0)
            newest = torch.where(cosine > self.similar, index, -1).amax(-1, keepdim=True)
            total += cosine.masked_fill_(newest == index, 0).sum(2)
        mean = mean_over_group(total, view) / view.valid.sum(-1, keepdim=True).clamp_min(1)
        return mean.masked_fill(~view.valid, -torch.inf).softmax(-1)
