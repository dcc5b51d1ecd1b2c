"""Queries that a fit is trained on: the prompt's own, asked again after its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.kernels.reference import soft_cap
from kvfold.methods.base import LayerView

Source = Literal["reread", "future", "synthetic"]


@dataclass(frozen=True)
class Training:
    """Queries of all query heads of one KV head, and what each of them is to see.

    Attributes
    ----------
    queries : (queries, key_dim) float32
    logits : (queries, tokens) float32
        Scaled and capped, over the prompt's real tokens, -inf where the query may not look.
    held : (queries,) bool
        One query in eight, spans of neighbours together: to validate on, not to be trained on.
    beside_lse : (queries,) float32
        Log-sum-exp over tokens that the query sees beside the prompt; -inf where there are none.
    beside_output : (queries, value_dim) float32
        Attention output over those alone.
    keys, values : (tokens, key_dim | value_dim) float32
    positions : (tokens,) int64
        Logical index of each.
    """

    queries: Tensor
    logits: Tensor
    held: Tensor
    beside_lse: Tensor
    beside_output: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor

    def attend(self, index: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Exact attention over some tokens of the prompt and what is beside it.

        Returns
        -------
        (weights (queries, index), output (queries, value_dim), log-sum-exp (queries,))
        """
        logits, values = (
            (self.logits, self.values) if index is None else (self.logits[:, index], self.values[index])
        )
        lse = torch.logaddexp(logits.logsumexp(-1), self.beside_lse)
        weights = torch.exp(logits - lse[:, None])
        return weights, weights @ values + torch.exp(self.beside_lse - lse)[:, None] * self.beside_output, lse


def training(view: LayerView, row: int, head: int, source: Source, window: int, horizon: int) -> Training:
    """Training queries of one KV head of one row.

    Parameters
    ----------
    view : LayerView
        With `queries` and `sampled`, of a model that caches keys and values as they are attended to.
    row, head : int
    source : "reread", "future" or "synthetic"
        "future": the sampled queries, un-RoPEd and turned to the `horizon` positions after the prompt, in turn, where
        they see all of it. "reread": they also see the tokens that they come from, as if these were read again there:
        what a query finds among them it does not ask of the prompt. "synthetic": `horizon` of them, drawn at random,
        one for each position (KVSculpt, section on synthetic queries).
    window : int
        Real queries added: the newest, each of which sees what is before it.
    horizon : int
    """
    assert view.queries is not None and view.sampled is not None and view.sampled_index is not None
    device, group = view.keys.device, view.sampled.shape[1] // view.keys.shape[1]
    members = slice(head * group, (head + 1) * group)
    real = view.valid[row, :, view.sampled_index].any(0)
    index, query = view.sampled_index[real], view.sampled[row, members][:, real].float()
    if source == "synthetic":
        generator = torch.Generator().manual_seed(view.layer_idx)
        drawn = torch.randperm(len(index), generator=generator)[:horizon].to(device)
        index, query = index[drawn], query[:, drawn]
    ahead = torch.arange(len(index), device=device) % horizon
    turned = query
    if view.rotary is not None and len(index):
        plain = view.rotary.unrotate(query, view.positions[row, index])
        turned = view.rotary.rotate(plain, view.positions[row, -1] + 1 + ahead)
    count = min(window, view.queries.shape[2], int(view.valid[row].any(0).sum()))
    newest = view.queries[row, members, view.queries.shape[2] - count :].float()
    last = view.tokens - 1 - torch.arange(count - 1, -1, -1, device=device)
    positions = view.valid[row, head].nonzero().flatten()
    keys, values = view.keys[row, head, positions].float(), view.values[row, head, positions].float()

    def scores(queries: Tensor) -> Tensor:
        return soft_cap(queries @ keys.t() * view.scaling, view.softcap)

    unseen = scores(newest).masked_fill_(positions > last[:, None], -torch.inf)
    logits = torch.cat([scores(turned), unseen], 1)
    lse = logits.new_full(logits.shape[:2], -torch.inf)
    output = values.new_zeros(*lse.shape, values.shape[1])
    if source == "reread":
        near = (positions <= index[:, None]) & (positions >= (index - ahead)[:, None])
        beside = scores(query).masked_fill_(~near, -torch.inf)
        lse[:, : len(index)] = beside.logsumexp(-1)
        output[:, : len(index)] = beside.softmax(-1) @ values
    span = min(max(len(index) // 64, 1), 32)
    held = torch.zeros(group, logits.shape[1], dtype=torch.bool, device=device)
    held[:, : len(index)] = torch.arange(len(index), device=device) // span % 8 == 5
    return Training(
        torch.cat([turned, newest], 1).flatten(0, 1),
        logits.flatten(0, 1),
        held.flatten(),
        lse.flatten(),
        output.flatten(0, 1),
        keys,
        values,
        positions,
    )
