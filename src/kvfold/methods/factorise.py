"""One row of a window of layers, factorised: what errors cost, components, and the basis of the turn before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cosine_similarity, pad

from kvfold.allocate.transform import ERROR, Components, Groups, fill
from kvfold.errors import BudgetError
from kvfold.kernels.reference import column_mass
from kvfold.methods.base import LayerView
from kvfold.methods.fit import future_queries
from kvfold.methods.scores import keys_for_scores
from kvfold.stores.lowrank import Factor, LowRankRow, LowRankStore, encode
from kvfold.stores.lowrank.encode import narrow
from kvfold.stores.trizone import position_dtype

if TYPE_CHECKING:
    from kvfold.methods.xkv import XKV

GOLDEN = 0.6180339887
"""Its multiples modulo 1 are spread evenly, however many there are."""
TOKENS = 8192
"""Whose moments are summed at a time, in float64."""


@dataclass
class Block:
    """Layers that share factors.

    Attributes
    ----------
    layers : range
        Within the window.
    found : (Factor, Factor)
        Of keys and of values, as what follows.
    factors : (Tensor (coded, rank), Tensor (coded, rank))
    bases : list over layers of dict
        Buffers.
    lost : float
        Squared error, as the metric counts it.
    """

    layers: range
    found: tuple[Factor, Factor]
    factors: tuple[Tensor, Tensor]
    bases: list[dict[str, Tensor]]
    lost: float


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
        self.states: list[Tensor] = []
        self._grams: list[Tensor | None] = [None, None]
        self.half = view.keys.dtype if view.keys.dtype in (torch.float16, torch.bfloat16) else torch.float16

    def encode(self) -> Iterator[tuple[LowRankRow, dict[str, Tensor]]]:
        """For each layer what is not a tensor, and buffers; those of factors are the same for layers that share them."""
        self._measure()
        blocks = self._blocks()
        # They take more than all that is to come.
        self.states.clear()
        self._grams.clear()
        for block in blocks:
            shared: dict[str, Tensor] = {}
            for name, factors, factor in zip(("key", "value"), block.factors, block.found, strict=True):
                shared |= encode.factors(name, factors, factor, self.half)
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
                yield described, {**shared, **basis, **self._exact_rows(layer, layer == block.layers[0])}

    # ---- what errors cost ----

    def _measure(self) -> None:
        """Token weights, and states less their mean with the metric applied, (coded, layers * kv_heads * dim) each."""
        self.metrics: list[tuple[Tensor, Tensor]] = []
        self.means: list[tuple[Tensor, Tensor]] = []
        self.weights = torch.stack([self._weights(view) for view in self.views]).mean(0)
        device, layers = self.views[0].keys.device, len(self.views)
        self.states = [
            torch.empty(self.coded, layers * self.heads * dim, dtype=torch.float32, device=device)
            for dim in self.dims
        ]
        for layer, view in enumerate(self.views):
            self.metrics.append((self._key_metric(view), self._value_metric(view)))
            self.means.append((self._mean(view, 0), self._mean(view, 1)))
            for part, (metric, means) in enumerate(zip(self.metrics[-1], self.means[-1], strict=True)):
                own = self._states(part, range(layer, layer + 1)).unflatten(1, (self.heads, -1))
                # A head at a time: what it takes on the way is in float32.
                for head in range(self.heads):
                    own[:, head] = (self._head(view, part, head) - means[head].float()) @ metric[head]

    def _head(self, view: LayerView, part: int, head: int) -> Tensor:
        """One head's keys before RoPE, or values, that are to be in factors: (coded, dim) float32."""
        states = (view.keys, view.values)[part][self.row, head, self.span].float()
        if part == 1 or view.rotary is None or not self.coded:
            return states
        return view.rotary.unrotate(states, view.positions[self.row, self.span])

    def _mean(self, view: LayerView, part: int) -> Tensor:
        """What is taken out of keys or values before, (kv_heads, dim) in 16 bits."""
        if not self.method.centre or not self.coded:
            return view.keys.new_zeros(self.heads, self.dims[part], dtype=self.half)
        sums = [self.weights @ self._head(view, part, head) for head in range(self.heads)]
        return narrow(torch.stack(sums) / self.weights.sum(), self.half)

    def _queries(self, view: LayerView) -> tuple[Tensor, Tensor]:
        """Real sampled queries (heads, n, query_dim) float32 and their index in the segment."""
        assert view.sampled is not None and view.sampled_index is not None
        inside = view.sampled_index >= self.first
        return view.sampled[self.row][:, inside].float(), view.sampled_index[inside]

    def _key_metric(self, view: LayerView) -> Tensor:
        """Root of the second moment of the queries that keys before RoPE meet, (kv_heads, key_dim, key_dim)."""
        dim = self.dims[0]
        unit = torch.eye(dim, device=view.keys.device).expand(self.heads, -1, -1)
        if self.method.metric == "plain" or not self.coded:
            return unit
        query, index = self._queries(view)
        query = query[..., -dim:] * view.scaling
        if view.rotary is not None:
            # A query turned back by the position of one of the keys before it: what that key met before RoPE.
            share = torch.arange(1, len(index) + 1, device=index.device) * GOLDEN % 1
            met = view.positions[self.row, self.first + ((index - self.first + 1) * share).long()]
            query = view.rotary.unrotate(query, met)
        query = query.reshape(self.heads, -1, dim)
        values, vectors = torch.linalg.eigh(query.transpose(1, 2) @ query / max(query.shape[1], 1))
        values = values.clamp_min(values[:, -1:].clamp_min(1e-20) * 1e-4)
        return (vectors * values[:, None].sqrt()) @ vectors.transpose(1, 2)

    def _value_metric(self, view: LayerView) -> Tensor:
        """One over the spread of each head's values, times the unit matrix: (kv_heads, value_dim, value_dim)."""
        unit = torch.eye(self.dims[1], device=view.values.device).expand(self.heads, -1, -1)
        if self.method.metric == "plain" or not self.coded:
            return unit
        spreads, sizes = [], []
        for head in range(self.heads):
            variance, mean = torch.var_mean(self._head(view, 1, head), 0, correction=0)
            spreads.append(variance.sum().sqrt())
            sizes.append((variance + mean.square()).sum().sqrt())
        spread, size = torch.stack(spreads), torch.stack(sizes)
        # A head of one value throughout would make a metric that 16-bit bases cannot undo.
        return unit / torch.maximum(spread, 0.01 * size).clamp_min(1e-6)[:, None, None]

    def _weights(self, view: LayerView) -> Tensor:
        """What an error of each token costs, on average 1: (coded,)."""
        flat = torch.ones(self.coded, device=view.keys.device)
        if self.method.metric == "plain" or not self.coded:
            return flat
        _, index = self._queries(view)
        query = future_queries(view, self.row, self.method.horizon)
        keys = keys_for_scores(view)[self.row : self.row + 1, :, self.first :]
        squares = column_mass(
            query[None].to(keys.dtype),
            keys,
            view.scaling,
            None,
            view.softcap,
            kv_heads=self.heads,
            squared=True,
        )
        # Queries left out would have met the neighbours of the tokens that those in the sample meet.
        stride = int(index[1] - index[0]) if len(index) > 1 else 1
        half = min(stride // 2, self.real - 1)
        if half:
            squares = avg_pool1d(pad(squares, (half, half), mode="reflect"), 2 * half + 1, 1)
        squares = squares[0, :, self.sinks : self.sinks + self.coded]
        weights = (squares / squares.mean(1, keepdim=True).clamp_min(1e-30)) ** self.method.flatten
        return (weights / weights.mean(1, keepdim=True).clamp_min(1e-30)).mean(0).clamp_min(1e-6)

    # ---- factorising ----

    def _blocks(self) -> list[Block]:
        """The cheapest way to factor the layers: on the bases there are, as one window, or in parts of it."""
        budget = self.method.budget
        blocks: list[Block] = []
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

    def _factor(self, layers: range, budget: int | None) -> list[Block]:
        """Factorise layers within a budget (None: the method's)."""
        best: list[tuple[range, list[tuple[Components, Tensor]], list[Groups]]] | None = None
        least = float("inf")
        for size in self._sizes(len(layers)):
            parts = [layers[start : start + size] for start in range(0, len(layers), size)]
            tried, lost = [], 0.0
            for part in parts:
                have = budget * len(part) // len(layers) if budget is not None else None
                if have is None and self.method.budget is not None:
                    have = self._budget(part)
                solved = self._solve(part, have)
                groups = self._allocate([one for one, _ in solved], have)
                if groups is None:
                    break
                tried.append((part, solved, groups))
                lost += sum(one.lost(group) for (one, _), group in zip(solved, groups, strict=True))
            if len(tried) == len(parts) and lost < least:
                best, least = tried, lost
        if best is None:
            raise BudgetError(
                f"the budget is smaller than the fewest components and their bases of {self.real} tokens: raise keep, or"
                " fold more tokens at once"
            )
        return [self._block(part, solved, groups) for part, solved, groups in best]

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
            states = self._states(part, layers)
            few = len(states) < states.shape[1]
            if few:
                states = (states * self.weights.sqrt()[:, None]).double()
                gram = states @ states.t()
            else:
                gram = self._gram(part, layers)
            most = min(rank, self._most(len(gram), layers, dim, budget))
            # Where most directions are wanted, iteration is no faster.
            if self.method.solver == "subspace" and 2 * most < len(gram):
                energy, vectors = leading(gram, most)
            else:
                energy, vectors = torch.linalg.eigh(gram)
                energy, vectors = energy.flip(0)[:rank], vectors.flip(1)[:, :rank]
            energy = energy.clamp_min(0)
            if few:
                # From the smaller Gram matrix: the other side's directions, which vanish with their energy.
                vectors = (
                    states.t() @ vectors / energy.sqrt().clamp_min(1e-6 * float(energy.max()) ** 0.5 + 1e-30)
                )
            rest = max(float(gram.trace() - energy.sum()), 0.0)
            lacking = max(2 - len(energy), 0)
            energy, vectors = pad(energy.float(), (0, lacking)), pad(vectors.float(), (0, lacking))
            result.append((self.method.components(energy, len(layers), self.heads, dim, rest), vectors))
        return result

    def _gram(self, part: int, layers: range) -> Tensor:
        """Second moments (channels, channels) float64 of some layers' states, summed over tokens by their weights."""
        gram = self._grams[part]
        if gram is None:
            states = self.states[part]
            gram = torch.zeros(states.shape[1], states.shape[1], dtype=torch.float64, device=states.device)
            for some, weights in zip(states.split(TOKENS), self.weights.split(TOKENS), strict=True):
                scaled = (some * weights.sqrt()[:, None]).double()
                gram.addmm_(scaled.t(), scaled)
            self._grams[part] = gram
        own = self._channels(part, layers)
        return gram[own, own]

    def _most(self, available: int, layers: range, dim: int, budget: int | None) -> int:
        """Components that a budget could pay at the narrowest width."""
        if budget is None:
            return available
        one = self.method.components(torch.empty(0), len(layers), self.heads, dim)
        each = self.coded * min(self.method.widths) // 8 + one.basis_bytes
        return min(budget // max(each, 1) + 8, available)

    def _block(self, layers: range, solved: list[tuple[Components, Tensor]], groups: list[Groups]) -> Block:
        found, factors, lost = [], [], 0.0
        bases: list[dict[str, Tensor]] = [{} for _ in layers]
        for part, ((components, vectors), group) in enumerate(zip(solved, groups, strict=True)):
            rank = sum(count for _, count in group)
            total = float(components.energy.sum()) + components.rest
            outside = total - float(components.energy[:rank].sum())
            found.append(Factor(group, self.method.basis_bits, max(outside, 0.0) / max(total, 1e-30)))
            vectors = vectors[:, :rank]
            factors.append(self._states(part, layers) @ vectors)
            lost += components.lost(group)
            for basis, layer, rows in zip(
                bases, layers, vectors.t().unflatten(1, (len(layers), self.heads, -1)).unbind(1), strict=True
            ):
                basis |= self._basis(part, layer, rows.transpose(0, 1), found[-1])
        return Block(layers, (found[0], found[1]), (factors[0], factors[1]), bases, lost)

    def _states(self, part: int, layers: range) -> Tensor:
        return self.states[part][:, self._channels(part, layers)]

    def _channels(self, part: int, layers: range) -> slice:
        width = self.heads * self.dims[part]
        return slice(layers[0] * width, (layers[-1] + 1) * width)

    def _basis(self, part: int, layer: int, rows: Tensor, factor: Factor) -> dict[str, Tensor]:
        """A layer's rows (kv_heads, rank, dim) of the basis, with the metric taken off again."""
        name, basis = ("key", "value")[part], torch.linalg.solve(self.metrics[layer][part], rows, left=False)
        mean = {f"{name}_mean": self.means[layer][part]} if self.method.centre else {}
        return {**mean, **encode.basis(name, basis, factor, self.half)}

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
        factors, lost, nbytes = [], 0.0, 0
        for part, name in enumerate(("key", "value")):
            factor: Factor = getattr(described, name)
            rows = [
                torch.cat(list(before.basis(its, name) @ self.metrics[layer][part]), 1)
                for layer, (before, its) in zip(layers, befores, strict=True)
                if before is not None
            ]
            basis = torch.cat(rows, 1)
            if factor.code is not None:
                basis = factor.code.rotate_back(basis.t()).t()
            moved = [
                (
                    (self.means[layer][part].float()[:, None] - before.mean(its, name))
                    @ self.metrics[layer][part]
                ).flatten()
                for layer, (before, its) in zip(layers, befores, strict=True)
                if before is not None
            ]
            states = self._states(part, layers) + torch.cat(moved)
            inner = (basis @ basis.t()).double()
            inner.diagonal().add_(inner.diagonal().mean() * 1e-8)
            found = torch.linalg.solve(inner, (basis @ states.t()).double()).t().float()
            factors.append(found)
            error = states - found @ basis
            lost += float((error.square().sum(1) * self.weights).sum())
            energy = (found.square() * self.weights[:, None]).sum(0) * basis.square().sum(1)
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
        block = Block(layers, (described.key, described.value), (factors[0], factors[1]), bases, lost)
        return block, nbytes

    # ---- exact tokens and landmarks ----

    def _exact_rows(self, layer: int, chooses: bool) -> dict[str, Tensor]:
        """Buffers of a layer beside factors and bases."""
        view, method = self.views[layer], self.method
        keys, values = (x[self.row, :, self.first :] for x in (view.keys, view.values))
        near = torch.cat([torch.arange(self.sinks), torch.arange(self.sinks + self.coded, self.real)])
        index = near.to(keys.device).expand(self.heads, -1)
        parts: dict[str, Tensor] = {}
        if method.sparse_budget:
            chunks = keys[:, self.sinks : self.sinks + self.coded].float().unflatten(1, (-1, method.chunk))
            marks = chunks.mean(2)
            alike = cosine_similarity(marks[:, :, None], chunks, dim=-1).amin(-1)
            outliers = alike.argsort(dim=-1, stable=True)[:, : method.outliers_of(self.coded)].sort(-1).values
            parts["outliers"] = outliers.to(position_dtype(max(marks.shape[1], 1)))
            inner = torch.arange(method.chunk, device=keys.device)
            tokens = self.sinks + (outliers[..., None] * method.chunk + inner).flatten(1)
            index = torch.cat([index, tokens], 1)
            if chooses or method.choice != "window":
                parts |= encode.landmarks(marks)
        for name, states in (("exact_keys", keys), ("exact_values", values)):
            parts[name] = narrow(
                states.gather(1, index[..., None].expand(-1, -1, states.shape[-1])), self.half
            )
        return parts


def leading(gram: Tensor, count: int, rounds: int = 2, spare: int = 16) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a positive semi-definite matrix, by randomised subspace iteration.

    Parameters
    ----------
    gram : (n, n)
    count : int
    rounds : int
        Multiplications beyond the first.
    spare : int
        Directions tried beyond `count`.

    Returns
    -------
    (values (count,), largest first, vectors (n, count) orthonormal)

    References
    ----------
    Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), algorithms 4.4 and 5.3.
    """
    n = len(gram)
    generator = torch.Generator("cpu").manual_seed(0)
    basis = torch.randn(n, min(count + spare, n), generator=generator).to(gram)
    for _ in range(rounds + 1):
        basis, _ = torch.linalg.qr(gram @ basis)
    values, inner = torch.linalg.eigh(basis.t() @ gram @ basis)
    return values.flip(0)[:count], (basis @ inner).flip(1)[:, :count]


def before(view: LayerView, row: int) -> tuple[LowRankStore | None, int]:
    """The low-rank store of the segment before, and its row for a batch row."""
    store, rows = view.previous or (None, None)
    if not isinstance(store, LowRankStore):
        return None, row
    return store, row if rows is None else int(rows[row])
