"""Attention that each key receives from all queries: column sums, without a matrix of queries by tokens.

A Triton kernel on a GPU (`triton_column_sums.py`); `plain` is its twin in torch, and serves everywhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.kernels import dense_decode
from kvfold.kernels.reference import column_mass

MAX_DIM = 256
"""Channels of a head that the kernel takes."""
ROWS_AT_A_TIME = 1024
"""Queries of which `plain` holds a mask."""


def problem(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernel cannot be used, or None.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
        Of queries and keys.
    dim : int
        Channels of a head.
    """
    if device.type != "cuda":
        return "no CUDA device"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is neither float16 nor bfloat16"
    if dim > MAX_DIM:
        return f"head_dim {dim} is larger than {MAX_DIM}"
    return dense_decode.problem(device)


def column_sums(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor | None = None,
    last: Tensor | None = None,
    softcap: float | None = None,
    other_lse: Tensor | None = None,
    squared: bool = False,
    kv_heads: int | None = None,
) -> Tensor:
    """Softmax weights, or their squares, summed over queries and over the query heads of each KV head.

    Parameters
    ----------
    query : (batch, heads, queries, key_dim)
    key : (batch, key_heads, tokens, key_dim)
    scaling : float
    valid : (batch, 1 or key_heads, tokens) bool, optional
        Tokens that can be seen.
    last : (batch, queries) int, optional
        Index of the last token that a query may see; -1 where it sees none. Without it, all see everything.
    softcap : float, optional
    other_lse : (batch, heads, queries) float32, optional
        Log-sum-exp of tokens outside `key` that share the softmax.
    squared : bool
    kv_heads : int, optional
        Heads of the result (default: key_heads; 1 where keys were expanded from one latent).

    Returns
    -------
    (batch, kv_heads, tokens) float32

    Raises
    ------
    ValueError
        Shapes disagree.
    """
    batch, heads, queries, dim = query.shape
    key_heads, tokens = key.shape[1:3]
    if key.shape[0] != batch or heads % key_heads or key.shape[3] != dim:
        raise ValueError(f"queries {tuple(query.shape)} and keys {tuple(key.shape)} disagree")
    if last is not None and last.shape != (batch, queries):
        raise ValueError(f"last {tuple(last.shape)} must be {(batch, queries)}")
    if valid is not None and valid.shape not in ((batch, 1, tokens), (batch, key_heads, tokens)):
        raise ValueError(f"valid {tuple(valid.shape)} must be ({batch}, 1 or {key_heads}, {tokens})")
    served = query.dtype == key.dtype and problem(query.device, key.dtype, dim) is None
    if served and query.numel() and key.numel():
        from kvfold.kernels import triton_column_sums

        sums = triton_column_sums.column_sums(
            query, key, scaling, valid, last, softcap or 0.0, other_lse, squared
        )
    else:
        sums = plain(query, key, scaling, valid, last, softcap, other_lse, squared)
    return sums if kv_heads is None else sums.view(batch, kv_heads, -1, tokens).sum(2)


def plain(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor | None = None,
    last: Tensor | None = None,
    softcap: float | None = None,
    other_lse: Tensor | None = None,
    squared: bool = False,
) -> Tensor:
    """As `column_sums`, one key head and some queries at a time, in torch."""
    heads, key_heads = query.shape[1], key.shape[1]
    if key_heads > 1:
        groups = [slice(start, start + heads // key_heads) for start in range(0, heads, heads // key_heads)]
        parts = [
            plain(
                query[:, own],
                key[:, head : head + 1],
                scaling,
                valid if valid is None or valid.shape[1] == 1 else valid[:, head : head + 1],
                last,
                softcap,
                None if other_lse is None else other_lse[:, own],
                squared,
            )
            for head, own in enumerate(groups)
        ]
        return torch.cat(parts, 1)
    queries, tokens = query.shape[2], key.shape[2]
    if last is None:
        mask = None if valid is None else valid[:, :, None].expand(-1, -1, queries, -1)
        return column_mass(query, key, scaling, mask, softcap, other_lse, squared=squared)
    index = torch.arange(tokens, device=key.device)
    mass = torch.zeros(*key.shape[:3], device=key.device)
    for start in range(0, queries, ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        mask = (index <= last[:, part, None])[:, None]
        if valid is not None:
            mask = mask & valid[:, :, None]
        outside = None if other_lse is None else other_lse[:, :, part]
        mass += column_mass(query[:, :, part], key, scaling, mask, softcap, outside, squared=squared)
    return mass
