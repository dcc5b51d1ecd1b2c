"""How a GPU's blocks share a layer's records, so that all are read soonest: what the kernel of `records` is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvfold.codecs.fragments import TOKENS

if TYPE_CHECKING:
    from kvfold.kernels.records import Records, Run

BOOK = 32
"""Bytes of a tile's levels: 16 of width 4, 8, 4 and 2 of widths 3, 2 and 1, then the index of its group."""
MOST_GROUP = 16
"""Query heads of a KV head."""
BLOCK_TIME = 4.0
"""Microseconds of a block's start and end."""
WAIT_TIME = 1.5
"""Microseconds that a warp waits for a record, if it has no room to ask for it earlier."""
_MOST_SPLITS, _MOST_STAGES, _IN_FLIGHT = 128, 4, 65536


@dataclass(frozen=True)
class Plan:
    """How blocks share records.

    Attributes
    ----------
    blocks : int
    warps : int
        Of a block.
    ring_bytes : int
        A warp's room for records that are on their way.
    common : tuple of int
        Of the blocks, if they are alike: as a row of `work`.
    work : (blocks, 16) int32 or None
        What each block reads: (row, head), index among the blocks of those, their number, the first one's place among partial
        results; the same two for its run of records, their number, tokens of the last one; where the run begins and a record's
        size, in units of 16 bytes, widths of the tiles of keys in 4 bits each (two numbers); width of values, flags, the run's
        first place among those of all heads, its first token that is seen.
    arrived : (rows * kv_heads,) int32
        Zeros; counts blocks while a kernel runs. One stream at a time.
    """

    blocks: int
    warps: int
    ring_bytes: int
    common: tuple[int, ...]
    work: Tensor | None
    arrived: Tensor

    @property
    def numbers(self) -> list[int]:
        """What is not a tensor, as the operator takes it."""
        return [self.blocks, self.warps, self.ring_bytes, *self.common]


def make_plan(
    records: Records,
    group: int,
    planes: int = 0,
    multiprocessors: int | None = None,
    shared_bytes: int | None = None,
) -> Plan:
    """Share records among blocks so that all are read soonest.

    Parameters
    ----------
    records : Records
    group : int
        Query heads of a KV head.
    planes : int
        Of a turned vector, whose logits the kernel adds.
    multiprocessors, shared_bytes : int, optional
        By default those of the records' device.
    """
    device = records.data.device
    if multiprocessors is None or shared_bytes is None:
        properties = torch.cuda.get_device_properties(device)
        multiprocessors = properties.multi_processor_count
        shared_bytes = getattr(properties, "shared_memory_per_block_optin", 227 * 1024)
    sets, tiles = sets_of(group), records.dim // 16
    state = sets * 4 * (records.dim + 8) * 4  # what a warp leaves in its room at the end
    every = [(index, run.records, run.layout.nbytes) for index, own in enumerate(records.runs) for run in own]
    heads, counts, sizes = np.array(every or [(0, 0, 16)], dtype=np.int64).T
    best, cost = (1, 0, np.ones_like(counts)), math.inf
    for warps in warps_of(records.dim, sets):
        room = shared_bytes - 64 - warps * 32 - sets * tiles * 160 - (tiles + 1) * BOOK
        room = (room - planes * (264 + 32 * sets)) // warps // 128 * 128
        wanted = np.minimum(_MOST_STAGES, np.maximum(2, -(-_IN_FLIGHT // (warps * sizes))))
        ring = min(room, max(int((wanted * sizes).max()), state, -(-MOST_GROUP * _MOST_SPLITS * 4 // warps)))
        ring = -(-ring // 128) * 128
        if ring < max(int(sizes.max()), state):
            continue
        shared, taken = _shared(heads, counts, sizes, ring // sizes, warps, multiprocessors)
        if taken < cost:
            best, cost = (warps, ring, shared), taken
    warps, ring, shared = best
    blocks_of = iter(shared.tolist())
    work: list[list[int]] = []
    begin = place = 0
    for head, own in enumerate(records.runs):
        shares = [next(blocks_of) for _ in own] or [1]
        first = len(work)
        for run, blocks in zip(own or [None], shares, strict=True):
            whole = (0, 1, begin, 1, 0, 0, 1, 0, 0, 0) if run is None else _described(run, begin, place)
            number, tokens, *rest = whole
            for index in range(blocks):
                among = [head, len(work) - first, sum(shares), first]
                work.append([*among, index, blocks, number, tokens, *rest])
            begin += 0 if run is None else run.nbytes // 16
            place += 0 if run is None else run.records * TOKENS
    alike = len({*records.runs}) == 1 and len(records.runs[0]) == 1
    return Plan(
        len(work),
        warps,
        ring,
        tuple(work[0]),
        None if alike else torch.tensor(work, dtype=torch.int32).to(device),
        torch.zeros(len(records.runs), dtype=torch.int32, device=device),
    )


def _described(run: Run, begin: int, place: int) -> tuple[int, ...]:
    """A run as `Plan.work` has it: records, tokens of the last, begin, units, two of widths, width of values, flags, place, first."""
    layout = run.layout
    widths = sum(width << (4 * tile) for tile, width in enumerate(layout.key_widths))
    flags = (layout.key_norms > 0) | layout.magnitudes << 1 | layout.logarithms << 2
    last = (run.tokens - 1) % TOKENS + 1
    words = (begin, layout.nbytes // 16, widths & 0xFFFFFFFF, widths >> 32)
    return (run.records, last, *map(_signed, words), layout.value_width, flags, place, run.first)


def sets_of(group: int) -> int:
    """Sets of four query heads that the kernel is compiled for."""
    return 1 if group <= 4 else 2 if group <= 8 else 4


def warps_of(dim: int, sets: int) -> tuple[int, ...]:
    """Warps of a block that have registers enough."""
    most = (12 if sets == 1 else 8) if dim > 128 else {1: 16, 2: 12, 4: 8}[sets]
    return tuple(warps for warps in (4, 6, 8, 12, 16) if warps <= most)


def _shared(
    heads: np.ndarray,
    counts: np.ndarray,
    sizes: np.ndarray,
    stages: np.ndarray,
    warps: int,
    multiprocessors: int,
) -> tuple[np.ndarray, float]:
    """Blocks for each run, and the microseconds that all take (roughly, on an H200).

    A run is told by its head, its records, their bytes, and how many a warp has room for. A warp thinks about a record for
    a while, longer beside others; a multiprocessor reads 32 kB a microsecond. Blocks begin as others end.
    """
    one = np.maximum(warps * sizes / 32e3, (0.9 + sizes / 5600) * (0.55 + 0.45 * warps / 8))
    one += WAIT_TIME * (stages < 2)
    rounds = -(-counts // warps)  # of a run, if one block reads it
    best, cost, goal = np.ones_like(counts), math.inf, float(one.max())
    while True:
        shares = np.maximum(1, -(-rounds // np.maximum(1, (goal / one).astype(np.int64))))
        each = -(-rounds // shares) * one + BLOCK_TIME
        longest, blocks = float(each.max()), int(shares.sum())
        taken = longest if blocks <= multiprocessors else float(shares @ each) / multiprocessors + longest / 2
        if taken < cost and np.bincount(heads, shares).max() <= _MOST_SPLITS:
            best, cost = shares, taken
        if blocks == len(counts):
            return best, cost
        goal *= 1.05


def _signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x
