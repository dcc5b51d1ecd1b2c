"""What a method is shown of a layer whose tokens it is to fold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.hf.bias import key_bias_of
from kvfold.hf.call import AttentionCall
from kvfold.methods.base import LayerView
from kvfold.methods.finite import check_finite

if TYPE_CHECKING:
    from kvfold.hf.layer import FoldedLayer


def view_of(
    layer: FoldedLayer,
    call: AttentionCall,
    tokens: int,
    real_tokens: tuple[int, ...],
    *queries: Tensor | None,
) -> LayerView:
    """The first `tokens` of a layer's tail, as its method folds them; what was observed of them is the caller's to add.

    Parameters
    ----------
    layer : FoldedLayer
    call : AttentionCall
        The last one over them.
    tokens : int
    real_tokens : tuple of int
        Of each row, padding left out.
    *queries : (batch, heads, n, query_dim) or None
        What the method will be shown beside them.

    Raises
    ------
    NonFiniteError
        Keys, values or queries hold NaN or infinity.
    KvfoldError
        The method keeps all text, and the cache was not told which tokens are.
    """
    assert layer.keys is not None and layer.values is not None
    keys, values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    if call.expand:
        keys, values = values, keys
    named = [("keys", keys), ("values", values)]
    named += [("queries", query) for query in queries if query is not None and query.numel()]
    check_finite(named, layer.layer_idx)
    view = LayerView(
        keys=keys,
        values=values,
        valid=call.valid[:, :, :tokens].expand(-1, keys.shape[1], -1),
        real_tokens=real_tokens,
        positions=call.positions[:, :tokens],
        scaling=call.scaling,
        softcap=call.softcap,
        gates=None if layer.gates is None else layer.gates[:, :, :tokens],
        text=_text(layer, call, tokens),
        layer_idx=layer.layer_idx,
        num_layers=layer.cache.num_layers,
        rotary=layer.rotary_of(call.module),
        key_bias=_key_bias(layer, call),
        expand=call.expand,
        previous=(layer.segments[-1].store, layer.segments[-1].rows) if layer.segments else None,
    )
    view.finite = True
    return view


def _key_bias(layer: FoldedLayer, call: AttentionCall) -> Tensor | None:
    """The bias in the keys, where the method works with it."""
    if not layer.cache.method.needs.rotary or call.expand:
        return None
    bias = key_bias_of(call.module, layer.kv_heads, layer.key_dim(call))
    return bias if bias is None or layer.keys is None else bias.to(layer.keys.device)


def _text(layer: FoldedLayer, call: AttentionCall, tokens: int) -> Tensor | None:
    """Which of the first `tokens` of the tail are text of a prompt, where the method asks."""
    method, told, start = layer.cache.method, layer.cache.text, layer.folded_tokens
    if not method.needs.text:
        return None
    if told is None:
        raise KvfoldError(
            f"{method.name} was told to keep all text, and this cache not which tokens are images: use"
            " kvfold.fold, kvfold.attach or kvfold.generate"
        )
    found = torch.zeros(call.batch, tokens, dtype=torch.bool, device=call.device)
    prompt = told[:, start : start + tokens].to(call.device)
    if prompt.shape[1]:  # beams are rows that it does not have
        found[:, : prompt.shape[1]] = prompt.repeat_interleave(call.batch // len(told), 0)
    return found & call.valid[:, 0, :tokens]
