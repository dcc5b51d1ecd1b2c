"""One method after another: the first says which tokens are kept, or makes them; the second says in which code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.methods.base import LayerView, Method, Needs
from kvfold.stores.base import Store


@dataclass(frozen=True, kw_only=True)
class Chain(Method):
    """`first >> then`, such as ``SnapKV(keep=0.2) >> BlockGTQ(bits=4)``.

    What `first` leaves of a head in 16 bits, `then` codes: the bytes are about the product of both shares, since the budget
    of `first` counts 16-bit tokens and `then` is told widths. No token is kept exact.

    Parameters
    ----------
    first : Method
        One that leaves tokens in 16 bits.
    then : Method
        One that can code any tokens (`Method.recodes`).

    Raises
    ------
    ValueError
        `then` cannot, or is a chain.
    """

    name = "chain"
    paper = "kvfold"

    first: Method
    then: Method

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.then.recodes:
            raise ValueError(
                f"{self.then.name} cannot code what another method keeps: use blockgtq or turboquant"
            )
        if getattr(self.then, "budget", None) is not None:
            raise ValueError(
                f"{self.then.name} comes second, so give it bits, and the budget to {self.first.name}"
            )
        if not self.first.leaves_tokens:
            raise ValueError(f"{self.first.name} leaves no tokens in 16 bits that another method could code")
        if getattr(self.first, "bits", 16) != 16:
            raise ValueError(f"{self.first.name} codes its tokens already: give it bits=16")

    @property
    def parts(self) -> tuple[Method, ...]:
        return self.first, self.then

    @property
    def granularity(self) -> Literal["layer", "window", "model"]:
        return self.first.granularity

    def complete(self, number: int, layers: int) -> bool:
        return self.first.complete(number, layers)

    @property
    def needs(self) -> Needs:
        return self.first.needs | self.then.needs

    @property
    def shortest(self) -> int:
        return max(self.first.shortest, self.then.shortest)

    @property
    def block(self) -> int:
        # A method that folds everything anew with each block would code codes.
        return 0 if self.first.refolds else self.first.block

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        self.first.check(tokens, kv_heads, key_dim, value_dim)

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        stores = self.first.fold(views)
        return [self.then.recode(store, view) for store, view in zip(stores, views, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.name, "first": self.first.to_dict(), "then": self.then.to_dict()}
