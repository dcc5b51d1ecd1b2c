"""Latent attention (MLA) over a low-rank store: the bases are expanded to heads, never the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.kernels.reference import Part, merge, soft_cap, softmax_part
from kvfold.kernels.reference import attend as attend_exact
from kvfold.stores.base import AttendContext
from kvfold.stores.lowrank.layout import PARTS

if TYPE_CHECKING:
    from kvfold.stores.lowrank.store import LowRankStore


def attend(store: LowRankStore, row: int, query: Tensor, context: AttendContext) -> Part:
    """Latent attention of query (heads, n, query_dim) with the basis expanded to heads, never the tokens.

    What expands latents and rotary parts is linear: a basis row expanded is a row of the heads' basis.
    """
    assert context.expand is not None
    parts = store.row(row)
    key_basis, value_basis = (store.basis(row, part) for part in PARTS)
    unit = torch.eye(store.key_dim, device=query.device)[None]
    # The mean is one more row of the basis, of which every token has one.
    value_basis = torch.cat([value_basis, store.mean(row, "value")], 1)
    latents, its_values = context.expand(
        value_basis.new_zeros(1, 1, value_basis.shape[1], store.key_dim), value_basis[None]
    )
    turned, _ = context.expand(unit[None], value_basis.new_zeros(1, 1, store.key_dim, store.value_dim))
    query = query * context.scaling
    by_latent, by_rotary = (query @ x[0].float().transpose(1, 2) for x in (latents, turned))
    found = []
    for index in store.tiles(row, None):
        factors = pad(store.factors(row, "value", index), (0, 1), value=1.0)
        keys = store.rebuilt(row, key_basis, index, context.rotary)
        scores = soft_cap(by_latent @ factors.t() + by_rotary @ keys.transpose(1, 2), context.softcap)
        hidden = store.hidden(row, index, slice(None))
        if hidden is not None:
            scores = scores.masked_fill(hidden[0], -torch.inf)
        found.append(softmax_part(scores, factors))
    output, lse = merge(found)
    far = output @ its_values[0].float(), lse
    if not parts["exact_keys"].shape[1]:
        return far
    keys, values = context.expand(parts["exact_keys"][None].float(), parts["exact_values"][None].float())
    visible = (store.near(row) < store.tokens)[None, None]
    near = attend_exact(
        query[None], keys, values, 1.0, visible.expand(-1, -1, query.shape[1], -1), context.softcap
    )
    return merge([far, (near[0][0], near[1][0])])
