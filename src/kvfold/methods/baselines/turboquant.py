"""TurboQuant with one width for every channel (arXiv 2504.19874): rotate, code, store a norm; nothing evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvfold.codecs.rotated import RotatedCode
from kvfold.methods.base import LayerView, Method, Needs, check_block
from kvfold.methods.keybias import KeyBias, key_constant
from kvfold.stores.base import Store
from kvfold.stores.coded import CodedStore
from kvfold.stores.rotated import RotatedLayout, RotatedStore
from kvfold.stores.tokenwise import padding_of, shifts_of


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """Random rotation and Lloyd-Max codes of every key and value.

    Parameters
    ----------
    bits : int
        Width of keys, and of values unless `value_bits` is given.
    value_bits : int, optional
        Width of values.
    variant : "mse" or "prod"
        "prod" spends one bit of a key's width on the signs of a random projection of what the other bits lose, which
        makes logits unbiased (and noisier). Values are averaged, not multiplied by: theirs are "mse" codes in both.
    bias : "in", "out" or "mean"
        "out" takes from the keys what RoPE makes of the bias of the model's key projection (Qwen2), where it has one, and
        gives it back exactly at attention time. "mean" takes their mean before RoPE instead, which any model has; a first
        token that is an attention sink lies far from it, and is then coded more coarsely. The paper's form is "in".
    sinks, recent : int
        First and newest tokens of a prompt kept exact.
    rotation : "hadamard" or "haar"
        Randomised Hadamard, or uniformly random as in the paper.
    block_tokens : int
        Generated tokens coded at a time, one block late (0: never).
    """

    name = "turboquant"
    paper = "TurboQuant, arXiv 2504.19874"
    recodes = True

    bits: int = 4
    value_bits: int | None = None
    variant: Literal["mse", "prod"] = "mse"
    bias: KeyBias = "in"
    sinks: int = 0
    recent: int = 0
    rotation: Literal["hadamard", "haar"] = "hadamard"
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 if self.variant == "prod" else 1
        if self.bits not in range(least, 9):
            raise ValueError(
                f"bits must be an integer from {least} to 8 for {self.variant!r}, got {self.bits!r}"
            )
        if self.value_bits is not None and self.value_bits not in range(1, 9):
            raise ValueError(f"value_bits must be an integer from 1 to 8, got {self.value_bits!r}")
        if min(self.sinks, self.recent) < 0:
            raise ValueError("sinks and recent must not be negative")
        check_block("block_tokens", self.block_tokens)

    @property
    def needs(self) -> Needs:
        return Needs(rotary=self.bias != "in")

    @property
    def shortest(self) -> int:
        return 32 + self.sinks + self.recent

    @property
    def block(self) -> int:
        return self.block_tokens

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        return [self._encode(view) for view in views]

    def recode(self, store: Store, view: LayerView) -> Store:
        heads = store.kv_heads
        key, value = self._codes(view)
        constant = key_constant(view, self.bias)
        constants = {} if constant is None else {"key_mean": constant}
        shifts = shifts_of(view.positions)
        return CodedStore.of(store, shifts, (key,) * heads, (value,) * heads, constants, view.rotary)

    def _codes(self, view: LayerView) -> tuple[RotatedCode, RotatedCode]:
        """Of keys and of values."""
        sketch = self.variant == "prod"
        key_dim, value_dim = view.keys.shape[-1], view.values.shape[-1]
        return (
            RotatedCode(((self.bits - sketch, key_dim),), rotation=self.rotation, sketch=sketch),
            RotatedCode(((self.value_bits or self.bits, value_dim),), rotation=self.rotation),
        )

    def _encode(self, view: LayerView) -> Store:
        tokens = view.tokens if view.generated else view.tokens - self.recent
        keys, values = view.keys[:, :, :tokens], view.values[:, :, :tokens]
        heads, key_dim, value_dim = keys.shape[1], keys.shape[-1], values.shape[-1]
        key, value = self._codes(view)
        constant = key_constant(view, self.bias)
        layout = RotatedLayout(
            tokens=tokens,
            real_tokens=tuple(max(count - (view.tokens - tokens), 0) for count in view.real_tokens),
            shifts=shifts_of(view.positions[:, :tokens]),
            kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            keys=(key,) * heads,
            values=(value,) * heads,
            turned=constant is not None and view.rotary is not None,
            sinks=0 if view.previous is not None else self.sinks,
        )
        extra = padding_of(view.valid[:, :, :tokens])
        if constant is not None:
            extra["key_mean"] = constant
        return RotatedStore.encode(keys, values, layout, extra, view.rotary)
