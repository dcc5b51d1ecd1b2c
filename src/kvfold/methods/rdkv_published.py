"""RDKV: eviction and quantisation as one rate-distortion problem (arXiv 2605.08317).

Every unit, a value token or a key channel, gets a width; width 0 evicts it. A unit's distortion is its weight times
the relative error of its width, and widths are chosen by reverse water-filling: tokens first, which decides what is
kept, then the key channels over the kept tokens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvfold.allocate.budget import Budget
from kvfold.allocate.knapsack import allocate, allocate_general
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.full import Full
from kvfold.methods.scores import all_mass, key_energy, query_energy, smooth, window_mass
from kvfold.stores.base import AttendContext, Store
from kvfold.stores.trizone import Layout, TriZoneStore

PUBLISHED_VALUE_ERROR = {0: 1.0, 2: 0.31287, 4: 0.013986, 8: 4.855e-5, 16: 0.0}
"""Relative squared error of a value token by width: the table that the released code ships (Llama-3.1-8B)."""
PUBLISHED_KEY_ERROR = {0: 1.0, 2: 0.14894, 4: 0.0062426, 8: 2.176e-5, 16: 0.0}
"""The same for a key channel."""
WIDTH_SETS = ((2, 4, 8, 16), (4, 8, 16), (4, 16))
"""What `widths="auto"` chooses from, the paper's first: a 2-bit value is often not worth its bytes."""


def load_table(path: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, float], ...]]:
    """Options of `PublishedRDKV` from a file that `kvfold calibrate rdkv` wrote.

    Examples
    --------
    >>> PublishedRDKV(keep=0.1, **load_table("table.json"))

    Raises
    ------
    KvfoldError
        The file is no such table.
    OSError
        It cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        tables = {
            name: tuple((int(width), float(error)) for width, error in data[name])
            for name in ("value_error", "key_error")
        }
    except UnicodeDecodeError as failure:
        raise KvfoldError(
            f"{path} is no calibration table: it is not text; kvfold calibrate rdkv makes one (energies of kvfold calibrate"
            " blockgtq are for blockgtq)"
        ) from failure
    except (ValueError, KeyError, TypeError) as failure:
        raise KvfoldError(
            f"{path} is no calibration table (kvfold calibrate rdkv makes one): {failure}"
        ) from failure
    for name, table in tables.items():
        if not all(0 <= error < math.inf and 0 <= width <= 16 for width, error in table):
            raise KvfoldError(f"{path}: {name} has an entry out of range")
    return tables


@dataclass(frozen=True, kw_only=True)
class PublishedRDKV(Method):
    """Joint eviction and quantisation by water-filling (RDKV, Theorem 3.3 and Algorithm 2).

    The defaults are the released code's choices, with physical bytes as the budget and nothing over it.

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget: share of the prompt's 16-bit bytes, bits per element, or the paper's "B fp16 tokens per head" (payload
        only). See `kvfold.allocate.budget.Budget`.
    queries : "window", "all", "all_raw" or "blend"
        Whose attention weighs a token: the newest `window` queries (released code), every query divided by how many
        see the token, every query summed as in the paper's text (Proposition 3.1), or the larger of "window" and
        "all", each scaled to the same mean.
    window : int
        Newest queries used.
    pool : int
        Kernel of the average over neighbouring tokens (1: none).
    distortion : "table", "linear" or "square"
        Error of a width relative to width 0: the table, 2^-b (paper, Bennett) or 4^-b (its square).
    value_error, key_error : tuple of (width, error)
        The table; `kvfold calibrate rdkv` makes one. Default: the released one.
    widths : tuple of int, or "auto"
        Widths above 0 that a unit may get; keys at 16 are stored with 8 (as published). "auto" folds each layer (with
        `scope="model"`: all of them) with each of `WIDTH_SETS` within the same bytes and keeps the one whose store
        errs least in the attention output of the newest queries; generated tokens follow their prompt.
    key_share : float
        Part of the budget meant for keys (the paper's rho).
    scope : "head", "layer" or "model"
        Which units share one multiplier. "head" is the paper; wider scopes let bits flow to the heads that need
        them. "model" needs the exact prompt of every layer at once.
    key_group, value_group : int or None
        Kept tokens of a channel, and channels of a token, that share a scale. None: all (as published).
    key_tile : int
        Neighbouring channels of the width order that share one width (16: what the GPU kernel reads fastest).
    block_tokens : int
        Generated tokens folded at a time, one block late (0: never).
    """

    name = "rdkv-published"
    paper = "RDKV, arXiv 2605.08317"

    keep: float | None = None
    bits_per_element: float | None = None
    tokens: int | None = None
    queries: Literal["window", "all", "all_raw", "blend"] = "window"
    window: int = 32
    pool: int = 5
    distortion: Literal["table", "linear", "square"] = "table"
    value_error: tuple[tuple[int, float], ...] = tuple(PUBLISHED_VALUE_ERROR.items())
    key_error: tuple[tuple[int, float], ...] = tuple(PUBLISHED_KEY_ERROR.items())
    widths: tuple[int, ...] | Literal["auto"] = WIDTH_SETS[0]
    key_share: float = 0.5
    scope: Literal["head", "layer", "model"] = "head"
    key_group: int | None = None
    value_group: int | None = None
    key_tile: int = 1
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget  # noqa: B018 (raises on a bad budget)
        widths = {width for widths in self._width_sets for width in widths}
        if not widths or not widths <= {1, 2, 3, 4, 5, 6, 7, 8, 16}:
            raise ValueError(f"widths must be chosen from 1 to 8 and 16, or be 'auto', got {self.widths!r}")
        if not 0 < self.key_share < 1:
            raise ValueError(f"key_share must lie between 0 and 1, got {self.key_share}")
        if self.distortion == "table":
            for table, field in ((self.value_error, "value_error"), (self.key_error, "key_error")):
                missing = sorted({0, *widths} - {width for width, _ in table} - {16})
                if missing:
                    raise ValueError(
                        f"{field} has no entry for width {missing}; calibrate, or use distortion='square'"
                    )

    @property
    def budget(self) -> Budget:
        """The byte budget."""
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element, tokens=self.tokens)

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model" if self.scope == "model" else "layer"

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, all_queries=self.queries != "window")

    @property
    def shortest(self) -> int:
        return self.window

    @property
    def block(self) -> int:
        return self.block_tokens

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        layouts = [self._layout(widths, tokens, (tokens,), key_dim, value_dim) for widths in self._width_sets]
        least = max(layout.fixed_bytes(kv_heads) + kv_heads * self._least_head(layout) for layout in layouts)
        full = 2 * tokens * kv_heads * (key_dim + value_dim)
        if self.budget.counts_metadata and self.budget.bytes(tokens, kv_heads, key_dim, value_dim) < least:
            what = f"the budget is smaller than the metadata of a {tokens}-token prompt"
            raise BudgetError.of(what, least, full)

    # ---- distortion ----

    def _errors(self, table: tuple[tuple[int, float], ...], widths: Sequence[int]) -> list[float]:
        """Distortion of each width, width 0 first: 1 there, 0 at 16."""
        if self.distortion == "table":
            known = {**dict(table), 0: 1.0, 16: 0.0}
            return [known[width] for width in (0, *widths)]
        base = 2.0 if self.distortion == "linear" else 4.0
        return [0.0 if width == 16 else base**-width for width in (0, *widths)]

    # ---- weights ----

    def token_weights(self, view: LayerView) -> Tensor:
        """Weight of each value token (Proposition 3.1), (batch, kv_heads, tokens) float32, 0 where invalid."""
        if view.queries is None:
            weights = all_mass(view, normalise=True)
        elif self.queries == "window":
            weights = window_mass(view, self.window, normalise=True)
        elif self.queries in ("all", "all_raw"):
            weights = all_mass(view, normalise=self.queries == "all")
        else:
            kinds = [window_mass(view, self.window, normalise=True), all_mass(view, normalise=True)]
            weights = torch.stack(
                [kind / kind.mean(-1, keepdim=True).clamp_min(1e-30) for kind in kinds]
            ).amax(0)
        return smooth(weights, view.valid, self.pool)

    def channel_weights(self, view: LayerView) -> Tensor:
        """Weight of each key channel (Proposition 3.2, squared), (batch, kv_heads, key_dim) float32."""
        return query_energy(view, self.window) * key_energy(view)

    # ---- widths ----

    @property
    def _width_sets(self) -> tuple[Sequence[int], ...]:
        """The widths, or what "auto" chooses from."""
        return WIDTH_SETS if self.widths == "auto" else (self.widths,)

    def _fold_with_best_widths(self, views: Sequence[LayerView]) -> list[Store]:
        if views[0].queries is None:
            before = views[0].previous[0] if views[0].previous is not None else None
            widths = before.layout.value_widths if isinstance(before, TriZoneStore) else WIDTH_SETS[0]
            return replace(self, widths=widths).fold(views)
        exact = [_newest_output(store, view) for store, view in zip(Full().fold(views), views, strict=True)]
        best: list[Store] = []
        least = math.inf
        for widths in WIDTH_SETS:
            stores = replace(self, widths=widths).fold(views)
            error = 0.0
            for store, view, output in zip(stores, views, exact, strict=True):
                difference = (_newest_output(store, view) - output).square().sum()
                error += float(difference / output.square().sum().clamp_min(1e-30))
            if error < least:
                best, least = stores, error
        return best

    # ---- folding ----

    def _layout(
        self,
        widths: Sequence[int],
        tokens: int,
        real_tokens: tuple[int, ...],
        key_dim: int,
        value_dim: int,
    ) -> Layout:
        return Layout(
            value_widths=tuple(sorted(widths)),
            key_widths=tuple(sorted({min(width, 8) for width in widths})),
            value_group=self.value_group,
            key_group=self.key_group,
            tokens=tokens,
            real_tokens=real_tokens,
            key_dim=key_dim,
            value_dim=value_dim,
        )

    def _least_head(self, layout: Layout) -> int:
        """Bytes of a head that keeps one token at the smallest widths."""
        return layout.value_bytes(layout.value_widths[0]) + layout.key_bytes(
            layout.key_widths[0], layout.key_dim, 1
        )

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        if self.widths == "auto":
            return self._fold_with_best_widths(views)
        layouts = [
            self._layout(
                self.widths,
                view.tokens,
                view.real_tokens,
                view.keys.shape[-1],
                view.values.shape[-1],
            )
            for view in views
        ]
        value_bits = [
            torch.zeros(view.keys.shape[:3], dtype=torch.uint8, device=view.keys.device) for view in views
        ]
        key_bits = [
            torch.zeros_like(bits[..., :1]).expand(-1, -1, view.keys.shape[-1]).clone()
            for bits, view in zip(value_bits, views, strict=True)
        ]
        weights = [self.token_weights(view) for view in views]
        channels = [self.channel_weights(view) for view in views]
        for row in range(views[0].keys.shape[0]):
            if views[0].real_tokens[row] <= self.shortest:
                for bits, kbits, view in zip(value_bits, key_bits, views, strict=True):
                    bits[row] = view.valid[row] * layouts[0].value_widths[-1]
                    kbits[row] = layouts[0].key_widths[-1]
                continue
            for pool in self._pools(views):
                _spend(
                    self,
                    [
                        _Head(views[i], layouts[i], row, head, weights[i][row, head], channels[i][row, head])
                        for i, head in pool
                    ],
                    [(value_bits[i], key_bits[i]) for i, head in pool],
                )
        return [
            TriZoneStore.encode(view.keys, view.values, bits, kbits, layout)
            for view, bits, kbits, layout in zip(views, value_bits, key_bits, layouts, strict=True)
        ]

    def _pools(self, views: Sequence[LayerView]) -> list[list[tuple[int, int]]]:
        """(view, head) pairs that share one budget and one multiplier."""
        heads = [[(i, head) for head in range(view.keys.shape[1])] for i, view in enumerate(views)]
        if self.scope == "head":
            return [[pair] for layer in heads for pair in layer]
        if self.scope == "layer":
            return heads
        return [[pair for layer in heads for pair in layer]]


def _newest_output(store: Store, view: LayerView) -> Tensor:
    """Attention of the newest queries over all of a store (batch, heads, window, value_dim) float32, unmasked."""
    assert view.queries is not None
    return store.attend(view.queries, None, AttendContext(view.scaling, view.softcap, view.expand))[0]


@dataclass(frozen=True)
class _Head:
    """One KV head of one row, as the allocator sees it."""

    view: LayerView
    layout: Layout
    row: int
    head: int
    weights: Tensor
    channels: Tensor

    @property
    def valid(self) -> Tensor:
        return self.view.valid[self.row, self.head]


def _spend(method: PublishedRDKV, heads: list[_Head], bits: list[tuple[Tensor, Tensor]]) -> None:
    """Spend the heads' common budget: tokens, then channels over the kept tokens, then what is left on tokens."""
    layout = heads[0].layout
    metadata = method.budget.counts_metadata
    device = heads[0].weights.device
    total = sum(
        method.budget.bytes(h.view.real_tokens[h.row], 1, h.layout.key_dim, h.layout.value_dim)
        - (h.layout.fixed_bytes(1) if metadata else 0)
        for h in heads
    )
    value_cost = [0] + [
        layout.value_bytes(width) if metadata else 2 * layout.value_dim * width // 16
        for width in layout.value_widths
    ]
    value_error = method._errors(method.value_error, layout.value_widths)
    weights = torch.cat([h.weights for h in heads])[None]
    valid = torch.cat([h.valid for h in heads])[None]
    lengths = [len(h.weights) for h in heads]
    ceiling = int(valid.sum()) * value_cost[-1]

    choice = allocate(
        weights, value_error, value_cost, min(int(total * (1 - method.key_share)), ceiling), valid
    )[0]
    kept = [int((part > 0).sum()) for part in choice.split(lengths)]
    spent = int(torch.tensor(value_cost, device=device)[choice.long()].sum())

    tile = method.key_tile
    tiles = -(-layout.key_dim // tile)
    widths = (0, *layout.key_widths)
    ordered = torch.stack([h.channels.sort(descending=True).values for h in heads])
    tile_weight = torch.nn.functional.pad(ordered, (0, tiles * tile - layout.key_dim)).view(
        len(heads), tiles, tile
    )
    error = torch.tensor(
        method._errors(method.key_error, layout.key_widths), dtype=torch.float64, device=device
    )
    size = torch.full((tiles,), tile, device=device)
    size[-1] = layout.key_dim - (tiles - 1) * tile
    cost = torch.zeros(len(heads), tiles, len(widths), dtype=torch.int64, device=device)
    slack = 0
    for index, count in enumerate(kept):
        groups = layout.key_groups(count) if metadata else 0
        for column, width in enumerate(widths[1:], 1):
            cost[index, :, column] = size * (count * width + 32 * groups if count else 0)
        # Sections end on whole bytes: at most 7 bits a token and plane are lost.
        slack += count * sum(
            7 * (1 + (width in (3, 5, 6)) + 2 * (width == 7)) for width in widths[1:] if width < 8
        )
    if tile % 8 == 0 and layout.key_dim % tile == 0:
        slack = 0
    distortion = tile_weight.double().sum(-1)[..., None] * error
    room = max((total - spent) * 8 - slack, 0)
    chosen = allocate_general(distortion.flatten(0, 1)[None], cost.flatten(0, 1)[None], room)[0].view(
        len(heads), tiles
    )

    used = 0
    table = torch.tensor(widths, dtype=torch.uint8, device=device)
    for index, h in enumerate(heads):
        per_channel = table[chosen[index].long()].repeat_interleave(tile)[: layout.key_dim]
        order = h.channels.sort(descending=True).indices
        target = bits[index][1][h.row, h.head]
        target[order] = per_channel
        for width in layout.key_widths:
            count = int((target == width).sum())
            payload = layout.key_bytes(width, count, kept[index])
            used += payload if metadata else kept[index] * count * width // 8

    left = total - spent - used
    if left > 0 and any(kept):
        # Kept tokens only: a new token would need key bytes too.
        alive = choice > 0
        upgraded = (
            allocate(
                weights,
                value_error[1:],
                value_cost[1:],
                spent + left,
                alive[None],
            )[0]
            + 1
        )
        choice = torch.where(alive, torch.maximum(choice, upgraded), choice)
    value_table = torch.tensor([0, *layout.value_widths], dtype=torch.uint8, device=device)
    for (value_bits, _), h, part in zip(bits, heads, choice.split(lengths), strict=True):
        value_bits[h.row, h.head] = value_table[part.long()]
