"""Rotated codes on a GPU: rotate, normalise, quantise and pack in one launch over all rows and heads, in Triton."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton_channel_sums import tables_of, turned
from kvfold.kernels.triton_rotated_table import CHANNELS, GROUP, LEVELS, PLANE, ROWS, START, WIDTH, table

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode
    from kvfold.kernels.position_bias import Turns

_GROUP, _START, _CHANNELS, _WIDTH = map(tl.constexpr, (GROUP, START, CHANNELS, WIDTH))
_LEVELS, _PLANE, _ROWS = map(tl.constexpr, (LEVELS, PLANE, ROWS))


SHAPES = {16: (32, 16, 4), 32: (32, 16, 4), 64: (32, 32, 4), 128: (64, 16, 8), 256: (32, 16, 8)}
"""By padded channels: tokens of a program, channels multiplied at a time, warps. 128: fastest on an H200."""


@triton.jit
def _encode(
    x, order, shares, codes, norms, channels, rotations, levels, heads_table,
    constant, fine, crossed, coarse_cos, coarse_sin, coarse, heads, tokens, dim, code_bytes, scales, most_groups, row_stride, head_stride, token_stride,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, BYTES: tl.constexpr,
    BITS: tl.constexpr, UNIFORM: tl.constexpr, SEARCHED: tl.constexpr,
    PLANES: tl.constexpr, BY_GROUP: tl.constexpr, KEEP_NORM: tl.constexpr, ORDER: tl.constexpr, SHARES: tl.constexpr,
    CONSTANT: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen, channel = token < tokens, tl.arange(0, SIZE)
    facts = channels + head * _ROWS * SIZE
    group = tl.load(facts + _GROUP * SIZE + channel)
    start = tl.load(facts + _START * SIZE + channel)
    wide = tl.load(facts + _CHANNELS * SIZE + channel)
    book = tl.load(facts + _LEVELS * SIZE + channel)
    last = (1 << tl.load(facts + _WIDTH * SIZE + channel)) - 1
    rotation = tl.load(rotations + head * SIZE + channel).to(tl.pointer_type(tl.float32))
    count = tl.load(heads_table + head)

    # Channels run along the first axis, and lie next to each other in memory: Triton then gives neighbours to neighbouring
    # threads. They are taken in the order in which the code groups them; outside of the groups the rotation is 0.
    source = x + row * row_stride + head.to(tl.int64) * head_stride
    y = tl.zeros([SIZE, BLOCK], tl.float32)
    for begin in range(0, SIZE, STEP):
        part = begin + tl.arange(0, STEP)
        known, place = part < dim, part
        if ORDER:
            place = tl.load(order + tl.program_id(1).to(tl.int64) * dim + part, mask=known, other=0).to(
                tl.int32
            )
        here = known[:, None] & seen[None, :]
        piece = tl.load(
            source + token[None, :].to(tl.int64) * token_stride + place[:, None], mask=here, other=0.0
        ).to(tl.float32)
        if TURNED:
            cos, sin = coarse_cos + row * coarse * dim, coarse_sin + row * coarse * dim
            piece -= turned(
                fine, crossed, cos, sin, tl.program_id(1), token[None, :], place[:, None], here, dim
            )
        elif CONSTANT:
            taken = tl.load(constant + tl.program_id(1) * dim + place, mask=known, other=0.0)
            piece -= tl.where(here, taken[:, None], 0.0)
        inside = (
            (part[None, :] >= start[:, None])
            & (part[None, :] < (start + wide)[:, None])
            & (group >= 0)[:, None]
        )
        at = ((channel - start) * wide - start)[:, None] + part[None, :]
        y += tl.dot(tl.load(rotation[:, None] + at, mask=inside, other=0.0), piece, input_precision=PRECISION)

    total = tl.sqrt(tl.sum(y * y, 0))
    share = tl.sqrt(wide.to(tl.float32) / dim)
    if SHARES:
        given = shares + tl.program_id(1).to(tl.int64) * most_groups + group
        share = tl.load(given, mask=group >= 0, other=1.0).to(tl.float32)
    if BY_GROUP:
        length = tl.zeros([SIZE, BLOCK], tl.float32)
        for one in range(count):
            mine = (group == one)[:, None]
            length = tl.where(mine, tl.sqrt(tl.sum(tl.where(mine, y * y, 0.0), 0))[None, :], length)
    else:
        length = total[None, :] * share[:, None]
    unit = y / tl.maximum(length, 1e-30)

    if SEARCHED:
        # The last level below each number, then whether the next one is nearer.
        code = tl.zeros([SIZE, BLOCK], tl.int32)
        for step in tl.static_range(BITS):
            probe = code + (1 << (BITS - 1 - step))
            # Beyond the last level of a narrower code there is nothing to find.
            level = tl.load(levels + (book[:, None] + tl.minimum(probe, last[:, None])))
            code = tl.where((level < unit) & (probe <= last[:, None]), probe, code)
        below = tl.load(levels + (book[:, None] + code))
        above = tl.load(levels + (book[:, None] + tl.minimum(code + 1, last[:, None])))
        up = (unit > (below + above) * 0.5) & (code < last[:, None])
        code, level = tl.where(up, code + 1, code), tl.where(up, above, below)
    else:
        # Level by level: a load for each channel and level costs less than one for each number and bit.
        below = tl.load(levels + book)
        code, level = tl.zeros([SIZE, BLOCK], tl.int32), tl.zeros([SIZE, BLOCK], tl.float32) + below[:, None]
        for step in tl.static_range(1, 1 << BITS):
            above = tl.load(levels + book + tl.minimum(step, last))
            up = (unit > ((below + above) * 0.5)[:, None]) & ((step <= last) & (last < 255))[:, None]
            code, level = tl.where(up, step, code), tl.where(up, above[:, None], level)
            below = above
        if UNIFORM:  # 8 bits: the code less 127.5
            pace = tl.load(levels + book + last) / 127.5
            fine = tl.minimum(tl.maximum(tl.ceil(unit / pace[:, None] + 127.0), 0.0), 255.0)
            fine = tl.where(unit == unit, fine, 0.0)
            wide_code = (last == 255)[:, None]
            code = tl.where(wide_code, fine.to(tl.int32), code)
            level = tl.where(wide_code, (fine - 127.5) * pace[:, None], level)
    level = tl.where((group >= 0)[:, None], level, 0.0)

    out = (row * tokens + token) * scales + tl.load(heads_table + 2 * heads + head)
    if BY_GROUP:
        for one in range(count):
            mine = (group == one)[:, None]
            norm = tl.sqrt(tl.sum(tl.where(mine, y * y, 0.0), 0))
            if KEEP_NORM:
                norm = norm / tl.maximum(tl.sqrt(tl.sum(tl.where(mine, level * level, 0.0), 0)), 1e-30)
            tl.store(norms + out + one, norm, mask=seen)
    else:
        if KEEP_NORM:
            scaled = level * share[:, None]
            total = total / tl.maximum(tl.sqrt(tl.sum(scaled * scaled, 0)), 1e-30)
        tl.store(norms + out, total, mask=seen)

    # A byte is the sum of its codes' bits, each moved up: a product with a matrix of powers of two, exact in float16.
    byte = tl.arange(0, BYTES)
    packed = tl.zeros([BYTES, BLOCK], tl.float32)
    for index in tl.static_range(4):
        if PLANES >> index & 1:
            place = tl.load(facts + (_PLANE + index) * SIZE + channel)
            bits = (code >> (place & 15)[:, None]) & ((1 << (1 << index)) - 1)
            power = ((1 << (place >> 4 & 15)) & 255).to(tl.float16)
            moved = tl.where((place >> 8)[None, :] == byte[:, None], power[None, :], 0.0)
            packed += tl.dot(moved, bits.to(tl.float16))
    target = codes + (row * tokens + token[None, :]) * code_bytes + tl.load(heads_table + heads + head)
    own = byte < tl.load(heads_table + 3 * heads + head)
    tl.store(target + byte[:, None], packed.to(tl.uint8), mask=own[:, None] & seen[None, :])


def encode(
    x: Tensor,
    codes: tuple[RotatedCode, ...],
    shares: Tensor | None = None,
    order: Tensor | None = None,
    constant: Tensor | None = None,
    turn: Sequence[Turns] = (),
) -> tuple[Tensor, Tensor]:
    """Code vectors of several heads, as `kvfold.kernels.rotated_encode.encode_heads`; never waits for the device.

    `turn` has the turns of each row if the constant is turned.
    """
    rows, heads, tokens, dim = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    facts = table(codes, x.device)
    packed = torch.empty(rows, tokens, facts.code_bytes, dtype=torch.uint8, device=x.device)
    norms = torch.empty(rows, tokens, facts.scales, dtype=torch.float32, device=x.device)
    size = facts.channels.shape[-1]
    block, step, warps = SHAPES[size]
    # Levels are few, or even, but for widths from 5 to 7.
    searched = any(4 < width < 8 for width in facts.widths)
    most = max((width for width in facts.widths if searched or width < 8), default=0)
    fixed, tables = x, [x] * 4
    if constant is not None and turn:
        own = zip(*(tables_of(one, t) for one, t in zip(constant, turn, strict=True)), strict=True)
        tables = [tables[0] if rows == 1 else torch.stack(tables) for tables in own]
    elif constant is not None:
        fixed = constant.float().contiguous()
    _encode[(triton.cdiv(tokens, block), rows * heads)](
        x, x if order is None else order.contiguous(), x if shares is None else shares.contiguous(), packed, norms,
        facts.channels, facts.rotations, facts.levels, facts.heads,
        fixed, *tables, turn[0].coarse_cos.shape[0] if turn else 0, heads, tokens, dim, facts.code_bytes, facts.scales,
        0 if shares is None else shares.shape[-1], x.stride(0), x.stride(1), x.stride(2),
        BLOCK=block, SIZE=size, STEP=step, BYTES=max(16, triton.next_power_of_2(facts.most_bytes)),
        BITS=most, UNIFORM=8 in facts.widths, SEARCHED=searched, PLANES=facts.planes, BY_GROUP=codes[0].norms == "group", KEEP_NORM=codes[0].keep_norm,
        ORDER=order is not None, SHARES=shares is not None,
        CONSTANT=constant is not None, TURNED=constant is not None and len(turn) > 0, PRECISION="tf32x3", num_warps=warps,
    )  # fmt: skip
    return packed, norms
