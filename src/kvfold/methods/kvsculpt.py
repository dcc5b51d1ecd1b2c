"""KVSculpt: a few keys and values that no token had, so that attention over them is that over the whole prompt.

Of each KV head the first and newest tokens stay as they are. The others are replaced by fewer keys, moved by L-BFGS, and
values, solved for by ridge regression, that give back the output and the log-sum-exp of exact attention for training
queries. `docs/kvsculpt.md` says what is the paper's, what is not, and what each is worth.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.allocate.pilot import damped_counts
from kvfold.errors import UnsupportedModelError
from kvfold.methods.base import LayerView
from kvfold.methods.baselines.select_fit import SelectFit
from kvfold.methods.distil import Batch, Questions
from kvfold.methods.fit import zones
from kvfold.methods.lbfgs import LBFGS, Objective
from kvfold.methods.queries import Source, training
from kvfold.stores.base import Kept, Store
from kvfold.stores.weighted import WeightedLayout, WeightedStore

logger = logging.getLogger(__name__)

SLICE_BYTES = 1 << 30
"""Of heads that are distilled together: their queries, keys and histories."""


@dataclass(frozen=True, kw_only=True)
class KVSculpt(SelectFit):
    """Distil each head's prompt into fewer keys and values (KVSculpt, section 3).

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget.
    sinks, window : int
        Tokens kept exact at either end; the window's queries are fitted to, each seeing what is before it.
    queries : "reread", "future" or "synthetic"
        What else is fitted to; see `kvfold.methods.queries.training`. "synthetic" with a `horizon` of 128 is the paper's.
    sampled : int
        Prompt queries used, at most, spread evenly over it.
    horizon : int
        Positions after the prompt that they are turned to.
    steps : int
        Iterations on the keys. 0 leaves them as they were: Select+Fit with these queries.
    every : int
        Iterations between two solutions for the values. Of all these each head keeps the best for held-out queries; the
        first is the fit before any iteration.
    lse : float
        Weight of the squared log-sum-exp error beside the squared output error, each a mean; 0 leaves it out.
    ridge, ridge_to
        As for `SelectFit`.
    optimiser : "lbfgs" or "adam"
        The latter is the paper's control.
    rate : float
        Step size of Adam.
    heads : "pilot" or "uniform"
        Whether heads get tokens by the error that a pilot run leaves them with, or all the same.
    damping : float
        Power of the pilot's error that a head's tokens are in proportion to; 0.5 in the paper.
    floor, cap : float
        Least and most that a head may get, in parts of the uniform budget.
    layers : "depth" or "even"
        Whether an error in the pilot counts for more the earlier its layer is, or the same everywhere (the paper).
    pilot_steps : int
        Iterations of the pilot; the main run starts from the keys that it has moved.
    """

    name = "kvsculpt"
    paper = "KVSculpt"
    leaves_tokens = True

    queries: Source = "reread"
    sampled: int = 2048
    steps: int = 15
    every: int = 5
    lse: float = 1.0
    ridge: float = 1e-2
    ridge_to: Literal["zero", "own"] = "own"
    optimiser: Literal["lbfgs", "adam"] = "lbfgs"
    rate: float = 0.01
    heads: Literal["pilot", "uniform"] = "pilot"
    damping: float = 0.3
    floor: float = 0.25
    cap: float = 2.5
    layers: Literal["depth", "even"] = "depth"
    pilot_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0 or self.pilot_steps < 0 or self.every < 1:
            raise ValueError("steps and pilot_steps must be at least 0, every at least 1")
        if not 0 <= self.lse < math.inf or not 0 < self.rate < math.inf:
            raise ValueError(
                f"lse must be at least 0, rate above 0, both finite, got {self.lse} and {self.rate}"
            )
        if not 0 <= self.damping <= 1 or not 0 <= self.floor <= 1 <= self.cap < math.inf:
            raise ValueError("damping and floor must be from 0 to 1, cap at least 1")

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model" if self.heads == "pilot" else "layer"

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        if any(view.expand is not None for view in views):
            raise UnsupportedModelError(
                "kvsculpt moves keys, which latent attention (MLA) derives from the values: use select-fit or rdkv"
            )
        heads = [
            Head(view, row, head)
            for view in views
            for row in range(len(view.real_tokens))
            for head in range(view.keys.shape[1])
        ]
        counts, pilot = [self._uniform(head) for head in heads], None
        if self.heads == "pilot":
            pilot = self._distil(heads, counts, self.pilot_steps, None)
            counts = self._budgets(heads, counts, [each.error for each in pilot])
        found = iter(self._distil(heads, counts, self.steps, pilot if self.pilot_steps else None))
        stores: list[Store] = []
        for view in views:
            rows = [[next(found).kept for _ in range(view.keys.shape[1])] for _ in view.real_tokens]
            layout = WeightedLayout(view.tokens, view.real_tokens)
            stores.append(WeightedStore.build(layout, rows, view.keys.dtype))
        return stores

    # ---- budgets ----

    def _uniform(self, head: Head) -> int:
        view, real = head.view, head.view.real_tokens[head.row]
        if real <= self.shortest:
            return real
        return self._count(real, view.tokens, view.keys.shape[-1], view.values.shape[-1])

    def _budgets(self, heads: Sequence[Head], uniform: Sequence[int], errors: Sequence[float]) -> list[int]:
        """Tokens of each head, the same number in all of a row as with uniform budgets (KVSculpt, adaptive budgets)."""
        counts = list(uniform)
        for row in {head.row for head in heads}:
            index = [i for i, head in enumerate(heads) if head.row == row]
            each, real = uniform[index[0]], heads[index[0]].view.real_tokens[row]
            if each >= real:
                continue
            low = min(max(int(self.floor * each), self.shortest + 1), each)
            high = min(int(self.cap * each), real)
            error = torch.tensor([errors[i] * self._weight(heads[i].view) for i in index])
            shared = damped_counts(error, each * len(index), self.damping, low, high).tolist()
            for i, count in zip(index, shared, strict=True):
                counts[i] = count
        return counts

    def _weight(self, view: LayerView) -> float:
        """What a squared output error of a layer counts for.

        Later layers add to a residual that has grown, and to fewer layers after them. The curve is the shape of what
        gradients say of SmolLM2 and Qwen2.5: e^-3 over the depth, and the first layer, most of all that the residual
        then holds, ten times as much.
        """
        if self.layers == "even":
            return 1.0
        return math.exp(-3 * view.layer_idx / view.num_layers) * (10 if view.layer_idx == 0 else 1)

    # ---- distillation ----

    def _distil(
        self, heads: Sequence[Head], counts: Sequence[int], steps: int, pilot: Sequence[Distilled] | None
    ) -> list[Distilled]:
        """Every head to its count: those of about a size together, as many as memory allows."""
        order = sorted(range(len(heads)), key=lambda i: -counts[i])
        results: dict[int, Distilled] = {}
        for part in _slices([counts[i] for i in order], [heads[i].bytes(counts[i]) for i in order]):
            problems = [self._problem(heads[i], counts[i], pilot[i] if pilot else None) for i in order[part]]
            results.update(zip(order[part], self._solve(problems, steps), strict=True))
        return [results[i] for i in range(len(heads))]

    def _problem(self, head: Head, count: int, pilot: Distilled | None) -> Problem:
        """What stays of a head, what its other keys start from, and what attention is to give."""
        full = training(head.view, head.row, head.head, self.queries, self.window, self.horizon)
        weights, output, lse = full.attend()
        # Squared errors count, so squared attention does.
        chosen, stays = zones(weights.square().sum(0), count, self.sinks, self.window)
        start = full.keys[chosen] if pilot is None else pilot.moved(chosen, full.keys[chosen])
        asked = Questions.of(full, output, lse, stays, head.view.scaling) if len(chosen) else None
        return Problem(head, full.positions, full.keys, full.values, chosen, stays, start, asked)

    def _solve(self, problems: Sequence[Problem], steps: int) -> list[Distilled]:
        """Move keys and solve for values in turn, all heads at once."""
        free = [problem for problem in problems if problem.asked is not None]
        done = {id(problem): Distilled.exact(problem) for problem in problems}
        if not free:
            return list(done.values())
        view = free[0].head.view
        batch = Batch(
            [problem.asked for problem in free if problem.asked is not None],
            [problem.keys[problem.chosen] for problem in free],
            [problem.values[problem.chosen] for problem in free],
            view.softcap,
            self.lse,
        )
        towards = batch.values if self.ridge_to == "own" else torch.zeros_like(batch.values)
        best, error = batch.keys.clone(), batch.keys.new_full((len(free),), torch.inf)

        def keep_better(keys: Tensor) -> None:
            """Solve for the values of all heads, and note the keys of those that have become better."""
            batch.values = batch.solve(keys, self.ridge, towards)
            now = batch.held_error(keys, batch.values)
            better = now < error  # false where it is NaN
            best[better], error[better] = keys[better], now[better]

        keep_better(batch.keys)
        start = batch.pad([problem.start for problem in free])
        if not torch.equal(start, batch.keys):
            keep_better(start)
        solver = self._solver(start.flatten(1))
        for taken in range(0, steps, self.every):
            solver.run(batch, min(self.every, steps - taken))
            keep_better(solver.x.view_as(best))

        dtype = view.keys.dtype if view.keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
        cast = best.to(dtype).float()
        sound = cast.isfinite().flatten(1).all(1)
        cast = torch.where(sound[:, None, None], cast, batch.keys.to(dtype).float())
        sound &= solver.x.isfinite().all(1)
        for problem, fine in zip(free, sound.tolist(), strict=True):
            if not fine:
                logger.warning(
                    "layer %d, KV head %d: the optimiser left the numbers; the best keys before that are kept",
                    problem.head.view.layer_idx,
                    problem.head.head,
                )
        values = batch.solve(cast, self.ridge, towards, everything=True)
        for i, problem in enumerate(free):
            count = len(problem.chosen)
            done[id(problem)] = Distilled(
                problem.kept(cast[i, :count], values[i, :count]),
                problem.chosen,
                cast[i, :count],
                float(error[i]),
            )
        return list(done.values())

    def _solver(self, x: Tensor) -> LBFGS | _Adam:
        return LBFGS(x) if self.optimiser == "lbfgs" else _Adam(x, self.rate)


class _Adam:
    """The control: the interface of `LBFGS`."""

    def __init__(self, x: Tensor, rate: float):
        self.x = x.clone()
        self._adam = torch.optim.Adam([self.x], lr=rate)

    def run(self, objective: Objective, iterations: int) -> Tensor:
        every = torch.arange(len(self.x), device=self.x.device)
        for _ in range(iterations):
            loss, self.x.grad = objective(self.x, every)
            self._adam.step()
        return loss


@dataclass(frozen=True)
class Head:
    """One KV head of one row of one layer."""

    view: LayerView
    row: int
    head: int

    def bytes(self, count: int) -> int:
        """What its distillation holds, about: queries with their targets, and keys with histories of 10 pairs."""
        assert self.view.sampled is not None
        queries = self.view.sampled.shape[1] // self.view.keys.shape[1] * self.view.sampled.shape[2]
        key_dim, value_dim = self.view.keys.shape[-1], self.view.values.shape[-1]
        return 4 * (queries * (key_dim + 2 * value_dim) + 30 * count * key_dim)


@dataclass(frozen=True)
class Problem:
    """A head, its tokens (those chosen to start from, those that stay), its first keys, and what it is asked."""

    head: Head
    positions: Tensor
    keys: Tensor
    values: Tensor
    chosen: Tensor
    stays: Tensor
    start: Tensor
    asked: Questions | None

    def kept(self, keys: Tensor, values: Tensor) -> Kept:
        """Distilled keys and values, then the tokens that stay."""
        return Kept(
            self.positions[torch.cat([self.chosen, self.stays])],
            torch.cat([keys, self.keys[self.stays]]),
            torch.cat([values, self.values[self.stays]]),
        )


@dataclass(frozen=True)
class Distilled:
    """What became of a head: its content, the keys of the tokens it started from, and its held-out error."""

    kept: Kept
    chosen: Tensor
    keys: Tensor
    error: float

    @classmethod
    def exact(cls, problem: Problem) -> Distilled:
        """A head that keeps nothing but tokens as they are."""
        none = problem.keys[:0]
        return cls(problem.kept(none, problem.values[:0]), problem.chosen[:0], none, 0.0)

    def moved(self, chosen: Tensor, keys: Tensor) -> Tensor:
        """Keys of other tokens, where this one has moved them: as it has."""
        both = torch.isin(chosen, self.chosen)
        keys = keys.clone()
        keys[both] = self.keys[torch.searchsorted(self.chosen, chosen[both])]
        return keys


def _slices(counts: Sequence[int], sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of descending counts that memory allows together, and that do not pad each other by more than a quarter."""
    start = used = 0
    for i, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if i > start and (used + size > SLICE_BYTES or count < 0.75 * counts[start]):
            yield slice(start, i)
            start, used = i, 0
        used += size
    yield slice(start, len(counts))
