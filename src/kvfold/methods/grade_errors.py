"""What RDKV's tokens would lose at each grade, measured on their own keys and values."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvfold.codecs.affine import dequantise, quantise
from kvfold.codecs.codebook import common_levels, decode, encode
from kvfold.kernels.channel_sums import spans
from kvfold.kernels.graded import Books, serves
from kvfold.kernels.position_bias import turns
from kvfold.methods.base import LayerView
from kvfold.stores.graded import Frame, GradedLayout, normal_keys, normal_values
from kvfold.stores.graded.frame import value_rotation

CELLS = 1 << 14
"""Cells of the table of nearest levels, over [-REACH, REACH]."""
REACH = 8.0


def squared_errors(
    view: LayerView, layout: GradedLayout, frame: Frame, row: int, energy: Tensor
) -> tuple[Tensor, Tensor]:
    """How far each value is from the mean, squared, and the measured squared output error of its token, before its weight.

    Returns
    -------
    (kv_heads, tokens) and (kv_heads, tokens, grades + 1) float32, fine last
    """
    keys, values = view.keys[row], view.values[row]
    tokens, meta, grades = keys.shape[1], frame.key_mean.dtype, frame.value_bits.shape[-1]
    if serves(keys.device, layout.key_dim, layout.value_dim, grades):
        return squared_errors_by_kernels(view, layout, frame, row, energy)
    sensitivity = (energy * frame.key_deviation[row].float().square()).gather(1, frame.order[row].long())
    counts, bits = frame.key_counts[row].long(), frame.value_bits[row].long()
    ends = counts.cumsum(-1)
    channel = torch.arange(layout.key_dim, device=keys.device)
    inside = []
    for index, width in enumerate((*layout.widths, 0)):
        start = ends[..., index - 1] if index else torch.zeros_like(ends[..., 0])
        stop = ends[..., index] if width else torch.full_like(ends[..., 0], layout.key_dim)
        own = (channel >= start[..., None]) & (channel < stop[..., None])
        inside.append((own * sensitivity[:, None]).transpose(1, 2))
    spreads = energy.new_empty(len(keys), tokens)
    errors = energy.new_empty(len(keys), tokens, grades + 1)
    order = frame.order[row].long()[:, None]
    for span in spans(tokens):
        z = normal_keys(keys, frame, row, view.rotary, layout.shifts[row], span)
        z = z.gather(2, order.expand_as(z))
        w, _ = normal_values(values[:, span], frame, row)
        key, value = keys[:, span].float(), values[:, span].float()
        spread = (value - frame.value_mean[row][:, None].float()).square().sum(-1)
        magnitude = spread / w.square().sum(-1).clamp_min(1e-30)
        key_error = z.new_zeros(*z.shape[:2], grades)
        value_error = torch.zeros_like(key_error)
        for width, own in zip((*layout.widths, 0), inside, strict=True):
            key_error += _lost(z, width) @ own
            value_error += (_lost(w, width).sum(-1) * magnitude)[..., None] * (bits == width)[:, None]
        spreads[:, span], errors[:, span, :-1] = spread, spread[..., None] * key_error + value_error
        key_lost = (_as_fine(key, meta) - key).square() @ energy[..., None]
        value_lost = (_as_fine(value, meta) - value).square().sum(-1)
        errors[:, span, -1] = spread * key_lost[..., 0] + value_lost
    return spreads, errors


def squared_errors_by_kernels(
    view: LayerView, layout: GradedLayout, frame: Frame, row: int, energy: Tensor
) -> tuple[Tensor, Tensor]:
    """As `squared_errors`, each key and value read once."""
    from kvfold.kernels import triton_graded_errors

    keys, values = view.keys[row], view.values[row]
    shared = layout.widths, _books(layout.widths, keys.device), frame.key_mean.dtype
    turned = turn = None
    if frame.key_turned is not None:
        assert view.rotary is not None
        turned = frame.key_turned[row]
        turn = turns(view.rotary, layout.key_dim, keys.shape[1], layout.shifts[row], keys.device)
    errors = triton_graded_errors.key_errors(
        keys,
        turned,
        turn,
        frame.key_mean[row],
        frame.key_deviation[row],
        energy,
        frame.order[row].long(),
        frame.key_counts[row],
        *shared,
    )
    lost = triton_graded_errors.value_errors(
        values,
        frame.value_mean[row],
        value_rotation(layout.value_dim, keys.device),
        frame.value_magnitude[row],
        frame.value_bits[row],
        *shared,
    )
    return lost[..., -1], errors.mul_(lost[..., -1:]).add_(lost[..., :-1])


@cache
def _books(widths: tuple[int, ...], device: torch.device) -> Books:
    """Levels, and those nearest to each cell, of all widths."""
    levels, cells = torch.zeros(9, 256), torch.zeros(9, CELLS)
    for width in widths:
        levels[width, : 1 << width] = common_levels(width)
        cells[width] = _nearest_levels(width, torch.device("cpu"))
    return Books(levels.to(device), cells.to(device), REACH)


@cache
def _nearest_levels(width: int, device: torch.device) -> Tensor:
    """Level nearest to the middle of each cell."""
    middles = (torch.arange(CELLS) + 0.5) * (2 * REACH / CELLS) - REACH
    levels = common_levels(width)
    return decode(encode(middles, levels), levels).to(device)


def _lost(z: Tensor, width: int) -> Tensor:
    """Squared error of coding N(0, 1) data at a width.

    The level comes from a table: next to a boundary it may be the other neighbour, which is as far away.
    """
    if width == 0:
        return z.square()
    cells = (z + REACH).mul_(CELLS / (2 * REACH)).clamp_(0, CELLS - 1).int()
    levels = _nearest_levels(width, z.device).index_select(0, cells.flatten())
    return levels.view_as(z).sub_(z).square_()


def _as_fine(x: Tensor, meta: torch.dtype) -> Tensor:
    """What 8 bits between the extremes of each vector give back."""
    return dequantise(*quantise(x, 8, meta_dtype=meta))
