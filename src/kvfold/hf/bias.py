"""The bias that a model's key projection adds to every key."""

from __future__ import annotations

import torch


def key_bias_of(module: torch.nn.Module, kv_heads: int, key_dim: int) -> torch.Tensor | None:
    """Bias of an attention module's `k_proj`, (kv_heads, key_dim), or None.

    None, too, where a norm lies between projection and cache, so that keys are not a sum with the bias, and where the
    parameter is not in memory (offloaded).
    """
    bias = getattr(getattr(module, "k_proj", None), "bias", None)
    if not isinstance(bias, torch.Tensor) or bias.is_meta or bias.numel() != kv_heads * key_dim:
        return None
    if any("norm" in name for name, _ in module.named_children()):
        return None
    return bias.detach().view(kv_heads, key_dim)
