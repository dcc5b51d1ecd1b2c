"""Attention that forgets: a key's logits fall by log beta with every step, in a model that is otherwise left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import AttentionInterface

from kvfold.errors import UnsupportedModelError
from kvfold.hf.inputs import given_to, watch
from kvfold.kernels.reference import soft_cap
from kvfold.methods.gates import RetentionGates

Backend = Literal["blocks", "flex"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    scaling: float,
    softcap: float | None = None,
    block: int = 512,
) -> Tensor:
    """Causal attention with (t - i) log beta_i on the logit of query t and key i.

    Parameters
    ----------
    query : (batch, heads, tokens, key_dim)
    key, value : (batch, kv_heads, tokens, key_dim | value_dim)
    log_beta : (batch, gates, tokens) float32
        The number of gates divides that of KV heads.
    scaling : float
    softcap : float, optional
        On logits, before they fall.
    block : int
        Queries at a time. Their logits are worked out again for the gradient, so that no more of them are ever held.

    Returns
    -------
    (batch, heads, tokens, value_dim) of the query's dtype
    """
    tokens = query.shape[2]
    outputs = []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        seen = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], log_beta[..., :stop]
        outputs.append(checkpoint(_attend_block, *seen, scaling, softcap, use_reentrant=False))
    return torch.cat(outputs, 2)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, log_beta: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """The newest queries over all tokens."""
    (batch, heads, count, _), (_, kv_heads, tokens, _) = query.shape, key.shape
    scores = query.reshape(batch, kv_heads, -1, query.shape[-1]) @ key.transpose(-1, -2)
    scores = soft_cap(scores.float() * scaling, softcap).view(batch, heads, count, tokens)
    steps = torch.arange(tokens, device=key.device)
    age = steps[tokens - count :, None] - steps
    fall = age * log_beta.repeat_interleave(heads // log_beta.shape[1], 1)[:, :, None]
    weights = (scores + fall).masked_fill(age < 0, -torch.inf).softmax(-1).to(value.dtype)
    return (weights.view(batch, kv_heads, -1, tokens) @ value).view(batch, heads, count, -1)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, log_beta: Tensor, scaling: float, softcap: float | None = None
) -> Tensor:
    """As `attend`, by torch's FlexAttention, compiled: for a GPU, where it is several times as fast."""
    group = query.shape[1] // log_beta.shape[1]

    def fall(score: Tensor, batch: Tensor, head: Tensor, step: Tensor, token: Tensor) -> Tensor:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        return score + (step - token) * log_beta[batch, head // group, token]

    flex, mask = _flex(query.shape[2], query.device)
    found: Tensor = flex(query, key, value, fall, mask, scaling, query.shape[1] != key.shape[1])
    return found


@cache
def _flex(tokens: int, device: torch.device) -> tuple[Callable[..., Tensor], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device)
    return torch.compile(flex_attention, dynamic=False), mask


def best_backend(model: Any, tokens: int = 256) -> Backend:
    """FlexAttention where it is there and agrees with `attend`, gradients included, on this model's shapes."""
    if model.device.type != "cuda":
        return "blocks"
    config = model.config.get_text_config(decoder=True)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    draw = torch.Generator(model.device).manual_seed(0)
    options: dict[str, Any] = {"device": model.device, "generator": draw}
    shapes = ((1, heads, tokens, dim), (1, kv_heads, tokens, dim), (1, kv_heads, tokens, dim))
    states = [torch.randn(shape, **options).to(model.dtype) for shape in shapes]
    states.append(-torch.rand(1, kv_heads, tokens, **options) / 20)
    found = []
    functions: tuple[Any, ...] = (attend, attend_flex)
    try:
        for function in functions:
            leaves = [state.clone().requires_grad_() for state in states]
            output = function(*leaves, 1 / math.sqrt(dim))
            found.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    except Exception:  # Whatever a compiler may raise: there is another way.
        return "blocks"
    near = all((a - b).abs().max() <= 0.03 * a.abs().max() for a, b in zip(*found))
    return "flex" if near else "blocks"


@contextmanager
def forgetting(model: Any, gates: RetentionGates, backend: Backend = "blocks") -> Iterator[dict[int, Tensor]]:
    """While the block runs, the model's layers that have a gate attend as `attend` does.

    Rows have no padding, and no cache is used.

    Yields
    ------
    dict of int to Tensor
        Log beta (batch, kv_heads, tokens) of each layer's newest pass.

    Raises
    ------
    UnsupportedModelError
        The model has attention sinks.
    """
    seen: dict[int, Tensor] = {}
    function = {"blocks": attend, "flex": attend_flex}[backend]
    held, original = watch(model), AttentionInterface.get_interface

    def forget(base: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(base)
        def attention(
            module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            layer = getattr(module, "layer_idx", None)
            if layer not in gates.config.layers:
                return base(module, query, key, value, *args, **kwargs)
            if kwargs.get("s_aux") is not None:
                raise UnsupportedModelError("gates cannot be trained on a model with attention sinks")
            seen[layer] = log_beta = gates(given_to(module), layer)
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            output = function(query, key, value, log_beta, scaling, kwargs.get("softcap"))
            return output.transpose(1, 2).contiguous(), None

        return attention

    @wraps(original)
    def get_interface(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return forget(original(self, name, default))

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]
        del held
