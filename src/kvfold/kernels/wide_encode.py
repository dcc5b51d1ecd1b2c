"""Codes of vectors that are turned already, of any number of channels, a norm for each group: in one launch on a GPU.

`RotatedCode.encode_rotated` is what the kernel computes, and serves everywhere else.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvfold.codecs.packing import packed_bytes
from kvfold.kernels.dense_decode import problem
from kvfold.kernels.transfer import sent

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode


def encode(y: Tensor, code: RotatedCode) -> tuple[Tensor, Tensor]:
    """Code turned vectors.

    Parameters
    ----------
    y : (..., dim) float32
    code : RotatedCode

    Returns
    -------
    codes : (..., nbytes) uint8
    norms : (..., scales) float16, or bfloat16 where float16 is too narrow

    Raises
    ------
    ValueError
        y holds NaN or infinity, or norms beyond float32.
    """
    if not serves(y.device, code) or y.numel() == 0:
        return code.encode_rotated(y)
    from kvfold.kernels import triton_wide_encode

    codes, norms = triton_wide_encode.encode(y.reshape(-1, code.dim), code)
    largest = float(norms.max())
    if not math.isfinite(largest):
        raise ValueError("y holds NaN or infinity; remove padding or masked positions before coding")
    narrow = torch.float16 if largest <= torch.finfo(torch.float16).max else torch.bfloat16
    return codes.view(*y.shape[:-1], -1), norms.to(narrow).view(*y.shape[:-1], -1)


def serves(device: torch.device, code: RotatedCode) -> bool:
    """Whether the kernel can work there, on this code."""
    own = code.norms == "group" or len(code.groups) == 1
    return device.type == "cuda" and own and not code.sketch and problem(device) is None


class Table(NamedTuple):
    """What the kernel reads about a code.

    Attributes
    ----------
    groups : (groups, 5) int32
        First channel, channels, width, first byte, and where the levels begin.
    levels, boundaries : (...) float32
        Of all groups; a boundary lies above the level of its index, and the last is infinity.
    """

    groups: Tensor
    levels: Tensor
    boundaries: Tensor


@lru_cache(maxsize=256)
def table(code: RotatedCode, device: torch.device) -> Table:
    """Of a code."""
    books = [levels for _, levels in code.tables(device)]
    facts, channel, byte, level = [], 0, 0, 0
    for (width, channels), book in zip(code.groups, books, strict=True):
        facts.append([channel, channels, width, byte, level])
        channel, byte, level = channel + channels, byte + packed_bytes(channels, width), level + len(book)
    beyond = torch.full((1,), torch.inf, device=device)
    boundaries = [torch.cat([(book[1:] + book[:-1]) / 2, beyond]) for book in books]
    return Table(
        sent(torch.tensor(facts, dtype=torch.int32), device), torch.cat(books), torch.cat(boundaries)
    )
