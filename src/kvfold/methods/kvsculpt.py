"""KVSculpt: a few keys and values that no token had, so that attention over them is that over the whole prompt.

Of each KV head the first and newest tokens stay as they are. The others are replaced by fewer keys, moved by L-BFGS, and
values, solved for by ridge regression, that give back the output and the log-sum-exp of exact attention for training
queries. `docs/kvsculpt.md` says what is the paper's, what is not, and what each is worth.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.allocate.pilot import damped_counts
from kvfold.kernels.reference import Part
from kvfold.methods.adam import Adam
from kvfold.methods.base import LayerView, Needs, cannot_read_again
from kvfold.methods.baselines.select_fit import SelectFit
from kvfold.methods.distil import Batch
from kvfold.methods.fit import ridge_values
from kvfold.methods.lbfgs import LBFGS
from kvfold.methods.pieces import (
    Distilled,
    Head,
    Piece,
    Problem,
    Standing,
    packed,
    shares,
    slices,
    unpacked,
)
from kvfold.methods.queries import Source, Training, first_reading, repeated, training
from kvfold.methods.work import Work
from kvfold.stores.base import Store
from kvfold.stores.sixteen import half
from kvfold.stores.weighted import WeightedLayout, WeightedStore

logger = logging.getLogger(__name__)

SLICE_BYTES = (1 << 30, 1 << 26)
"""Of what is distilled together (queries, keys, histories): where many cores want work, and on a CPU."""


@dataclass(frozen=True, kw_only=True)
class KVSculpt(SelectFit):
    """Distil each head's prompt into fewer keys and values (KVSculpt, section 3).

    Parameters
    ----------
    keep, bits_per_element, tokens : exactly one
        Budget.
    sinks, window : int
        Tokens kept exact at either end; the window's queries are fitted to, each seeing what is before it.
    queries : "reread", "future", "synthetic" or "repeat"
        What else is fitted to; see `kvfold.methods.queries.training`. "synthetic" with a `horizon` of 128 is the paper's;
        "repeat" reads the prompt a second time.
    sampled : int
        Prompt queries used, at most, spread evenly over it. Of a longer prompt tokens are chosen by attention averaged over
        neighbours, as many as lie between two of these queries.
    horizon : int
        Positions after the prompt that they are turned to.
    chunk : int, optional
        Tokens of a piece of the prompt that is distilled by itself, about, so that what is held does not grow with the
        prompt. Its queries are those of the whole prompt; they see the pieces before it as they were distilled and
        those after it as they are. None: all in one.
    cascade : bool
        Distil layer after layer, each for the queries that the layers below lead to as they were distilled, towards what
        exact ones got: a layer makes up for the errors below. Reads the prompt a second time, so it is for
        `kvfold.fold`, and for models all of whose layers are full attention.
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
    chunk: int | None = None
    cascade: bool = False
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
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")
        if self.steps < 0 or self.pilot_steps < 0 or self.every < 1:
            raise ValueError("steps and pilot_steps must be at least 0, every at least 1")
        if not 0 <= self.lse < math.inf or not 0 < self.rate < math.inf:
            raise ValueError(
                f"lse must be at least 0, rate above 0, both finite, got {self.lse} and {self.rate}"
            )
        if not 0 <= self.damping <= 1 or not 0 <= self.floor <= 1 <= self.cap < math.inf:
            raise ValueError("damping and floor must be from 0 to 1, cap at least 1")

        if self.cascade and self.queries not in ("reread", "future"):
            raise ValueError(f"cascade goes with queries 'reread' or 'future', got {self.queries!r}")

    @property
    def needs(self) -> Needs:
        return replace(super().needs, again=self.cascade or self.queries == "repeat")

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model" if self.heads == "pilot" or self.needs.again else "layer"

    @property
    def refuses_latent(self) -> str:
        return "kvsculpt moves keys, which latent attention (MLA) derives from the values: use select-fit or rdkv"

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        if self.needs.again and views[0].again is None:
            raise cannot_read_again(self.name)
        asked: list[tuple[LayerView, Part | None]] = [(view, None) for view in views]
        if self.queries == "repeat":
            asked = [*repeated(views, self.sampled, self.horizon)]
        heads = [head for each in asked for head in self._heads(*each)]
        pieces = [piece for head in heads for piece in head.pieces(self.chunk)]
        counts, pilot = [piece.uniform for piece in pieces], None
        first = self.heads == "pilot" or self.chunk is not None
        stages = [self.pilot_steps] * first + [self.steps]
        meter = _Meter(views[0].work, sum(_effort(count, steps) for count in counts for steps in stages))
        if first and pieces:
            pilot = self._distil(pieces, counts, None, meter)
            counts = self._budgets(pieces, pilot)
        moved = pilot if self.pilot_steps else None
        if self.cascade and pieces:
            found = self._cascade(heads, pieces, counts, moved, meter)
        else:
            found = self._distil(pieces, counts, moved, meter, last=True)
        of: dict[Head, list[Distilled]] = {head: [] for head in heads}
        for piece, distilled in zip(pieces, found, strict=True):
            of[piece.head].append(distilled)
        views[0].said.extend(_told(head, parts) for head, parts in of.items() if parts)
        kept = iter([head.kept(parts) for head, parts in of.items()])
        stores: list[Store] = []
        for view in views:
            rows = [[next(kept) for _ in range(view.keys.shape[1])] for _ in view.real_tokens]
            layout = WeightedLayout(view.tokens, view.real_tokens)
            stores.append(WeightedStore.build(layout, rows, view.keys.dtype))
        return stores

    # ---- budgets ----

    def _heads(self, view: LayerView, beside: Part | None) -> Iterator[Head]:
        """Each row's KV heads, with their tokens that stay and how many others are left to distil to."""
        there = view.valid.sum(-1).tolist()
        for row, real in enumerate(view.real_tokens):
            budget = real
            if real > self.shortest:
                budget = self._count(real, view.tokens, view.keys.shape[-1], view.values.shape[-1])
            for head, tokens in enumerate(there[row]):
                index = torch.arange(tokens, device=view.keys.device)
                stays, others = index, slice(0, 0)
                if budget < tokens:
                    first = min(self.sinks, tokens)
                    others = slice(first, max(tokens - self.window, first))
                    stays = torch.cat([index[: others.start], index[others.stop :]])
                    stays = stays[max(len(stays) - budget, 0) :]
                found = Head(view, row, head, stays, others, min(budget, tokens) - len(stays))
                if beside is not None:
                    found = replace(
                        found, beside=(beside[0][row, found.members], beside[1][row, found.members])
                    )
                yield found

    def _budgets(self, pieces: Sequence[Piece], pilot: Sequence[Distilled]) -> list[int]:
        """Tokens of each piece.

        Heads share by their errors, the same number in all of a row as with uniform budgets (KVSculpt, adaptive budgets).
        Pieces of a head get as many as it has there of the tokens that are attended to most.
        """
        parts: dict[Head, list[Distilled]] = {piece.head: [] for piece in pieces}
        for piece, part in zip(pieces, pilot, strict=True):
            parts[piece.head].append(part)
        shared: dict[Head, list[int]] = {}
        for row in {head.row for head in parts}:
            heads = [head for head in parts if head.row == row]
            counts = [head.free for head in heads]
            if self.heads == "pilot":
                errors = [float(sum(part.error for part in parts[head])) for head in heads]
                least = torch.tensor([len(parts[head]) for head in heads])
                counts = self._adapted(heads, errors, least)
            shared |= {
                head: shares(n, [part.scores for part in parts[head]]) for head, n in zip(heads, counts)
            }
        return [count for head in parts for count in shared[head]]

    def _adapted(self, heads: Sequence[Head], errors: Sequence[float], least: Tensor) -> list[int]:
        """Tokens of each head of a row, by errors."""
        same = torch.tensor([head.free for head in heads])
        size = torch.tensor([head.others.stop - head.others.start for head in heads])
        base = torch.tensor([len(head.stays) for head in heads])
        each = float((same + base).double().mean())
        low = torch.minimum(torch.maximum((self.floor * each - base).long(), least), same)
        high = torch.maximum(torch.minimum((self.cap * each - base).long(), size), same)
        error = torch.tensor([e * self._weight(head.view) for e, head in zip(errors, heads, strict=True)])
        counts: list[int] = damped_counts(error, int(same.sum()), self.damping, low, high, base).tolist()
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
        self,
        pieces: Sequence[Piece],
        counts: Sequence[int],
        start: Sequence[Distilled] | None,
        meter: _Meter,
        last: bool = False,
        changed: Mapping[int, Tensor] | None = None,
    ) -> list[Distilled]:
        """Every piece to its count: those of about a size together, as many as memory allows.

        Pieces of a head go one after the other, those of the other heads of its layer, and of as many neighbouring layers
        as memory allows, together: each sees those before it as they were distilled, and makes up for their errors. When
        all are done, so do the values of those before.

        `changed` has a layer's sampled queries (batch, heads, n, key_dim) as the layers below, distilled, lead to them.
        """
        heads = list(dict.fromkeys(piece.head for piece in pieces))
        groups = self._neighbours(heads) if self.chunk else dict.fromkeys(heads, 0)

        def turn(piece: Piece) -> tuple[str, int, int]:
            device = str(piece.head.view.keys.device)
            return (device, groups[piece.head], piece.number if self.chunk else 0)

        order = sorted(range(len(pieces)), key=lambda i: (turn(pieces[i]), -counts[i]))
        largest = max(Counter(groups.values()).values(), default=1) if self.chunk else 1
        standing = lru_cache(largest)(partial(self._standing, changed=changed))
        results: dict[int, Distilled] = {}
        sizes = [pieces[i].bytes(counts[i]) for i in order]
        room = self._room(pieces[0].head.view) if pieces else 0
        turns = [turn(pieces[i]) for i in order]
        for part in slices([counts[i] for i in order], sizes, turns, room):
            index, view = order[part], pieces[order[part.start]].head.view
            name = f"{'main' if last else 'pilot'}-{view.layer_idx}-{part.start}"
            scores = [0 if last else pieces[i].size for i in index]
            done = unpacked(meter.work.kept(name), [counts[i] for i in index], scores, view.keys.device)
            if done is None:
                problems = [
                    Problem.of(pieces[i], counts[i], standing(pieces[i].head), start[i] if start else None)
                    for i in index
                ]
                done = self._solve(problems, meter, last)
                meter.work.keep(name, packed(done))
            else:
                steps = self.steps if last else self.pilot_steps
                meter.add(sum(_effort(counts[i], steps) for i in index))
            results.update(zip(index, done, strict=True))
            for i in index if last and self.chunk else ():
                head = pieces[i].head
                standing(head).take(pieces[i], results[i])
                if pieces[i].number and (i + 1 == len(pieces) or pieces[i + 1].head is not head):
                    own = range(i - pieces[i].number, i + 1)
                    settled = self._settled(standing(head), [results[j] for j in own])
                    results.update(zip(own, settled, strict=True))
        return [results[i] for i in range(len(pieces))]

    def _neighbours(self, heads: Sequence[Head]) -> dict[Head, int]:
        """Numbers of the groups of layers whose pieces are distilled together: what stands of all their heads is held."""
        groups: dict[Head, int] = {}
        number = used = 0
        for view in {id(head.view): head.view for head in heads}.values():
            own = [head for head in heads if head.view is view]
            size = sum(head.bytes for head in own)
            if used and used + size > self._room(view):
                number, used = number + 1, 0
            used += size
            groups |= dict.fromkeys(own, number)
        return groups

    def _settled(self, standing: Standing, parts: Sequence[Distilled]) -> list[Distilled]:
        """All pieces of a head, their values solved for once more: each piece's for what all others leave.

        Keys stay, and with them all weights, so that values are least squares piece by piece.
        """
        lacking, settled = standing.whole[0] - standing.now[0], []
        for part in parts:
            weights = standing.scores(part).sub_(standing.now[1][:, None]).exp_()
            lacking = lacking + weights @ part.values.float()
            own = standing.asked.values[part.chosen]
            towards = own if self.ridge_to == "own" else torch.zeros_like(own)
            values = ridge_values(weights, lacking, self.ridge, towards).to(part.values.dtype)
            lacking = lacking - weights @ values.float()
            settled.append(replace(part, values=values))
        return settled

    @staticmethod
    def _room(view: LayerView) -> int:
        return SLICE_BYTES[view.keys.device.type == "cpu"]

    def _standing(self, head: Head, changed: Mapping[int, Tensor] | None = None) -> Standing:
        """Training queries of a head, and exact attention: theirs, or that of what they were before they changed."""

        def asked(view: LayerView) -> Training:
            return training(view, head.row, head.head, self.queries, self.window, self.horizon, head.beside)

        exact = asked(head.view)
        whole = exact.attend()
        if changed is None:
            return Standing(exact, whole, whole)
        now = asked(replace(head.view, sampled=changed[head.view.layer_idx]))
        return Standing(now, whole, now.attend())

    def _cascade(
        self,
        heads: Sequence[Head],
        pieces: Sequence[Piece],
        counts: Sequence[int],
        start: Sequence[Distilled] | None,
        meter: _Meter,
    ) -> list[Distilled]:
        """Layer after layer, as a second reading of the sampled tokens comes to them.

        Each token gets what it got in the first reading, and what its query, asked again after the prompt, now gets of
        the distilled tokens more than the exact query got of all: where nothing is lost nothing changes.
        """
        found: dict[int, Distilled] = {}

        def answer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = [head for head in heads if head.view.layer_idx == layer]
            index = [i for i, piece in enumerate(pieces) if piece.head.view.layer_idx == layer]
            changed = {layer: query}
            some = [pieces[i] for i in index], [counts[i] for i in index], start and [start[i] for i in index]
            found.update(zip(index, self._distil(*some, meter, True, changed), strict=True))
            view = own[0].view
            output = first_reading(view)
            for head in own:
                parts = [found[i] for i in index if pieces[i].head is head]
                change = self._standing(head, changed).change(head.others, parts)
                real = view.valid[head.row, :, view.sampled_index].any(0)
                change = change.unflatten(0, (head.members.stop - head.members.start, -1))[
                    :, : int(real.sum())
                ]
                output[head.row, head.members, real] += change
            return output

        view = heads[0].view
        assert view.again is not None and view.sampled_index is not None
        view.again(view.sampled_index, view.positions[:, view.sampled_index], answer)
        return [found[i] for i in range(len(pieces))]

    def _solve(self, problems: Sequence[Problem], meter: _Meter, last: bool) -> list[Distilled]:
        """Move keys and solve for values in turn, all pieces at once; a pilot only wants to know how well that went."""
        view, steps = problems[0].piece.head.view, self.steps if last else self.pilot_steps
        batch = Batch(
            [problem.asked for problem in problems],
            [problem.keys for problem in problems],
            [problem.values for problem in problems],
            view.softcap,
            self.lse,
        )
        towards = batch.values if self.ridge_to == "own" else torch.zeros_like(batch.values)
        best, errors = batch.keys.clone(), batch.keys.new_full((len(problems), 2, 2), torch.inf)
        tokens = sum(batch.counts)

        def keep_better(keys: Tensor) -> None:
            """Solve for the values of all pieces, and note the keys of those that have become better."""
            batch.values = batch.solve(keys, self.ridge, towards)
            now = batch.errors(keys, batch.values)
            better = now[:, 1] < errors[:, 1, 1]  # false where it is NaN
            best[better], errors[better, 1] = keys[better], now[better]

        start = batch.pad([problem.start for problem in problems])
        moved = not torch.equal(start, batch.keys)
        if steps or moved or not last:
            keep_better(batch.keys)
            errors[:, 0] = errors[:, 1]
        if moved:
            keep_better(start)
        solver = self._solver(start.flatten(1))
        meter.add(_effort(tokens, 0))
        for taken in range(0, steps, self.every):
            now = min(self.every, steps - taken)
            solver.run(batch, now)
            keep_better(solver.x.view_as(best))
            meter.add(now * tokens)

        # Keys that left float16 are beyond it, unless the tokens' own are.
        dtype = half(view.keys.dtype, batch.keys)
        cast = best.to(dtype).float()
        sound = cast.isfinite().flatten(1).all(1)
        cast = torch.where(sound[:, None, None], cast, batch.keys.to(dtype).float())
        sound &= solver.x.isfinite().all(1)
        for problem, fine in zip(problems, sound.tolist(), strict=True):
            if not fine:
                logger.warning(
                    "layer %d, KV head %d: the optimiser left the numbers; the best keys before that are kept",
                    problem.piece.head.view.layer_idx,
                    problem.piece.head.head,
                )
        values = batch.solve(cast, self.ridge, towards, everything=True) if last else batch.values
        wide = half(dtype, values)
        return [
            Distilled(
                problem.chosen,
                cast[i, :count].to(dtype),
                values[i, :count].to(wide),
                errors[i],
                sound[i],
                problem.scores[: 0 if last else None],
            )
            for i, (problem, count) in enumerate(zip(problems, batch.counts, strict=True))
        ]

    def _solver(self, x: Tensor) -> LBFGS | Adam:
        return LBFGS(x) if self.optimiser == "lbfgs" else Adam(x, self.rate)


def _told(head: Head, parts: Sequence[Distilled]) -> dict[str, Any]:
    """What the report says of a head; errors are summed over its pieces, each (of Select+Fit, of what is kept)."""
    errors = torch.stack([part.errors for part in parts])
    trained, held = errors.sum(0).t().tolist()
    return {
        "layer": head.view.layer_idx,
        "row": head.row,
        "head": head.head,
        "tokens": [head.others.stop - head.others.start, sum(len(part.chosen) for part in parts)],
        **({"trained": trained, "held_out": held} if math.isfinite(held[1]) else {}),
        "keys_of_tokens": int((errors[:, 0] == errors[:, 1]).flatten(1).all(1).sum()),
        "pieces": len(parts),
        "diverged": not all(bool(part.sound) for part in parts),
    }


@dataclass
class _Meter:
    """How much of the work is done."""

    work: Work
    total: int
    done: int = 0

    def add(self, effort: int) -> None:
        self.done += effort
        self.work.tell(self.done, self.total)


def _effort(count: int, steps: int) -> int:
    """Work of distilling to so many tokens, about: solving for values counts as much as three steps."""
    return count * (steps + 3)
