"""Plain-torch attention that also returns its log-sum-exp, and the exact merge of such parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.kernels import softmax_columns

Part = tuple[torch.Tensor, torch.Tensor]
"""(output (batch, heads, queries, value_dim) float32, log-sum-exp (batch, heads, queries) float32)."""


BLOCK_ELEMENTS = (1 << 26, 1 << 20)
"""Elements of the largest temporary of `column_mass`: where memory is fast, and on a CPU, whose cache should hold it."""


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
        return scores.new_zeros(*scores.shape[:-1], values.shape[-1]), scores.new_full(
            scores.shape[:-1], -torch.inf
        )
    weights, lse = softmax_lse(scores)
    return (weights @ values).masked_fill(lse[..., None] == -torch.inf, 0), lse


def softmax_lse(scores: torch.Tensor) -> Part:
    """Weights and log-sum-exp of logits (..., tokens), at least one token; weights are NaN where all are -inf.

    torch's softmax is one pass, and several times faster on a CPU than its exp; the largest weight tells the sum.
    """
    peak = scores.amax(-1)
    weights = torch.softmax(scores, -1)
    lse = peak - weights.amax(-1).log()
    return weights, torch.where(peak == -torch.inf, peak, lse)


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
    block: int | None = None,
) -> torch.Tensor:
    """Attention mass that each key receives from all queries: column sums, without the whole matrix.

    In float32, but a processor with fast bfloat16 products multiplies unmasked bfloat16 queries and keys as they are.

    Parameters
    ----------
    query : (batch, heads, queries, key_dim)
    key : (batch, key_heads, tokens, key_dim)
    scaling : float
    mask : (batch, 1 or kv_heads, 1 or queries, tokens) bool, True where visible, optional
    softcap : float, optional
    other_lse : (batch, heads, queries) float32, optional
        Log-sum-exp of tokens outside `key` that share the softmax.
    kv_heads : int, optional
        Heads of the result (default: key_heads; 1 where keys were expanded from one latent).
    squared : bool
        Sum the squares of the attention weights instead.
    block : int, optional
        Queries at a time: the largest temporary is (batch, heads, block, tokens). By default few enough for it to
        stay in a processor's cache.

    Returns
    -------
    (batch, kv_heads, tokens) float32, summed over queries and over the query heads of each KV head.
    """
    batch, heads, queries, _ = query.shape
    key_heads, tokens = key.shape[1:3]
    group = heads // key_heads
    if block is None:
        block = max(1, BLOCK_ELEMENTS[query.device.type == "cpu"] // max(batch * heads * tokens, 1))
    if mask is not None and mask.stride(2) == 0:
        mask = mask[:, :, :1]
    if mask is not None and mask.shape[2] == 1 and bool(mask.all()):
        mask = None
    plain = mask is None and softcap is None and other_lse is None
    loop = plain and query.device.type == "cpu" and not softmax_columns.NATIVE.problem()
    low = loop and query.dtype == key.dtype == torch.bfloat16 and softmax_columns.low_precision_pays()
    key_t = (key if low else key.float()).transpose(-1, -2).contiguous()
    mass = torch.zeros(batch, key_heads, tokens, device=key.device)
    for start in range(0, queries, block):
        part = (query[:, :, start : start + block].float() * scaling).to(key_t.dtype)
        count = part.shape[2]
        if loop:
            scores = part.reshape(batch, key_heads, group * count, -1) @ key_t
            softmax_columns.add_columns(scores.flatten(0, 1), mass.view(-1, tokens), squared)
            continue
        scores = soft_cap(part.reshape(batch, key_heads, group * count, -1) @ key_t, softcap)
        seen = None
        if mask is not None:
            visible = mask if mask.shape[2] == 1 else mask[:, :, start : start + block]
            scores.view(batch, key_heads, group, count, tokens).masked_fill_(~visible[:, :, None], -torch.inf)
            seen = visible.any(-1, keepdim=True)[:, :, None].expand(-1, key_heads, group, count, 1)
        if other_lse is not None:
            outside = (
                other_lse[:, :, start : start + block].reshape(batch, key_heads, group * count, 1).float()
            )
            total = torch.logaddexp(torch.logsumexp(scores, -1, keepdim=True), outside)
            weights = scores.sub_(total.clamp_min(torch.finfo(total.dtype).min)).exp_()
        else:
            weights = torch.softmax(scores, -1)
            if seen is not None and not bool(seen.all()):
                weights.masked_fill_(~seen.reshape(batch, key_heads, group * count, 1), 0)
        mass += (weights.square_() if squared else weights).sum(2)
    return mass if kv_heads in (None, key_heads) else mass.view(batch, kv_heads, -1, tokens).sum(2)
