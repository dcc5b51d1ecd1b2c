"""One row of a window of layers, factorised: what errors cost, components, and the basis of the turn before."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvfold.allocate.transform import ERROR, Components, Groups, fill
from kvfold.codecs.rotated import prepare
from kvfold.errors import BudgetError
from kvfold.kernels.column_sums import column_sums
from kvfold.kernels.split_products import Moments, product
from kvfold.methods.base import LayerView
from kvfold.methods.exact_rows import exact_rows
from kvfold.methods.fit import future_queries
from kvfold.methods.scores import keys_for_scores
from kvfold.methods.subspace import leading, orthonormal
from kvfold.stores.lowrank import Factor, LowRankRow, LowRankStore, encode
from kvfold.stores.sixteen import half, narrow

if TYPE_CHECKING:
    from kvfold.methods.xkv import XKV

GOLDEN = 0.6180339887
"""Its multiples modulo 1 are spread evenly, however many there are."""
TOKENS = 8192
"""Worked on at a time: nothing of a prompt's length is held but weights, codes and what is to be folded."""


@dataclass
class Block:
    """Layers that share factors.

    Attributes
    ----------
    layers : range
        Within the window.
    found : (Factor, Factor)
        Of keys and of values, as what follows.
    shared : dict
        Buffers of the token factors.
    bases : list over layers of dict
        Buffers.
    lost : float
        Squared error, as the metric counts it.
    """

    layers: range
    found: tuple[Factor, Factor]
    shared: dict[str, Tensor]
    bases: list[dict[str, Tensor]]
    lost: float


@dataclass
class Plan:
    """How layers are to be factored.

    Attributes
    ----------
    layers : range
        Within the window.
    solved : list of (Components, Tensor)
        Of keys and of values, with directions (channels, components).
    groups : list of Groups
    """

    layers: range
    solved: list[tuple[Components, Tensor]]
    groups: list[Groups]

    @property
    def lost(self) -> float:
        """Squared error, as the metric counts it."""
        return sum(one.lost(group) for (one, _), group in zip(self.solved, self.groups, strict=True))


class Window:
    """One row of the layers of a window.

    Parameters
    ----------
    method : XKV
    views : list of LayerView
        Of one shape and device.
    row : int
    """

    def __init__(self, method: XKV, views: list[LayerView], row: int):
        self.method, self.views, self.row = method, views, row
        view = views[0]
        real = view.valid[row].any(0).nonzero().flatten()
        self.first = int(real[0]) if len(real) else view.tokens
        self.real = view.tokens - self.first
        self.sinks, self.newest = method.exact_tokens(self.real)
        self.span = slice(self.first + self.sinks, view.tokens - self.newest)
        self.coded = self.span.stop - self.span.start
        self.heads, self.dims = view.keys.shape[1], (view.keys.shape[-1], view.values.shape[-1])
        self.ranks = method.key_rank or sys.maxsize, method.value_rank or sys.maxsize
        self._grams: list[Tensor | None] = [None, None]
        self.half = half(view.keys.dtype)

    def encode(self) -> Iterator[tuple[LowRankRow, dict[str, Tensor]]]:
        """For each layer what is not a tensor, and buffers; those of factors are the same for layers that share them."""
        if not self.coded and self.method.budget is not None and self.real > self.method.shortest:
            raise self.method.no_chunk(self.real)
        self._measure()
        blocks = self._blocks()
        self._grams.clear()
        for found in blocks:
            block = found if isinstance(found, Block) else self._block(found)
            described = LowRankRow(
                first=self.first,
                shift=int(self.views[0].positions[self.row, -1]) - self.views[0].tokens + 1,
                sinks=self.sinks,
                newest=self.newest,
                layers=len(block.layers),
                key=block.found[0],
                value=block.found[1],
            )
            for layer, basis in zip(block.layers, block.bases, strict=True):
                yield (
                    described,
                    {**block.shared, **basis, **self._exact(layer, layer == block.layers[0])},
                )

    def _exact(self, layer: int, chooses: bool) -> dict[str, Tensor]:
        """Buffers of a layer beside factors and bases."""
        view = self.views[layer]
        keys, values = (x[self.row, :, self.first :] for x in (view.keys, view.values))
        coded = slice(self.sinks, self.sinks + self.coded)
        return exact_rows(self.method, keys, values, coded, chooses, self.half)

    # ---- what errors cost ----

    def _measure(self) -> None:
        """Token weights, and of keys and of values what is taken out before and their metrics, of all layers."""
        self.weights = torch.stack([self._weights(view) for view in self.views]).mean(0)
        key_mean, _ = self._mean_and_spread(0)
        value_mean, spread = self._mean_and_spread(1)
        unit = torch.eye(self.dims[1], device=spread.device)
        # (layers, kv_heads, dim) in 16 bits.
        self.means = key_mean, value_mean
        # (layers, kv_heads, dim, dim), lower triangular: states, as rows, are multiplied by it.
        self.metrics = self._key_metrics(), unit / spread[..., None, None]

    def _tokens(self) -> list[slice]:
        """Those in factors, some at a time."""
        return [
            slice(start, min(start + TOKENS, self.coded)) for start in range(0, max(self.coded, 1), TOKENS)
        ]

    def _raw(self, part: int, layers: range, tokens: slice) -> Tensor:
        """Some tokens' keys before RoPE, or values, of those that are to be in factors: (layers, kv_heads, n, dim) float32."""
        some = slice(self.span.start + tokens.start, self.span.start + tokens.stop)
        views = [self.views[layer] for layer in layers]
        states = torch.stack([(view.keys, view.values)[part][self.row, :, some] for view in views]).float()
        if part == 1 or not self.coded:
            return states
        positions, turned, start = views[0].positions[self.row, some], [], 0
        # Layers of one rotary embedding together: it takes dozens of launches.
        for rotary, run in groupby(views, key=lambda view: view.rotary):
            own = states[start : start + len(list(run))]
            turned.append(own if rotary is None else rotary.unrotate(own, positions))
            start += len(own)
        return turned[0] if len(turned) == 1 else torch.cat(turned)

    def _some_states(self, part: int, layers: range, tokens: slice) -> Tensor:
        """Some tokens' states less their mean with the metric applied, (n, layers * kv_heads * dim) float32."""
        own = slice(layers[0], layers[-1] + 1)
        raw = self._raw(part, layers, tokens) - self.means[part][own].float()[:, :, None]
        return (raw @ self.metrics[part][own]).permute(2, 0, 1, 3).flatten(1)

    def _mean_and_spread(self, part: int) -> tuple[Tensor, Tensor]:
        """What is taken out of keys or values before, (layers, kv_heads, dim) in 16 bits, and of values each head's spread."""
        plain, shape = self.method.metric == "plain" or part == 0, (self.heads, self.dims[part])
        every, device = range(len(self.views)), self.weights.device
        mean = torch.zeros(len(every), *shape, dtype=self.half, device=device)
        spread = torch.ones(len(every), self.heads, device=device)
        if not self.coded or (plain and not self.method.centre):
            return mean, spread
        weighted, sums, squares = torch.zeros(3, len(every), *shape, dtype=torch.float64, device=device)
        for tokens in self._tokens():
            raw = self._raw(part, every, tokens)
            weighted += self.weights[tokens] @ raw
            if not plain:
                sums += raw.sum(2, dtype=torch.float64)
                squares += raw.square().sum(2, dtype=torch.float64)
            del raw  # before the next piece is made
        if self.method.centre:
            mean = narrow((weighted / self.weights.sum()).float(), self.half)
        if plain:
            return mean, spread
        size = (squares / self.coded).sum(-1).sqrt()
        spread = (squares / self.coded - (sums / self.coded).square()).clamp_min(0).sum(-1).sqrt()
        # A head of one value throughout would make a metric that 16-bit bases cannot undo.
        return mean, torch.maximum(spread, 0.01 * size).clamp_min(1e-6).float()

    def _queries(self, view: LayerView) -> tuple[Tensor, Tensor]:
        """Real sampled queries (heads, n, query_dim) float32 and their index in the segment."""
        assert view.sampled is not None and view.sampled_index is not None
        inside = view.sampled_index >= self.first
        return view.sampled[self.row][:, inside].float(), view.sampled_index[inside]

    def _key_metrics(self) -> Tensor:
        """A root of the second moment of the queries that keys before RoPE meet, (layers, kv_heads, key_dim, key_dim)."""
        dim = self.dims[0]
        if self.method.metric == "plain" or not self.coded:
            unit = torch.eye(dim, device=self.views[0].keys.device)
            return unit.expand(len(self.views), self.heads, -1, -1)
        moments = []
        for view in self.views:
            query, index = self._queries(view)
            query = query[..., -dim:] * view.scaling
            if view.rotary is not None:
                # A query turned back by the position of one of the keys before it: what that key met before RoPE.
                share = torch.arange(1, len(index) + 1, device=index.device) * GOLDEN % 1
                met = view.positions[self.row, self.first + ((index - self.first + 1) * share).long()]
                query = view.rotary.unrotate(query, met)
            query = query.reshape(self.heads, -1, dim)
            moments.append(query.transpose(1, 2) @ query / max(query.shape[1], 1))
        return root(torch.stack(moments))

    def _weights(self, view: LayerView) -> Tensor:
        """What an error of each token costs, on average 1: (coded,)."""
        flat = torch.ones(self.coded, device=view.keys.device)
        if self.method.metric == "plain" or not self.coded:
            return flat
        _, index = self._queries(view)
        query = future_queries(view, self.row, self.method.horizon)
        keys = keys_for_scores(view)[self.row : self.row + 1, :, self.first :]
        squares = column_sums(
            query[None].to(keys.dtype),
            keys,
            view.scaling,
            softcap=view.softcap,
            kv_heads=self.heads,
            squared=True,
        )
        # Queries left out would have met the neighbours of the tokens that those in the sample meet.
        stride = int(index[1] - index[0]) if len(index) > 1 else 1
        reach = min(stride // 2, self.real - 1)
        if reach:
            squares = avg_pool1d(pad(squares, (reach, reach), mode="reflect"), 2 * reach + 1, 1)
        squares = squares[0, :, self.sinks : self.sinks + self.coded]
        weights = (squares / squares.mean(1, keepdim=True).clamp_min(1e-30)) ** self.method.flatten
        return (weights / weights.mean(1, keepdim=True).clamp_min(1e-30)).mean(0).clamp_min(1e-6)

    # ---- factorising ----

    def _blocks(self) -> list[Block | Plan]:
        """The cheapest way to factor the layers: on the bases there are, as one window, or in parts of it."""
        budget = self.method.budget
        blocks: list[Block | Plan] = []
        for layers in self._known():
            projected = self._project(layers)
            if projected is None:
                blocks += self._factor(layers, None)
                continue
            block, nbytes = projected
            have = None if budget is None else self._budget(layers)
            if have is None or nbytes <= have:
                try:
                    own = self._factor(layers, nbytes)
                except BudgetError:
                    own = []
                if not own or block.lost <= sum(one.lost for one in own):
                    blocks.append(block)
                    continue
            blocks += self._factor(layers, None)
        return blocks

    def _budget(self, layers: range) -> int:
        """Bytes for factors and bases of some layers."""
        budget = self.method.budget
        assert budget is not None
        have = len(layers) * budget.bytes(self.real, self.heads, *self.dims)
        exact = self.sinks + self.newest
        for layer in layers:
            have -= self.method.fixed_bytes(
                self.coded, exact, self.heads, *self.dims, chooses=layer == layers[0]
            )
        return have

    def _factor(self, layers: range, budget: int | None) -> list[Plan]:
        """Factorise layers within a budget (None: the method's)."""
        best: list[Plan] | None = None
        least = float("inf")
        for size in self._sizes(len(layers)):
            parts = [layers[start : start + size] for start in range(0, len(layers), size)]
            tried: list[Plan] = []
            for part in parts:
                have = budget * len(part) // len(layers) if budget is not None else None
                if have is None and self.method.budget is not None:
                    have = self._budget(part)
                solved = self._solve(part, have)
                groups = self._allocate([one for one, _ in solved], have)
                if groups is None:
                    break
                tried.append(Plan(part, solved, groups))
            lost = sum(plan.lost for plan in tried)
            if len(tried) == len(parts) and lost < least:
                best, least = tried, lost
        if best is None:
            raise BudgetError(
                f"the budget is smaller than the fewest components and their bases of {self.real} tokens: raise keep, or"
                " fold more tokens at once"
            )
        return best

    def _sizes(self, layers: int) -> list[int]:
        sizes = [layers]
        while self.method.split and self.method.budget and self.coded and sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
        return sizes

    def _allocate(self, parts: list[Components], budget: int | None) -> list[Groups] | None:
        if not self.coded:
            return [((min(self.method.widths), 2),) for _ in parts]
        if budget is None:
            return [((self.method.widths[0], len(part.energy)),) for part in parts]
        found = fill(parts, self.coded, budget, self.method.widths)
        return found or fill(parts, self.coded, budget, self.method.widths, tile=2)

    def _solve(self, layers: range, budget: int | None) -> list[tuple[Components, Tensor]]:
        """Components and directions (channels, components) of keys and of values of some layers."""
        result = []
        for part, (dim, rank) in enumerate(zip(self.dims, self.ranks, strict=True)):
            few = 0 < self.coded < len(layers) * self.heads * dim
            if few:
                states = torch.cat([self._some_states(part, layers, tokens) for tokens in self._tokens()])
                states = (states * self.weights.sqrt()[:, None]).double()
                gram = states @ states.t()
            else:
                gram = self._gram(part, layers)
            most = min(rank, self._most(len(gram), layers, dim, budget))
            # Where most directions are wanted, iteration is no faster.
            if self.method.solver == "subspace" and 2 * most < len(gram):
                energy, vectors = leading(gram, most)
                if few:
                    # From the smaller Gram matrix: the other side's directions, which are orthogonal for eigenvectors alone.
                    vectors = orthonormal(states.t() @ vectors)
                    energy = (states @ vectors).square().sum(0)
            else:
                energy, vectors = torch.linalg.eigh(gram)
                energy, vectors = energy.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
                if few:
                    # They vanish with their energy.
                    least = 1e-6 * float(energy.max()) ** 0.5 + 1e-30
                    vectors = states.t() @ vectors / energy.sqrt().clamp_min(least)
            rest = max(float(gram.trace() - energy.sum()), 0.0)
            lacking = max(2 - len(energy), 0)
            energy, vectors = pad(energy.float(), (0, lacking)), pad(vectors.float(), (0, lacking))
            result.append((self.method.components(energy, len(layers), self.heads, dim, rest), vectors))
        return result

    def _gram(self, part: int, layers: range) -> Tensor:
        """Second moments (channels, channels) float64 of some layers' states, summed over tokens by their weights."""
        gram = self._grams[part]
        if gram is None:
            every = range(len(self.views))
            channels = len(every) * self.heads * self.dims[part]
            moments = Moments(channels, self.weights.device)
            for tokens in self._tokens():
                # Nothing of a piece is left when the next one is made.
                moments.add(self._some_states(part, every, tokens) * self.weights[tokens].sqrt()[:, None])
            self._grams[part] = gram = moments.total()
        own = self._channels(part, layers)
        return gram[own, own]

    def _most(self, available: int, layers: range, dim: int, budget: int | None) -> int:
        """Components that a budget could pay at the narrowest width."""
        if budget is None:
            return available
        one = self.method.components(torch.empty(0), len(layers), self.heads, dim)
        each = self.coded * min(self.method.widths) // 8 + one.basis_bytes
        # What is kept beside factors may cost more than the budget.
        return min(max(budget, 0) // max(each, 1) + 8, available)

    def _block(self, plan: Plan) -> Block:
        layers, solved, groups = plan.layers, plan.solved, plan.groups
        found = []
        shared: dict[str, Tensor] = {}
        bases: list[dict[str, Tensor]] = [{} for _ in layers]
        for (components, _), group in zip(solved, groups, strict=True):
            rank = sum(count for _, count in group)
            total = float(components.energy.sum()) + components.rest
            outside = total - float(components.energy[:rank].sum())
            found.append(Factor(group, self.method.basis_bits, max(outside, 0.0) / max(total, 1e-30)))
        prepare([factor.code for factor in found if factor.code is not None], self.weights.device)
        for part, (_, vectors) in enumerate(solved):
            # Turned as their codes are: that turns factors and bases.
            vectors = found[part].turned(vectors[:, : found[part].rank])
            pieces = (product(self._some_states(part, layers, tokens), vectors) for tokens in self._tokens())
            shared |= self._coded(part, found[part], pieces)
            rows = vectors.t().unflatten(1, (len(layers), self.heads, -1)).permute(1, 2, 0, 3)
            for basis, own in zip(bases, self._bases(part, layers, rows, found[part]), strict=True):
                basis |= own
        return Block(layers, (found[0], found[1]), shared, bases, plan.lost)

    def _coded(self, part: int, factor: Factor, pieces: Iterable[Tensor]) -> dict[str, Tensor]:
        """Token factors (n, rank), turned, of some tokens after others as buffers."""
        return encode.factors(("key", "value")[part], pieces, factor, self.half)

    def _channels(self, part: int, layers: range) -> slice:
        width = self.heads * self.dims[part]
        return slice(layers[0] * width, (layers[-1] + 1) * width)

    def _bases(self, part: int, layers: range, rows: Tensor, factor: Factor) -> Iterator[dict[str, Tensor]]:
        """Each layer's buffers of the rows (layers, kv_heads, rank, dim) of the basis, turned, with the metric taken off again."""
        name, own = ("key", "value")[part], slice(layers[0], layers[-1] + 1)
        rows = torch.linalg.solve_triangular(self.metrics[part][own], rows, upper=False, left=False)
        buffers = encode.bases(name, rows, factor, self.half)
        if self.method.centre:
            buffers[f"{name}_mean"] = self.means[part][own]
        for layer in range(len(layers)):
            # Each in memory of its own: a layer may outlive the others.
            yield {stem: tensor[layer].clone() for stem, tensor in buffers.items()}

    # ---- a turn after a folded one ----

    def _known(self) -> Iterator[range]:
        """Runs of layers that share factors in the segment before, or all layers if there is none."""
        names: list[object] = []
        for view in self.views:
            store, row = before(view, self.row)
            names.append(None if store is None else tuple(id(tensor) for tensor in store.shared(row)))
        start = 0
        for _, run in groupby(names):
            stop = start + len(list(run))
            yield range(start, stop)
            start = stop

    def _project(self, layers: range) -> tuple[Block, int] | None:
        """The layers' states on the basis of the segment before, and the bytes that takes; None where there is none."""
        befores = [before(self.views[layer], self.row) for layer in layers]
        store, row = befores[0]
        if store is None or not self.coded:
            return None
        described = store.layout.rows[row]
        if described.layers != len(layers) or (store.kv_heads, (store.key_dim, store.value_dim)) != (
            self.heads,
            self.dims,
        ):
            return None
        shared: dict[str, Tensor] = {}
        lost, nbytes = 0.0, 0
        for part, name in enumerate(("key", "value")):
            factor: Factor = getattr(described, name)
            rows = [
                torch.cat(list(before.basis(its, name) @ self.metrics[part][layer]), 1)
                for layer, (before, its) in zip(layers, befores, strict=True)
                if before is not None
            ]
            basis = torch.cat(rows, 1)
            if factor.code is not None:
                basis = factor.code.rotate_back(basis.t()).t()
            moved = [
                (
                    (self.means[part][layer].float()[:, None] - before.mean(its, name))
                    @ self.metrics[part][layer]
                ).flatten()
                for layer, (before, its) in zip(layers, befores, strict=True)
                if before is not None
            ]
            inner = (basis @ basis.t()).double()
            inner.diagonal().add_(inner.diagonal().mean() * 1e-8)
            energy = torch.zeros(len(basis), device=basis.device)
            pieces = []
            for tokens in self._tokens():
                states = self._some_states(part, layers, tokens) + torch.cat(moved)
                pieces.append(torch.linalg.solve(inner, (basis @ states.t()).double()).t().float())
                error = states - pieces[-1] @ basis
                lost += float((error.square().sum(1) * self.weights[tokens]).sum())
                energy += (pieces[-1].square() * self.weights[tokens, None]).sum(0)
            shared |= self._coded(part, factor, (factor.turned(piece) for piece in pieces))
            energy *= basis.square().sum(1)
            start = 0
            for width, count in factor.groups:
                lost += ERROR[width] * float(energy[start : start + count].sum())
                start += count
            nbytes += Components(energy, 0).nbytes(factor.groups, self.coded)
        bases = [
            {
                stem: tensor
                for stem, tensor in before.row(its).items()
                if stem.startswith(("key_", "value_")) and stem.endswith(("_basis", "_scales", "_mean"))
            }
            for before, its in befores
            if before is not None
        ]
        block = Block(layers, (described.key, described.value), shared, bases, lost)
        return block, nbytes


def root(moments: Tensor) -> Tensor:
    """Lower triangular L (..., n, n) with L L^T near symmetric positive semi-definite matrices, none of its directions nearly zero.

    Of any root R of a second moment the squares of x R sum to the same. 3e-5 of the Frobenius norm, which is at least the largest
    eigenvalue, is added to the diagonal: enough for bases in few bits to be divided by it. Three times as much draws bytes to keys
    that no query meets.
    """
    ridge = 3e-5 * torch.linalg.matrix_norm(moments).clamp_min(1e-20)
    return torch.linalg.cholesky(moments + torch.diag_embed(ridge[..., None].expand(moments.shape[:-1])))


def before(view: LayerView, row: int) -> tuple[LowRankStore | None, int]:
    """The low-rank store of the segment before, and its row for a batch row."""
    store, rows = view.previous or (None, None)
    if not isinstance(store, LowRankStore):
        return None, row
    return store, row if rows is None else int(rows[row])
