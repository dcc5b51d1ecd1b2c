"""xKV: the layers of a window share one row of factors a token, for keys before RoPE and for values (arXiv 2503.18893)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, inf
from typing import Literal

import torch
from torch import Tensor

from kvfold.allocate.budget import Budget
from kvfold.allocate.transform import Components
from kvfold.errors import BudgetError
from kvfold.ledger import storage_bytes
from kvfold.methods.base import LayerView, Method, Needs
from kvfold.methods.factorise import Window
from kvfold.methods.full import Full
from kvfold.stores.base import Store
from kvfold.stores.lowrank import LowRankLayout, LowRankRow, LowRankStore, landmark_code, vector_code
from kvfold.stores.trizone import position_dtype

logger = logging.getLogger(__name__)
EXACT_SHARE = 0.25
"""Of a budget, at most, for sinks and newest tokens."""


@dataclass(frozen=True, kw_only=True)
class XKV(Method):
    """Cross-layer factorisation of keys and values, its factors coded; optionally few tokens rebuilt for a query.

    The paper's form is XKV(key_rank=512, value_rank=768, widths=(16,), basis_bits=16, metric="plain", centre=False,
    sinks=0, recent=0, split=False), sizes of Llama-3.1-8B. The defaults differ: what all tokens have is taken out first;
    components are coded, the large ones in more bits; errors are weighed by the queries that will meet them; attention
    sinks and the newest tokens stay exact.

    Parameters
    ----------
    keep, bits_per_element : float
        Budget: share of the prompt's 16-bit bytes, or bits for each element, every byte counted, bases too.
    key_rank, value_rank : int
        Components of a window's keys and values: with a budget the most that it may buy (keys are rebuilt from theirs at
        every step, so that fewer are faster), without one as many, in the one width given.
    layers : int
        Layers of a window. 1 factors each alone; the last window may be smaller.
    borders : tuple of int, optional
        Instead of equal windows: the (folding) layers, counted from 0, that begin a new one. `kvfold inspect --cka`
        proposes them.
    widths : tuple of int
        Bits that components may get: some from 1 to 8, or 16 alone (factors as they are).
    basis_bits : 8 or 16
        Of a number of the bases.
    metric : "queries" or "plain"
        What the factorisation keeps: what the prompt's queries meet in keys, each head's values relative to their spread,
        and tokens by the squared attention that they would receive from the prompt's queries asked again after it; or
        squared norms (paper).
    centre : bool
        Take the mean key before RoPE and the mean value of each layer's heads out before factorising; attention gives them
        back. Most of a key of models whose key projection has a bias (Qwen2) is that mean.
    sinks, recent : int
        First and newest tokens kept exact; fewer where they would take more than a quarter of the budget.
    split : bool
        Factor a window in halves or layer by layer where bases of their own lose less at the same bytes.
    solver : "eigh" or "subspace"
        Of the Gram matrix: all eigenvectors, or by subspace iteration, nearly, those that the budget can pay.
    sampled : int
        Queries, spread evenly over the prompt, that tell the metric.
    horizon : int
        Positions after the prompt that queries are turned to.
    flatten : float
        Power of the token weights.
    sparse_budget : int
        Tokens that a query reads beside the exact ones, chosen by landmarks (the paper's selective reconstruction); 0
        reads all.
    chunk : int
        Tokens that share a landmark, the mean of their keys in 4 bits.
    outlier_chunks : int
        Chunks of each head kept exact, those with a key least like the mean. Only with a sparse_budget.
    choice : "head", "layer" or "window"
        Whose queries choose together, by the sum of their softmax over landmarks: one row of factors, once read, serves
        them all. With "window" the queries of its first layer choose, and only it has landmarks.

    Notes
    -----
    Where given ranks would take more bytes than the tokens as they are, those stay exact, and a warning says so; layers of
    a window on several devices share factors on each by itself.
    A later turn is put on the basis of the one before, unless a basis of its own would lose less at the same bytes; one
    that is too short to pay for either stays exact.
    With latent attention (MLA) the latents are factored as values and the shared rotary key as a key of one head; nothing
    is expanded to heads but the bases.

    References
    ----------
    xKV (arXiv 2503.18893), sections 3 and 4; ShadowKV (arXiv 2410.21465), algorithm 2, for landmarks and outliers.
    """

    name = "xkv"
    paper = "after xKV, arXiv 2503.18893"

    keep: float | None = None
    bits_per_element: float | None = None
    key_rank: int | None = None
    value_rank: int | None = None
    layers: int = 4
    borders: tuple[int, ...] | None = None
    widths: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    basis_bits: Literal[8, 16] = 8
    metric: Literal["queries", "plain"] = "queries"
    centre: bool = True
    sinks: int = 4
    recent: int = 32
    split: bool = True
    solver: Literal["eigh", "subspace"] = "eigh"
    sampled: int = 256
    horizon: int = 128
    flatten: float = 0.7
    sparse_budget: int = 0
    chunk: int = 8
    outlier_chunks: int = 4
    choice: Literal["head", "layer", "window"] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = [rank for rank in (self.key_rank, self.value_rank) if rank is not None]
        if self.budget is None and len(ranks) != 2:
            raise ValueError(
                "give keep, or bits_per_element, or both key_rank and value_rank; for example keep=0.125"
            )
        if min(ranks, default=2) < 2:
            raise ValueError(
                f"key_rank and value_rank must be at least 2, got {self.key_rank} and {self.value_rank}"
            )
        if self.budget is None and len(self.widths) != 1:
            raise ValueError(
                f"key_rank and value_rank need one width, such as widths=(16,), got {self.widths}"
            )
        if not self.widths or not ({16} == set(self.widths) or set(self.widths) <= set(range(1, 9))):
            raise ValueError(f"widths must be chosen from 1 to 8, or be 16 alone, got {self.widths}")
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")
        if self.borders is not None and (
            any(border < 1 for border in self.borders) or sorted(set(self.borders)) != list(self.borders)
        ):
            raise ValueError(f"borders must be ascending layers from 1 on, got {self.borders}")
        if not 0 <= self.flatten < inf:
            raise ValueError(f"flatten must be at least 0 and finite, got {self.flatten}")
        if min(self.sinks, self.recent, self.sparse_budget, self.outlier_chunks) < 0:
            raise ValueError("sinks, recent, sparse_budget and outlier_chunks must not be negative")
        if min(self.sampled, self.horizon, self.chunk) < 1:
            raise ValueError("sampled, horizon and chunk must be at least 1")
        if self.sparse_budget and self.sparse_budget < self.chunk:
            raise ValueError(
                f"sparse_budget must be at least one chunk of {self.chunk}, got {self.sparse_budget}"
            )

    @property
    def budget(self) -> Budget | None:
        """The byte budget; None where ranks alone are given."""
        if self.keep is None and self.bits_per_element is None:
            return None
        return Budget(keep=self.keep, bits_per_element=self.bits_per_element)

    @property
    def granularity(self) -> Literal["layer", "window", "model"]:
        return "window"

    def complete(self, number: int, layers: int) -> bool:
        after = number + 1
        ends = after % self.layers == 0 if self.borders is None else after in self.borders
        return ends or after == layers

    @property
    def needs(self) -> Needs:
        return Needs(sampled=self.sampled if self.metric == "queries" else 0, rotary=True)

    @property
    def shortest(self) -> int:
        return 32

    @property
    def refuses_latent(self) -> str | None:
        if not self.sparse_budget:
            return None
        return (
            "xkv chooses chunks by the keys of each head, but latent attention (MLA) has none in its cache: leave"
            " sparse_budget at 0, which reads all of them"
        )

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        for name, rank, dim in (("key", self.key_rank, key_dim), ("value", self.value_rank, value_dim)):
            width = self.layers * kv_heads * dim
            if self.borders is None and rank is not None and rank > width:
                raise BudgetError(
                    f"{name}_rank={rank} is more than the {width} channels that the {name}s of a window of"
                    f" {self.layers} layers have: ask for fewer"
                )
        if self.budget is None:
            return
        if sum(self.exact_tokens(tokens)) == tokens:
            raise self.no_chunk(tokens)
        shape = tokens, kv_heads, key_dim, value_dim
        full = 2 * tokens * kv_heads * (key_dim + value_dim)
        have, least = self.budget.bytes(*shape), self._least(*shape)
        if have >= least:
            return
        while have < least <= full:
            # Of a larger budget more goes to exact tokens.
            larger = replace(self, keep=ceil(1e4 * least / full) / 1e4, bits_per_element=None)
            assert larger.budget is not None
            have, least = larger.budget.bytes(*shape), larger._least(*shape)
        what = f"the budget is smaller than two components and their bases of a {tokens}-token prompt"
        raise BudgetError.of(what, max(have, least), full)

    def no_chunk(self, tokens: int) -> BudgetError:
        """What to say of a prompt whose tokens would all stay exact, since they fill no chunk."""
        return BudgetError(
            f"a {tokens}-token prompt has no whole chunk of {self.chunk} tokens to choose, so that all of it would stay exact,"
            " beyond any budget: ask for a smaller chunk, or leave sparse_budget at 0, which reads all tokens"
        )

    # ---- bytes ----

    def _least(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Bytes of one layer with two components of keys and of values."""
        sinks, newest = self.exact_tokens(tokens)
        coded = tokens - sinks - newest
        parts = [self.components(torch.ones(2), 1, kv_heads, dim) for dim in (key_dim, value_dim)]
        least = sum(part.nbytes(((min(self.widths), 2),), coded) for part in parts)
        return least + self.fixed_bytes(coded, sinks + newest, kv_heads, key_dim, value_dim, chooses=True)

    def exact_tokens(self, real: int) -> tuple[int, int]:
        """Sinks and newest tokens of a row that are kept exact."""
        if real <= self.shortest:
            return real, 0
        share = real if self.budget is None else self.budget.bytes(real, 1, 1, 1) / (4 * real)
        most = min(int(EXACT_SHARE * share * real), real - 2)
        sinks = min(self.sinks, most)
        newest = min(self.recent, most - sinks)
        if self.sparse_budget:
            newest += (real - sinks - newest) % self.chunk
        return sinks, newest

    def outliers_of(self, coded: int) -> int:
        """Chunks of each head kept exact: at most a quarter of them."""
        return min(self.outlier_chunks, coded // self.chunk // 4) if self.sparse_budget else 0

    def fixed_bytes(
        self, coded: int, exact: int, kv_heads: int, key_dim: int, value_dim: int, chooses: bool
    ) -> int:
        """Bytes of one layer beside factors and bases."""
        outliers = self.outliers_of(coded)
        total = 2 * kv_heads * (key_dim + value_dim) * (exact + outliers * self.chunk + self.centre)
        if self.sparse_budget:
            chunks = coded // self.chunk
            total += kv_heads * outliers * position_dtype(max(chunks, 1)).itemsize
            if chooses or self.choice != "window":
                total += kv_heads * chunks * (landmark_code(key_dim).nbytes + 2)
        return total

    def components(self, energy: Tensor, layers: int, kv_heads: int, dim: int, rest: float = 0) -> Components:
        row = 2 * dim if self.basis_bits == 16 else vector_code(dim).nbytes + 2
        return Components(energy, layers * kv_heads * row, rest)

    # ---- folding ----

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        stores: list[Store] = []
        devices = list(dict.fromkeys(str(view.keys.device) for view in views))
        if len(devices) > 1:
            logger.warning(
                "xkv: a window lies on %s; layers share factors on each by itself", ", ".join(devices)
            )
        # Layers of different shapes or on different devices cannot share a row.
        for _, run in groupby(views, key=lambda view: (view.keys.shape, view.values.shape, view.keys.device)):
            window = list(run)
            try:
                folded: list[Store] = [*self._fold_window(window)]
            except BudgetError:
                if any(view.previous is None for view in window):
                    raise
                # A later turn that is too short to pay for factors: it has been read, and must not be lost.
                folded = Full().fold(window)
            stores += folded if self.budget is not None else self._smaller(folded, window)
        return stores

    def _smaller(self, folded: list[Store], window: list[LayerView]) -> list[Store]:
        """What was folded to given ranks, or the tokens as they are where those take fewer bytes."""
        exact = Full().fold(window)
        takes = storage_bytes(tensor for store in folded for tensor in store.tensors().values())
        full = sum(store.nbytes for store in exact)
        if takes < full:
            return folded
        logger.warning(
            "xkv: key_rank=%s and value_rank=%s take %d bytes for %d tokens, which take %d as they are and so stay"
            " exact: fold more tokens at once, or ask for fewer components",
            self.key_rank, self.value_rank, takes, window[0].tokens, full,
        )  # fmt: skip
        return exact

    def _fold_window(self, views: list[LayerView]) -> list[LowRankStore]:
        self.check_views(views)
        rows: list[list[LowRankRow]] = [[] for _ in views]
        buffers: list[dict[str, Tensor]] = [{} for _ in views]
        for row in range(len(views[0].keys)):
            window = Window(self, views, row)
            for layer, (described, parts) in enumerate(window.encode()):
                rows[layer].append(described)
                buffers[layer].update({f"{name}.{row}": tensor for name, tensor in parts.items()})
        return [
            LowRankStore(
                LowRankLayout(
                    tokens=view.tokens,
                    real_tokens=view.real_tokens,
                    kv_heads=view.keys.shape[1],
                    key_dim=view.keys.shape[-1],
                    value_dim=view.values.shape[-1],
                    turned=view.rotary is not None,
                    rows=tuple(described),
                    chunk=self.chunk if self.sparse_budget else 0,
                    selected=self.sparse_budget // self.chunk,
                    choice=self.choice,
                ),
                parts,
            )
            for view, described, parts in zip(views, rows, buffers, strict=True)
        ]
