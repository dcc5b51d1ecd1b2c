"""DBTrimKV: learned gates say how fast each token may be forgotten; all layers and heads compete for one budget.

What a token will be worth is beta^age, with a beta that its KV head's gate gave it when it was read. Every so many tokens,
what is worth least is evicted: of the whole model at once, so that a head keeps what it wins. A token is never more
than its key, its value, a position and a log beta, and what is evicted is freed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.allocate.budget import Budget
from kvfold.allocate.ranking import best_first, ranks
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import LayerView, Method, Needs, check_block
from kvfold.methods.gates import TRAIN, load_gates
from kvfold.stores.base import Store
from kvfold.stores.retained import Entries, Lot, RetainedLayout, RetainedStore
from kvfold.stores.trizone import position_dtype


@dataclass(frozen=True, kw_only=True)
class DBTrimKV(Method):
    """Eviction by learned retention, one budget for the whole model, again and again while generating.

    Parameters
    ----------
    tokens, total, keep, memory, threshold : at most one; 512 tokens if none
        Budget of each row of a batch. `tokens`: entries of a KV head, on average over all heads (the paper's M).
        `total`: entries of all layers and heads. `memory`: bytes of all layers, every byte counted. `keep`: share of the
        16-bit bytes of all tokens so far, every byte counted. `threshold`: no budget, but everything that is still worth
        at least this, between 0 and 1.
    gates : str
        A file that `kvfold train-gates` wrote, or the name of gates that come with the package.
    scope : "model" or "head"
        All heads of all layers compete, or each keeps equally many (TrimKV), a layer being folded as soon as it is read.
    buffer : int
        Tokens between evictions while generating (0: none then). The peak is the budget and that many tokens.
    chunks : bool
        Evict after each chunk of a prompt that is read in chunks, not only after the last: that bounds the peak, and
        later chunks no longer see what was evicted.
    lookahead : int
        Steps over which a token's future worth is summed (the paper's n).
    sinks, recent : int
        First and newest tokens of a row that are always kept. The papers keep none; without the first, small budgets
        fail (docs/dbtrimkv.md).
    least : int
        Tokens that a head keeps however little they are worth.
    text : "competes" or "kept"
        For models that see: text and images compete for the budget, or all text of the prompt is kept and `tokens` or
        `total` is a budget of what else there is.

    Notes
    -----
    With s tokens seen, the token at position i has age s - i: what it is worth to the next query. The authors' code counts
    one more. Of equal worth, the newest is kept. Prompts of at most `tokens` (32 with other budgets) pass through.

    References
    ----------
    DBTrimKV, section 3; TrimKV (arXiv 2512.03324), section 4; their released cache.
    """

    name = "dbtrimkv"
    paper = "DBTrimKV; TrimKV, arXiv 2512.03324"
    leaves_tokens = True

    tokens: int | None = None
    total: int | None = None
    keep: float | None = None
    memory: int | None = None
    threshold: float | None = None
    gates: str = "smollm2-135m-instruct"
    scope: Literal["model", "head"] = "model"
    buffer: int = 32
    chunks: bool = False
    lookahead: int = 1
    sinks: int = 1
    recent: int = 0
    least: int = 1
    text: Literal["competes", "kept"] = "competes"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("tokens", "total", "keep", "memory", "threshold")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(names)}, got {', '.join(given)}")
        if self.keep is not None:
            Budget(keep=self.keep)
        for name in ("tokens", "total", "memory"):
            if name in given and given[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {given[name]}")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError(f"threshold must lie between 0 and 1, got {self.threshold}")
        if self.scope not in ("model", "head"):
            raise ValueError(f"scope must be model or head, got {self.scope!r}")
        if self.text not in ("competes", "kept"):
            raise ValueError(f"text must be competes or kept, got {self.text!r}")
        if self.text == "kept" and self.per_head is None and self.total is None:
            raise ValueError(f"text=kept needs a budget of tokens or total, got {', '.join(given)}")
        if self.lookahead < 1 or min(self.sinks, self.recent, self.least) < 0:
            raise ValueError(
                "lookahead must be at least 1, and sinks, recent and least must not be negative, got"
                f" lookahead={self.lookahead}, sinks={self.sinks}, recent={self.recent}, least={self.least}"
            )
        check_block("buffer", self.buffer)

    @property
    def per_head(self) -> int | None:
        """Entries of a head on average, where that is the budget."""
        other = (self.total, self.keep, self.memory, self.threshold)
        return self.tokens or (512 if all(option is None for option in other) else None)

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model" if self.scope == "model" and self.threshold is None else "layer"

    @property
    def needs(self) -> Needs:
        return Needs(gates=(load_gates(self.gates),), text=self.text == "kept")

    @property
    def shortest(self) -> int:
        return self.per_head or 32

    @property
    def block(self) -> int:
        return self.buffer

    @property
    def refolds(self) -> bool:
        return True

    @property
    def pages(self) -> bool:
        return True

    @property
    def folds_chunks(self) -> bool:
        return self.chunks

    @property
    def calibrated_for(self) -> str | None:
        return load_gates(self.gates).fingerprint or None

    @property
    def calibrated_by(self) -> str:
        return "kvfold train-gates"

    def check(self, tokens: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        config = load_gates(self.gates).gates.config
        if config.kv_heads != kv_heads:
            raise KvfoldError(
                f"the gates {self.gates} are for {config.kv_heads} KV heads, the model has {kv_heads}; {TRAIN}"
            )
        heads, least = kv_heads * len(config.layers), max(self.least, self.sinks + self.recent)
        found = self._entries(tokens, heads, key_dim, value_dim, tokens, share=1.0)
        if found < heads * max(least, 1 if self.scope == "head" else 0) or found < 1:
            needed = f"at least {least} tokens in each of {heads} heads" if least else "one token"
            raise BudgetError(
                f"the budget pays for {max(found, 0)} tokens of a {tokens}-token prompt, all {heads} heads together, and"
                f" {needed} must be kept: give more, or lower least, sinks and recent"
            )

    def _entries(self, real: int, heads: int, key_dim: int, value_dim: int, tokens: int, share: float) -> int:
        """Entries that a row may keep in so many heads, which are `share` of the model's."""
        if self.threshold is not None:
            return real * heads
        if self.per_head is not None:
            return self.per_head * heads
        if self.total is not None:
            return int(self.total * share)
        if self.keep is not None:
            limit = Budget(keep=self.keep).bytes(real, heads, key_dim, value_dim)
        else:
            assert self.memory is not None
            limit = int(self.memory * share)
        return (limit - 4 * heads) // RetainedStore.entry_bytes(key_dim, value_dim, tokens)

    # ---- folding ----

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        pools = [_Pool(view) for view in views]
        sizes = [len(pool.positions) for pool in pools]
        chosen = self.choose(_together(pools, self)).split(sizes)
        return [pool.keep(mask) for pool, mask in zip(pools, chosen, strict=True)]

    def choose(self, entries: Entries) -> Tensor:
        position, head, alive = entries.positions, entries.slots, entries.alive
        row = head // entries.kv_heads % len(entries.padding)
        score = future_worth(entries.tokens - position, entries.log_beta, self.lookahead)
        always = (position - entries.padding[row] < self.sinks) | (position >= entries.tokens - self.recent)
        always, score = always & alive, score.masked_fill(~alive, -torch.inf)
        order = best_first(score.masked_fill(always, torch.inf), position)
        ahead = None  # `order` begins with what is always kept, until more is
        if self.scope == "head" or self.least > self.sinks + self.recent:
            rank = ranks(order, head)
            ahead = always = always | ((rank < self.least) & alive)
        if self.threshold is not None:
            return always | (score >= math.log(self.threshold))
        limit = entries.limits[row]
        if self.scope == "head":
            return alive & (rank < limit // entries.heads)
        return alive & (ranks(order, row if len(entries.padding) > 1 else None, ahead) < limit)

    def limits(self, lot: Lot) -> list[int]:
        return [self._limit(lot, real, text) for real, text in zip(lot.real_tokens, _text(lot))]

    def most(self, lot: Lot, ahead: int) -> int | None:
        if self.threshold is not None:
            return None
        rows = [(real + ahead, text) for real, text in zip(lot.real_tokens, _text(lot))]
        return sum(
            max(self._limit(lot, end, text), min(self.shortest, end) * lot.heads) for end, text in rows
        )

    def _limit(self, lot: Lot, real: int, text: int) -> int:
        """Entries of a row of so many real tokens, `text` of which its budget does not count."""
        if real <= self.shortest:
            return real * lot.heads
        share = lot.layers / lot.folding_layers
        found = self._entries(real, lot.heads, lot.key_dim, lot.value_dim, lot.tokens, share)
        if found < 1:
            raise BudgetError(
                f"the budget pays for no token of {real}: give more than {lot.heads} heads' metadata"
            )
        return found + text * lot.heads


def _text(lot: Lot) -> tuple[int, ...]:
    return lot.text or (0,) * len(lot.real_tokens)


def future_worth(age: Tensor, log_beta: Tensor, lookahead: int) -> Tensor:
    """Log of the retention that tokens keep over the next steps: log sum_{s=0}^{n-1} beta^(age + s).

    Parameters
    ----------
    age : (...,) integer
        Steps from the token to the next query, at least 1.
    log_beta : (...,) float32
    lookahead : int
        n.

    Returns
    -------
    (...,) float32
    """
    now = age * log_beta
    if lookahead == 1:
        return now
    log_beta = log_beta.clamp_max(-torch.finfo(log_beta.dtype).tiny)
    return now + _log1mexp(lookahead * log_beta) - _log1mexp(log_beta)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for negative x."""
    return torch.where(x > -math.log(2), (-x.expm1()).log(), (-x.exp()).log1p())


def _together(pools: Sequence[_Pool], method: DBTrimKV) -> Entries:
    """What the layers' pools hold, on the device of the first."""
    first = pools[0]
    device, real = first.positions.device, first.real_tokens
    slots, tokens = len(real) * first.kv_heads, torch.tensor(first.tokens, device=device)
    dims = [(pool.view.keys.shape[-1], pool.view.values.shape[-1]) for pool in pools]
    folding = first.view.folding_layers
    lot = Lot(first.tokens, real, first.kv_heads, len(pools), folding, *max(dims, key=sum), first.text)
    positions = torch.cat([pool.positions.to(device) for pool in pools])
    return Entries(
        positions=positions,
        log_beta=torch.cat([pool.log_beta.to(device) for pool in pools]),
        slots=torch.cat([pool.slots.to(device) + index * slots for index, pool in enumerate(pools)]),
        alive=torch.ones_like(positions, dtype=torch.bool),
        tokens=tokens,
        padding=tokens - torch.tensor(real, device=device),
        limits=torch.tensor(method.limits(lot), device=device),
        kv_heads=lot.kv_heads,
        heads=lot.heads,
    )


class _Pool:
    """Every token of one layer that may be kept: those kept before, then new ones.

    Attributes
    ----------
    positions : (n,) int64
        Logical index, from the first token of all.
    log_beta : (n,) float32
    slots : (n,) int64
        Row times KV heads, plus KV head.
    tokens : int
        Logical tokens of all.
    real_tokens : tuple of int
        Of each row.
    text : tuple of int
        Of each row, tokens that are kept beside its budget; empty: none.
    """

    def __init__(self, view: LayerView):
        assert view.gates is not None
        self.view, self.kv_heads = view, view.keys.shape[1]
        row, head, self._token = view.valid.nonzero(as_tuple=True)
        self.slots = row * self.kv_heads + head
        self.log_beta = view.gates[row, head, self._token, 0]
        self.tokens, self.real_tokens = view.tokens, view.real_tokens
        self.positions = self._token
        self.text: tuple[int, ...] = ()
        if view.text is not None:
            self.text = tuple(view.text.sum(1).tolist())
            # A beta of 1: never worth less than anything else.
            self.log_beta = self.log_beta.masked_fill(view.text.to(row.device)[row, self._token], 0)
        self._old: RetainedStore | None = None
        if view.previous is not None:
            self._add(*view.previous)

    def _add(self, store: Store, rows: Tensor | None) -> None:
        """Put what was kept before in front."""
        assert isinstance(store, RetainedStore)
        self._old = old = store if rows is None else store.select(rows)
        kept = len(old.buffers["positions"])
        counts = old.buffers["counts"].flatten().long()
        slots = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=kept)
        self.slots = torch.cat([slots, self.slots])
        self.log_beta = torch.cat([old.buffers["log_beta"], self.log_beta])
        self.positions = torch.cat([old.buffers["positions"].long(), old.tokens + self.positions])
        self.tokens += old.tokens
        self.real_tokens = tuple(map(sum, zip(old.real_tokens, self.real_tokens, strict=True)))
        if old.layout.text:
            self.text = tuple(map(sum, zip(old.layout.text, self.text, strict=True)))

    def keep(self, chosen: Tensor) -> RetainedStore:
        """A store of the tokens that chosen (n,) bool says."""
        index = chosen.to(self.slots.device).nonzero()[:, 0]
        # By row and head; in each, old tokens come first, so that positions ascend.
        index = index[self.slots[index].argsort(stable=True)]
        slots = self.slots[index]
        rows, states = len(self.real_tokens), {"keys": self.view.keys, "values": self.view.values}
        buffers = {
            "counts": slots.bincount(minlength=rows * self.kv_heads).int().view(rows, self.kv_heads),
            "positions": self.positions[index].to(position_dtype(self.tokens)),
            "log_beta": self.log_beta[index],
        }
        old = 0 if self._old is None else len(self._old.buffers["positions"])
        new = index >= old
        place = slots[new] // self.kv_heads, slots[new] % self.kv_heads, self._token[index[new] - old]
        for name, tensor in states.items():
            half = tensor.dtype if tensor.dtype in (torch.float16, torch.bfloat16) else torch.float16
            kept = tensor.new_empty(len(index), tensor.shape[-1], dtype=half)
            kept[new] = tensor[place].to(half)
            if self._old is not None:
                kept[~new] = self._old.buffers[name][index[~new]]
            buffers[name] = kept
        return RetainedStore(RetainedLayout(self.tokens, self.real_tokens, self.text), buffers)
