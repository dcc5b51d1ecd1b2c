"""What Triton kernels over graded tokens share: values in the frame's units, codes between extremes, magnitudes."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

STEPS = tl.constexpr(16.0)
"""8-bit magnitudes: steps in an octave."""
METAS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SHAPES = {16: (32, 4), 32: (32, 4), 64: (32, 4), 128: (32, 4), 256: (16, 8)}
"""By padded channels: tokens of a program, warps."""
STEP = 16
"""Channels that are rotated at a time."""


@triton.jit
def rotated(
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
def _next(x, BELOW: tl.constexpr):
    """The neighbouring 16-bit number, as `codecs.affine` steps."""
    raw = x.to(tl.int16, bitcast=True).to(tl.int32)
    order = tl.where(raw < 0, -(raw & 0x7FFF), raw) + (-1 if BELOW else 1)
    return tl.where(order < 0, -order | -0x8000, order).to(tl.int16).to(x.dtype, bitcast=True)


@triton.jit
def between(piece, known, META: tl.constexpr):
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
def magnitude_of(energy, unit, dim):
    """8-bit magnitude of values of some energy, and what it stands for."""
    ratio = tl.maximum(tl.sqrt(energy / dim), 1e-12) / unit
    code = tl.minimum(tl.maximum(tl.floor(tl.log2(ratio) * STEPS + 128.5), 0.0), 255.0)
    return code, tl.exp2((code - 128) / STEPS) * unit
