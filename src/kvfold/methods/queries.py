"""Queries that a fit is trained on: the prompt's own, asked again after its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvfold.kernels.reference import Part, attend, merge, soft_cap, softmax_part
from kvfold.methods.base import LayerView

Source = Literal["reread", "future", "synthetic", "repeat"]

BLOCK, BESIDE = 2048, (512, 128)
"""Tokens whose logits are held at once; queries whose logits over what is beside them are, and on a CPU."""
SEEN = 1e-6
"""Share of attention below which what is beside some tokens is not told apart from nothing."""


@dataclass(frozen=True)
class Training:
    """Queries of all query heads of one KV head, and what each of them is to see.

    Attributes
    ----------
    queries : (queries, key_dim) float32
    last : (queries,) int64
        Logical index of the newest token that the query sees.
    held : (queries,) bool
        One query in eight, spans of neighbours together: to validate on, not to be trained on.
    beside_lse : (queries,) float32
        Log-sum-exp over tokens that the query sees beside the prompt; -inf where there are none.
    beside_output : (queries, value_dim) float32
        Attention output over those alone.
    keys, values : (tokens, key_dim | value_dim) float32
        Of the prompt's real tokens.
    positions : (tokens,) int64
        Logical index of each.
    scaling : float
    softcap : float or None
    window : int
        Newest tokens, of which some queries may not see all.
    every : int
        Prompt tokens of which one was asked for its query.
    """

    queries: Tensor
    last: Tensor
    held: Tensor
    beside_lse: Tensor
    beside_output: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scaling: float
    softcap: float | None
    window: int
    every: int = 1

    def logits(self, tokens: slice | Tensor) -> Tensor:
        """Logits (queries, n) of some tokens: scaled, capped, -inf where the query may not look."""
        scores = soft_cap((self.queries * self.scaling) @ self.keys[tokens].t(), self.softcap)
        positions = self.positions[tokens]
        if isinstance(tokens, slice):
            # All see the others: no pass over so many numbers.
            first = max(len(self.keys) - self.window - tokens.indices(len(self.keys))[0], 0)
            scores[:, first:].masked_fill_(positions[first:] > self.last[:, None], -torch.inf)
            return scores
        return scores.masked_fill_(positions > self.last[:, None], -torch.inf)

    def attend(self) -> Part:
        """Exact attention over the prompt and what is beside it: (output (queries, value_dim), log-sum-exp (queries,))."""
        whole = self.beside_output, self.beside_lse
        for start in range(0, len(self.keys), BLOCK):
            span = slice(start, start + BLOCK)
            whole = merge([whole, softmax_part(self.logits(span), self.values[span])])
        return whole

    def apart(self, whole: Part, tokens: slice | Tensor) -> tuple[Tensor, Part]:
        """Part some tokens from all else that is attended to.

        Parameters
        ----------
        whole : Part
            What `attend` gives.
        tokens : slice or (n,) int64

        Returns
        -------
        (weights (queries, n) in attention over everything, attention over everything but these tokens)
        """
        output, lse = whole
        weights = self.logits(tokens).sub_(lse[:, None]).exp_()
        # What is left of nearly nothing is rounding: it counts for no more than that.
        share = (1 - weights.sum(1)).clamp_min(SEEN)
        rest = (output - weights @ self.values[tokens]) / share[:, None]
        return weights, (rest, lse + share.log())


def training(
    view: LayerView,
    row: int,
    head: int,
    source: Source,
    window: int,
    horizon: int,
    beside: Part | None = None,
) -> Training:
    """Training queries of one KV head of one row.

    Parameters
    ----------
    view : LayerView
        With `queries` and `sampled`, of a model that caches keys and values as they are attended to.
    row, head : int
    source : "reread", "future", "synthetic" or "repeat"
        "future": the sampled queries, un-RoPEd and turned to the `horizon` positions after the prompt, in turn, where
        they see all of it. "reread": they also see the tokens that they come from, as if these were read again there:
        what a query finds among them it does not ask of the prompt. "synthetic": `horizon` of them, drawn at random,
        one for each position (KVSculpt, section on synthetic queries). "repeat": the sampled queries are those of
        `repeated`, and stay as they are.
    window : int
        Real queries added: the newest, each of which sees what is before it.
    horizon : int
    beside : Part, optional
        For "repeat": attention of the group's queries over what they see beside the prompt, (group, n, value_dim) and
        (group, n).
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
    if view.rotary is not None and len(index) and source != "repeat":
        plain = view.rotary.unrotate(query, view.positions[row, index])
        turned = view.rotary.rotate(plain, view.positions[row, -1] + 1 + ahead)
    count = min(window, view.queries.shape[2], int(view.valid[row].any(0).sum()))
    newest = view.queries[row, members, view.queries.shape[2] - count :].float()
    last = torch.full((len(index) + count,), view.tokens - 1, device=device)
    last[len(index) :] -= torch.arange(count - 1, -1, -1, device=device)
    positions = view.valid[row, head].nonzero().flatten()
    keys, values = view.keys[row, head, positions].float(), view.values[row, head, positions].float()
    lse = keys.new_full((group, len(last)), -torch.inf)
    output = values.new_zeros(*lse.shape, values.shape[1])
    if beside is not None:
        output[:, : len(index)], lse[:, : len(index)] = (part[:, real] for part in beside)
    if source == "reread":
        block = BESIDE[device.type == "cpu"]
        for start in range(0, len(index), block):
            part = slice(start, min(start + block, len(index)))
            newest_near, oldest_near = index[part, None], (index - ahead)[part, None]
            ends = torch.stack([oldest_near.amin(), newest_near.amax() + 1])
            near = slice(*torch.searchsorted(positions, ends).tolist())
            own = (positions[near] <= newest_near) & (positions[near] >= oldest_near)
            scores = soft_cap(query[:, part] @ keys[near].t() * view.scaling, view.softcap)
            scores = scores.masked_fill_(~own, -torch.inf)
            output[:, part], lse[:, part] = softmax_part(scores, values[near])
    span = min(max(len(index) // 64, 1), 32)
    held = torch.zeros_like(lse, dtype=torch.bool)
    held[:, : len(index)] = torch.arange(len(index), device=device) // span % 8 == 5
    return Training(
        torch.cat([turned, newest], 1).flatten(0, 1),
        last.repeat(group),
        held.flatten(),
        lse.flatten(),
        output.flatten(0, 1),
        keys,
        values,
        positions,
        view.scaling,
        view.softcap,
        count,
        round(view.tokens / len(view.sampled_index)) if source in ("reread", "future") else 1,
    )


def repeated(views: Sequence[LayerView], sampled: int, span: int) -> list[tuple[LayerView, Part]]:
    """Queries that the model has when it reads parts of the prompt once more after its end, as if it repeated them.

    Spans of neighbouring tokens, evenly over the prompt, each at the positions after it: a query sees the whole prompt
    and what is before it in its span.

    Parameters
    ----------
    views : sequence of LayerView
        Every layer's, with `again`.
    sampled, span : int
        Tokens at most, and of a span.

    Returns
    -------
    Of each layer: the view with these queries as sampled ones, and their attention (batch, heads, n, value_dim) and
    (batch, heads, n) over their spans.
    """
    first = views[0]
    assert first.again is not None
    tokens = first.tokens
    spans = -(-min(sampled, tokens) // span)
    starts = torch.arange(spans, device=first.keys.device) * max(tokens - span, 0) // max(spans - 1, 1)
    index = (starts[:, None] + torch.arange(min(span, tokens), device=starts.device)).flatten()
    step = torch.arange(len(index), device=index.device)
    # Padding in a span takes no position: a row is read again as it would be alone.
    real = first.valid.any(1)[:, index].unflatten(1, (spans, -1))
    positions = first.positions[:, -1:] + (real.cumsum(2).clamp_min(1)).flatten(1)
    own = (step[:, None] >= step) & (step[:, None] // min(span, tokens) == step // min(span, tokens))
    of_layer = {view.layer_idx: view for view in views}
    found = {}

    def answer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        view = of_layer[layer]
        real = view.valid[:, :, index].repeat_interleave(query.shape[1] // view.valid.shape[1], 1)
        beside = attend(query, key, value, view.scaling, own & real[:, :, None], view.softcap)
        found[layer] = replace(view, sampled=query, sampled_index=index), beside
        return merge([_prompt(view, query, torch.full_like(index, view.tokens)), beside])[0]

    first.again(index, positions, answer)
    return [found[view.layer_idx] for view in views]


def first_reading(view: LayerView) -> Tensor:
    """What the sampled queries got of the prompt when it was read, (batch, heads, n, value_dim) float32."""
    assert view.sampled is not None and view.sampled_index is not None
    return _prompt(view, view.sampled, view.sampled_index)[0]


def _prompt(view: LayerView, query: Tensor, last: Tensor) -> Part:
    """Attention of queries (batch, heads, n, key_dim) over a prompt's tokens up to the `last` (n,) of each."""
    group = query.shape[1] // view.keys.shape[1]
    outputs, lses = [], []
    for start in range(0, len(last), 256):
        part = slice(start, start + 256)
        seen = torch.arange(view.tokens, device=last.device) <= last[part, None]
        mask = (view.valid[:, :, None] & seen).repeat_interleave(group, 1)
        output, lse = attend(query[:, :, part], view.keys, view.values, view.scaling, mask, view.softcap)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)
