"""Bits a cached number, by layer and KV head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.evaluate.report.samples import Place, is_ours
from kvfold.evaluate.results import Row


@dataclass(frozen=True)
class BitMap:
    """What one fold spent where.

    Attributes
    ----------
    model, view, when, format, method, budget, task : str
    tokens : int
    ours : bool
    ratio : float or None
        Folded bytes over full bytes.
    keys, values : list over layers of list over KV heads of float
        Mean bits a number of the full cache; evicted tokens count as 0. A layer that was not folded has no heads.
    """

    model: str
    view: str
    when: str
    format: str
    method: str
    budget: str
    task: str
    tokens: int
    ours: bool
    ratio: float | None
    keys: list[list[float]]
    values: list[list[float]]


def head_bits(widths: list[Any], tokens: int) -> tuple[list[list[float]], list[list[float]]]:
    """Mean bits of keys and of values by layer and KV head.

    Parameters
    ----------
    widths : list over layers of list over heads of {"values": {bits: tokens}, "keys": {bits: channels}}
        `FoldedCache.widths()`; bits may be text, as JSON makes them.
    tokens : int
        Tokens of the prompt, kept or not.
    """
    keys: list[list[float]] = []
    values: list[list[float]] = []
    for layer in widths:
        pairs = [_mean_bits(head, tokens) for head in layer]
        keys.append([key for key, _ in pairs])
        values.append([value for _, value in pairs])
    return keys, values


def bit_maps(place: Place, rows: list[Row], highlighted: frozenset[str]) -> list[BitMap]:
    """Of each method and budget, the longest prompt whose widths were kept."""
    longest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.widths is not None and any(row.widths) and row.prompt_tokens:
            key = (row.cell.method, row.cell.budget)
            if key not in longest or row.prompt_tokens > longest[key].prompt_tokens:
                longest[key] = row
    maps = []
    for row in sorted(
        longest.values(),
        key=lambda r: (not is_ours(r.cell.method, highlighted), r.cell.method, -(r.ratio or 0.0)),
    ):
        keys, values = head_bits(row.widths or [], row.prompt_tokens)
        cell = row.cell
        ours = is_ours(cell.method, highlighted)
        maps.append(
            BitMap(
                *place, cell.method, cell.budget, cell.task, row.prompt_tokens, ours, row.ratio, keys, values
            )
        )
    return maps


def _mean_bits(head: Mapping[str, Mapping[Any, int]], tokens: int) -> tuple[float, float]:
    channels = {int(bits): count for bits, count in head["keys"].items()}
    kept = {int(bits): count for bits, count in head["values"].items()}
    share = sum(count for bits, count in kept.items() if bits) / tokens
    value = sum(bits * count for bits, count in kept.items()) / tokens
    # A kept token's key costs each channel's width.
    key = share * sum(bits * count for bits, count in channels.items()) / (sum(channels.values()) or 1)
    return key, value
