"""Plain-torch attention that also returns its log-sum-exp, and the exact merge of such parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Part = tuple[torch.Tensor, torch.Tensor]
"""(output (batch, heads, queries, value_dim) float32, log-sum-exp (batch, heads, queries) float32)."""


def soft_cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Gemma-2 style capping of attention logits; None leaves them alone."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_part(scores: torch.Tensor, values: torch.Tensor) -> Part:
    """Attention over one block of tokens from its logits.

    Parameters
    ----------
    scores : (..., queries, tokens) float32, -inf where masked
    values : (..., tokens, value_dim) float32

    Returns
    -------
    (output, log-sum-exp); a query that sees nothing has output 0 and log-sum-exp -inf.
    """
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], values.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
    weights = torch.exp(scores - peak)
    mass = weights.sum(-1, keepdim=True)
    output = weights @ values / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    return output, (mass.log() + peak).squeeze(-1)


def merge(parts: Sequence[Part]) -> Part:
    """Merge attention over disjoint sets of tokens exactly, by their log-sum-exp.

    A part may have one query set's shape only; all parts share (batch, heads, queries).
    """
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts])
    total = torch.logsumexp(lse, 0)
    safe = torch.where(total == -torch.inf, torch.zeros_like(total), total)
    weights = torch.exp(lse - safe)
    output = sum(weight[..., None] * part[0] for weight, part in zip(weights, parts))
    assert isinstance(output, torch.Tensor)
    return output, total


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    block: int = 1024,
) -> Part:
    """Exact grouped-query attention in float32.

    Parameters
    ----------
    query : (batch, heads, queries, key_dim)
    key, value : (batch, kv_heads, tokens, key_dim | value_dim), kv_heads divides heads
    scaling : float
        Factor on the logits.
    mask : (batch, 1 or heads, queries, tokens), bool (True: visible) or additive float, optional
    softcap : float, optional
    block : int
        Queries processed at a time, so that no (queries x tokens) matrix of a long turn is ever whole.

    Returns
    -------
    (output (batch, heads, queries, value_dim) float32, log-sum-exp (batch, heads, queries) float32)
    """
    batch, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    key_t, value = key.float().transpose(-1, -2), value.float()
    outputs, lses = [], []
    for start in range(0, queries, block):
        part = query[:, :, start : start + block].float()
        count = part.shape[2]
        scores = part.reshape(batch, kv_heads, group * count, -1) @ key_t * scaling
        scores = soft_cap(scores, softcap)
        if mask is not None:
            scores = scores.view(batch, heads, count, -1)
            visible = mask[:, :, start : start + block]
            if visible.dtype == torch.bool:
                scores = scores.masked_fill(~visible, -torch.inf)
            else:
                # Additive masks use finfo.min for "hidden": in a merge that must be exactly nothing.
                floor = torch.finfo(visible.dtype).min / 2
                scores = (scores + visible.float()).masked_fill(visible < floor, -torch.inf)
            scores = scores.view(batch, kv_heads, group * count, -1)
        output, lse = softmax_part(scores, value)
        outputs.append(output.view(batch, heads, count, -1))
        lses.append(lse.view(batch, heads, count))
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def column_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None = None,
    other_lse: torch.Tensor | None = None,
    kv_heads: int | None = None,
    squared: bool = False,
    block: int = 128,
) -> torch.Tensor:
    """Attention mass that each key receives from all queries: column sums, without the whole matrix.

    Parameters
    ----------
    query : (batch, heads, queries, key_dim)
    key : (batch, key_heads, tokens, key_dim)
    scaling : float
    mask : (batch, 1 or kv_heads, queries, tokens) bool, True where visible, optional
    softcap : float, optional
    other_lse : (batch, heads, queries) float32, optional
        Log-sum-exp of tokens outside `key` that share the softmax.
    kv_heads : int, optional
        Heads of the result (default: key_heads; 1 where keys were expanded from one latent).
    squared : bool
        Sum the squares of the attention weights instead.
    block : int
        Queries at a time: the largest temporary is (batch, heads, block, tokens).

    Returns
    -------
    (batch, kv_heads, tokens) float32, summed over queries and over the query heads of each KV head.
    """
    batch, heads, queries, _ = query.shape
    key_heads, tokens = key.shape[1:3]
    group = heads // key_heads
    key_t = key.float().transpose(-1, -2)
    mass = key_t.new_zeros(batch, key_heads, tokens)
    for start in range(0, queries, block):
        part = query[:, :, start : start + block].float()
        count = part.shape[2]
        scores = part.reshape(batch, key_heads, group * count, -1) @ key_t * scaling
        scores = soft_cap(scores, softcap).view(batch, key_heads, group, count, tokens)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None, start : start + block], -torch.inf)
        lse = torch.logsumexp(scores, -1)
        if other_lse is not None:
            outside = other_lse[:, :, start : start + block].view(batch, key_heads, group, count)
            lse = torch.logaddexp(lse, outside.float())
        lse = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
        weights = torch.exp(scores - lse[..., None])
        mass += (weights.square() if squared else weights).sum((2, 3))
    return mass if kv_heads in (None, key_heads) else mass.view(batch, kv_heads, -1, tokens).sum(2)
