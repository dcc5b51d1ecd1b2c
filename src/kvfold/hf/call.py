"""One attention call as folding sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvfold.errors import UnsupportedModelError
from kvfold.stores.base import Expand


@dataclass
class AttentionCall:
    """One attention call as folding sees it; columns are the tail's."""

    module: torch.nn.Module
    new: int
    tail: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    valid: torch.Tensor
    """(batch, 1 or kv_heads, tail) bool"""
    positions: torch.Tensor
    real_tokens: tuple[int, ...]
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
        batch, _, new, _ = query.shape
        tail = key.shape[2]
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
            raise UnsupportedModelError(
                f"attention masks of type {type(attention_mask).__name__} (flex_attention) cannot be split between"
                " folded and exact tokens; load the model with attn_implementation='sdpa'"
            )
        mask = None
        if attention_mask is None:
            valid = torch.ones(batch, 1, tail, dtype=torch.bool, device=key.device)
        elif attention_mask.dim() == 2:
            valid = attention_mask[:, None, -tail:].bool()
        else:
            mask = attention_mask[..., -tail:]
            valid = visible_columns(mask)[:, 0, -1:, :].expand(batch, -1, -1)
        scaling = kwargs.get("scaling")
        return AttentionCall(
            module=module,
            new=new,
            tail=tail,
            scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            mask=mask,
            valid=valid,
            positions=_tail_positions(valid[:, 0], kwargs.get("position_ids"), new, length),
            real_tokens=tuple(int(count) for count in valid[:, 0].sum(-1)),
            expand=_expand_of(module),
        )

    def __post_init__(self) -> None:
        self.tail_positions = self.positions

    def tail_mask(self) -> torch.Tensor | None:
        """Mask over the tail's columns, (batch, 1, new, tail), or None where every query sees all of it."""
        if self.mask is not None:
            return self.mask
        tail_valid = self.valid[:, :, -self.tail :]
        mask = None
        if self.new > 1:
            last = torch.arange(self.tail - self.new, self.tail, device=self.valid.device)
            mask = (torch.arange(self.tail, device=self.valid.device) <= last[:, None])[None, None]
        if not bool(tail_valid.all()):
            padding = tail_valid[:, :1, None, :]
            mask = padding.expand(-1, -1, self.new, -1) if mask is None else mask & padding
        return mask

    def count_real(self, tokens: int) -> tuple[int, ...]:
        """Real tokens of each row among the first `tokens`."""
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
    own = position_ids.to(valid.device).long().expand(batch, -1)
    if new > 1 and bool((own[:, 1:] - own[:, :-1] == 1).all()):
        return last - plain
    after = valid.flip(1).cumsum(1).flip(1) - 1
    return last - after.clamp_min(0)


def _expand_of(module: torch.nn.Module) -> Expand | None:
    """For multi-head latent attention: (rotary part, latent) to per-head keys and values."""
    expand_kv = getattr(module, "expand_kv", None)
    if expand_kv is None:
        return None
    dtype = next(module.parameters()).dtype

    def expand(rotary: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand_kv(latent.to(dtype), rotary.to(dtype))
        return keys, values

    return expand
