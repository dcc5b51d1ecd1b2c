"""What coded tokens are relative to, the widths of each grade, and the bytes that follow."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.rotation import hadamard
from kvfold.kernels.channel_sums import less
from kvfold.stores.base import Rotary
from kvfold.stores.ragged import channel_dtype, position_dtype

STEPS = 16
"""8-bit magnitudes: steps in an octave, centred on the head's own mean magnitude."""


@cache
def value_rotation(dim: int, device: torch.device) -> Tensor:
    """The rotation of values, the same for every head: (dim, dim) float32."""
    return hadamard(dim, seed=0).to(device)


@dataclass(frozen=True)
class Frame:
    """What coded tokens of each head are relative to; blocks of generated tokens share their prompt's.

    Attributes
    ----------
    key_turned : (rows, kv_heads, key_dim) or None
        Vector that RoPE turns to each token's position and that is taken from its key. None without RoPE.
    key_mean, key_deviation : (rows, kv_heads, key_dim)
    value_mean : (rows, kv_heads, value_dim)
    value_magnitude : (rows, kv_heads) float32
        Unit of the 8-bit magnitudes.
    order : (rows, kv_heads, key_dim) uint8
        Channels, most precise first; the same for every grade.
    key_counts : (rows, kv_heads, grades, key widths) int16
        Channels of each width, widest first.
    value_bits : (rows, kv_heads, grades) uint8
    """

    key_turned: Tensor | None
    key_mean: Tensor
    key_deviation: Tensor
    value_mean: Tensor
    value_magnitude: Tensor
    order: Tensor
    key_counts: Tensor
    value_bits: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def of_heads(self, heads: slice) -> Frame:
        """Of some KV heads only."""
        chosen: dict[str, Any] = {name: value[:, heads] for name, value in self.tensors().items()}
        return Frame(**{"key_turned": None, **chosen})

    @cached_property
    def grades(self) -> tuple[list[list[list[list[int]]]], list[list[list[int]]]]:
        """`key_counts` and `value_bits` as lists: fetched from the device once."""
        both = torch.cat([self.key_counts.long(), self.value_bits.long()[..., None]], -1)
        rows = both.tolist()
        counts = [[[grade[:-1] for grade in head] for head in row] for row in rows]
        return counts, [[[grade[-1] for grade in head] for head in row] for row in rows]

    def select(self, rows: Tensor | int) -> Frame:
        """Of the given rows only; of an int without the first dimension."""
        chosen: dict[str, Any] = {name: value[rows] for name, value in self.tensors().items()}
        return Frame(**{"key_turned": None, **chosen})


@dataclass(frozen=True)
class GradedLayout:
    """What is not a tensor.

    Attributes
    ----------
    widths : tuple of int
        Key widths above 0 in use, widest first.
    tokens : int
        Logical length of the segment.
    real_tokens : tuple of int
    shifts : tuple of int
        RoPE position minus logical index, for each row.
    key_dim, value_dim : int
    """

    widths: tuple[int, ...]
    tokens: int
    real_tokens: tuple[int, ...]
    shifts: tuple[int, ...]
    key_dim: int
    value_dim: int

    def token_bytes(self, key_counts: list[int], value_bits: int) -> int:
        """Bytes of one token of a grade: codes, position, magnitude."""
        keys = sum(packed_bytes(count, width) for count, width in zip(key_counts, self.widths) if count)
        values = packed_bytes(self.value_dim, value_bits) if value_bits else 0
        return keys + values + position_dtype(self.tokens).itemsize + 1

    @property
    def fine_bytes(self) -> int:
        """Bytes of one token at 8 bits with its own scales."""
        return self.key_dim + self.value_dim + 8 + position_dtype(self.tokens).itemsize

    @property
    def exact_bytes(self) -> int:
        """Bytes of one token kept as it is."""
        return 2 * (self.key_dim + self.value_dim) + position_dtype(self.tokens).itemsize

    def frame_bytes(self, heads: int, grades: int, turned: bool) -> int:
        """Bytes of one row's frame and token counts."""
        frame = 2 * self.key_dim * (3 if turned else 2) + 2 * self.value_dim + 4
        tables = self.key_dim * channel_dtype(self.key_dim).itemsize + grades * (2 * len(self.widths) + 1)
        return heads * (frame + tables + 4 * (grades + 2))


def normal_keys(
    keys: Tensor,
    frame: Frame,
    row: int,
    rotary: Rotary | None,
    shift: int,
    span: slice | Tensor | None = None,
) -> Tensor:
    """Keys (kv_heads, tokens, key_dim) of one row in the frame's units, or some of them: what the codebook codes, float32."""
    turned = None if frame.key_turned is None else frame.key_turned[row]
    span = slice(0, keys.shape[1]) if span is None else span
    z = less(keys, span, turned, None if turned is None else require(rotary), shift)
    return (z - frame.key_mean[row][:, None].float()) / frame.key_deviation[row][:, None].float()


def normal_values(values: Tensor, frame: Frame, row: int) -> tuple[Tensor, Tensor]:
    """Values (kv_heads, tokens, value_dim) of one row, centred, rotated and divided by their coded magnitude.

    Returns
    -------
    ((kv_heads, tokens, value_dim) float32, (kv_heads, tokens) uint8)
    """
    w = values.float() - frame.value_mean[row][:, None].float()
    w = w @ value_rotation(values.shape[-1], values.device).t()
    unit = frame.value_magnitude[row][:, None]
    ratio = w.square().mean(-1).sqrt().clamp_min(1e-12) / unit
    codes = (ratio.log2() * STEPS + 128).round().clamp(0, 255)
    magnitudes = torch.exp2((codes - 128) / STEPS) * unit
    return w / magnitudes[..., None], codes.to(torch.uint8)


@cache
def _magnitude_table(device: torch.device) -> Tensor:
    return torch.exp2((torch.arange(256, device=device) - 128) / STEPS)


def magnitudes(codes: Tensor) -> Tensor:
    """What 8-bit magnitude codes stand for, in the frame's unit: float32."""
    return _magnitude_table(codes.device).index_select(0, codes.int())


def require(rotary: Rotary | None) -> Rotary:
    """The rotary embedding that coded keys are relative to; raises ValueError where there is none."""
    if rotary is None:
        raise ValueError(
            "keys were coded relative to RoPE, but this model's rotary embedding cannot be found"
        )
    return rotary
