"""Graded tokens on a GPU, in Triton: what each would lose at every grade, and the codes of those that are kept.

Keys and values are read as they lie in the cache, brought into the frame's units in registers and never written out in
float32. One row of a batch a launch. `methods.rdkv` and `stores.graded` have the plain twins.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.graded import Books
from kvfold.kernels.transfer import sent
from kvfold.kernels.triton_channel_sums import tables_of, turned

if TYPE_CHECKING:
    from kvfold.kernels.position_bias import Turns

LOOP = tl.constexpr(4)
"""Codebooks of at most so many bits are tried level by level; others by a table of nearest levels."""
STEPS = tl.constexpr(16.0)
"""8-bit magnitudes: steps in an octave."""
_META = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SHAPES = {16: (32, 4), 32: (32, 4), 64: (32, 4), 128: (32, 4), 256: (16, 8)}
"""By padded channels: tokens of a program, warps."""
STEP = 16
"""Channels that are rotated at a time."""


@cache
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


# ---- what a token loses ----


@triton.jit
def _rotated(
    source, offset, here, mean, rotation, place, wanted, dim,
    BLOCK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Channels `place` (WIDE of them) of some values less their mean, rotated: (BLOCK, WIDE)."""
    w = tl.zeros([BLOCK, WIDE], tl.float32)
    for begin in range(0, DIM, STEP):
        part = begin + tl.arange(0, STEP)
        known = part < dim
        mask = here[:, None] & known[None, :]
        piece = tl.load(source + offset[:, None] + part[None, :], mask=mask, other=0.0).to(tl.float32)
        piece -= tl.load(mean + part, mask=known, other=0.0)[None, :]
        # w = rotation @ piece: the transpose is loaded.
        turn = tl.load(
            rotation + place[None, :] * dim + part[:, None], mask=known[:, None] & wanted[None, :], other=0.0
        )
        w = tl.dot(tl.where(mask, piece, 0.0), turn, w, input_precision="tf32x3")
    return w


@triton.jit
def _lost(z, levels, nearest, WIDTH: tl.constexpr, CELLS: tl.constexpr, REACH: tl.constexpr):
    """Squared error of the nearest level of a codebook that is symmetric about 0; without bits, of 0."""
    size = tl.abs(z)
    if WIDTH == 0:
        return size * size
    elif WIDTH <= LOOP:
        near = size - tl.load(levels + (1 << (WIDTH - 1)))
        least = near * near
        for index in tl.static_range(1, 1 << (WIDTH - 1)):
            near = size - tl.load(levels + (1 << (WIDTH - 1)) + index)
            least = tl.minimum(least, near * near)
        return least
    else:
        cell = tl.minimum((size * (CELLS / (2 * REACH))).to(tl.int32), CELLS // 2 - 1)
        near = size - tl.load(nearest + WIDTH * CELLS + CELLS // 2 + cell)
        return near * near


@triton.jit
def _next(x, BELOW: tl.constexpr):
    """The neighbouring 16-bit number, as `codecs.affine` steps."""
    raw = x.to(tl.int16, bitcast=True).to(tl.int32)
    order = tl.where(raw < 0, -(raw & 0x7FFF), raw) + (-1 if BELOW else 1)
    return tl.where(order < 0, -order | -0x8000, order).to(tl.int16).to(x.dtype, bitcast=True)


@triton.jit
def _between(piece, known, META: tl.constexpr):
    """Codes of 8 bits between each token's extremes, scale and minimum, as `codecs.affine.quantise` has them."""
    low = tl.min(tl.where(known, piece, float("inf")), 1)
    high = tl.max(tl.where(known, piece, float("-inf")), 1)
    least = low.to(META)
    least = tl.where(least.to(tl.float32) > low, _next(least, True), least).to(tl.float32)
    reach = high - least
    scale = (reach / 255).to(META)
    scale = tl.where(scale.to(tl.float32) * 255.5 < reach, _next(scale, False), scale).to(tl.float32)
    steps = (piece - least[:, None]) / tl.where(scale == 0, 1.0, scale)[:, None]
    return tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), 255.0), scale, least


@triton.jit
def _fine(piece, known, META: tl.constexpr):
    """Error of each element at 8 bits."""
    steps, scale, least = _between(piece, known, META)
    return tl.where(known, steps * scale[:, None] + least[:, None] - piece, 0.0)


@triton.jit
def _key_errors(
    keys, fine, crossed, coarse_cos, coarse_sin, mean, deviation, energy, weights, levels, nearest, errors,
    tokens, dim, grades, head_stride, token_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, GRADES: tl.constexpr, WIDTHS: tl.constexpr, TURNED: tl.constexpr, META: tl.constexpr,
    CELLS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token, channel, grade = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.arange(0, DIM),
        tl.arange(0, GRADES),
    )
    here, inside = token < tokens, channel < dim
    known = here[:, None] & inside[None, :]
    source = keys + head.to(tl.int64) * head_stride + token[:, None].to(tl.int64) * token_stride
    piece = tl.load(source + channel[None, :], mask=known, other=0.0).to(tl.float32)
    spread = tl.load(energy + head * dim + channel, mask=inside, other=0.0)
    lost = _fine(piece, known, META)
    out = errors + (head.to(tl.int64) * tokens + token) * (grades + 1)
    tl.store(out + grades, tl.sum(lost * lost * spread[None, :], 1), mask=here)

    if TURNED:
        piece -= turned(
            fine, crossed, coarse_cos, coarse_sin, head, token[:, None], channel[None, :], known, dim
        )
    z = piece - tl.load(mean + head * dim + channel, mask=inside, other=0.0)[None, :]
    z = z / tl.load(deviation + head * dim + channel, mask=inside, other=1.0)[None, :]
    # Of each width, from 0 on, the weights of the channels that have it at a grade.
    own, total = weights + head * 9 * grades * dim + channel, tl.zeros([BLOCK, GRADES], tl.float32)
    for width in tl.static_range(9):
        if (WIDTHS | 1) >> width & 1:
            lost = _lost(z, levels + width * 256, nearest, width, CELLS, REACH)
            for one in range(grades):
                weight = tl.load(own + (width * grades + one) * dim, mask=inside, other=0.0)
                part = tl.sum(lost * weight[None, :], 1)
                total += tl.where((grade == one)[None, :], part[:, None], 0.0)
    tl.store(out[:, None] + grade[None, :], total, mask=here[:, None] & (grade < grades)[None, :])


@triton.jit
def _value_errors(
    values, mean, rotation, unit, bits, levels, nearest, errors, tokens, dim, grades, head_stride, token_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, GRADES: tl.constexpr, STEP: tl.constexpr, WIDTHS: tl.constexpr, META: tl.constexpr,
    CELLS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token, channel, grade = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.arange(0, DIM),
        tl.arange(0, GRADES),
    )
    here, inside = token < tokens, channel < dim
    known = here[:, None] & inside[None, :]
    source = values + head.to(tl.int64) * head_stride + token[:, None].to(tl.int64) * token_stride
    piece = tl.load(source + channel[None, :], mask=known, other=0.0).to(tl.float32)
    lost = _fine(piece, known, META)
    out = errors + (head.to(tl.int64) * tokens + token) * (grades + 2)
    tl.store(out + grades, tl.sum(lost * lost, 1), mask=here)

    piece -= tl.load(mean + head * dim + channel, mask=inside, other=0.0)[None, :]
    piece = tl.where(known, piece, 0.0)
    spread = tl.sum(piece * piece, 1)
    tl.store(out + grades + 1, spread, mask=here)
    w = _rotated(
        values + head.to(tl.int64) * head_stride,
        token.to(tl.int64) * token_stride,
        here,
        mean + head * dim,
        rotation,
        channel,
        inside,
        dim,
        BLOCK,
        DIM,
        DIM,
        STEP,
    )
    _, size = _magnitude(tl.sum(w * w, 1), tl.load(unit + head), dim)
    w = w / size[:, None]
    own = tl.load(bits + head * grades + grade, mask=grade < grades, other=9).to(tl.int32)
    total = tl.where((own == 0)[None, :], spread[:, None], 0.0)
    rescale = spread / tl.maximum(tl.sum(w * w, 1), 1e-30)
    for width in tl.static_range(1, 9):
        if WIDTHS >> width & 1:
            part = _lost(w, levels + width * 256, nearest, width, CELLS, REACH)
            part = tl.sum(tl.where(inside[None, :], part, 0.0), 1) * rescale
            total += tl.where((own == width)[None, :], part[:, None], 0.0)
    tl.store(out[:, None] + grade[None, :], total, mask=here[:, None] & (grade < grades)[None, :])


@triton.jit
def _magnitude(energy, unit, dim):
    """8-bit magnitude of values of some energy, and what it stands for."""
    ratio = tl.maximum(tl.sqrt(energy / dim), 1e-12) / unit
    code = tl.minimum(tl.maximum(tl.floor(tl.log2(ratio) * STEPS + 128.5), 0.0), 255.0)
    return code, tl.exp2((code - 128) / STEPS) * unit


def key_errors(
    keys: Tensor,
    constant: Tensor | None,
    turn: Turns | None,
    mean: Tensor,
    deviation: Tensor,
    energy: Tensor,
    order: Tensor,
    counts: Tensor,
    widths: Sequence[int],
    books: Books,
    meta: torch.dtype,
) -> Tensor:
    """Squared error of each token's logits at every grade, and at 8 bits of its own.

    Parameters
    ----------
    keys : (kv_heads, tokens, dim)
    constant : (kv_heads, dim), optional
        Turned by RoPE to each token's position and taken from its key; with `turn`.
    mean, deviation : (kv_heads, dim)
    energy : (kv_heads, dim) float32
        Weight of a channel's squared error.
    order : (kv_heads, dim) int64
        Channels, most precise first.
    counts : (kv_heads, grades, widths)
        Channels of each width.
    widths : sequence of int
        Widest first.
    books : Books
    meta : torch.dtype
        Of the scales of tokens at 8 bits.

    Returns
    -------
    (kv_heads, tokens, grades + 1) float32
    """
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    heads, tokens, dim = keys.shape
    grades, deviation, energy = counts.shape[1], deviation.float().contiguous(), energy.contiguous()
    # The place of a channel in the order tells its width at each grade.
    place = torch.arange(dim, device=keys.device)
    kind = (place >= counts.cumsum(-1)[..., None]).sum(2)
    width = _sent((*widths, 0), keys.device)[kind]
    sensitivity = (energy * deviation.square()).gather(1, order)
    own = (width[:, None] == torch.arange(9, device=keys.device)[:, None, None]) * sensitivity[:, None, None]
    weights = torch.empty_like(own).scatter_(3, order[:, None, None].expand_as(own), own)
    turned_by = constant is not None and turn is not None
    tables = tables_of(constant, turn) if turned_by else [keys] * 4
    errors = torch.empty(heads, tokens, grades + 1, dtype=torch.float32, device=keys.device)
    size = max(16, triton.next_power_of_2(dim))
    block, warps = SHAPES[size]
    _key_errors[(triton.cdiv(tokens, block), heads)](
        keys, *tables, mean.float().contiguous(), deviation, energy, weights, books.levels, books.nearest, errors,
        tokens, dim, grades, *keys.stride()[:2],
        BLOCK=block, DIM=size, GRADES=triton.next_power_of_2(grades), WIDTHS=sum(1 << width for width in widths),
        TURNED=turned_by, META=_META[meta],
        CELLS=books.nearest.shape[1], REACH=books.reach, num_warps=warps,
    )  # fmt: skip
    return errors


def value_errors(
    values: Tensor,
    mean: Tensor,
    rotation: Tensor,
    unit: Tensor,
    bits: Tensor,
    widths: Sequence[int],
    books: Books,
    meta: torch.dtype,
) -> Tensor:
    """Squared error of each token's value at every grade, at 8 bits of its own, and its squared distance from the mean.

    Parameters
    ----------
    values : (kv_heads, tokens, dim)
    mean : (kv_heads, dim)
    rotation : (dim, dim) float32
    unit : (kv_heads,) float32
        Of the magnitudes.
    bits : (kv_heads, grades) uint8
    widths, books, meta
        As for `key_errors`.

    Returns
    -------
    (kv_heads, tokens, grades + 2) float32
    """
    values = values if values.stride(-1) == 1 else values.contiguous()
    (heads, tokens, dim), grades = values.shape, bits.shape[1]
    errors = torch.empty(heads, tokens, grades + 2, dtype=torch.float32, device=values.device)
    size = max(16, triton.next_power_of_2(dim))
    block, warps = SHAPES[size]
    _value_errors[(triton.cdiv(tokens, block), heads)](
        values, mean.float().contiguous(), rotation.contiguous(), unit.contiguous(), bits.contiguous(), books.levels,
        books.nearest, errors, tokens, dim, grades, *values.stride()[:2],
        BLOCK=block, DIM=size, GRADES=triton.next_power_of_2(grades), STEP=STEP,
        WIDTHS=sum(1 << width for width in widths), META=_META[meta],
        CELLS=books.nearest.shape[1], REACH=books.reach, num_warps=warps,
    )  # fmt: skip
    return errors


# ---- the codes of those that are kept ----


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
    number, magnitude = _magnitude(tl.sum(piece * piece, 1), tl.load(unit + head), dim)
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
                    _rotated(
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
    steps, scale, least = _between(piece, known, META)
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
                COLUMN=column, META=_META[meta], BLOCK=block, DIM=size, num_warps=warps,
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
