"""Records (`codecs.fragments`) from rows of packed codes, without a byte a code in between: a Triton kernel.

`fragments.pack_mixed` of the codes that `codecs.packing` and `codecs.lookup` unpack is the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.codecs.fragments import TILE, TOKENS, RecordFormat
from kvfold.kernels import dense_decode


class Codes(NamedTuple):
    """Where the packed codes of some channels of many tokens lie: a row of bytes for each token."""

    address: int
    """Of the first token's row"""
    stride: int
    """Bytes from one token's row to the next one's"""
    width: int
    channels: int
    """Of the row, whole tiles"""
    neighbours: bool = False
    """A byte holds neighbouring codes, as `codecs.lookup` packs some widths; otherwise as `codecs.packing`"""


class Numbers(NamedTuple):
    """Where one number of each of many tokens lies: a norm or a magnitude, as wide as the record has them."""

    address: int
    stride: int
    """Bytes"""


@dataclass(frozen=True)
class Tokens:
    """What becomes consecutive records of one format.

    Attributes
    ----------
    layout : RecordFormat
    count : int
        Tokens; what is missing in the last record is 0.
    keys : sequence of Codes
        One after the other; channels beyond them have no codes.
    values : Codes
    numbers : sequence of Numbers
        Norms, then the magnitude, of those that the format has.

    Raises
    ------
    ValueError
        They are not what the format says.
    """

    layout: RecordFormat
    count: int
    keys: Sequence[Codes]
    values: Codes
    numbers: Sequence[Numbers] = field(default=())

    def __post_init__(self) -> None:
        widths = [codes.width for codes in self.keys for _ in range(codes.channels // TILE)]
        widths += [0] * (len(self.layout.key_widths) - len(widths))
        values = self.values.width, self.values.channels
        numbers = self.layout.key_norms + self.layout.magnitudes
        if (*widths,) != self.layout.key_widths or values != (self.layout.value_width, self.layout.dim):
            raise ValueError(f"codes of {widths} and {values} bits are not those of {self.layout}")
        if len(self.numbers) != numbers:
            raise ValueError(f"{self.layout} has {numbers} numbers a token, not {len(self.numbers)}")

    @property
    def records(self) -> int:
        """Records of 64 tokens."""
        return -(-self.count // TOKENS)


def problem(device: torch.device) -> str | None:
    """None if the kernel can run there, else the reason why not."""
    return dense_decode.problem(device)


def pack_records(runs: Sequence[Tokens], device: torch.device) -> Tensor:
    """Records of all runs, one after the other; nothing waits for the device.

    Parameters
    ----------
    runs : sequence of Tokens
        All with numbers of one kind. What they point to must be on the device, and outlive the call.
    device : torch.device

    Returns
    -------
    (bytes,) uint8
    """
    from kvfold.kernels import triton_pack_records

    return triton_pack_records.pack_records(runs, device)
