"""Sums over tokens of every channel, and of its square: what means, deviations and energies are made of.

A Triton kernel on a GPU (`triton_channel_sums.py`), which writes nothing as large as its input; elsewhere some tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.kernels import dense_decode
from kvfold.kernels.position_bias import turned_rows, turns

if TYPE_CHECKING:
    from kvfold.stores.base import Rotary

MAX_DIM = 256
"""Channels that the kernel takes."""
AT_A_TIME = 1024
"""Tokens of which there is a float32 copy."""


def spans(tokens: int) -> Iterator[slice]:
    """All tokens, so many at a time that their float32 copies are small beside a long prompt."""
    for start in range(0, tokens, AT_A_TIME):
        yield slice(start, min(start + AT_A_TIME, tokens))


def _serves(x: Tensor) -> bool:
    return dense_decode.problem(x.device) is None and x.shape[-1] <= MAX_DIM and x.numel() > 0


def channel_sums(
    x: Tensor,
    valid: Tensor,
    constant: Tensor | None = None,
    rotary: Rotary | None = None,
    shift: int = 0,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over the valid tokens of x less what is taken from it, and of its squares.

    Parameters
    ----------
    x : (kv_heads, tokens, dim)
    valid : (kv_heads, tokens) bool
    constant : (kv_heads, dim), optional
        Taken from x, turned by RoPE to each token's position if `rotary` is given.
    rotary : Rotary, optional
    shift : int
        RoPE position of index 0.
    centre : (kv_heads, dim), optional
        Taken from what is left.

    Returns
    -------
    (kv_heads, dim) float32, twice
    """
    if _serves(x):
        from kvfold.kernels import triton_channel_sums

        turn = None
        if constant is not None and rotary is not None:
            turn = turns(rotary, x.shape[-1], x.shape[1], shift, x.device)
        return triton_channel_sums.channel_sums(x, valid, constant, turn, centre)
    total, squares = x.new_zeros(2, x.shape[0], x.shape[2], dtype=torch.float32)
    for span in spans(x.shape[1]):
        part = less(x, span, constant, rotary, shift)
        if centre is not None:
            part = part - centre.float()[:, None]
        part = part * valid[:, span, None]
        total += part.sum(1)
        squares += part.square_().sum(1)
    return total, squares


def less(
    x: Tensor, span: slice | Tensor, constant: Tensor | None, rotary: Rotary | None, shift: int
) -> Tensor:
    """Some tokens of x less the constant (see `channel_sums`), float32."""
    part = x[:, span].float()
    if constant is None:
        return part
    if rotary is None:
        return part - constant.float()[:, None]
    return part - turned_rows(constant.float(), rotary, x.shape[1], shift, span)


def unturned_sum(x: Tensor, valid: Tensor, rotary: Rotary, shift: int) -> Tensor:
    """Sum over the valid tokens of x as it was before RoPE turned it.

    Parameters
    ----------
    x : (kv_heads, tokens, dim)
    valid : (kv_heads, tokens) bool
    rotary : Rotary
    shift : int
        RoPE position of index 0.

    Returns
    -------
    (kv_heads, dim) float32
    """
    if _serves(x):
        from kvfold.kernels import triton_channel_sums

        t = turns(rotary, x.shape[-1], x.shape[1], shift, x.device)
        return triton_channel_sums.unturned_sum(x, valid, t)
    total = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float32)
    for span in spans(x.shape[1]):
        positions = torch.arange(shift + span.start, shift + span.stop, device=x.device)
        total += (rotary.unrotate(x[:, span].float(), positions) * valid[:, span, None]).sum(1)
    return total
