"""A second pass of prompt tokens through a model, its attention left to whoever asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kvfold.errors import UnsupportedModelError
from kvfold.hf import bridge
from kvfold.hf.support import CACHE_KEYWORD, folds, stock_layers
from kvfold.methods.base import Answer


class Again:
    """Reads tokens of a prompt once more; `kvfold.methods.base.Again`.

    Parameters
    ----------
    model : transformers causal language model
    input_ids : (batch, tokens) int64
        The prompt.

    Raises
    ------
    UnsupportedModelError
        Some layers are not full attention: what they see in a second pass is not up to the caller.
    """

    def __init__(self, model: Any, input_ids: Tensor):
        if not all(folds(layer) for layer in stock_layers(model.config)):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers that are not full attention (sliding or linear), and the method reads"
                " the prompt a second time, which needs every layer's attention: for kvsculpt, leave out cascade=True and"
                " queries='repeat'"
            )
        self.model, self.input_ids = model, input_ids

    def __call__(self, index: Tensor, positions: Tensor, answer: Answer) -> None:
        ids = self.input_ids[:, index.to(self.input_ids.device)]
        cache = _Asking(answer, len(stock_layers(self.model.config)))
        try:
            with torch.no_grad():
                self.model(
                    input_ids=ids,
                    position_ids=positions.to(ids.device),
                    use_cache=True,
                    logits_to_keep=1,
                    **{CACHE_KEYWORD: cache},
                )
        finally:
            bridge.forget()
            bridge.uninstall(cache)


class _Asking(Cache):
    """Keeps nothing: every layer's attention is answered."""

    def __init__(self, answer: Answer, layers: int):
        self.layers: list[Any]
        super().__init__(layers=[])
        self.layers = [_Asked(self, answer, number) for number in range(layers)]


class _Asked(DynamicLayer):
    """Announces itself as the layer whose attention call comes next."""

    def __init__(self, cache: _Asking, answer: Answer, layer_idx: int):
        super().__init__()
        self.cache, self.answer, self.layer_idx = cache, answer, layer_idx
        self.tail = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.tail = key_states.shape[2]
        bridge.announce(self)
        return key_states, value_states

    def attention(
        self,
        base: Any,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        output = self.answer(self.layer_idx, query, key, value)
        return output.transpose(1, 2).contiguous().to(query.dtype), None
