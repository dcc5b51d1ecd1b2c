"""What is taken out of keys before they are coded, and given back at attention time without a byte a token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvfold.kernels.position_bias import in_few_planes
from kvfold.methods.base import LayerView
from kvfold.stores.rotated import RotatedStore

KeyBias = Literal["out", "mean", "in"]
"""Take out the bias of the model's key projection, the prompt's mean key before RoPE, or nothing."""
MEAN_OF = 1024
"""Tokens, evenly spread, that the mean is taken over: any constant is put back exactly, and more tokens hardly move it."""


def key_constant(view: LayerView, bias: KeyBias) -> Tensor | None:
    """The constant, (batch, kv_heads, key_dim) in 16 bits, in no more planes than kernels turn; generated tokens share their prompt's.

    A projection gives k = Wx + b, so that RoPE(k) = RoPE(Wx) + RoPE(b): the bias is the same for every token, and what is
    left of an attention sink's key is small, as that of any other. The mean lies far from such a key, and leaves more.
    """
    if bias == "in":
        return None
    if view.generated and view.previous is not None:
        store, rows = view.previous
        if isinstance(store, RotatedStore):
            mean = store.buffers.get("key_mean")
            return mean if mean is None or rows is None else mean[rows]
    if bias == "out":
        if view.key_bias is None:
            return None
        mean = view.key_bias.float().expand(len(view.keys), -1, -1)
    else:
        means = []
        for row, count in enumerate(view.real_tokens):
            some = slice(view.tokens - count, None, max(1, count // MEAN_OF))
            keys = view.keys[row, :, some].float()
            if view.rotary is not None:
                keys = view.rotary.unrotate(keys, view.positions[row, some])
            real = view.valid[row, :, some, None].float()
            means.append((keys * real).sum(1) / real.sum(1).clamp_min(1))
        mean = torch.stack(means)
    if view.rotary is not None:
        mean = in_few_planes(mean, view.rotary)
    narrow = float(mean.abs().max()) < torch.finfo(torch.float16).max
    return mean.to(torch.float16 if narrow else torch.bfloat16).contiguous()
