"""What a method cannot fold of a model or of a prompt, said before any work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvfold.hf.support import cache_shape, caches_latent
from kvfold.methods.base import Method


def check_latent(method: Method, config: Any) -> None:
    """Refuse a method that cannot fold the latents which this model caches (UnsupportedModelError)."""
    if caches_latent(config):
        method.check_latent()


def check_lengths(method: Method, config: Any, lengths: Iterable[int]) -> None:
    """Refuse prompts of any of these numbers of real tokens that are folded, and not within the budget (BudgetError)."""
    shape = cache_shape(config)
    for tokens in sorted({*lengths}):
        if tokens > method.shortest:
            method.check(tokens, shape.kv_heads, shape.key_dim, shape.value_dim)


def check_prompt(method: Method, model: Any, prompt: Tensor, options: Mapping[str, Any]) -> None:
    """Refuse what `model.generate` is about to read into an empty cache, if it cannot be folded within the budget.

    Parameters
    ----------
    method : Method
    model : transformers causal language model
    prompt : (batch, tokens) int64 or (batch, tokens, hidden_size)
    options : mapping of str to Any
        The other arguments of `generate`.

    Raises
    ------
    BudgetError
        Where no mask tells of padding, `generate` finds it, and the cache itself refuses when its first layer is to attend.
    """
    mask = options.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == prompt.shape[:2]:
        check_lengths(method, model.config, (int(count) for count in mask.bool().sum(-1)))
    elif mask is None and prompt.dim() > 1 and not _padded(model, prompt, options):
        check_lengths(method, model.config, [prompt.shape[1]])


def _padded(model: Any, prompt: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether `generate` may take some tokens for padding."""
    configs = options.get("generation_config"), getattr(model, "generation_config", None)
    given = [options.get("pad_token_id"), *(getattr(config, "pad_token_id", None) for config in configs)]
    return prompt.dim() == 2 and any(bool((prompt == pad).any()) for pad in given if isinstance(pad, int))
