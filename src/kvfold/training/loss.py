"""What gates are trained by: stay like the model, predict the text, and fit a cache. Nothing here is ever tokens x tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.checkpoint import checkpoint

BLOCK = 256
"""Tokens on a side of a block of the retention matrix."""


class _SoftSize(torch.autograd.Function):
    """Sums of beta^age over the tokens so far, whose gradient is worked out block by block again."""

    @staticmethod
    def forward(ctx: Any, log_beta: Tensor, block: int) -> Tensor:
        ctx.save_for_backward(log_beta)
        ctx.block = block
        size = torch.zeros_like(log_beta)
        for queries, keys, age in _blocks(log_beta, block):
            worth = (age * log_beta[..., None, keys]).exp_().masked_fill_(age < 0, 0)
            size[..., queries] += worth.sum(-1)
        return size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (log_beta,) = ctx.saved_tensors
        found = torch.zeros_like(log_beta)
        for queries, keys, age in _blocks(log_beta, ctx.block):
            slope = (age * log_beta[..., None, keys]).exp_().mul_(age).masked_fill_(age < 0, 0)
            found[..., keys] += (grads[0][..., queries, None] * slope).sum(-2)
        return found, None


def _blocks(log_beta: Tensor, block: int) -> Any:
    """Pairs of a block of queries and a block of tokens not after them, and the ages (queries, tokens) in it."""
    steps = torch.arange(log_beta.shape[-1], device=log_beta.device)
    spans = [slice(start, start + block) for start in range(0, len(steps), block)]
    for place, queries in enumerate(spans):
        for keys in spans[: place + 1]:
            yield queries, keys, steps[queries, None] - steps[keys]


def soft_size(log_beta: Tensor, block: int = BLOCK) -> Tensor:
    """Tokens that a cache holds when each counts as what is left of it: sum_{i<=t} beta_i^(t-i).

    Betas differ from token to token, so that no recurrence gives the sum.

    Parameters
    ----------
    log_beta : (..., tokens) float32
    block : int
        The largest temporary is (..., block, block).

    Returns
    -------
    (..., tokens) float32
    """
    found: Tensor = _SoftSize.apply(log_beta, block)
    return found


def capacity_loss(size: Tensor, budget: float, scope: Literal["model", "head"]) -> Tensor:
    """How much a soft cache is over its budget, relative to what it could hold: a hinge for each step, averaged.

    Parameters
    ----------
    size : (batch, heads, tokens) float32
        `soft_size` of every KV head of every layer.
    budget : float
        Tokens a head (the paper's M).
    scope : "model" or "head"
        Heads have one budget together (DBTrimKV), or each its own (TrimKV).

    Returns
    -------
    () float32
        Mean over steps t = 1 ... of max(0, sum over heads - M heads) / (heads t), or the mean of max(0, one - M) / t.

    Notes
    -----
    DBTrimKV does not say what its sum over steps is divided by; this is TrimKV's division, by heads and by t.
    """
    steps = torch.arange(1, size.shape[-1] + 1, device=size.device)
    if scope == "model":
        size = size.mean(1)
    return ((size - budget).clamp_min(0) / steps).mean()


def next_token_losses(
    teacher: Tensor, student: Tensor, ids: Tensor, block: int = 1024
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of next-token distributions, and the student's cross-entropy, in nats, averaged over tokens.

    Parameters
    ----------
    teacher, student : (batch, tokens, vocabulary)
        Logits.
    ids : (batch, tokens) int64
    block : int
        Tokens whose distributions exist at a time.
    """
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    kl = ce = student.new_zeros((), dtype=torch.float32)
    for start in range(0, ids.shape[1], block):
        span = slice(start, start + block)
        parts = checkpoint(_sums, teacher[:, span], student[:, span], targets[:, span], use_reentrant=False)
        kl, ce = kl + parts[0], ce + parts[1]
    return kl / ids.numel(), ce / max(ids.shape[0] * (ids.shape[1] - 1), 1)


def _sums(teacher: Tensor, student: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = student.float().log_softmax(-1)
    kl = kl_div(logs, teacher.float().log_softmax(-1), reduction="sum", log_target=True)
    return kl, cross_entropy(
        student.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
    )
