"""What a cache layer at fixed addresses is to transformers, whatever it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvfold.hf.call import expand_of
from kvfold.hf.layer import FoldedLayer
from kvfold.kernels.reference import Part, merge
from kvfold.stores.base import AttendContext


class NotFixedError(Exception):
    """The model, or the cache, cannot be decoded at fixed addresses; the message says why."""


class FixedAddresses(CacheLayerMixin):
    """A cache layer whose numbers of tokens lie in device memory, out of the host's sight.

    Parameters
    ----------
    source : FoldedLayer or DynamicSlidingWindowLayer
        Whose tokens it holds.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, source: Any):
        super().__init__()
        self.source = source
        self.is_initialized = True
        self._context: AttendContext | None = None
        self._call: dict[str, Any] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the addresses are fixed."""

    def get_seq_length(self) -> int:
        raise NotFixedError("its forward pass asks for the length of the cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotFixedError("its forward pass makes an attention mask of its own")

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def context(self, module: torch.nn.Module, query: Tensor, kwargs: dict[str, Any]) -> AttendContext:
        """What attention over a store takes from the model, learnt from the first call."""
        if self._context is None:
            scaling = kwargs.get("scaling")
            scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
            self._call = dict(
                module=module, scaling=scaling, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux")
            )
            rotary = self.source.rotary_of(module) if isinstance(self.source, FoldedLayer) else None
            self._context = AttendContext(scaling, kwargs.get("softcap"), expand_of(module), rotary)
        return self._context

    @staticmethod
    def merged(parts: list[Part], query: Tensor, sinks: Tensor | None) -> Part:
        """Attention over all parts, and the model's sinks if it has them."""
        if sinks is not None:
            lse = sinks.float().view(1, -1, 1).expand(query.shape[:3])
            parts = [*parts, (torch.zeros_like(parts[-1][0]), lse)]
        return merge(parts)
