"""What each token of a prompt would lose at every grade, in Triton.

Keys and values are read as they lie in the cache, brought into the frame's units in registers and never written out in
float32. One row of a batch a launch. `methods.rdkv` has the plain twin.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.graded import Books
from kvfold.kernels.triton_channel_sums import tables_of, turned
from kvfold.kernels.triton_graded import METAS, SHAPES, STEP, between, magnitude_of, rotated

if TYPE_CHECKING:
    from kvfold.kernels.position_bias import Turns

LOOP = tl.constexpr(4)
"""Codebooks of at most so many bits are tried level by level; others by a table of nearest levels."""


@cache
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


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
def _own(states, head, tokens, dim, head_stride, token_stride, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """A program's tokens and channels, which of them there are, and their states (BLOCK, DIM) float32."""
    token, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    here, inside = token < tokens, channel < dim
    known = here[:, None] & inside[None, :]
    source = states + head.to(tl.int64) * head_stride + token[:, None].to(tl.int64) * token_stride
    return (
        token,
        channel,
        here,
        inside,
        known,
        tl.load(source + channel[None, :], mask=known, other=0.0).to(tl.float32),
    )


@triton.jit
def _fine(piece, known, META: tl.constexpr):
    """Error of each element at 8 bits."""
    steps, scale, least = between(piece, known, META)
    return tl.where(known, steps * scale[:, None] + least[:, None] - piece, 0.0)


@triton.jit
def _key_errors(
    keys, fine, crossed, coarse_cos, coarse_sin, mean, deviation, energy, weights, levels, nearest, errors,
    tokens, dim, grades, head_stride, token_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, GRADES: tl.constexpr, WIDTHS: tl.constexpr, TURNED: tl.constexpr, META: tl.constexpr,
    CELLS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    head, grade = tl.program_id(1), tl.arange(0, GRADES)
    token, channel, here, inside, known, piece = _own(
        keys, head, tokens, dim, head_stride, token_stride, BLOCK, DIM
    )
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
    head, grade = tl.program_id(1), tl.arange(0, GRADES)
    token, channel, here, inside, known, piece = _own(
        values, head, tokens, dim, head_stride, token_stride, BLOCK, DIM
    )
    lost = _fine(piece, known, META)
    out = errors + (head.to(tl.int64) * tokens + token) * (grades + 2)
    tl.store(out + grades, tl.sum(lost * lost, 1), mask=here)

    piece -= tl.load(mean + head * dim + channel, mask=inside, other=0.0)[None, :]
    piece = tl.where(known, piece, 0.0)
    spread = tl.sum(piece * piece, 1)
    tl.store(out + grades + 1, spread, mask=here)
    w = rotated(
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
    _, size = magnitude_of(tl.sum(w * w, 1), tl.load(unit + head), dim)
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
        TURNED=turned_by, META=METAS[meta],
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
        WIDTHS=sum(1 << width for width in widths), META=METAS[meta],
        CELLS=books.nearest.shape[1], REACH=books.reach, num_warps=warps,
    )  # fmt: skip
    return errors
