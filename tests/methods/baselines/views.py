"""Layer views made by hand."""

from __future__ import annotations

import torch

from kvfold.methods import LayerView
from tests.stores.checks import Turn


def view(
    pads=(0,),
    tokens=60,
    kv_heads=2,
    group=2,
    key_dim=16,
    value_dim=24,
    window=8,
    seed=0,
    rotary=True,
    **options,
):
    """Random states; queries for the newest `window` tokens and every third of the prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(pads)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    heads = kv_heads * group
    valid = torch.arange(tokens) >= torch.tensor(pads)[:, None]
    index = torch.arange(0, tokens, 3)
    fields = dict(
        keys=draw(rows, kv_heads, tokens, key_dim),
        values=draw(rows, kv_heads, tokens, value_dim),
        valid=valid[:, None].expand(-1, kv_heads, -1),
        real_tokens=tuple(tokens - pad for pad in pads),
        positions=torch.arange(tokens) - torch.tensor(pads)[:, None],
        scaling=key_dim**-0.5 * 2,
        queries=draw(rows, heads, window, key_dim) * 1.5,
        sampled=draw(rows, heads, len(index), key_dim) * 1.5,
        sampled_index=index,
        rotary=Turn() if rotary else None,
    )
    return LayerView(**{**fields, **options})
