"""One row of a window of layers, factorised: what errors cost, components, and the basis of the turn before."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cosine_similarity, pad

from kvfold.allocate.transform import ERROR, Components, Groups, fill
from kvfold.codecs.rotated import prepare
from kvfold.errors import BudgetError
from kvfold.kernels.column_sums import column_sums
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
"""Worked on at a time: nothing of a prompt's length is held but weights, codes and what is to be folded."""
PANEL = 512
"""Rows of a symmetric product at a time, which then leaves out what lies below the diagonal."""


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
        self.half = view.keys.dtype if view.keys.dtype in (torch.float16, torch.bfloat16) else torch.float16

    def encode(self) -> Iterator[tuple[LowRankRow, dict[str, Tensor]]]:
        """For each layer what is not a tensor, and buffers; those of factors are the same for layers that share them."""
        self._measure()
        blocks = self._blocks()
        self._grams.clear()
        for block in blocks:
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
                    {**block.shared, **basis, **self._exact_rows(layer, layer == block.layers[0])},
                )

    # ---- what errors cost ----

    def _measure(self) -> None:
        """Token weights, and of each layer the means of keys and values and their metrics."""
        self.weights = torch.stack([self._weights(view) for view in self.views]).mean(0)
        self.means: list[tuple[Tensor, Tensor]] = []
        metrics: list[Tensor] = []
        for view in self.views:
            key_mean, _ = self._mean_and_metric(view, 0)
            value_mean, metric = self._mean_and_metric(view, 1)
            self.means.append((key_mean, value_mean))
            metrics.append(metric)
        self.metrics = list(zip(self._key_metrics(), metrics, strict=True))

    def _tokens(self) -> list[slice]:
        """Those in factors, some at a time."""
        return [
            slice(start, min(start + TOKENS, self.coded)) for start in range(0, max(self.coded, 1), TOKENS)
        ]

    def _raw(self, view: LayerView, part: int, tokens: slice) -> Tensor:
        """Some tokens' keys before RoPE, or values, of those that are to be in factors: (kv_heads, n, dim) float32."""
        some = slice(self.span.start + tokens.start, self.span.start + tokens.stop)
        states = (view.keys, view.values)[part][self.row, :, some].float()
        if part == 1 or view.rotary is None or not self.coded:
            return states
        return view.rotary.unrotate(states, view.positions[self.row, some])

    def _some_states(self, part: int, layers: range, tokens: slice) -> Tensor:
        """Some tokens' states less their mean with the metric applied, (n, layers * kv_heads * dim) float32."""
        count, dim = tokens.stop - tokens.start, self.dims[part]
        states = torch.empty(count, len(layers), self.heads, dim, device=self.weights.device)
        for index, layer in enumerate(layers):
            raw = self._raw(self.views[layer], part, tokens) - self.means[layer][part].float()[:, None]
            states[:, index] = (raw @ self.metrics[layer][part]).transpose(0, 1)
        return states.flatten(1)

    def _mean_and_metric(self, view: LayerView, part: int) -> tuple[Tensor, Tensor]:
        """What is taken out of keys or values before, (kv_heads, dim) in 16 bits, and the metric of values.

        That is one over the spread of each head's, times the unit matrix: (kv_heads, dim, dim).
        """
        plain, dim = self.method.metric == "plain" or part == 0, self.dims[part]
        unit = torch.eye(dim, device=view.keys.device).expand(self.heads, -1, -1)
        mean = view.keys.new_zeros(self.heads, dim, dtype=self.half)
        if not self.coded or (plain and not self.method.centre):
            return mean, unit
        weighted, sums, squares = torch.zeros(
            3, self.heads, dim, dtype=torch.float64, device=view.keys.device
        )
        for tokens in self._tokens():
            raw = self._raw(view, part, tokens)
            weighted += self.weights[tokens] @ raw
            if not plain:
                sums += raw.sum(1, dtype=torch.float64)
                squares += raw.square().sum(1, dtype=torch.float64)
        if self.method.centre:
            mean = narrow((weighted / self.weights.sum()).float(), self.half)
        if plain:
            return mean, unit
        size = (squares / self.coded).sum(1).sqrt()
        spread = (squares / self.coded - (sums / self.coded).square()).clamp_min(0).sum(1).sqrt()
        # A head of one value throughout would make a metric that 16-bit bases cannot undo.
        spread = torch.maximum(spread, 0.01 * size).clamp_min(1e-6).float()
        return mean, unit / spread[:, None, None]

    def _queries(self, view: LayerView) -> tuple[Tensor, Tensor]:
        """Real sampled queries (heads, n, query_dim) float32 and their index in the segment."""
        assert view.sampled is not None and view.sampled_index is not None
        inside = view.sampled_index >= self.first
        return view.sampled[self.row][:, inside].float(), view.sampled_index[inside]

    def _key_metrics(self) -> list[Tensor]:
        """For each layer the root of the second moment of the queries that keys before RoPE meet, (kv_heads, key_dim, key_dim)."""
        dim = self.dims[0]
        if self.method.metric == "plain" or not self.coded:
            unit = torch.eye(dim, device=self.views[0].keys.device).expand(self.heads, -1, -1)
            return [unit] * len(self.views)
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
        # Together: many small ones take as long as one.
        values, vectors = torch.linalg.eigh(torch.stack(moments))
        values = values.clamp_min(values[..., -1:].clamp_min(1e-20) * 1e-4)
        return list((vectors * values[..., None, :].sqrt()) @ vectors.transpose(-1, -2))

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
            every = range(len(self.views))
            channels = len(every) * self.heads * self.dims[part]
            gram = torch.zeros(channels, channels, dtype=torch.float64, device=self.weights.device)
            for tokens in self._tokens():
                some = self._some_states(part, every, tokens)
                some *= self.weights[tokens].sqrt()[:, None]
                some = some.double()
                for start in range(0, channels, PANEL):
                    rows = slice(start, start + PANEL)
                    gram[rows, start:].addmm_(some[:, rows].t(), some[:, start:])
            gram = gram.triu() + gram.triu(1).t()
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
        found, lost = [], 0.0
        shared: dict[str, Tensor] = {}
        bases: list[dict[str, Tensor]] = [{} for _ in layers]
        for (components, _), group in zip(solved, groups, strict=True):
            rank = sum(count for _, count in group)
            total = float(components.energy.sum()) + components.rest
            outside = total - float(components.energy[:rank].sum())
            found.append(Factor(group, self.method.basis_bits, max(outside, 0.0) / max(total, 1e-30)))
        prepare([factor.code for factor in found if factor.code is not None], self.weights.device)
        for part, ((components, vectors), group) in enumerate(zip(solved, groups, strict=True)):
            vectors = vectors[:, : found[part].rank]
            pieces = (self._some_states(part, layers, tokens) @ vectors for tokens in self._tokens())
            shared |= self._coded(part, found[part], pieces)
            lost += components.lost(group)
            for basis, layer, rows in zip(
                bases, layers, vectors.t().unflatten(1, (len(layers), self.heads, -1)).unbind(1), strict=True
            ):
                basis |= self._basis(part, layer, rows.transpose(0, 1), found[part])
        return Block(layers, (found[0], found[1]), shared, bases, lost)

    def _coded(self, part: int, factor: Factor, pieces: Iterable[Tensor]) -> dict[str, Tensor]:
        """Token factors (n, rank) of some tokens after others as buffers."""
        return encode.factors(("key", "value")[part], pieces, factor, self.half)

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
        shared: dict[str, Tensor] = {}
        lost, nbytes = 0.0, 0
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
            shared |= self._coded(part, factor, pieces)
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

    # ---- exact tokens and landmarks ----

    def _exact_rows(self, layer: int, chooses: bool) -> dict[str, Tensor]:
        """Buffers of a layer beside factors and bases."""
        view, method = self.views[layer], self.method
        keys, values = (x[self.row, :, self.first :] for x in (view.keys, view.values))
        near = torch.cat([torch.arange(self.sinks), torch.arange(self.sinks + self.coded, self.real)])
        index = near.to(keys.device).expand(self.heads, -1)
        parts: dict[str, Tensor] = {}
        if method.sparse_budget:
            found = []
            for some in keys[:, self.sinks : self.sinks + self.coded].split(
                max(TOKENS // method.chunk, 1) * method.chunk, 1
            ):
                chunks = some.float().unflatten(1, (-1, method.chunk))
                mean = chunks.mean(2)
                found.append((mean, cosine_similarity(mean[:, :, None], chunks, dim=-1).amin(-1)))
            marks, alike = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
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
    for _ in range(rounds):
        basis = orthonormal(gram @ basis, passes=1)
    basis = orthonormal(gram @ basis)
    inner = basis.t() @ gram @ basis
    # Half of the time finds vectors in float32; they are made orthonormal again, and what they hold is measured.
    turned = orthonormal(basis @ torch.linalg.eigh(inner.float())[1].to(gram), passes=1)
    values = (turned * (gram @ turned)).sum(0)
    order = values.argsort(descending=True)[:count]
    return values[order], turned[:, order]


def orthonormal(x: Tensor, passes: int = 2) -> Tensor:
    """An orthonormal basis (n, k) of the columns of x (n, k), float64: by Cholesky factors, which a GPU finds far faster than QR.

    Parameters
    ----------
    x : (n, k)
        Where columns are too nearly dependent for Cholesky factors, QR is used.
    passes : int
        1 suffices where only their span matters.

    References
    ----------
    Fukaya and others, "CholeskyQR2" (2014).
    """
    found = x
    for _ in range(passes):
        factor, failed = torch.linalg.cholesky_ex(found.t() @ found)
        if bool(failed):
            return torch.linalg.qr(x)[0]
        found = torch.linalg.solve_triangular(factor, found.t(), upper=False).t()
    return found


def before(view: LayerView, row: int) -> tuple[LowRankStore | None, int]:
    """The low-rank store of the segment before, and its row for a batch row."""
    store, rows = view.previous or (None, None)
    if not isinstance(store, LowRankStore):
        return None, row
    return store, row if rows is None else int(rows[row])
