"""Logits of one constant vector turned to every position, read from no memory.

q . R(p + j) b = (R(-p) q) . (R(j) b): coarse steps turn the query, fine ones turn the constant, and a small
matrix product gives every position. Both sides below compose the same two turns, so that what folding took out of the
keys is what attention puts back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvfold.stores.base import Rotary

FINE = 128
"""Positions between coarse turns, at most: about the square root of a long prompt makes both sides small."""


def _turns(tokens: int, shift: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the coarse turns and of the fine ones."""
    fine = min(FINE, tokens)
    return torch.arange(shift, shift + tokens, fine, device=device), torch.arange(fine, device=device)


def turned_rows(vector: Tensor, rotary: Rotary, tokens: int, shift: int) -> Tensor:
    """The constant at every position.

    Parameters
    ----------
    vector : (kv_heads, key_dim) float32
    rotary : Rotary
    tokens : int
    shift : int
        RoPE position of index 0.

    Returns
    -------
    (kv_heads, tokens, key_dim) float32
    """
    heads, dim = vector.shape
    coarse, steps = _turns(tokens, shift, vector.device)
    fine = rotary.rotate(vector[:, None].expand(-1, len(steps), -1), steps)
    spread = fine[:, :, None].expand(-1, -1, len(coarse), -1).reshape(-1, len(coarse), dim)
    turned = rotary.rotate(spread, coarse).view(heads, len(steps), len(coarse), dim) / rotary.scale
    return turned.transpose(1, 2).reshape(heads, -1, dim)[:, :tokens]


def position_logits(query: Tensor, vector: Tensor, rotary: Rotary, tokens: int, shift: int) -> Tensor:
    """Products of queries with the constant at every position.

    Parameters
    ----------
    query : (kv_heads, n, key_dim) float32
    vector : (kv_heads, key_dim) float32
    rotary : Rotary
    tokens : int
    shift : int
        RoPE position of index 0.

    Returns
    -------
    (kv_heads, n, tokens) float32
    """
    heads, count, dim = query.shape
    if count > FINE:
        return query @ turned_rows(vector, rotary, tokens, shift).transpose(1, 2)
    coarse, steps = _turns(tokens, shift, query.device)
    fine = rotary.rotate(vector[:, None].expand(-1, len(steps), -1), steps)
    spread = query[:, :, None].expand(-1, -1, len(coarse), -1).reshape(heads * count, len(coarse), dim)
    turned = rotary.unrotate(spread, coarse).view(heads, count * len(coarse), dim) * rotary.scale
    return (turned @ fine.transpose(1, 2)).view(heads, count, -1)[..., :tokens]
