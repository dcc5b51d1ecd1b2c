"""What xKV keeps of a layer beside factors: its exact tokens, landmarks, and the chunks that those say least of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvfold.stores.lowrank import encode
from kvfold.stores.sixteen import narrow
from kvfold.stores.trizone import position_dtype

if TYPE_CHECKING:
    from kvfold.methods.xkv import XKV

TOKENS = 16384
"""Of which numbers in float32 are held at a time."""


def exact_rows(
    method: XKV, keys: Tensor, values: Tensor, coded: slice, chooses: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Buffers of a layer beside factors and bases.

    Parameters
    ----------
    method : XKV
    keys, values : (kv_heads, tokens, dim)
        Real tokens of one row.
    coded : slice
        Those in factors, a multiple of a chunk where the method chooses chunks.
    chooses : bool
        Whether the layer is the first that shares factors: with `choice="window"` only it has landmarks.
    dtype : torch.dtype
        Of 16 bits.

    References
    ----------
    ShadowKV (arXiv 2410.21465), algorithm 2.
    """
    real, heads, chunk = keys.shape[1], len(keys), method.chunk
    index = torch.arange(real - (coded.stop - coded.start), device=keys.device)
    index = torch.where(index < coded.start, index, index + (coded.stop - coded.start)).expand(heads, -1)
    parts: dict[str, Tensor] = {}
    if method.sparse_budget:
        found = []
        for some in keys[:, coded].split(max(TOKENS // chunk, 1) * chunk, 1):
            chunks = some.float().unflatten(1, (-1, chunk))
            mean = chunks.mean(2)
            found.append((mean, cosine_similarity(mean[:, :, None], chunks, dim=-1).amin(-1)))
        marks, alike = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        count = method.outliers_of(coded.stop - coded.start)
        outliers = alike.argsort(dim=-1, stable=True)[:, :count].sort(-1).values
        parts["outliers"] = outliers.to(position_dtype(max(marks.shape[1], 1)))
        inner = torch.arange(chunk, device=keys.device)
        index = torch.cat([index, coded.start + (outliers[..., None] * chunk + inner).flatten(1)], 1)
        if chooses or method.choice != "window":
            parts |= encode.landmarks(marks)
    for name, states in (("exact_keys", keys), ("exact_values", values)):
        parts[name] = narrow(states.gather(1, index[..., None].expand(-1, -1, states.shape[-1])), dtype)
    return parts
