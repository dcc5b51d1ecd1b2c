"""What Triton kernels read about the rotated codes of several heads: for every channel, where its levels and its bits are."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.codecs.packing import packed_bytes
from kvfold.kernels.dense_decode import problem
from kvfold.kernels.transfer import sent

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode

PLANES = (1, 2, 4, 8)
"""Widths of the planes that `packing.pack` cuts codes into"""
_PLANES_OF = {bits: [plane for plane in reversed(PLANES) if bits & plane] for bits in range(1, 9)}
GROUP, START, CHANNELS, WIDTH, LEVELS, PLANE = range(6)
"""Rows of `Table.channels`; from PLANE on one for each plane: byte << 8 | shift in the byte << 4 | shift in the code"""
ABSENT = 15 << 4
"""A plane that a channel does not have: the bits of any byte, moved out of it"""
ROWS = PLANE + len(PLANES)


MAX_DIM, MAX_QUERIES = 256, 64
"""Largest head dimension and number of queries of a KV head."""


def alike(codes: tuple[RotatedCode, ...]) -> bool:
    """Whether the heads' codes differ in their groups and rotations only, and have no sketch: what one launch serves."""
    return len({(code.norms, code.keep_norm, code.sketch) for code in codes}) == 1 and not codes[0].sketch


def serves(device: torch.device, codes: tuple[RotatedCode, ...], queries: int = 1) -> bool:
    """Whether the kernels can work there, on these codes."""
    fits = codes[0].dim <= MAX_DIM and queries <= MAX_QUERIES
    return device.type == "cuda" and fits and alike(codes) and problem(device) is None


class Table(NamedTuple):
    """Of all heads.

    Attributes
    ----------
    channels : (heads, ROWS, channels padded to a power of two) int32
        Padding is in group -1, and otherwise such that it can be read.
    rotations : (heads, channels padded) int64
        Addresses of the rotations.
    levels : (...) float32
        Of all codes; the row LEVELS says where a channel's begin.
    heads : (4, heads) int32
        Groups; where the codes of a head begin in those of a token; where its norms begin; bytes of its codes.
    planes : int
        Those that any code has, as bits.
    widths : frozenset of int
        Of all codes.
    code_bytes, scales : int
        Of one token.
    most_bytes : int
        Of one head's codes.
    kept : list of Tensor
        What the addresses point to.
    """

    channels: Tensor
    rotations: Tensor
    levels: Tensor
    heads: Tensor
    planes: int
    widths: frozenset[int]
    code_bytes: int
    scales: int
    most_bytes: int
    kept: list[Tensor]


@lru_cache(maxsize=256)
def table(codes: tuple[RotatedCode, ...], device: torch.device) -> Table:
    """Of the heads' codes; made without waiting for the device."""
    size = max(16, 1 << (codes[0].dim - 1).bit_length())
    kept: list[Tensor] = []
    books: list[Tensor] = []
    places: dict[tuple[int, int, bool], int] = {}
    channels = np.stack([_facts(code.groups, size) for code in codes])
    rotations = np.zeros((len(codes), size), dtype=np.int64)
    for head, code in enumerate(codes):
        start = 0
        for (width, count), tensors in zip(code.groups, code.tables(device), strict=True):
            rotation, own = (tensor.contiguous() for tensor in tensors)
            kept.append(rotation)
            book = width, count, len(code.groups) > 1
            if book not in places:
                places[book] = sum(levels.numel() for levels in books)
                books.append(own)
            channels[head, LEVELS, start : start + count] = places[book]
            rotations[head, start : start + count] = rotation.data_ptr()
            start += count
    heads = [
        [len(code.groups) for code in codes],
        list(accumulate((code.nbytes for code in codes), initial=0))[:-1],
        list(accumulate((code.scales for code in codes), initial=0))[:-1],
        [code.nbytes for code in codes],
    ]
    widths = [width for code in codes for width, _ in code.groups]
    return Table(
        sent(torch.from_numpy(channels), device),
        sent(torch.from_numpy(rotations), device),
        torch.cat(books),
        sent(torch.tensor(heads, dtype=torch.int32), device),
        planes=sum(plane for plane in PLANES if any(width & plane for width in widths)),
        widths=frozenset(widths),
        code_bytes=sum(code.nbytes for code in codes),
        scales=sum(code.scales for code in codes),
        most_bytes=max(code.nbytes for code in codes),
        kept=kept,
    )


@lru_cache(maxsize=1024)
def _facts(groups: tuple[tuple[int, int], ...], size: int) -> NDArray[np.int32]:
    """`Table.channels` of one head, but for the row LEVELS."""
    facts = np.zeros((ROWS, size), dtype=np.int32)
    facts[GROUP], facts[PLANE:] = -1, ABSENT
    start = byte = 0
    for group, (width, count) in enumerate(groups):
        mine = facts[:, start : start + count]
        mine[[GROUP, START, CHANNELS, WIDTH]] = np.array([[group], [start], [count], [width]])
        index, low = np.arange(count, dtype=np.int32), 0
        for plane in _PLANES_OF[width]:
            size_of = packed_bytes(count, plane)
            up = index // size_of * plane
            mine[PLANE + PLANES.index(plane)] = (byte + index % size_of) << 8 | up << 4 | low
            byte, low = byte + size_of, low + plane
        start += count
    return facts
