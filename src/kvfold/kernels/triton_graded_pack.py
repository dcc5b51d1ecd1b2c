"""The codes of graded tokens that are kept, in Triton.

Keys and values are read as they lie in the cache, brought into the frame's units in registers and never written out in
float32. One row of a batch a launch. `stores.graded.encode` has the plain twin.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.transfer import sent
from kvfold.kernels.triton_channel_sums import tables_of, turned
from kvfold.kernels.triton_graded import METAS, SHAPES, STEP, between, magnitude_of, rotated

if TYPE_CHECKING:
    from kvfold.kernels.position_bias import Turns


@triton.jit
def _nearest_code(z, boundaries, WIDTH: tl.constexpr):
    """Boundaries below each number, as `codecs.codebook.encode` counts them."""
    code = tl.zeros(z.shape, tl.int32)
    for step in tl.static_range(WIDTH):
        probe = code + (1 << (WIDTH - 1 - step))
        code = tl.where(tl.load(boundaries + probe - 1) < z, probe, code)
    return code


@triton.jit
def _place(byte, part, size, PLANE: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Of a byte's codes the one of its `part`: neighbours share a byte, or codes `size` apart (`codecs.lookup.pack`)."""
    if NEIGHBOURS:
        place = byte * (8 // PLANE) + part
    else:
        place = byte + part * size
    return place


@triton.jit
def _pack_keys(
    keys, index, sections, fine, crossed, coarse_cos, coarse_sin, mean, deviation, order, boundaries, codes,
    dim, head_stride, token_stride,
    BLOCK: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, NEIGHBOURS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    facts = sections + tl.program_id(1) * 6
    head, first, count = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2)
    column, channels, begin = tl.load(facts + 3), tl.load(facts + 4), tl.load(facts + 5)
    one, byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BYTES)
    here = one < count
    token = tl.load(index + first + one, mask=here, other=0)
    source = keys + head * head_stride + token[:, None] * token_stride
    whole = channels * 0
    for power in tl.static_range(4):
        if WIDTH & (8 >> power):
            whole += (channels * (8 >> power) + 7) // 8
    out = codes + begin + one[:, None] * whole + byte[None, :]
    # Planes of a width one after the other, the widest first, which holds the low bits.
    for power in tl.static_range(4):
        if WIDTH & (8 >> power):
            size = (channels * (8 >> power) + 7) // 8
            packed = tl.zeros([BLOCK, BYTES], tl.int32)
            for part in range(1 << power):
                place = _place(byte, part, size, 8 >> power, NEIGHBOURS)
                inside = (byte < size) & (place < channels)
                channel = tl.load(order + head * dim + column + place, mask=inside, other=0)
                known = here[:, None] & inside[None, :]
                z = tl.load(source + channel[None, :], mask=known, other=0.0).to(tl.float32)
                if TURNED:
                    z -= turned(
                        fine,
                        crossed,
                        coarse_cos,
                        coarse_sin,
                        head,
                        token[:, None],
                        channel[None, :],
                        known,
                        dim,
                    )
                z -= tl.load(mean + head * dim + channel, mask=inside, other=0.0)[None, :]
                z = z / tl.load(deviation + head * dim + channel, mask=inside, other=1.0)[None, :]
                code = _nearest_code(z, boundaries, WIDTH) >> (WIDTH - WIDTH % (16 >> power))
                code = (code & ((1 << (8 >> power)) - 1)) << (part * (8 >> power))
                packed |= tl.where(known, code, 0)
            tl.store(out, packed.to(tl.uint8), mask=here[:, None] & (byte < size)[None, :])
            out += size


@triton.jit
def _pack_values(
    values, index, sections, mean, rotation, unit, boundaries, codes, magnitudes, dim, head_stride, token_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, NEIGHBOURS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    facts = sections + tl.program_id(1) * 5
    head, first, count = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2)
    begin, size_at = tl.load(facts + 3), tl.load(facts + 4)
    one, byte, channel = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.arange(0, BYTES),
        tl.arange(0, DIM),
    )
    here, within = one < count, channel < dim
    token = tl.load(index + first + one, mask=here, other=0)
    known = here[:, None] & within[None, :]
    source = values + head * head_stride + token[:, None] * token_stride + channel[None, :]
    piece = tl.load(source, mask=known, other=0.0).to(tl.float32)
    piece = tl.where(
        known, piece - tl.load(mean + head * dim + channel, mask=within, other=0.0)[None, :], 0.0
    )
    number, magnitude = magnitude_of(tl.sum(piece * piece, 1), tl.load(unit + head), dim)
    tl.store(magnitudes + size_at + one, number.to(tl.uint8), mask=here)
    whole = 0
    for power in tl.static_range(4):
        if WIDTH & (8 >> power):
            whole += (dim * (8 >> power) + 7) // 8
    out = codes + begin + one[:, None] * whole + byte[None, :]
    for power in tl.static_range(4):
        if WIDTH & (8 >> power):
            size = (dim * (8 >> power) + 7) // 8
            packed = tl.zeros([BLOCK, BYTES], tl.int32)
            for part in range(1 << power):
                place = _place(byte, part, size, 8 >> power, NEIGHBOURS)
                inside = (byte < size) & (place < dim)
                z = (
                    rotated(
                        values + head * head_stride,
                        token * token_stride,
                        here,
                        mean + head * dim,
                        rotation,
                        place,
                        inside,
                        dim,
                        BLOCK,
                        DIM,
                        BYTES,
                        STEP,
                    )
                    / magnitude[:, None]
                )
                code = _nearest_code(z, boundaries, WIDTH) >> (WIDTH - WIDTH % (16 >> power))
                code = (code & ((1 << (8 >> power)) - 1)) << (part * (8 >> power))
                packed |= tl.where(inside[None, :], code, 0)
            tl.store(out, packed.to(tl.uint8), mask=here[:, None] & (byte < size)[None, :])
            out += size


@triton.jit
def _pack_fine(
    states, heads, tokens, codes, scales, count, dim, head_stride, token_stride,
    COLUMN: tl.constexpr, META: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    one, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    here = one < count
    head, token = tl.load(heads + one, mask=here, other=0), tl.load(tokens + one, mask=here, other=0)
    known = here[:, None] & (channel < dim)[None, :]
    source = states + head[:, None] * head_stride + token[:, None] * token_stride + channel[None, :]
    piece = tl.load(source, mask=known, other=0.0).to(tl.float32)
    steps, scale, least = between(piece, known, META)
    tl.store(codes + one[:, None].to(tl.int64) * dim + channel[None, :], steps.to(tl.uint8), mask=known)
    tl.store(scales + one * 4 + COLUMN, scale.to(META), mask=here)
    tl.store(scales + one * 4 + COLUMN + 1, least.to(META), mask=here)


def pack_fine(
    keys: Tensor, values: Tensor, heads: Tensor, tokens: Tensor, meta: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Code some tokens at 8 bits between their own extremes.

    Parameters
    ----------
    keys, values : (kv_heads, tokens, key_dim | value_dim)
    heads, tokens : (n,) int64
        Which.
    meta : torch.dtype
        Of the scales.

    Returns
    -------
    (n, key_dim) uint8, (n, value_dim) uint8, (n, 4): scale and minimum of key and value
    """
    count, device = len(tokens), keys.device
    scales, found = torch.empty(count, 4, dtype=meta, device=device), []
    for column, states in ((0, keys), (2, values)):
        states = states if states.stride(-1) == 1 else states.contiguous()
        dim = states.shape[2]
        codes = torch.empty(count, dim, dtype=torch.uint8, device=device)
        size = max(16, triton.next_power_of_2(dim))
        block, warps = SHAPES[size]
        if count:
            _pack_fine[(triton.cdiv(count, block),)](
                states, heads, tokens, codes, scales, count, dim, *states.stride()[:2],
                COLUMN=column, META=METAS[meta], BLOCK=block, DIM=size, num_warps=warps,
            )  # fmt: skip
        found.append(codes)
    return found[0], found[1], scales


def pack_keys(
    keys: Tensor,
    index: Tensor,
    sections: Mapping[int, list[list[int]]],
    constant: Tensor | None,
    turn: Turns | None,
    mean: Tensor,
    deviation: Tensor,
    order: Tensor,
    boundaries: Mapping[int, Tensor],
    neighbours: Collection[int],
    codes: Tensor,
) -> None:
    """Write the key codes of some tokens.

    Parameters
    ----------
    keys, constant, turn, mean, deviation, order
        As for `key_errors`.
    index : (kept,) int64
        Tokens of all heads, one head after the other.
    sections : dict of int to lists of 6 int
        By width: head, first of its tokens in `index` and their number, first channel in `order` and their number, where
        in `codes` the packed rows begin.
    boundaries : mapping of int to Tensor
        By width, between levels.
    neighbours : collection of int
        Widths of which a byte holds neighbours, instead of `codecs.packing`'s codes.
    codes : (bytes,) uint8
        Written to.
    """
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    dim, device = keys.shape[2], keys.device
    turned_by = constant is not None and turn is not None
    tables = tables_of(constant, turn) if turned_by else [keys] * 4
    mean, deviation = mean.float().contiguous(), deviation.float().contiguous()
    for width, most, table in _moved(sections, device):
        _pack_keys[(triton.cdiv(most, 16), len(table))](
            keys, index, table, *tables, mean, deviation, order, boundaries[width], codes,
            dim, *keys.stride()[:2], BLOCK=16, BYTES=triton.next_power_of_2(_row_bytes(dim, width)), WIDTH=width,
            NEIGHBOURS=width in neighbours, TURNED=turned_by, num_warps=4,
        )  # fmt: skip


def pack_values(
    values: Tensor,
    index: Tensor,
    sections: Mapping[int, list[list[int]]],
    mean: Tensor,
    rotation: Tensor,
    unit: Tensor,
    boundaries: Mapping[int, Tensor],
    neighbours: Collection[int],
    codes: Tensor,
    magnitudes: Tensor,
) -> None:
    """Write the value codes and magnitudes of some tokens.

    Parameters
    ----------
    values, mean, rotation, unit
        As for `value_errors`.
    index, boundaries, neighbours, codes
        As for `pack_keys`.
    sections : dict of int to lists of 5 int
        By width, of 0 bits too: head, first of its tokens in `index` and their number, where their codes begin, and where
        their magnitudes do.
    magnitudes : (coded,) uint8
        Written to.
    """
    values = values if values.stride(-1) == 1 else values.contiguous()
    dim, device = values.shape[2], values.device
    mean, rotation, unit = mean.float().contiguous(), rotation.contiguous(), unit.contiguous()
    size = max(16, triton.next_power_of_2(dim))
    block, warps = SHAPES[size]
    for width, most, table in _moved(sections, device):
        row = max(16, triton.next_power_of_2(_row_bytes(dim, width)))
        _pack_values[(triton.cdiv(most, block), len(table))](
            values, index, table, mean, rotation, unit, boundaries.get(width, mean), codes, magnitudes,
            dim, *values.stride()[:2], BLOCK=block, DIM=size, BYTES=row, WIDTH=width, NEIGHBOURS=width in neighbours,
            STEP=STEP, num_warps=warps,
        )  # fmt: skip


def _row_bytes(channels: int, width: int) -> int:
    """Bytes of the widest plane of a row."""
    return max([-(-channels * plane // 8) for plane in (8, 4, 2, 1) if width & plane], default=1)


def _moved(
    sections: Mapping[int, list[list[int]]], device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """Each width, most tokens of a section, and the sections on the device: one transfer for all, not waited for."""
    if not sections:
        return
    table = np.array([section for own in sections.values() for section in own])
    table = sent(torch.from_numpy(table), device)
    parts = table.split([len(own) for own in sections.values()])
    for (width, own), part in zip(sections.items(), parts, strict=True):
        yield width, max(section[2] for section in own), part
