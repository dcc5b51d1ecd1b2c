"""The Triton kernels of `pack_records`: a thread gathers the codes that a thread of the reading kernel will hold."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.codecs.fragments import TILE, TOKENS, tile_bytes
from kvfold.kernels.pack_records import Tokens
from kvfold.kernels.transfer import sent

_TOKENS = tl.constexpr(TOKENS)
RECORDS = 4
"""Records of a program."""
ADDRESS, STRIDE, COUNT, TO, SIZE, WIDTH, COLUMN, CHANNELS, NEIGHBOURS = range(9)
"""A tile: its row's address and stride, tokens, where its bytes begin, bytes of a record, width, place in the row"""
_STRIDE, _COUNT, _TO, _SIZE, _WIDTH, _COLUMN, _CHANNELS, _NEIGHBOURS = map(tl.constexpr, range(1, 9))
_FACTS = tl.constexpr(9)


@triton.jit
def _code(source, row, column, here, width, channels, neighbours):
    """Codes of a width at some columns of packed rows."""
    if neighbours:
        byte, shift = column * width // 8, column * width % 8
        code = tl.load(source + row + byte, mask=here, other=0).to(tl.uint32) >> shift.to(tl.uint32)
    else:
        # Planes of a power of two each, the widest first, which holds the low bits; a byte's codes lie `size` apart.
        wide = tl.where(width == 3, 2, width)
        size = channels * wide // 8
        byte, shift = column % size, column // size * wide
        code = tl.load(source + row + byte, mask=here, other=0).to(tl.uint32) >> shift.to(tl.uint32)
        if width == 3:
            narrow = channels // 8
            byte, shift = size + column % narrow, column // narrow
            high = tl.load(source + row + byte, mask=here, other=0).to(tl.uint32) >> shift.to(tl.uint32)
            code = code & 3 | (high & 1) << 2
    return code & ((1 << width) - 1).to(tl.uint32)


@triton.jit
def _tiles(records, tiles, KEYS: tl.constexpr, RECORDS: tl.constexpr):
    facts = tiles + tl.program_id(0) * _FACTS
    count, record = tl.load(facts + _COUNT), tl.program_id(1) * RECORDS
    if record * _TOKENS < count:
        source = tl.load(facts).to(tl.pointer_type(tl.uint8))
        stride, to, size = tl.load(facts + _STRIDE), tl.load(facts + _TO), tl.load(facts + _SIZE)
        width, column = tl.load(facts + _WIDTH).to(tl.int32), tl.load(facts + _COLUMN).to(tl.int32)
        channels, near = tl.load(facts + _CHANNELS).to(tl.int32), tl.load(facts + _NEIGHBOURS).to(tl.int32)
        # Threads along the last axis, so that each has the bytes of all its registers, two to a group, to itself.
        thread, group = tl.arange(0, RECORDS * 32), tl.arange(0, 4)[:, None]
        half, byte = tl.arange(0, 2)[None, :, None, None], tl.arange(0, 4)[None, None, :, None]
        own, lane = record + thread // 32, thread % 32
        if KEYS:  # mma.m16n8k16: rows are tokens, lane / 4 and 8 more; columns are channels
            token, channel = 8 * half + lane // 4 + byte * 0, 4 * (lane % 4) + byte
        else:  # m16n8k32: rows are channels; a token is where movmatrix leaves its weight
            token = 8 * (byte % 2) + 2 * (lane % 4) + byte // 2
            channel = 8 * half + lane // 4
        token += own * _TOKENS + 16 * group[:, :, None, None]
        row = token.to(tl.int64) * stride
        code = _code(source, row, column + channel, token < count, width, channels, near)
        # Records, and their parts, are whole words.
        out, here = records + (to + own * size) // 4, own * _TOKENS < count
        if width == 8:
            place = (group // 2 * 128 + group % 2 * 2)[:, :, None] + tl.arange(0, 2)[:, None] + 4 * lane
            _store(out + place, tl.sum(code << 8 * byte, 2), here)
        else:
            # Eight codes of each group, in nibbles.
            word = tl.sum(tl.sum(code << 4 * (4 * half + byte), 2), 1)
            if width == 4:
                _store(out + 4 * lane + group, word, here)
            elif width == 3:
                last = tl.sum(tl.where(group == 3, word, 0), 0)
                word |= (last[None, :] >> group & 0x11111111) << 3
                _store(out + tl.where(group == 2, 64 + lane, 2 * lane + group), word, here & (group < 3))
            elif width == 2:
                word = word << 2 * (group % 2)
                _store(out + 2 * lane, tl.sum(tl.where(group < 2, word, 0), 0), here)
                _store(out + 2 * lane + 1, tl.sum(tl.where(group < 2, 0, word), 0), here)
            else:
                _store(out + lane, tl.sum(word << group, 0), here)


@triton.jit
def _store(out, word, here):
    tl.store(out, word.to(tl.int32, bitcast=True), mask=here)


@triton.jit
def _numbers(records, rows, BYTES: tl.constexpr):
    """Numbers of BYTES each of one record: the one of token 16 i + 8 j + row at index 8 row + 2 i + j."""
    facts = rows + tl.program_id(0) * _FACTS
    count, record = tl.load(facts + _COUNT), tl.program_id(1)
    if record * _TOKENS < count:
        source = tl.load(facts).to(tl.pointer_type(tl.uint8))
        place = tl.arange(0, _TOKENS * BYTES)
        index = place // BYTES
        token = record * _TOKENS + 16 * (index % 8 // 2) + 8 * (index % 2) + index // 8
        at = source + token.to(tl.int64) * tl.load(facts + _STRIDE) + place % BYTES
        to = tl.load(facts + _TO) + record * tl.load(facts + _SIZE)
        tl.store(records + to + place, tl.load(at, mask=token < count, other=0))


def pack_records(runs: Sequence[Tokens], device: torch.device) -> Tensor:
    """As `kvfold.kernels.pack_records.pack_records`."""
    tables: tuple[list[list[int]], ...] = ([], [], [])
    begin = most = 0
    for run in runs:
        layout, to = run.layout, begin
        most = max(most, run.records)
        for number in run.numbers:
            tables[2].append([*number, run.count, to, layout.nbytes, 0, 0, 0, 0])
            to += layout.number_bytes
        for table, sources in zip(tables, (run.keys, (run.values,))):
            for address, stride, width, channels, neighbours in sources:
                for column in range(0, channels, TILE):
                    place = [width, column, channels, neighbours]
                    table.append([address, stride, run.count, to, layout.nbytes, *place])
                    to += tile_bytes(width)
        begin += run.records * layout.nbytes
    records = torch.empty(begin, dtype=torch.uint8, device=device)
    if not begin:
        return records
    every = np.array([row for table in tables for row in table])  # much faster than a tensor of lists
    every = sent(torch.from_numpy(every), device)
    keys, values, numbers = every.split([len(table) for table in tables])
    for table, of_keys in ((keys, True), (values, False)):
        if len(table):
            _tiles[(len(table), triton.cdiv(most, RECORDS))](
                records.view(torch.int32), table, KEYS=of_keys, RECORDS=RECORDS, num_warps=RECORDS
            )
    if len(numbers):
        width = runs[0].layout.number_bytes // TOKENS
        _numbers[(len(numbers), most)](records, numbers, BYTES=width, num_warps=1)
    return records
