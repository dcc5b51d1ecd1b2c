"""What prefill and decode hand to a method: collected from attention calls, dropped when the fold is done."""

from __future__ import annotations

import torch

from kvfold.kernels.column_sums import column_sums
from kvfold.methods.base import Needs


class PromptObserver:
    """Statistics of an open prompt, whatever the chunking.

    Parameters
    ----------
    needs : Needs
    total : int or None
        Logical length of the segment when it is complete, if known.
    later : bool
        Whether the cache held tokens before it.
    """

    def __init__(self, needs: Needs, total: int | None, later: bool):
        self.needs, self.total, self.later = needs, total, later
        self.queries: torch.Tensor | None = None
        self.mass: torch.Tensor | None = None
        self.seen_by: torch.Tensor | None = None
        self.sampled: list[torch.Tensor] = []
        self.sampled_index: list[torch.Tensor] = []

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        valid: torch.Tensor,
        scaling: float,
        softcap: float | None,
        other_lse: torch.Tensor | None,
        kv_heads: int,
    ) -> None:
        """Take in one call.

        Parameters
        ----------
        query : (batch, heads, new, query_dim)
            Queries of the segment's tokens [tokens - new, tokens).
        key : (batch, key_heads, tokens, query_dim)
            Keys of the segment so far, per head where the cache holds latents.
        valid : (batch, 1 or key_heads, tokens) bool
        other_lse : (batch, heads, new) float32 or None
            Log-sum-exp over earlier segments.
        kv_heads : int
        """
        new, tokens = query.shape[2], key.shape[2]
        first = tokens - new
        if self.needs.window:
            recent = query[:, :, -self.needs.window :]
            if self.queries is not None:
                recent = torch.cat([self.queries, recent], 2)[:, :, -self.needs.window :]
            self.queries = recent.clone()
        if self.needs.sampled:
            total = max(self.total or tokens, tokens)
            stride = -(-total // self.needs.sampled)
            start = -(-first // stride) * stride
            self.sampled.append(query[:, :, start - first :: stride].clone())
            self.sampled_index.append(torch.arange(start, max(tokens, start), stride, device=query.device))
        if self.needs.all_queries:
            any_valid = valid.any(1)
            real = any_valid[:, first:]
            last = torch.arange(first, tokens, device=key.device).masked_fill(~real, -1)
            mass = column_sums(query, key, scaling, valid, last, softcap, other_lse, kv_heads=kv_heads)
            seen = real.flip(1).cumsum(1).flip(1).float()
            seen = torch.cat([seen[:, :1].expand(-1, first), seen], 1) * any_valid
            if self.mass is not None and self.seen_by is not None:
                mass[:, :, : self.mass.shape[2]] += self.mass
                seen[:, : self.seen_by.shape[1]] += self.seen_by
            self.mass, self.seen_by = mass, seen

    def shorten(self, removed: int, tokens: int) -> None:
        """Forget the newest `removed` of the tokens seen; `tokens` are left.

        What the removed queries added to the mass of the others stays.
        """
        if self.queries is not None:
            self.queries = self.queries[:, :, : max(self.queries.shape[2] - removed, 0)].clone()
        if self.mass is not None and self.seen_by is not None:
            self.mass, self.seen_by = self.mass[..., :tokens].clone(), self.seen_by[:, :tokens].clone()
        left = [index < tokens for index in self.sampled_index]
        self.sampled = [sample[:, :, kept] for sample, kept in zip(self.sampled, left, strict=True)]
        self.sampled_index = [index[kept] for index, kept in zip(self.sampled_index, left, strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        """Live tensors, for the ledger."""
        named = [self.queries, self.mass, self.seen_by, *self.sampled, *self.sampled_index]
        return [tensor for tensor in named if tensor is not None]

    def select(self, rows: torch.Tensor) -> None:
        """Reorder batch rows."""
        self.queries = None if self.queries is None else self.queries[rows]
        self.mass = None if self.mass is None else self.mass[rows]
        self.seen_by = None if self.seen_by is None else self.seen_by[rows]
        self.sampled = [sample[rows] for sample in self.sampled]


class BlockObserver:
    """How the queries of the next block weigh a block of generated tokens.

    Sums instead of the queries themselves: a block's worth of queries would outweigh the folded block.
    """

    def __init__(self) -> None:
        self.mass: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None
        self.energy: torch.Tensor | None = None
        self.count = 0

    def observe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        lse: torch.Tensor,
        scaling: float,
        softcap: float | None,
        kv_heads: int,
        key_dim: int,
    ) -> None:
        """Take in the queries (batch, heads, new, query_dim) that saw the block's keys (batch, key_heads, block, .).

        lse : (batch, heads, new) log-sum-exp over everything each query saw; mask (batch, 1, new, block) or None.
        """
        batch, heads, new, _ = query.shape
        key_heads, block = key.shape[1:3]
        scores = (
            query.float().reshape(batch, key_heads, -1, query.shape[-1])
            @ key.float().transpose(-1, -2)
            * scaling
        )
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.view(batch, heads, new, block)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = torch.exp(scores - lse[..., None]).view(batch, kv_heads, -1, block)
        mass, squares = weights.sum(2), weights.square().sum(2)
        energy = query[..., -key_dim:].float().square().reshape(batch, kv_heads, -1, key_dim).mean(2) * new
        self.mass = mass if self.mass is None else self.mass + mass
        self.squares = squares if self.squares is None else self.squares + squares
        self.energy = energy if self.energy is None else self.energy + energy
        self.count += new

    def tensors(self) -> list[torch.Tensor]:
        """Live tensors, for the ledger."""
        return [tensor for tensor in (self.mass, self.squares, self.energy) if tensor is not None]

    def select(self, rows: torch.Tensor) -> None:
        """Reorder batch rows."""
        self.mass = None if self.mass is None else self.mass[rows]
        self.squares = None if self.squares is None else self.squares[rows]
        self.energy = None if self.energy is None else self.energy[rows]
