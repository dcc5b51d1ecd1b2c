"""Codes of tokens at their grades."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.codecs import lookup
from kvfold.codecs.affine import quantise
from kvfold.codecs.codebook import common_levels
from kvfold.codecs.codebook import encode as nearest
from kvfold.stores.base import Rotary
from kvfold.stores.graded.frame import Frame, GradedLayout, normal_keys, normal_values
from kvfold.stores.graded.sections import key_sections, value_sections
from kvfold.stores.ragged import position_dtype


def encode(
    keys: Tensor, values: Tensor, grades: Tensor, layout: GradedLayout, frame: Frame, rotary: Rotary | None
) -> dict[str, Tensor]:
    """Buffers of a `GradedStore`; arguments as for its `encode`."""
    rows, _, tokens = grades.shape
    count = frame.value_bits.shape[-1]
    half = keys.dtype if keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
    counts = torch.stack([(grades == grade).sum(-1) for grade in range(1, count + 3)], -1).int()
    sorted_tokens = torch.sort(grades, dim=-1, stable=True).indices
    key_counts, value_bits = frame.key_counts.tolist(), frame.value_bits.tolist()
    meta = torch.bfloat16 if frame.key_mean.dtype == torch.bfloat16 else torch.float16
    names = ["positions", "key_codes", "value_codes", "magnitudes"]
    names += ["fine_keys", "fine_values", "fine_scales", "exact_keys", "exact_values"]
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    host_counts = counts.tolist()
    for row in range(rows):
        z = normal_keys(keys[row], frame, row, rotary, layout.shifts[row])
        w, magnitudes = normal_values(values[row], frame, row)
        chosen = []
        for head, head_counts in enumerate(host_counts[row]):
            index = sorted_tokens[row, head, tokens - sum(head_counts) :]
            chosen.append(index)
            parts["positions"].append(index)
            coded, fine, exact = index.split([sum(head_counts[:-2]), *head_counts[-2:]])
            parts["magnitudes"].append(magnitudes[head, coded])
            key = quantise(keys[row, head, fine].float(), 8, meta_dtype=meta)
            value = quantise(values[row, head, fine].float(), 8, meta_dtype=meta)
            parts["fine_keys"].append(key.codes)
            parts["fine_values"].append(value.codes)
            parts["fine_scales"].append(torch.cat([key.scale, key.minimum, value.scale, value.minimum], 1))
            parts["exact_keys"].append(keys[row, head, exact].to(half))
            parts["exact_values"].append(values[row, head, exact].to(half))
        order = frame.order[row].long()
        for section in key_sections(layout.widths, host_counts[row], key_counts[row]):
            index = chosen[section.head][section.start : section.stop, None]
            channels = order[section.head, section.column : section.column + section.channels]
            parts["key_codes"].append(_code(z[section.head, index, channels], section.width))
        for section in value_sections(layout.value_dim, host_counts[row], value_bits[row]):
            index = chosen[section.head][section.start : section.stop]
            parts["value_codes"].append(_code(w[section.head, index], section.width))
    empty = keys.new_zeros(0, dtype=torch.uint8)
    buffers = {name: torch.cat(pieces) if pieces else empty for name, pieces in parts.items()}
    buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
    buffers["counts"] = counts
    return buffers


def _code(z: Tensor, width: int) -> Tensor:
    """Codes of (tokens, channels), packed and flat."""
    return lookup.pack(nearest(z.contiguous(), common_levels(width).to(z.device)), width).flatten()
