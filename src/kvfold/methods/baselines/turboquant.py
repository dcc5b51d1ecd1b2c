"""TurboQuant with one width for every channel (arXiv 2504.19874): rotate, code, store a norm; nothing evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.codecs.rotated import RotatedCode
from kvfold.methods.base import LayerView, Method, Needs, check_block
from kvfold.stores.base import Store
from kvfold.stores.rotated import RotatedLayout, RotatedStore
from kvfold.stores.tokenwise import padding_of, shifts_of


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """Random rotation and Lloyd-Max codes of every key and value.

    Parameters
    ----------
    bits : int
        Width of keys and values.
    variant : "mse" or "prod"
        "prod" spends one bit of a key's width on the signs of a random projection of what the other bits lose, which
        makes logits unbiased (and noisier). Values are averaged, not multiplied by: theirs are "mse" codes in both.
    bias : "in" or "out"
        "out" takes from the keys what RoPE makes of their mean before RoPE, which holds the bias of a key projection
        (Qwen2), and gives it back exactly at attention time. The paper's form is "in". A first token that is an
        attention sink lies far from that mean: its key is then coded more coarsely than "in".
    rotation : "hadamard" or "haar"
        Randomised Hadamard, or uniformly random as in the paper.
    block_tokens : int
        Generated tokens coded at a time, one block late (0: never).
    """

    name = "turboquant"
    paper = "TurboQuant, arXiv 2504.19874"

    bits: int = 4
    variant: Literal["mse", "prod"] = "mse"
    bias: Literal["in", "out"] = "in"
    rotation: Literal["hadamard", "haar"] = "hadamard"
    block_tokens: int = 64

    def __post_init__(self) -> None:
        least = 2 if self.variant == "prod" else 1
        if self.bits not in range(least, 9):
            raise ValueError(
                f"bits must be an integer from {least} to 8 for {self.variant!r}, got {self.bits!r}"
            )
        check_block("block_tokens", self.block_tokens)

    @property
    def needs(self) -> Needs:
        return Needs(rotary=self.bias == "out")

    @property
    def shortest(self) -> int:
        return 32

    @property
    def block(self) -> int:
        return self.block_tokens

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        return [self._encode(view) for view in views]

    def _encode(self, view: LayerView) -> Store:
        heads, key_dim, value_dim = view.keys.shape[1], view.keys.shape[-1], view.values.shape[-1]
        sketch = self.variant == "prod"
        key = RotatedCode(((self.bits - sketch, key_dim),), rotation=self.rotation, sketch=sketch)
        value = RotatedCode(((self.bits, value_dim),), rotation=self.rotation)
        layout = RotatedLayout(
            tokens=view.tokens,
            real_tokens=view.real_tokens,
            shifts=shifts_of(view.positions),
            kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            keys=(key,) * heads,
            values=(value,) * heads,
            turned=self.bias == "out" and view.rotary is not None,
        )
        extra = padding_of(view.valid)
        if self.bias == "out":
            extra["key_mean"] = mean_key(view)
        return RotatedStore.encode(view.keys, view.values, layout, extra, view.rotary)


def mean_key(view: LayerView) -> Tensor:
    """Mean key before RoPE, (batch, kv_heads, key_dim) in 16 bits; blocks of generated tokens share their prompt's."""
    if view.generated and view.previous is not None:
        store, rows = view.previous
        if isinstance(store, RotatedStore) and "key_mean" in store.buffers:
            mean = store.buffers["key_mean"]
            return mean if rows is None else mean[rows]
    keys = view.keys.float()
    if view.rotary is not None:
        keys = torch.stack([view.rotary.unrotate(row, where) for row, where in zip(keys, view.positions)])
    real = view.valid[..., None].float()
    mean = (keys * real).sum(2) / real.sum(2).clamp_min(1)
    return mean.to(
        torch.float16 if float(mean.abs().max()) < torch.finfo(torch.float16).max else torch.bfloat16
    )
