"""What of a low-rank store is not a tensor, and the codes of its vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvfold.codecs.rotated import RotatedCode

PARTS = ("key", "value")


@dataclass(frozen=True)
class Factor:
    """How one row's keys or values of a window are factored.

    Attributes
    ----------
    groups : tuple of (width, components)
        Width 16: not coded. Otherwise the token factors are `RotatedCode(groups, norms="group")`, and the basis is that of
        the rotated components.
    basis_bits : 8 or 16
    lost : float
        Share of the (weighted) squared norm that lies outside the basis, over the prompt that it was made for.
    """

    groups: tuple[tuple[int, int], ...]
    basis_bits: int
    lost: float

    @property
    def rank(self) -> int:
        """Components."""
        return sum(count for _, count in self.groups)

    @property
    def code(self) -> RotatedCode | None:
        """Of token factors; None if they are 16-bit."""
        return None if self.groups[0][0] == 16 else RotatedCode(self.groups, norms="group")

    def turned(self, components: Tensor) -> Tensor:
        """Components (..., rank), or columns of a basis, turned as those that are coded are."""
        return components if self.code is None else self.code.rotate(components)


@dataclass(frozen=True)
class LowRankRow:
    """What is not a tensor, for one row.

    Attributes
    ----------
    first : int
        Logical index of the first real token.
    shift : int
        RoPE position minus logical index.
    sinks, newest : int
        First and last real tokens kept exact. Those between them are in factors.
    layers : int
        Layers that share the factors.
    key, value : Factor
    """

    first: int
    shift: int
    sinks: int
    newest: int
    layers: int
    key: Factor
    value: Factor


@dataclass(frozen=True)
class LowRankLayout:
    """What is not a tensor.

    Attributes
    ----------
    tokens : int
        Logical length; a crop leaves the buffers as they are and hides what lies beyond.
    real_tokens : tuple of int
    kv_heads, key_dim, value_dim : int
    turned : bool
        Factors are of keys before RoPE.
    rows : tuple of LowRankRow
    chunk : int
        Tokens that share a landmark; 0: none has.
    selected : int
        Chunks that a query reads beside outliers and exact tokens.
    choice : "head", "layer" or "window"
        Who chooses chunks together: the queries of one KV head, of the layer, or the window's first layer for all.
    """

    tokens: int
    real_tokens: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    turned: bool
    rows: tuple[LowRankRow, ...]
    chunk: int = 0
    selected: int = 0
    choice: Literal["head", "layer", "window"] = "window"


def vector_code(dim: int) -> RotatedCode:
    """The code of basis rows: 8 bits, and a norm for each."""
    return RotatedCode(((8, dim),))


def landmark_code(dim: int) -> RotatedCode:
    """The code of landmarks: 4 bits, and a norm for each. They rank chunks, no more."""
    return RotatedCode(((4, dim),))
