"""How much each token matters: weights that methods share, all per KV head and per row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from kvfold.kernels.channel_sums import channel_sums
from kvfold.kernels.column_sums import column_sums
from kvfold.methods.base import LayerView
from kvfold.stores.tokenwise import shifts_of


def keys_for_scores(view: LayerView) -> Tensor:
    """Keys as queries meet them: expanded per head where the cache holds latents."""
    return view.expand(view.keys, view.values)[0] if view.expand is not None else view.keys


def window_mass(view: LayerView, window: int, normalise: bool, squared: bool = False) -> Tensor:
    """Attention that the newest queries pay to each token.

    Parameters
    ----------
    view : LayerView
        With `queries`.
    window : int
        Newest queries used.
    normalise : bool
        Divide by the number of window queries that can see the token, so that the newest tokens, which few see,
        are not undervalued (RDKV's released scoring; SnapKV does not).
    squared : bool
        Sum the squares of the attention weights.

    Returns
    -------
    (batch, kv_heads, tokens) float32, 0 for invalid tokens.
    """
    assert view.queries is not None
    queries = view.queries[:, :, -window:]
    count, tokens = queries.shape[2], view.tokens
    real = view.valid.any(1)[:, tokens - count :]
    last = torch.arange(tokens - count, tokens, device=queries.device).masked_fill(~real, -1)
    mass = column_sums(
        queries,
        keys_for_scores(view),
        view.scaling,
        view.valid,
        last,
        view.softcap,
        squared=squared,
        kv_heads=view.keys.shape[1],
    )
    if normalise:
        seen = real.flip(1).cumsum(1).flip(1)
        seen = torch.cat([seen[:, :1].expand(-1, tokens - count), seen], 1)
        mass = mass / seen[:, None].clamp_min(1)
    return mass


def all_mass(view: LayerView, normalise: bool) -> Tensor:
    """Attention that every query of the segment paid, (batch, kv_heads, tokens), raw or per query that saw it."""
    assert view.mass is not None and view.seen_by is not None
    return view.mass / view.seen_by[:, None].clamp_min(1) if normalise else view.mass


def query_energy(view: LayerView, window: int) -> Tensor:
    """Mean squared channel of the newest queries (or of those that weighed a generated block).

    Returns (batch, kv_heads, key_dim) float32.
    """
    batch, kv_heads, _, key_dim = view.keys.shape
    if view.queries is None:
        assert view.energy is not None
        return view.energy
    queries = view.queries[:, :, -window:, -key_dim:].float().square()
    real = view.valid.any(1)[:, -queries.shape[2] :].float()[:, None, :, None]
    total = (queries * real).reshape(batch, kv_heads, -1, key_dim).sum(2)
    group = view.queries.shape[1] // kv_heads
    return total / (real.sum((1, 2, 3)) * group).clamp_min(1)[:, None, None]


def sampled_energy(view: LayerView) -> Tensor:
    """Mean squared channel of the queries spread over the prompt, or of the newest where there are none.

    Returns (batch, kv_heads, key_dim) float32.
    """
    batch, heads, _, key_dim = view.keys.shape
    if view.sampled is None or view.sampled_index is None:
        return query_energy(view, view.tokens)
    real = view.valid.any(1)[:, view.sampled_index].float()[:, None, :, None]
    total = (view.sampled[..., -key_dim:].float().square() * real).reshape(batch, heads, -1, key_dim).sum(2)
    group = view.sampled.shape[1] // heads
    return total / (real.sum((1, 2, 3)) * group).clamp_min(1)[:, None, None]


def key_energy(view: LayerView, constant: Tensor | None = None) -> Tensor:
    """Mean squared key channel over valid tokens, (batch, kv_heads, key_dim) float32.

    constant : (batch, kv_heads, key_dim), optional
        Taken from the keys, turned by RoPE to their positions where the method works with it.
    """
    shifts = [0] * len(view.keys) if constant is None else shifts_of(view.positions)
    squares = [
        channel_sums(
            view.keys[row], view.valid[row], None if constant is None else constant[row], view.rotary, shift
        )[1]
        for row, shift in enumerate(shifts)
    ]
    return torch.stack(squares) / view.valid.sum(2).clamp_min(1)[..., None]


def smooth(
    scores: Tensor, valid: Tensor, kernel: int, mode: Literal["avg", "max"] = "avg", reflect: bool = True
) -> Tensor:
    """Pool scores over neighbouring tokens, stride 1, each row from its first valid token on.

    Parameters
    ----------
    scores : (batch, kv_heads, tokens) float32
    valid : (batch, kv_heads, tokens) bool
    kernel : int
        It shrinks on short prompts.
    mode : "avg" or "max"
    reflect : bool
        Mirror the ends (RDKV); otherwise they are padded with zeros (SnapKV).

    Returns
    -------
    (batch, kv_heads, tokens) float32, 0 where invalid.
    """
    pooled = torch.zeros_like(scores)
    # One value for all tokens needs no look at the device.
    firsts = [0] * len(scores) if valid.stride(-1) == 0 else valid.any(1).int().argmax(-1).tolist()
    for row, first in enumerate(firsts):
        part = scores[row, :, first:]
        size = min(kernel, 2 * part.shape[-1] - 1)
        half = (size - 1) // 2
        if half > 0:
            padded = pad(part[:, None], (half, half), mode="reflect" if reflect else "constant")
            pool = avg_pool1d if mode == "avg" else max_pool1d
            part = pool(padded, 2 * half + 1, 1)[:, 0]
        pooled[row, :, first:] = part
    return pooled * valid
