"""Quantise and pack tokens and channels at their widths."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.codecs.affine import narrow_dtype, quantise
from kvfold.codecs.packing import pack
from kvfold.stores.ragged import channel_dtype, position_dtype
from kvfold.stores.trizone.layout import Layout


def encode(
    keys: Tensor, values: Tensor, value_bits: Tensor, key_bits: Tensor, layout: Layout
) -> dict[str, Tensor]:
    """Buffers of a `TriZoneStore`; arguments as for its `encode`."""
    rows, heads = keys.shape[:2]
    device = keys.device
    half = keys.dtype if keys.dtype in (torch.float16, torch.bfloat16) else narrow_dtype(16, keys, values)
    meta = narrow_dtype(min(layout.value_widths + layout.key_widths), keys, values)
    # Stable sort: by width, then by position; evicted tokens and dropped channels come first and are cut off.
    token_order = torch.sort(value_bits, dim=-1, stable=True).indices
    channel_order = torch.sort(key_bits, dim=-1, stable=True).indices
    value_counts = torch.stack([(value_bits == width).sum(-1) for width in layout.value_widths], -1).int()
    key_counts = torch.stack([(key_bits == width).sum(-1) for width in layout.key_widths], -1).int()
    dropped = key_counts.sum(-1)
    parts: dict[str, list[Tensor]] = {"positions": [], "key_scale": [], "key_minimum": []}
    for width in layout.value_widths:
        coded = [f"value_scale_{width}", f"value_minimum_{width}"] if width < 16 else []
        parts |= {name: [] for name in [f"values_{width}", *coded]}
    parts |= {f"keys_{width}": [] for width in layout.key_widths}
    orders = []
    for row in range(rows):
        for head in range(heads):
            kept = int(value_counts[row, head].sum())
            tokens = token_order[row, head, layout.tokens - kept :] if kept else token_order[row, head, :0]
            parts["positions"].append(tokens)
            start = 0
            for width, count in zip(layout.value_widths, value_counts[row, head].tolist(), strict=True):
                x = values[row, head, tokens[start : start + count]]
                start += count
                if width == 16:
                    parts["values_16"].append(x.to(half))
                    continue
                coded_x = quantise(x.float(), width, layout.value_group, meta)
                parts[f"values_{width}"].append(pack(coded_x.codes, width))
                parts[f"value_scale_{width}"].append(coded_x.scale)
                parts[f"value_minimum_{width}"].append(coded_x.minimum)
            used = int(dropped[row, head])
            channels = (
                channel_order[row, head, layout.key_dim - used :] if used else channel_order[row, head, :0]
            )
            rest = channel_order[row, head, : layout.key_dim - used]
            orders.append(torch.cat([channels, rest]))
            k = keys[row, head, tokens].float()
            start = 0
            for width, count in zip(layout.key_widths, key_counts[row, head].tolist(), strict=True):
                x = k[:, channels[start : start + count]]
                start += count
                if width == 16:
                    parts["keys_16"].append(x.to(half).flatten())
                    continue
                coded_k = quantise(x.t().contiguous(), width, layout.key_group, meta)
                parts[f"keys_{width}"].append(pack(coded_k.codes.t().contiguous(), width).flatten())
                parts["key_scale"].append(coded_k.scale.t().flatten())
                parts["key_minimum"].append(coded_k.minimum.t().flatten())
    buffers = {name: torch.cat(pieces) for name, pieces in parts.items() if pieces}
    for name in ("key_scale", "key_minimum"):
        buffers.setdefault(name, torch.empty(0, dtype=meta, device=device))
    buffers["positions"] = buffers["positions"].to(position_dtype(layout.tokens))
    buffers["order"] = torch.stack(orders).view(rows, heads, -1).to(channel_dtype(layout.key_dim))
    buffers["value_counts"], buffers["key_counts"] = value_counts, key_counts
    return buffers
