"""What quantising a model's own keys and values costs, by width: the tables of the published RDKV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs.affine import dequantise, nmse, quantise
from kvfold.errors import KvfoldError
from kvfold.evaluate.prefill import Prefill
from kvfold.methods.full import Full

WIDTHS = (2, 3, 4, 8)


def relative_error(x: Tensor, width: int, group: int | None = None) -> Tensor:
    """Squared error over variance of each vector (..., n) of x, coded as `TriZoneStore` codes it; (...) float32."""
    half = torch.finfo(torch.float16).max
    meta = torch.bfloat16 if x.dtype == torch.bfloat16 and bool((x.abs() > half).any()) else torch.float16
    x = x.float()
    return nmse(x, dequantise(*quantise(x, width, group, meta), group))


def distortion_tables(
    model: Any,
    input_ids: Tensor,
    widths: Sequence[int] = WIDTHS,
    *,
    key_group: int | None = None,
    value_group: int | None = None,
) -> dict[str, list[tuple[int, float]]]:
    """Mean relative squared error of a model's keys and values on a text, for each width.

    Parameters
    ----------
    model : transformers causal language model
    input_ids : (1, tokens) int64
    widths : sequence of int
        From 1 to 8.
    key_group, value_group : int, optional
        Tokens of a key channel, and channels of a value, that share a scale; None: all, as published.

    Returns
    -------
    dict
        "value_error" (a vector is one token's value) and "key_error" (one channel's post-RoPE keys over all tokens):
        (width, error) pairs with width 0 (error 1 by definition) first and 16 (error 0) last. Means over every
        folding layer, KV head and vector; vectors without variance are left out.

    Raises
    ------
    KvfoldError
        Fewer than 32 tokens: no statistics.
    UnsupportedModelError
        As for `kvfold.fold`.
    """
    if input_ids.shape[1] < 32:
        raise KvfoldError(
            f"{input_ids.shape[1]} tokens are too few to calibrate with: give a text of at least 32"
        )
    views = Prefill(model, input_ids, [Full()]).views

    def vectors(part: str) -> Iterator[Tensor]:
        for view in views:
            yield view.values if part == "value" else view.keys.transpose(-1, -2)

    tables = {}
    for part, group in (("value", value_group), ("key", key_group)):
        table = [(0, 1.0)]
        for width in sorted(widths):
            errors = torch.cat([relative_error(x, width, group).flatten() for x in vectors(part)])
            errors = errors[torch.isfinite(errors)]
            table.append((width, float(f"{errors.double().mean().item():.6g}")))
        tables[f"{part}_error"] = [*table, (16, 0.0)]
    return tables
