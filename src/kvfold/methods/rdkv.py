"""RDKV, taken further: eviction and precision as one rate-distortion choice for a whole model.

The paper (arXiv 2605.08317; `rdkv_published` follows its released code) weighs value tokens and key channels apart, fills
them one after the other, and gives every head the same budget. Here:

* A token's weight is the mean *square* of the attention it receives, which is what a squared output error asks for, from
  queries that are still to come: the prompt's own queries, turned by RoPE to positions after its end and unmasked, so that
  each of them also sees what followed it. Window queries are added for questions that are already in the prompt.
* A token buys its key and its value together, as a *grade*: a width for every key channel (reverse water-filling over the
  channels) and one for the value. Its distortion at each grade is measured, not tabulated.
* One multiplier serves every head of every layer, after each head's weights are scaled so that losing everything costs 1.
* Codes are Lloyd-Max (`codebook.common_levels`), relative to means that cost almost nothing (see `stores.graded`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kvfold.allocate.budget import Budget
from kvfold.allocate.price import allocate_at_one_price, bytes_at_prices
from kvfold.codecs.affine import dequantise, quantise
from kvfold.codecs.codebook import common_levels, decode, encode
from kvfold.codecs.fragments import WIDTHS
from kvfold.errors import BudgetError, KvfoldError
from kvfold.kernels.column_sums import column_sums
from kvfold.kernels.position_bias import turned_rows
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.scores import keys_for_scores, query_energy, smooth, window_mass
from kvfold.stores.base import Store
from kvfold.stores.graded import Frame, GradedLayout, GradedStore, normal_keys, normal_values
from kvfold.stores.ragged import channel_dtype

GAUSSIAN_ERROR = (1.0, 0.3634, 0.1175, 0.03455, 0.009524, 0.002499, 0.000641, 0.000163, 0.000088)
"""Relative squared error of `common_levels` of N(0, 1) at 0 to 8 bits."""

PRICES = tuple(math.exp(exponent) for exponent in range(-40, 8))
"""Multipliers at which a layer's appetite is recorded while streaming."""


@dataclass(frozen=True, kw_only=True)
class RDKV(Method):
    """Joint eviction and quantisation with one multiplier for the model.

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget: share of the prompt's 16-bit bytes, bits per element, or fp16 tokens per head (payload only). See
        `kvfold.allocate.budget.Budget`.
    queries : "both", "future" or "window"
        Whose squared attention weighs a token: the prompt's queries turned to future positions, the newest `window`
        queries, or the mean of both.
    window : int
        Newest queries used.
    sampled : int
        Future queries at most, spread evenly over the prompt. Where that leaves some out, weights are averaged over as
        many neighbouring tokens.
    horizon : int
        Positions after the prompt that future queries are turned to.
    flatten : float
        Power of the weights within a head; below 1 it hedges against queries unlike those seen.
    evict_penalty : float
        Factor on the distortion of evicting a token.
    grades : tuple of float
        Water levels: at level r a channel of mean importance gets the width that minimises r * error + bits.
    widths : tuple of int
        Widths from 1 to 8 that a channel or value may get.
    tile : 1 or 16
        Channels of a key, neighbours in importance, that share a width. 16 makes folds that a GPU reads as records
        (`stores.graded.recorded`): widths are of 1, 2, 3, 4 and 8, values have at least the least of them in every grade, and no
        token is fine: what outgrows the grades is exact.
    scope : "model", "stream", "layer" or "head"
        Units that share one multiplier and one budget. "model" needs the exact prompt of every layer at once. The others
        hold one layer's at a time: "stream" gives each layer what the multiplier would, judging the layers to come by
        those it has seen, and spends the whole budget on the way; "layer" and "head" give all the same.
    block_tokens : int
        Generated tokens folded at a time, one block late (0: never).
    """

    name = "rdkv"
    paper = "after RDKV, arXiv 2605.08317"

    keep: float | None = None
    bits_per_element: float | None = None
    tokens: int | None = None
    queries: Literal["both", "future", "window"] = "both"
    window: int = 32
    sampled: int = 2048
    horizon: int = 128
    flatten: float = 0.7
    evict_penalty: float = 2.0
    grades: tuple[float, ...] = (8.0, 32.0, 128.0, 1024.0)
    widths: tuple[int, ...] = (2, 4, 8)
    tile: Literal[1, 16] = 1
    scope: Literal["model", "stream", "layer", "head"] = "stream"
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget  # noqa: B018 (raises on a bad budget)
        if not self.widths or any(width not in range(1, 9) for width in self.widths):
            raise ValueError(f"widths must be chosen from 1 to 8, got {self.widths}")
        if self.tile > 1 and not {*self.widths} <= {*WIDTHS}:
            raise ValueError(f"with tile={self.tile}, widths must be chosen from {WIDTHS}, got {self.widths}")
        if not self.grades or any(level <= 0 for level in self.grades):
            raise ValueError(f"grades must be positive water levels, got {self.grades}")
        if self.window < 1 or self.sampled < 1 or self.horizon < 1:
            raise ValueError("window, sampled and horizon must be at least 1")

    @property
    def budget(self) -> Budget:
        """The byte budget."""
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element, tokens=self.tokens)

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model" if self.scope == "model" else "layer"

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, sampled=0 if self.queries == "window" else self.sampled, rotary=True)

    @property
    def shortest(self) -> int:
        return self.window

    @property
    def block(self) -> int:
        return self.block_tokens

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        if key_dim % self.tile:
            raise KvfoldError(f"tile={self.tile} does not divide the {key_dim} channels of a key; use tile=1")
        layout = self._layout(tokens, (tokens,), (0,), key_dim, value_dim)
        least = layout.frame_bytes(kv_heads, len(self.grades), turned=True) + kv_heads * layout.exact_bytes
        full = 2 * tokens * kv_heads * (key_dim + value_dim)
        if self.budget.counts_metadata and self.budget.bytes(tokens, kv_heads, key_dim, value_dim) < least:
            raise BudgetError(
                f"the budget is smaller than the metadata of a {tokens}-token prompt: at least"
                f" keep={least / full:.4f} ({16 * least / full:.3f} bits per element) is needed"
            )

    def _layout(
        self, tokens: int, real_tokens: tuple[int, ...], shifts: tuple[int, ...], key_dim: int, value_dim: int
    ) -> GradedLayout:
        widths = tuple(sorted(self.widths, reverse=True))
        return GradedLayout(widths, tokens, real_tokens, shifts, key_dim, value_dim)

    # ---- who will look ----

    def future_queries(self, view: LayerView, row: int) -> Tensor:
        """The prompt's queries as if asked after its end, (heads, n, query_dim) float32.

        A query at position i is turned to one of the `horizon` positions that follow; without RoPE, or where it cannot be
        told, it stays as it is and only loses its mask.
        """
        assert view.sampled is not None and view.sampled_index is not None
        index = view.sampled_index[view.valid[row, :, view.sampled_index].any(0)]
        chosen = view.valid[row, :, view.sampled_index].any(0)
        query = view.sampled[row][:, chosen].float()
        if view.rotary is None:
            return query
        key_dim = view.keys.shape[-1]
        ahead = view.positions[row, -1] + 1 + (view.tokens - 1 - index) % self.horizon
        turned = view.rotary.rotate(
            view.rotary.unrotate(query[..., -key_dim:], view.positions[row, index]), ahead
        )
        return torch.cat([query[..., :-key_dim], turned], -1)

    def token_weights(self, view: LayerView, future: Sequence[Tensor]) -> Tensor:
        """Mean squared attention that each token receives, pooled: (batch, kv_heads, tokens) float32."""
        if view.generated:
            assert view.squares is not None and view.seen_by is not None
            return smooth(view.squares / view.seen_by[:, None], view.valid, 5)
        kinds, kernel = [], 5
        if self.queries != "future":
            kinds.append(window_mass(view, self.window, normalise=True, squared=True))
        if self.queries != "window":
            assert view.sampled_index is not None
            index, keys, kv_heads = view.sampled_index, keys_for_scores(view), view.keys.shape[1]
            rows = [
                column_sums(
                    query[None].to(keys.dtype),
                    keys[row : row + 1],
                    view.scaling,
                    view.valid[row : row + 1],
                    softcap=view.softcap,
                    squared=True,
                    kv_heads=kv_heads,
                )
                / query.shape[1]
                for row, query in enumerate(future)
            ]
            kinds.append(torch.cat(rows))
            kernel = 1 if len(index) < 2 else int(index[1] - index[0]) // 2 * 2 + 1
        return smooth(torch.stack(kinds).mean(0), view.valid, kernel)

    # ---- folding ----

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        drafts = [self._draft(view) for view in views]
        for row in range(views[0].keys.shape[0]):
            if views[0].real_tokens[row] <= self.shortest and not views[0].generated:
                for draft in drafts:
                    draft.choice[row] = draft.view.valid[row] * (len(self.grades) + 2)
                continue
            for pool in self._pools(drafts):
                self._spend(pool, row)
        return [
            GradedStore.encode(
                draft.view.keys,
                draft.view.values,
                draft.choice.to(torch.uint8),
                draft.layout,
                draft.frame,
                draft.view.rotary,
            )
            for draft in drafts
        ]

    def _pools(self, drafts: list[_Draft]) -> list[list[tuple[_Draft, slice]]]:
        """(layer, heads) that share one multiplier."""
        if self.scope == "head":
            return [[(draft, slice(h, h + 1))] for draft in drafts for h in range(draft.cost.shape[1])]
        if self.scope == "model":
            return [[(draft, slice(None)) for draft in drafts]]
        return [[(draft, slice(None))] for draft in drafts]

    def _spend(self, pool: list[tuple[_Draft, slice]], row: int) -> None:
        budget = 0
        for draft, heads in pool:
            layout, count = draft.layout, draft.cost[row, heads].shape[0]
            budget += self.budget.bytes(draft.view.real_tokens[row], count, layout.key_dim, layout.value_dim)
            if self.budget.counts_metadata:
                budget -= draft.fixed_bytes // draft.cost.shape[1] * count
        distortion = torch.cat([draft.distortion[row, heads] for draft, heads in pool])
        cost = torch.cat([draft.cost[row, heads] for draft, heads in pool])
        if budget < 0:
            raise BudgetError(
                "the budget is smaller than the metadata; raise keep, or fold more tokens at once"
            )
        if self.scope == "stream":
            budget = self._stream(pool[0][0].view, row, budget, distortion, cost)
        choice = allocate_at_one_price(distortion, cost, budget)
        if self.scope == "stream":
            pool[0][0].view.account[row]["left"] -= int(cost.gather(1, choice).sum())
        start = 0
        for draft, heads in pool:
            count = draft.cost[row, heads].shape[0]
            draft.choice[row, heads] = choice[start : start + count]
            start += count

    def _stream(self, view: LayerView, row: int, share: int, distortion: Tensor, cost: Tensor) -> int:
        """Bytes that a layer gets of its own share and of what the layers before it left or overdrew.

        `distortion` and `cost` as for `allocate_at_one_price`; `share` is the layer's equal part of the budget.
        """
        account = view.account.setdefault(row, {"left": 0, "layers": 0, "wanted": torch.zeros(len(PRICES))})
        account["left"] += share
        account["layers"] += 1
        wanted = bytes_at_prices(distortion, cost, PRICES)
        account["wanted"] += wanted
        ahead = view.folding_layers - account["layers"]
        if not ahead:
            return int(account["left"])
        typical = account["wanted"] / account["layers"]
        # What all layers from here on would take at each price, against what there is for them.
        need, have = wanted + ahead * typical, account["left"] + ahead * share
        above = int((need > have).sum())
        if above == 0:
            return int(min(wanted[0], have))
        if above == len(PRICES):
            return int(wanted[-1])
        part = (have - need[above]) / (need[above - 1] - need[above]).clamp_min(1)
        return int(wanted[above] + part * (wanted[above - 1] - wanted[above]))

    def _draft(self, view: LayerView) -> _Draft:
        """Frame of a layer, and what each token would lose and cost at each grade."""
        batch, heads, tokens, key_dim = view.keys.shape
        value_dim = view.values.shape[-1]
        shifts = tuple(int(last) - tokens + 1 for last in view.positions[:, -1])
        layout = self._layout(tokens, view.real_tokens, shifts, key_dim, value_dim)
        future = []
        if not view.generated and self.queries != "window":
            future = [self.future_queries(view, row) for row in range(batch)]
        if future:
            squares = [
                query[..., -key_dim:].square().mean(1).view(heads, -1, key_dim).mean(1) for query in future
            ]
            energy = torch.stack(squares) * view.scaling**2
        else:
            energy = query_energy(view, self.window) * view.scaling**2
        shared = _shared_frame(view)
        frame = shared or self._frame(view, layout, energy)
        weights = self.token_weights(view, future)

        real = view.valid.float()
        spread = (view.values.float() - frame.value_mean[:, :, None].float()).square().sum(-1) * real
        number = real.sum(-1, keepdim=True).clamp_min(1)
        weights = (weights / (weights.sum(-1, keepdim=True) / number).clamp_min(1e-30)) ** self.flatten * real
        weights = weights / ((weights * spread).sum(-1, keepdim=True) / number).clamp_min(1e-30)

        grades = len(self.grades)
        distortion = spread.new_zeros(batch, heads, tokens, grades + 3)
        distortion[..., 0] = self.evict_penalty * weights * spread
        for row in range(batch):
            errors = self._errors(view, layout, frame, row, energy[row], spread[row])
            distortion[row, ..., 1:-1] = weights[row, ..., None] * errors
        if self.tile > 1:
            distortion[..., -2] = distortion[..., 0]  # fine: dearer than evicting, no better
        distortion *= real[..., None]
        metadata = self.budget.counts_metadata
        extra = 0 if metadata else layout.token_bytes([], 0)
        table = [
            [
                [0]
                + [layout.token_bytes(counts, bits) - extra for counts, bits in zip(head_counts, head_bits)]
                + [layout.fine_bytes, layout.exact_bytes] * metadata
                + [key_dim + value_dim, 2 * (key_dim + value_dim)] * (not metadata)
                for head_counts, head_bits in zip(row_counts, row_bits)
            ]
            for row_counts, row_bits in zip(frame.key_counts.tolist(), frame.value_bits.tolist())
        ]
        fixed = 4 * heads * (grades + 2)
        if shared is None:
            fixed = layout.frame_bytes(heads, grades, frame.key_turned is not None)
        return _Draft(
            view=view,
            layout=layout,
            frame=frame,
            distortion=distortion,
            cost=torch.tensor(table, dtype=torch.int64, device=view.keys.device),
            choice=torch.zeros(batch, heads, tokens, dtype=torch.int64, device=view.keys.device),
            fixed_bytes=fixed,
        )

    def _frame(self, view: LayerView, layout: GradedLayout, energy: Tensor) -> Frame:
        """Means, deviations and the channel widths of each grade."""
        half = torch.float16 if view.keys.dtype != torch.bfloat16 else _narrowest(view)
        real = view.valid[..., None].float()
        number = real.sum(2).clamp_min(1)
        keys = view.keys.float()
        turned = None
        if view.rotary is not None:
            rotary = view.rotary
            plain = torch.stack([rotary.unrotate(keys[row], view.positions[row]) for row in range(len(keys))])
            turned = ((plain * real).sum(2) / number).to(half)
            keys = torch.stack(
                [
                    keys[row] - turned_rows(turned[row].float(), rotary, view.tokens, layout.shifts[row])
                    for row in range(len(keys))
                ]
            )
        mean = ((keys * real).sum(2) / number).to(half)
        deviation = (((keys - mean[:, :, None].float()).square() * real).sum(2) / number).sqrt()
        deviation = deviation.clamp_min(1e-4).to(half)
        values = view.values.float()
        value_mean = ((values * real).sum(2) / number).to(half)
        spread = (values - value_mean[:, :, None].float()).square().sum(-1, keepdim=True) * real
        spread_mean = spread.sum(2) / number
        magnitude = (spread_mean[..., 0] / layout.value_dim).sqrt().clamp_min(1e-12)

        key_importance = energy * deviation.float().square() * spread_mean
        value_importance = spread_mean / layout.value_dim
        total = key_importance.sum(-1, keepdim=True) + value_importance * layout.value_dim
        average = (total / (layout.key_dim + layout.value_dim)).clamp_min(1e-30)
        order = key_importance.argsort(-1, descending=True)
        tiles = (key_importance.gather(-1, order) / average).unflatten(-1, (-1, self.tile)).mean(-1)
        key_bits = self._fill(tiles, 0)
        value_bits = self._fill(
            (value_importance / average)[..., 0], 0 if self.tile == 1 else min(self.widths)
        )
        counts = torch.stack([(key_bits == width).sum(-2) for width in layout.widths], -1) * self.tile
        return Frame(
            key_turned=turned,
            key_mean=mean,
            key_deviation=deviation,
            value_mean=value_mean,
            value_magnitude=magnitude,
            order=order.to(channel_dtype(layout.key_dim)),
            key_counts=counts.to(torch.int16),
            value_bits=value_bits.to(torch.uint8).contiguous(),
        )

    def _fill(self, importance: Tensor, least: int) -> Tensor:
        """Reverse water-filling: the width, at least `least`, of each unit (...) at each grade, (..., grades) int64."""
        choice = [width for width in (0, *sorted(self.widths)) if width >= least]
        widths = torch.tensor(choice, device=importance.device)
        error = torch.tensor([GAUSSIAN_ERROR[width] for width in widths.tolist()], device=importance.device)
        level = torch.tensor(self.grades, device=importance.device)
        price = importance[..., None, None] * level[:, None] * error + widths
        return widths[price.argmin(-1)]

    def _errors(
        self, view: LayerView, layout: GradedLayout, frame: Frame, row: int, energy: Tensor, spread: Tensor
    ) -> Tensor:
        """Measured squared output error of each token, before its weight: (kv_heads, tokens, grades + 1), fine last."""
        z = normal_keys(view.keys[row], frame, row, view.rotary, layout.shifts[row])
        w, _ = normal_values(view.values[row], frame, row)
        ordered = z.gather(2, frame.order[row].long()[:, None].expand_as(z))
        sensitivity = (energy * frame.key_deviation[row].float().square()).gather(1, frame.order[row].long())
        counts, bits = frame.key_counts[row].long(), frame.value_bits[row].long()
        ends = counts.cumsum(-1)
        channel = torch.arange(layout.key_dim, device=z.device)
        key_error = z.new_zeros(*z.shape[:2], len(self.grades))
        value_error = torch.zeros_like(key_error)
        magnitude = spread / w.square().sum(-1).clamp_min(1e-30)
        for index, width in enumerate((*layout.widths, 0)):
            start = ends[..., index - 1] if index else torch.zeros_like(ends[..., 0])
            stop = ends[..., index] if width else torch.full_like(ends[..., 0], layout.key_dim)
            inside = (channel >= start[..., None]) & (channel < stop[..., None])
            lost = _lost(ordered, width) @ (inside * sensitivity[:, None]).transpose(1, 2)
            key_error += lost
            value_error += (_lost(w, width).sum(-1) * magnitude)[..., None] * (bits == width)[:, None]
        keys, values = view.keys[row].float(), view.values[row].float()
        key_lost = (dequantise(*quantise(keys, 8)) - keys).square() @ energy[..., None]
        fine = spread[..., None] * key_lost + (dequantise(*quantise(values, 8)) - values).square().sum(
            -1, keepdim=True
        )
        return torch.cat([spread[..., None] * key_error + value_error, fine], -1)


@dataclass
class _Draft:
    """A layer before its tokens have chosen."""

    view: LayerView
    layout: GradedLayout
    frame: Frame
    distortion: Tensor
    """(batch, kv_heads, tokens, grades + 3): evicted, each grade, fine, exact"""
    cost: Tensor
    """(batch, kv_heads, grades + 3) bytes"""
    choice: Tensor
    fixed_bytes: int
    """of one row"""


CELLS = 1 << 14
"""Cells of the table of nearest levels, over [-REACH, REACH]."""
REACH = 8.0


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


def _shared_frame(view: LayerView) -> Frame | None:
    """The frame of the segment before, for a block of generated tokens: they are of one kind with the prompt's."""
    if not view.generated or view.previous is None:
        return None
    store, rows = view.previous
    if not isinstance(store, GradedStore):
        return None
    return store.frame if rows is None else store.frame.select(rows)


def _narrowest(view: LayerView) -> torch.dtype:
    """float16 for its precision, unless a bfloat16 model's numbers are beyond its range."""
    largest = max(float(view.keys.abs().max()), float(view.values.abs().max()))
    return torch.float16 if largest < torch.finfo(torch.float16).max / 4 else torch.bfloat16
