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
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kvfold.allocate.budget import Budget
from kvfold.allocate.groups import allocate_in_groups
from kvfold.allocate.price import allocate_at_one_price, bytes_at_prices
from kvfold.codecs.fragments import TOKENS, WIDTHS
from kvfold.codecs.packing import packed_bytes
from kvfold.errors import BudgetError, KvfoldError
from kvfold.kernels.channel_sums import channel_sums, unturned_sum
from kvfold.kernels.column_sums import column_sums
from kvfold.kernels.position_bias import in_few_planes
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.grade_errors import squared_errors
from kvfold.methods.scores import keys_for_scores, query_energy, smooth, window_mass
from kvfold.stores.base import Store
from kvfold.stores.graded import Frame, GradedLayout, GradedStore
from kvfold.stores.graded.recorded import RecordedGradedStore, recorded_bytes
from kvfold.stores.ragged import channel_dtype
from kvfold.stores.reading import reads_records

GAUSSIAN_ERROR = (1.0, 0.3634, 0.1175, 0.03455, 0.009524, 0.002499, 0.000641, 0.000163, 0.000088)
"""Relative squared error of `common_levels` of N(0, 1) at 0 to 8 bits."""

QUERIES_AT_A_TIME = 512
"""Future queries of which there is a float32 copy."""

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
    tile : 1 or 16, optional
        Channels of a key, neighbours in importance, that share a width. None: 16 where a GPU decodes such folds from records
        (docs/performance.md), 1 elsewhere. 16 makes folds that a GPU reads as records
        (`stores.graded.recorded`): widths are of 1, 2, 3, 4 and 8, values have at least the least of them in every grade, no
        token is fine (what outgrows the grades is exact), and a prompt's tokens come to each grade 64 at a time.
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
    tile: Literal[1, 16] | None = None
    scope: Literal["model", "stream", "layer", "head"] = "stream"
    block_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget  # noqa: B018 (raises on a bad budget)
        if not self.widths or any(width not in range(1, 9) for width in self.widths):
            raise ValueError(f"widths must be chosen from 1 to 8, got {self.widths}")
        if self._tile > 1 and not {*self.widths} <= {*WIDTHS}:
            raise ValueError(f"with tile={self.tile}, widths must be chosen from {WIDTHS}, got {self.widths}")
        if self._tile > 1 and list(self.grades) != sorted(self.grades):
            raise ValueError(f"with tile={self.tile}, grades must ascend, got {self.grades}")
        if not self.grades or not all(0 < level < math.inf for level in self.grades):
            raise ValueError(f"grades must be positive water levels, got {self.grades}")
        for name in ("flatten", "evict_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
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
        if key_dim % self._tile:
            raise KvfoldError(f"tile={self.tile} does not divide the {key_dim} channels of a key; use tile=1")
        layout = self._layout(tokens, (tokens,), (0,), key_dim, value_dim)
        least = layout.frame_bytes(kv_heads, len(self.grades), turned=True) + kv_heads * layout.exact_bytes
        least += self._more_bytes(layout, kv_heads)[1]
        full = 2 * tokens * kv_heads * (key_dim + value_dim)
        if self.budget.counts_metadata and self.budget.bytes(tokens, kv_heads, key_dim, value_dim) < least:
            what = f"the budget is smaller than the metadata of a {tokens}-token prompt"
            raise BudgetError.of(what, least, full)

    def _more_bytes(self, layout: GradedLayout, kv_heads: int) -> tuple[int, int]:
        """Bytes of a token, and of a row, that records take beside the plain form's."""
        return (0, 0) if self._tile == 1 else recorded_bytes(layout, kv_heads)

    def _layout(
        self, tokens: int, real_tokens: tuple[int, ...], shifts: tuple[int, ...], key_dim: int, value_dim: int
    ) -> GradedLayout:
        widths = tuple(sorted(self.widths, reverse=True))
        return GradedLayout(widths, tokens, real_tokens, shifts, key_dim, value_dim)

    # ---- who will look ----

    def future_queries(self, view: LayerView, row: int) -> Tensor:
        """The prompt's queries as if asked after its end, (heads, n, query_dim).

        A query at position i is turned to one of the `horizon` positions that follow; without RoPE, or where it cannot be
        told, it stays as it is and only loses its mask.
        """
        assert view.sampled is not None and view.sampled_index is not None
        index, query = view.sampled_index, view.sampled[row]
        if view.real_tokens[row] < view.tokens:
            chosen = view.valid[row, :, index].any(0).nonzero().flatten()
            index, query = index[chosen], query[:, chosen]
        if view.rotary is None:
            return query
        key_dim = view.keys.shape[-1]
        ahead = view.positions[row, -1] + 1 + (view.tokens - 1 - index) % self.horizon
        # From one position to another is a turn by their difference.
        angle, found = ahead - view.positions[row, index], torch.empty_like(query)
        found[..., :-key_dim] = query[..., :-key_dim]
        for start in range(0, len(index), QUERIES_AT_A_TIME):
            span = slice(start, start + QUERIES_AT_A_TIME)
            found[:, span, -key_dim:] = (
                view.rotary.rotate(query[:, span, -key_dim:], angle[span]) / view.rotary.scale
            )
        return found

    def token_weights(self, view: LayerView, future: Sequence[Tensor]) -> Tensor:
        """Mean squared attention that each token receives, pooled: (batch, kv_heads, tokens) float32."""
        if view.generated:
            assert view.squares is not None and view.seen_by is not None
            return smooth(view.squares / view.seen_by[:, None], view.valid, 5)
        kinds, kernel = [], 5
        if self.queries != "window":
            assert view.sampled_index is not None
            index = view.sampled_index[:2].tolist()
            kernel = 1 if len(index) < 2 else (index[1] - index[0]) // 2 * 2 + 1
        if self.queries != "future":
            kinds.append(window_mass(view, self.window, normalise=True, squared=True))
        if self.queries != "window":
            keys, kv_heads = keys_for_scores(view), view.keys.shape[1]
            rows = [
                column_sums(
                    query[None],
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
        return smooth(torch.stack(kinds).mean(0), view.valid, kernel)

    # ---- folding ----

    @property
    def _tile(self) -> int:
        return self.tile or 1

    def _for(self, views: Sequence[LayerView]) -> RDKV:
        """With a tile for the layers' device, if none was chosen; for a block of generated tokens, with its prompt's."""
        if self.tile is not None:
            return self
        first = views[0]
        if first.generated:
            before = None if first.previous is None else first.previous[0]
            return replace(self, tile=16 if isinstance(before, RecordedGradedStore) else 1)
        if not all(map(reads_records, views)):
            return self
        shapes = {(view.keys.shape[1], view.keys.shape[-1], view.values.shape[-1]) for view in views}
        try:
            wide = replace(self, tile=16)
            for count in {count for count in first.real_tokens if count > self.shortest}:
                for shape in shapes:
                    wide.check(count, *shape)
        except (KvfoldError, ValueError):  # widths, grades or a budget that single channels alone can have
            return self
        return wide

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        return self._for(views)._fold(views)

    def _fold(self, views: Sequence[LayerView]) -> list[Store]:
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
        parts = [(draft.distortion[row, heads], draft.cost[row, heads]) for draft, heads in pool]
        distortion, cost = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if budget < 0:
            raise BudgetError(
                "the budget is smaller than the metadata; raise keep, or fold more tokens at once"
            )
        have: int | Tensor = budget
        if self.scope == "stream":
            have = self._stream(pool[0][0].view, row, budget, distortion, cost)
        if self._tile > 1 and not pool[0][0].view.generated:
            choice, spent = allocate_in_groups(distortion, cost, have, TOKENS, len(self.grades))
        else:
            choice = allocate_at_one_price(distortion, cost, have)
            spent = cost.gather(1, choice).sum()
        if self.scope == "stream":
            pool[0][0].view.account[row]["left"] -= spent
        start = 0
        for draft, heads in pool:
            count = draft.cost[row, heads].shape[0]
            draft.choice[row, heads] = choice[start : start + count]
            start += count

    def _stream(self, view: LayerView, row: int, share: int, distortion: Tensor, cost: Tensor) -> Tensor:
        """Bytes that a layer gets of its own share and of what the layers before it left or overdrew, in a tensor of none.

        `distortion` and `cost` as for `allocate_at_one_price`; `share` is the layer's equal part of the budget. All of it
        on the layer's device, so that a GPU is not waited for.
        """
        device = distortion.device
        nothing = {
            "left": torch.zeros((), dtype=torch.float64, device=device),
            "layers": 0,
            "wanted": torch.zeros(len(PRICES), dtype=torch.float64, device=device),
        }
        account = view.account.setdefault(row, nothing)
        wanted = bytes_at_prices(distortion, cost, PRICES)
        account["left"] = account["left"].to(device) + share
        account["wanted"] = account["wanted"].to(device) + wanted
        account["layers"] += 1
        left: Tensor = account["left"]
        ahead = view.folding_layers - account["layers"]
        if not ahead:
            return left
        typical = account["wanted"] / account["layers"]
        # What all layers from here on would take at each price, against what there is for them.
        need, have = wanted + ahead * typical, left + ahead * share
        above = (need > have).sum()
        at = torch.stack([above - 1, above]).clamp(0, len(PRICES) - 1)
        (dearer, cheaper), (more, less) = need.index_select(0, at), wanted.index_select(0, at)
        part = (have - cheaper) / (dearer - cheaper).clamp_min(1)
        between = less + part * (more - less)
        return torch.where(above == 0, torch.minimum(wanted[0], have), between).floor()

    def _draft(self, view: LayerView) -> _Draft:
        """Frame of a layer, and what each token would lose and cost at each grade."""
        batch, heads, tokens, key_dim = view.keys.shape
        value_dim = view.values.shape[-1]
        shifts = tuple(int(last) - tokens + 1 for last in view.positions[:, -1])
        layout = self._layout(tokens, view.real_tokens, shifts, key_dim, value_dim)
        half = torch.float16 if view.keys.dtype == torch.float16 else _narrowest(view)
        future = []
        if not view.generated and self.queries != "window":
            future = [self.future_queries(view, row) for row in range(batch)]
        # What takes longest, while the host goes on: from here to the choices nothing waits for a GPU.
        weights = self.token_weights(view, future)
        if future:
            squares = [
                _mean_squares(query[..., -key_dim:]).view(heads, -1, key_dim).mean(1) for query in future
            ]
            energy = torch.stack(squares) * view.scaling**2
        else:
            energy = query_energy(view, self.window) * view.scaling**2
        shared = _shared_frame(view)
        frame = shared or self._frame(view, layout, energy, half)

        real = view.valid.float()
        errors = [squared_errors(view, layout, frame, row, energy[row]) for row in range(batch)]
        spread = torch.stack([own for own, _ in errors]) * real
        number = real.sum(-1, keepdim=True).clamp_min(1)
        weights = (weights / (weights.sum(-1, keepdim=True) / number).clamp_min(1e-30)) ** self.flatten * real
        weights = weights / ((weights * spread).sum(-1, keepdim=True) / number).clamp_min(1e-30)

        grades = len(self.grades)
        distortion = spread.new_zeros(batch, heads, tokens, grades + 3)
        distortion[..., 0] = self.evict_penalty * weights * spread
        for row, (_, own) in enumerate(errors):
            torch.mul(own, weights[row, ..., None], out=distortion[row, ..., 1:-1])
        if self._tile > 1:
            distortion[..., -2] = distortion[..., 0]  # fine: dearer than evicting, no better
        distortion *= real[..., None]
        fixed = 4 * heads * (grades + 2)
        if shared is None:
            fixed = layout.frame_bytes(heads, grades, frame.key_turned is not None)
            fixed += self._more_bytes(layout, heads)[1]
        return _Draft(
            view=view,
            layout=layout,
            frame=frame,
            distortion=distortion,
            cost=self._cost(layout, frame),
            choice=torch.zeros(batch, heads, tokens, dtype=torch.int64, device=view.keys.device),
            fixed_bytes=fixed,
        )

    def _cost(self, layout: GradedLayout, frame: Frame) -> Tensor:
        """Bytes of a token that is evicted, at each grade, fine and exact: (batch, kv_heads, grades + 3) int64."""
        metadata = self.budget.counts_metadata
        counts = frame.key_counts.long()
        # Of each width and number of channels, and of each width of a value.
        keys, values = _packed_bytes(layout.widths, layout.key_dim, layout.value_dim, counts.device)
        coded = keys[torch.arange(counts.shape[-1], device=counts.device), counts].sum(-1)
        more = self._more_bytes(layout, 1)[0]
        coded += values[frame.value_bits.long()] + metadata * (layout.token_bytes([], 0) + more)
        cost = coded.new_zeros(*coded.shape[:2], coded.shape[2] + 3)
        cost[..., 1:-2] = coded
        both = layout.key_dim + layout.value_dim
        cost[..., -2] = layout.fine_bytes if metadata else both
        cost[..., -1] = layout.exact_bytes + more if metadata else 2 * both
        return cost

    def _frame(self, view: LayerView, layout: GradedLayout, energy: Tensor, half: torch.dtype) -> Frame:
        """Means, deviations and the channel widths of each grade."""
        number = view.valid.sum(2).clamp_min(1)[..., None]
        rows = range(len(view.keys))

        def means(states: Tensor, turned: Tensor | None, mean: Tensor | None) -> tuple[Tensor, Tensor]:
            """Means of channels and of their squares, less what is given."""
            sums = [
                channel_sums(
                    states[row],
                    view.valid[row],
                    None if turned is None else turned[row],
                    view.rotary,
                    layout.shifts[row],
                    None if mean is None else mean[row],
                )
                for row in rows
            ]
            first, second = (torch.stack(part) / number for part in zip(*sums, strict=True))
            return first, second

        turned = None
        if view.rotary is not None:
            plain = [
                unturned_sum(view.keys[row], view.valid[row], view.rotary, layout.shifts[row]) for row in rows
            ]
            turned = in_few_planes((torch.stack(plain) / number).to(half), view.rotary)
        mean = means(view.keys, turned, None)[0].to(half)
        deviation = means(view.keys, turned, mean)[1].sqrt().clamp_min(1e-4).to(half)
        value_mean = means(view.values, None, None)[0].to(half)
        spread_mean = means(view.values, None, value_mean)[1].sum(-1, keepdim=True)
        magnitude = (spread_mean[..., 0] / layout.value_dim).sqrt().clamp_min(1e-12)

        key_importance = energy * deviation.float().square() * spread_mean
        value_importance = spread_mean / layout.value_dim
        total = key_importance.sum(-1, keepdim=True) + value_importance * layout.value_dim
        average = (total / (layout.key_dim + layout.value_dim)).clamp_min(1e-30)
        order = key_importance.argsort(-1, descending=True)
        tiles = (key_importance.gather(-1, order) / average).unflatten(-1, (-1, self._tile)).mean(-1)
        key_bits = self._fill(tiles, 0)
        value_bits = self._fill(
            (value_importance / average)[..., 0], 0 if self._tile == 1 else min(self.widths)
        )
        counts = torch.stack([(key_bits == width).sum(-2) for width in layout.widths], -1) * self._tile
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
        choice = tuple(width for width in (0, *sorted(self.widths)) if width >= least)
        widths, errors, levels = _water(choice, self.grades, importance.device)
        price = importance[..., None, None] * levels[:, None] * errors + widths
        return widths[price.argmin(-1)]


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


@cache
def _water(
    widths: tuple[int, ...], grades: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Widths, what each loses, and water levels; kept, since to send them is to wait for a GPU."""
    errors = [GAUSSIAN_ERROR[width] for width in widths]
    return tuple(torch.tensor(numbers, device=device) for numbers in (widths, errors, grades))  # type: ignore[return-value]


@cache
def _packed_bytes(
    widths: tuple[int, ...], key_dim: int, value_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Bytes of a key's channels, (widths, channels + 1), and of a value by its width, (9,); int64."""
    keys = [[packed_bytes(count, width) for count in range(key_dim + 1)] for width in widths]
    values = [0, *(packed_bytes(value_dim, width) for width in range(1, 9))]
    return torch.tensor(keys, device=device), torch.tensor(values, device=device)


def _mean_squares(queries: Tensor) -> Tensor:
    """Mean squared channel, (heads, key_dim) float32."""
    parts = [part.float().square().sum(1) for part in queries.split(QUERIES_AT_A_TIME, 1)]
    return torch.stack(parts).sum(0) / max(queries.shape[1], 1)


def _shared_frame(view: LayerView) -> Frame | None:
    """The frame of the segment before, for a block of generated tokens: they are of one kind with the prompt's."""
    if not view.generated or view.previous is None:
        return None
    store, rows = view.previous
    if not isinstance(store, GradedStore):
        return None
    return store.frame if rows is None else store.frame.select(rows)


def _narrowest(view: LayerView) -> torch.dtype:
    """float16 for its precision, unless the model's numbers are beyond its range."""
    extremes = [extreme for states in (view.keys, view.values) for extreme in torch.aminmax(states)]
    largest = float(torch.stack(extremes).abs().max())
    return torch.float16 if largest < torch.finfo(torch.float16).max / 4 else torch.bfloat16
