"""Fitting a few tokens to what attention over the whole prompt gives to queries that are still to come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.kernels.reference import soft_cap
from kvfold.methods.base import LayerView
from kvfold.methods.scores import keys_for_scores
from kvfold.stores.base import Kept


@dataclass(frozen=True)
class Target:
    """One KV head's exact attention, for the queries of all its query heads.

    Attributes
    ----------
    logits : (queries, tokens) float32
        Scaled and capped, -inf where the query may not look. Real tokens only.
    keys, values : (tokens, key_dim | value_dim)
    positions : (tokens,) int64
        Logical index of each.
    """

    logits: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor

    @property
    def weights(self) -> Tensor:
        """Attention weights (queries, tokens)."""
        return self.logits.softmax(-1)

    def kept(self, index: Tensor, values: Tensor | None = None, bias: Tensor | None = None) -> Kept:
        """Some of the tokens, with other values or a bias."""
        return Kept(
            self.positions[index], self.keys[index], self.values[index] if values is None else values, bias
        )


def targets(view: LayerView, row: int, window: int, horizon: int) -> Iterator[Target]:
    """What each KV head of one row is fitted to.

    The queries are the newest `window`, each of which sees what is before it, and the sampled ones as if asked after the
    prompt's end: un-RoPEd and turned to one of `horizon` positions there, seeing everything (KVSculpt, section on
    synthetic queries). Without RoPE, or where it cannot be told, these only lose their mask.

    Parameters
    ----------
    view : LayerView
        With `queries` and `sampled`.
    row : int
    window, horizon : int
    """
    future, recent = future_queries(view, row, horizon), _recent_queries(view, row, window)
    kv_heads, count = view.keys.shape[1], future.shape[1] + recent.shape[1]
    keys = keys_for_scores(view)[row].float()
    # (kv_heads, key heads of each, query heads of each of those, queries, dim): more than one key head for latents.
    query = torch.cat([future, recent], 1).view(kv_heads, len(keys) // kv_heads, -1, count, future.shape[-1])
    last = view.tokens - 1 - torch.arange(recent.shape[1] - 1, -1, -1, device=keys.device)
    for head in range(kv_heads):
        positions = view.valid[row, head].nonzero().flatten()
        own = keys.view(kv_heads, -1, *keys.shape[1:])[head][:, None, positions]
        logits = soft_cap(query[head] @ own.transpose(-1, -2) * view.scaling, view.softcap)
        logits[..., future.shape[1] :, :].masked_fill_(positions > last[:, None], -torch.inf)
        yield Target(
            logits.reshape(-1, len(positions)),
            view.keys[row, head, positions].float(),
            view.values[row, head, positions].float(),
            positions,
        )


def future_queries(view: LayerView, row: int, horizon: int) -> Tensor:
    """The sampled queries of one row at the `horizon` positions after its end, in turn: (heads, n, query_dim) float32."""
    assert view.sampled is not None and view.sampled_index is not None
    real = view.valid[row, :, view.sampled_index].any(0)
    index, query = view.sampled_index[real], view.sampled[row][:, real].float()
    if view.rotary is None or not len(index):
        return query
    key_dim = view.keys.shape[-1]
    ahead = view.positions[row, -1] + 1 + torch.arange(len(index), device=query.device) % horizon
    plain = view.rotary.unrotate(query[..., -key_dim:], view.positions[row, index])
    return torch.cat([query[..., :-key_dim], view.rotary.rotate(plain, ahead)], -1)


def _recent_queries(view: LayerView, row: int, window: int) -> Tensor:
    """Real queries among the newest `window`, (heads, n, query_dim) float32."""
    assert view.queries is not None
    count = min(window, view.queries.shape[2], int(view.valid[row].any(0).sum()))
    return view.queries[row, :, view.queries.shape[2] - count :].float()


def zones(scores: Tensor, count: int, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """Split `count` tokens, of those that have scores, into those to be fitted, best scores first, and those kept exact: the first and the newest.

    Returns
    -------
    (chosen, exact) : int64 indices, ascending
    """
    tokens = len(scores)
    index = torch.arange(tokens, device=scores.device)
    if count >= tokens:
        return index[:0], index
    exact = index[(index < sinks) | (index >= tokens - window)]
    exact = exact[max(len(exact) - count, 0) :]
    scores = scores.index_fill(0, exact, -torch.inf)
    return scores.topk(count - len(exact)).indices.sort().values, exact


def ridge_values(weights: Tensor, wanted: Tensor, ridge: float, towards: Tensor) -> Tensor:
    """Values V with weights V near `wanted`, drawn towards values given; float32.

    Parameters
    ----------
    weights : (..., queries, tokens) float32
    wanted : (..., queries, value_dim) float32
    ridge : float
        Factor on the squared distance from `towards`, beside squared errors summed over queries. 0: least squares, up to
        what float64 needs where queries do not tell tokens apart.
    towards : (..., tokens, value_dim) float32
    """
    a, b = weights.double(), (wanted - weights @ towards).double()
    few = a.shape[-2] < a.shape[-1]
    gram = a @ a.mT if few else a.mT @ a
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += (1e-10 * diagonal.amax(-1, keepdim=True)).clamp_min(ridge)
    root = torch.linalg.cholesky(gram)
    moved = a.mT @ torch.cholesky_solve(b, root) if few else torch.cholesky_solve(a.mT @ b, root)
    return towards + moved.float()


def bounded_least_squares(gram: Tensor, moment: Tensor, low: float, high: float, steps: int = 500) -> Tensor:
    """Weights w in [low, high] that minimise the squared error of a w = b, (..., n) float32; all below zero is NNLS.

    Accelerated projected gradient on columns of equal length, restarted where it would turn back; each of a batch by itself.

    Parameters
    ----------
    gram : (..., n, n) float64
        a^T a.
    moment : (..., n) float64
        a^T b.
    low, high : float
    steps : int
    """
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(1e-12)
    gram = gram / length[..., :, None] / length[..., None, :]
    moment, length = (moment / length)[..., None], length[..., None]
    # The largest eigenvalue by power steps, from below; a twentieth more is enough above it.
    top = torch.ones_like(length)
    for _ in range(30):
        top = gram @ (top / top.norm(dim=-2, keepdim=True))
    step = 1 / (1.05 * top.norm(dim=-2, keepdim=True))
    floor, ceiling = low * length, high * length
    w = length.clamp(floor, ceiling)
    ahead, speed = w, torch.ones_like(step)
    for _ in range(steps):
        new = (ahead - step * (gram @ ahead - moment)).clamp(floor, ceiling)
        # Decided on the device: a look at the sign would stop a GPU at every step.
        moved = new - w
        back = ((ahead - new) * moved).sum(-2, keepdim=True) > 0
        faster = (speed.square() + 0.25).sqrt() + 0.5
        ahead = new + ((speed - 1) / faster).masked_fill(back, 0) * moved
        w, speed = new, faster.masked_fill(back, 1)
    return (w / length).squeeze(-1).float()
