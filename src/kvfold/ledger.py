"""The byte ledger: what every live byte of a folded cache is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

KERNEL_TABLES = "kernel tables"
"""Purpose of what attention derived from a cache and keeps beside it (`Store.derived`)."""


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements."""
    return tensor.numel() * tensor.element_size()


def tensors_in(state: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings, lists and tuples."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that tensors keep alive: of a view all of its storage, a shared storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@dataclass(frozen=True)
class Ledger:
    """Bytes of a folded cache by purpose.

    What is made once for the process, whatever caches there are, is none of theirs: codebooks, rotations, compiled kernels.

    Attributes
    ----------
    by_purpose : mapping of str to int
        Bytes for each purpose ("codes", "scales", "minima", "positions", "order", "fp16 rows", "tail", ...).
        Their sum equals the storage bytes of the cache's live tensors. "kernel tables" are there once a kernel has read the
        cache: they belong to the total, but to no folded segment, and are not saved.
    full_bytes : int
        16-bit keys and values of the same real tokens, the bytes a full cache would take.
    folded_bytes : int
        The part of the total that belongs to folded segments (all but tail and stock layers).
    folded_full_bytes : int
        16-bit keys and values of the tokens in folded segments.
    tokens : int
        Logical tokens seen (with padding, the longest row).
    """

    by_purpose: Mapping[str, int] = field(default_factory=dict)
    full_bytes: int = 0
    folded_bytes: int = 0
    folded_full_bytes: int = 0
    tokens: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.by_purpose.values())

    @property
    def ratio(self) -> float:
        """Total bytes over the bytes of a full 16-bit cache (1.0 for an empty cache)."""
        return self.total / self.full_bytes if self.full_bytes else 1.0

    @property
    def folded_ratio(self) -> float:
        """Bytes of the folded segments over the 16-bit bytes of their tokens: what `keep` bounds."""
        return self.folded_bytes / self.folded_full_bytes if self.folded_full_bytes else 1.0

    @property
    def saved(self) -> Ledger:
        """Without what a loaded cache derives anew."""
        return replace(
            self, by_purpose={name: n for name, n in self.by_purpose.items() if name != KERNEL_TABLES}
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "by_purpose": dict(self.by_purpose),
            "total": self.total,
            "full_bytes": self.full_bytes,
            "ratio": self.ratio,
            "folded_bytes": self.folded_bytes,
            "folded_full_bytes": self.folded_full_bytes,
            "folded_ratio": self.folded_ratio,
            "tokens": self.tokens,
        }

    @staticmethod
    def merge(ledgers: Iterable[Ledger]) -> Ledger:
        """Sum ledgers of several layers; tokens are the most any of them saw."""
        by_purpose: dict[str, int] = {}
        full = folded = folded_full = tokens = 0
        for ledger in ledgers:
            for purpose, count in ledger.by_purpose.items():
                by_purpose[purpose] = by_purpose.get(purpose, 0) + count
            full += ledger.full_bytes
            folded += ledger.folded_bytes
            folded_full += ledger.folded_full_bytes
            tokens = max(tokens, ledger.tokens)
        return Ledger(by_purpose, full, folded, folded_full, tokens)
