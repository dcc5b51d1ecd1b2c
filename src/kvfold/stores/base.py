"""The store interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from kvfold.kernels.reference import Part, attend, merge
from kvfold.ledger import tensor_bytes

T = TypeVar("T")
Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""MLA: (keys (rows, 1, n, rope_dim), values (rows, 1, n, latent_dim)) -> per-head keys and values."""

_KINDS: dict[str, type[Store]] = {}


class Rotary(Protocol):
    """The model's own rotary embedding, as methods and stores see it.

    Attributes
    ----------
    scale : float
        Factor that the model puts on cosines and sines (YaRN); 1 for most.
    """

    scale: float

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x (..., tokens, head_dim) at positions (tokens,); float32."""

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`; float32."""

    def shared(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once for all layers of a step."""


@dataclass(frozen=True)
class AttendContext:
    """What attention over a store takes from the model rather than from the store's own bytes.

    Attributes
    ----------
    scaling : float
        Factor on the logits.
    softcap : float or None
    expand : callable or None
        For multi-head latent attention: turns a dequantised block into per-head keys and values.
    rotary : Rotary or None
    """

    scaling: float
    softcap: float | None = None
    expand: Expand | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True)
class Kept:
    """What one (row, KV head) of a store still holds, dequantised.

    Attributes
    ----------
    positions : (kept,) int64, logical index within the segment, in the store's own order
    keys, values : (kept, key_dim | value_dim) float32
    bias : (kept,) float32 or None
        Added to the token's logits, after scaling and capping.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None = None


class Store(ABC):
    """One folded segment (a prompt, or a block of generated tokens) of one layer.

    A store never changes once built: batch operations act on an index of rows that the cache keeps, and
    `crop` and `select` return new stores. Rows are batch rows at fold time.

    Attributes
    ----------
    kind : str
        Name in saved caches.
    purposes : mapping of str to str
        Ledger purpose of each tensor name.
    tokens : int
        Logical length of the segment, padding and evicted tokens included.
    real_tokens : tuple of int
        Real (unpadded) tokens of each row at fold time.
    """

    kind: ClassVar[str]
    purposes: ClassVar[Mapping[str, str]]
    tokens: int
    real_tokens: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            _KINDS[cls.kind] = cls

    @property
    def rows(self) -> int:
        """Batch rows held."""
        return len(self.real_tokens)

    @property
    def chooses(self) -> bool:
        """Whether a query reads only tokens that it chose by their scores: of scores that are nearly alike, roundings decide."""
        return False

    @abstractmethod
    def attend(self, query: torch.Tensor, rows: torch.Tensor | None, context: AttendContext) -> Part:
        """Attention of every query over all tokens of its row.

        Parameters
        ----------
        query : (batch, heads, queries, query_dim), post-RoPE
        rows : (batch,) int64 or None
            Store row of each batch row; None means the identity.
        context : AttendContext

        Returns
        -------
        (output (batch, heads, queries, value_dim) float32, log-sum-exp (batch, heads, queries) float32);
        output 0 and -inf where a row's head holds no token.
        """

    def attend_with_tail(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: AttendContext,
        before: Part | None,
        length: torch.Tensor | None = None,
    ) -> Part | None:
        """Attention over the store, over exact tokens after it and over what came before, in one go.

        Parameters
        ----------
        query : (batch, heads, queries, query_dim)
        key, value : (batch, kv_heads, tokens, key_dim | value_dim)
            Every query sees all of them; batch row i reads store row i.
        context : AttendContext
        before : Part or None
            Attention over yet other tokens.
        length : (1,) int64 or None
            Only so many of the exact tokens are there: read on the device, so that a CUDA graph can replay.

        Returns
        -------
        As `attend` (the output perhaps of the query's dtype), or None where only the parts can be had one by one.
        """
        return None

    def for_decoding(self) -> Store:
        """The same content in the form that attention of one query reads fastest where it is."""
        return self

    @abstractmethod
    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        """Dequantised content of one row and KV head; `rotary` is for stores that coded keys relative to RoPE."""

    @abstractmethod
    def crop(self, tokens: int) -> Store:
        """The same store without what lies at or after logical index `tokens`."""

    @abstractmethod
    def select(self, rows: torch.Tensor) -> Store:
        """A store of the given rows only (int64), in that order."""

    def join(self, following: Store) -> Store | None:
        """Make one segment of this and the one after it, if they share all constants; None if they do not."""
        return None

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor the store owns, by name."""

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """What `from_state` needs beside the tensors; JSON-able."""

    @classmethod
    @abstractmethod
    def from_state(cls, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Store:
        """Rebuild a store; raises ValueError where shapes and meta disagree."""

    def widths(self) -> list[dict[str, dict[int, int]]]:
        """For each KV head: how many tokens (row 0 ...) have which value width, and channels which key width.

        Returns
        -------
        list over KV heads of {"values": {bits: tokens}, "keys": {bits: channels}}, summed over rows.
        Stores of one precision report 16.
        """
        return [
            {
                "values": {16: sum(len(self.kept(row, head).positions) for row in range(self.rows))},
                "keys": {16: self.key_dim * self.rows},
            }
            for head in range(self.kv_heads)
        ]

    @property
    def derived(self) -> list[torch.Tensor]:
        """What attention derived from those tensors and the store keeps: tables of kernels.

        They are there once a kernel has run, nobody saves them, and no budget bounds them. What is made once for the process
        is not among them.
        """
        return []

    def ledger(self) -> dict[str, int]:
        """Bytes of `tensors` by purpose."""
        result: dict[str, int] = {}
        for name, tensor in self.tensors().items():
            purpose = self.purposes[name]
            result[purpose] = result.get(purpose, 0) + tensor_bytes(tensor)
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors`."""
        return sum(self.ledger().values())

    @property
    def full_bytes(self) -> int:
        """16-bit keys and values of the segment's real tokens."""
        return 2 * sum(self.real_tokens) * self.kv_heads * (self.key_dim + self.value_dim)

    def to(self, device: torch.device | str) -> Store:
        """A copy on another device (itself if already there)."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return self.from_state(moved, self.meta())


def attend_expanded(kept: Kept, query: torch.Tensor, context: AttendContext, block: int = 4096) -> Part:
    """Latent attention of query (heads, queries, dim): blocks of latents become per-head keys and values."""
    assert context.expand is not None
    parts = []
    for start in range(0, max(len(kept.positions), 1), block):
        span = slice(start, start + block)
        keys, values = context.expand(kept.keys[None, None, span], kept.values[None, None, span])
        parts.append(attend(query[None], keys, values, context.scaling, None, context.softcap))
    output, lse = merge(parts)
    return output[0], lse[0]


def store_from_state(kind: str, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Store:
    """Rebuild a saved store; raises ValueError for an unknown kind."""
    if kind not in _KINDS:
        raise ValueError(
            f"unknown store kind {kind!r}: this kvfold knows {', '.join(sorted(_KINDS))}; upgrade kvfold"
        )
    return _KINDS[kind].from_state(tensors, meta)
