"""One attention call as folding sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvfold.errors import UnsupportedModelError
from kvfold.stores.base import Expand


@dataclass
class AttentionCall:
    """One attention call as folding sees it; columns are the tail's.

    What decode steps do not need is worked out when asked for: they are many, and each runs once for every layer.
    """

    module: torch.nn.Module
    batch: int
    new: int
    tail: int
    length: int
    """Logical tokens that the cache has seen, with this call's"""
    device: torch.device
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    """(batch or 1, 1 or heads, new, tail), bool or additive"""
    padding: torch.Tensor | None
    """(batch, 1, tail) bool, where the model gave a mask of tokens only"""
    position_ids: torch.Tensor | None
    expand: Expand | None

    @staticmethod
    def of(
        length: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: Any,
        kwargs: dict[str, Any],
    ) -> AttentionCall:
        batch, _, new, query_dim = query.shape
        tail = key.shape[2]
        mask = padding = None
        if isinstance(attention_mask, torch.Tensor):
            if attention_mask.dim() == 2:
                padding = attention_mask[:, None, -tail:].bool()
            else:
                mask = attention_mask[..., -tail:]
        elif attention_mask is not None:
            raise UnsupportedModelError(
                f"attention masks of type {type(attention_mask).__name__} (flex_attention) cannot be split between"
                " folded and exact tokens; load the model with attn_implementation='sdpa'"
            )
        scaling = kwargs.get("scaling")
        return AttentionCall(
            module=module,
            batch=batch,
            new=new,
            tail=tail,
            length=length,
            device=key.device,
            scaling=float(query_dim**-0.5 if scaling is None else scaling),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            mask=mask,
            padding=padding,
            position_ids=kwargs.get("position_ids"),
            expand=expand_of(module),
        )

    @property
    def first(self) -> bool:
        """Whether the cache had seen nothing before."""
        return self.length == self.new

    @cached_property
    def valid(self) -> torch.Tensor:
        """(batch, 1, tail) bool, False for padding."""
        if self.mask is not None:
            return visible_columns(self.mask)[:, 0, -1:, :].expand(self.batch, -1, -1)
        if self.padding is not None:
            return self.padding
        # Of stride 0: who asks can tell without waiting for the device that all are valid.
        return torch.ones(1, 1, 1, dtype=torch.bool, device=self.device).expand(self.batch, 1, self.tail)

    @cached_property
    def positions(self) -> torch.Tensor:
        """RoPE positions (batch, tail)."""
        return _tail_positions(self.valid[:, 0], self.position_ids, self.new, self.length)

    @cached_property
    def real_tokens(self) -> tuple[int, ...]:
        """Unpadded tokens of each row."""
        return self.count_real(self.tail)

    @cached_property
    def tail_mask(self) -> torch.Tensor | None:
        """Mask over the tail's columns, (batch, 1, new, tail), or None where every query sees all of it."""
        if self.mask is not None:
            everything = self.new == 1 and bool(visible_columns(self.mask).all())
            return None if everything else self.mask
        mask = None
        if self.new > 1:
            last = torch.arange(self.tail - self.new, self.tail, device=self.device)
            mask = (torch.arange(self.tail, device=self.device) <= last[:, None])[None, None]
        if self.padding is not None and not bool(self.padding.all()):
            padding = self.padding[:, :, None, :]
            mask = padding.expand(-1, -1, self.new, -1) if mask is None else mask & padding
        return mask

    def count_real(self, tokens: int) -> tuple[int, ...]:
        """Real tokens of each row among the first `tokens`."""
        if self.mask is None and self.padding is None:
            return (tokens,) * self.batch
        return tuple(int(count) for count in self.valid[:, 0, :tokens].sum(-1))


def visible_columns(mask: torch.Tensor) -> torch.Tensor:
    """Bool mask, True where a query may look, from a bool or additive mask of any shape."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _tail_positions(
    valid: torch.Tensor, position_ids: torch.Tensor | None, new: int, length: int
) -> torch.Tensor:
    """RoPE positions (batch, tail) of the tail, from those of the call's own tokens.

    Positions count real tokens where the call's own positions do (`generate`), and every token where they are a
    plain range (a bare forward pass).
    """
    batch, tail = valid.shape
    plain = torch.arange(tail - 1, -1, -1, device=valid.device).expand(batch, -1)
    if position_ids is None or position_ids.dim() != 2:
        return length - 1 - plain
    last = position_ids[:, -1:].to(valid.device).long().expand(batch, 1)
    after = (valid.flip(1).cumsum(1).flip(1) - 1).clamp_min(0)
    if new == 1:
        return last - after
    own = position_ids.to(valid.device).long().expand(batch, -1)
    return last - torch.where((own[:, 1:] - own[:, :-1] == 1).all(), plain, after)


def expand_of(module: torch.nn.Module) -> Expand | None:
    """For multi-head latent attention: (rotary part, latent) to per-head keys and values."""
    expand_kv = getattr(module, "expand_kv", None)
    if expand_kv is None:
        return None
    dtype = next(module.parameters()).dtype

    def expand(rotary: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand_kv(latent.to(dtype), rotary.to(dtype))
        return keys, values

    return expand
