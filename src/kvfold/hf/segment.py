"""One folded prompt or block of a layer, as the rows of a batch read it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.stores.base import Rotary, Store


@dataclass(frozen=True)
class Segment:
    """A store, and which of its rows each batch row reads (None: its own)."""

    store: Store
    rows: Tensor | None = None
    generated: bool = False
    """A block of generated tokens, not a prompt."""

    def select(self, index: Tensor) -> Segment:
        """The segment seen from another choice of batch rows; the store itself is shared."""
        return replace(self, rows=index if self.rows is None else self.rows[index])

    def compact(self) -> Segment:
        """Drop store rows that no batch row reads any more."""
        if self.rows is None:
            return self
        used, rows = torch.unique(self.rows, return_inverse=True)
        if len(used) == self.store.rows:
            return self
        store = self.store.select(used)
        own = torch.equal(rows, torch.arange(store.rows, device=rows.device))
        return replace(self, store=store, rows=None if own else rows)

    def sources(self, batch: int) -> list[int]:
        """The store row that each batch row reads."""
        return list(range(batch)) if self.rows is None else self.rows.tolist()

    def real_tokens(self, batch: int) -> tuple[int, ...]:
        """Real tokens of each batch row."""
        return tuple(self.store.real_tokens[source] for source in self.sources(batch))

    def laid_out(self, keys: Tensor, values: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Every logical token of each batch row, decoded; evicted ones are zeros and not valid.

        Parameters
        ----------
        keys, values : (batch, kv_heads, any, key_dim | value_dim)
            Of what shape, dtype and device.
        rotary : Rotary or None

        Returns
        -------
        keys, values : (batch, kv_heads, tokens, key_dim | value_dim)
        valid : (batch, kv_heads, tokens) bool
        """
        batch, heads = keys.shape[:2]
        all_keys = keys.new_zeros(batch, heads, self.store.tokens, keys.shape[-1])
        all_values = values.new_zeros(batch, heads, self.store.tokens, values.shape[-1])
        valid = torch.zeros(batch, heads, self.store.tokens, dtype=torch.bool, device=keys.device)
        for row, source in enumerate(self.sources(batch)):
            for head in range(heads):
                kept = self.store.kept(source, head, rotary)
                all_keys[row, head, kept.positions] = kept.keys.to(keys.dtype)
                all_values[row, head, kept.positions] = kept.values.to(values.dtype)
                valid[row, head, kept.positions] = True
        return all_keys, all_values, valid
