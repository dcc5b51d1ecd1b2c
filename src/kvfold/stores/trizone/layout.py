"""Everything about a TriZone store that is not a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.codecs.packing import packed_bytes
from kvfold.stores.ragged import channel_dtype, position_dtype


@dataclass(frozen=True)
class Layout:
    """Everything about a TriZone store that is not a tensor.

    Attributes
    ----------
    value_widths, key_widths : tuple of int
        The widths in use above 0, ascending; 16 means stored as it is.
    value_group, key_group : int or None
        Channels (of a value) and kept tokens (of a key channel) that share a scale and minimum; None: all of them.
    tokens : int
    real_tokens : tuple of int
    key_dim, value_dim : int
    """

    value_widths: tuple[int, ...]
    key_widths: tuple[int, ...]
    value_group: int | None
    key_group: int | None
    tokens: int
    real_tokens: tuple[int, ...]
    key_dim: int
    value_dim: int

    def value_groups(self) -> list[slice]:
        """Channel ranges that share a scale."""
        step = self.value_group or self.value_dim
        return [slice(start, min(start + step, self.value_dim)) for start in range(0, self.value_dim, step)]

    def key_groups(self, tokens: int) -> int:
        """Scales of one key channel over `tokens` kept tokens."""
        if not tokens:
            return 0
        return -(-tokens // min(tokens, self.key_group or tokens))

    def value_bytes(self, width: int) -> int:
        """Bytes that one token's value row and its position take at a width (0: evicted)."""
        if width == 0:
            return 0
        position = position_dtype(self.tokens).itemsize
        if width == 16:
            return 2 * self.value_dim + position
        return packed_bytes(self.value_dim, width) + 4 * len(self.value_groups()) + position

    def key_bytes(self, width: int, channels: int, tokens: int) -> int:
        """Bytes of `channels` key channels of one width over `tokens` kept tokens."""
        if width == 0 or not channels:
            return 0
        if width == 16:
            return 2 * channels * tokens
        return tokens * packed_bytes(channels, width) + 4 * channels * self.key_groups(tokens)

    def fixed_bytes(self, heads: int) -> int:
        """Bytes of one row that do not depend on the allocation: channel order and counts."""
        order = self.key_dim * channel_dtype(self.key_dim).itemsize
        return heads * (order + 4 * (len(self.value_widths) + len(self.key_widths)))
