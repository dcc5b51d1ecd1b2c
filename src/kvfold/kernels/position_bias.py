"""One constant vector turned by RoPE to every position: its rows and its logits, from two small tables.

RoPE turns planes of two channels. With R(p) for the turn to position p, q . R(p) b is, in every plane, a cosine and a sine
of p times two products of q and b, so one row of factors for each query, made once, gives the logit at any position by a
product with a table that knows neither q nor b. Every position is a coarse turn and a fine one: the factors take the coarse
turn, the table holds the fine ones. Rows compose the same two turns, so that what folding took out of the keys is what
attention puts back.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from kvfold.stores.base import Rotary

FINE = 64
"""Positions between coarse turns: as many as a record has tokens (`codecs.fragments`)."""
MOST_PLANES = 32
"""Planes that a constant taken out of keys is turned in (`in_few_planes`)."""
LANES = 16
"""Columns of the table of fine turns are a multiple, for the C loop."""

_planes: weakref.WeakKeyDictionary[Rotary, dict[int, tuple[int, ...] | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Circles:
    """The planes in which constants of a layer's heads turn, as many for each head.

    Attributes
    ----------
    channels : (rows, kv_heads, planes, 2) int32
        First and second channel of each, ascending. A multiple of 16 of them.
    real : int
        As many are planes, those after them only there for the multiple.
    still : (rows, kv_heads, key_dim) float32 or None
        What RoPE leaves alone of the constants, the model's factor in; None where it turns every channel.
    """

    channels: Tensor
    real: int
    still: Tensor | None

    @property
    def count(self) -> int:
        """Planes of a head."""
        return self.channels.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory held."""
        return [self.channels] if self.still is None else [self.channels, self.still]

    @staticmethod
    def of(vector: Tensor, rotary: Rotary) -> Circles:
        """Of constants (rows, kv_heads, key_dim): every plane that is not zero in all heads. Waits for the device.

        Raises
        ------
        ValueError
            RoPE does not turn planes of two channels.
        """
        dim = vector.shape[-1]
        t = turns(rotary, dim, 0, 0, vector.device)
        channel = torch.arange(dim, device=vector.device)
        vector, alone = vector.float() * t.scale, t.partner == channel
        first = channel[t.first & ~alone]
        energy = vector[..., first].square() + vector[..., t.partner[first]].square()
        count = max(1, int((energy > 0).sum(-1).max()))
        count = max(16, -(-count // 16) * 16)
        real = min(count, len(first))
        chosen = first[pad(energy.topk(real).indices.sort().values, (0, count - real))]
        still = vector * alone if bool(alone.any()) else None
        return Circles(torch.stack([chosen, t.partner[chosen]], -1).int(), real, still)

    def factors(self, query: Tensor, vector: Tensor, t: Turns) -> Tensor:
        """Of each plane's cosine and sine (rows, kv_heads, n, planes, 2), for queries (rows, kv_heads, n, key_dim)."""
        first, second = self.channels.long().unbind(-1)
        a, b = (vector.float().gather(-1, at)[:, :, None] * t.scale for at in (first, second))
        x, y = (query.gather(-1, at[:, :, None].expand(*query.shape[:3], -1)) for at in (first, second))
        a, b = (part.where(torch.arange(self.count, device=a.device) < self.real, 0) for part in (a, b))
        return torch.stack([x * a + y * b, y * a - x * b], -1)

    def logits(self, factors: Tensor, coarse: Tensor, fine: Tensor, tokens: int) -> Tensor:
        """(rows, kv_heads, n, tokens) at the positions of the tables (`coarse_pairs`, `Turns.fine`), from 0 on."""
        first, second = self.channels.long().unbind(-1)
        index = torch.arange(tokens, device=factors.device)
        far, near = index // FINE, index % FINE
        cos, sin = coarse.transpose(0, 1)[first].unbind(-1)  # (rows, kv_heads, planes, coarse)
        near_cos, near_sin = fine.t()[first], fine.t()[second]
        whole_cos = cos[..., far] * near_cos[..., near] - sin[..., far] * near_sin[..., near]
        whole_sin = sin[..., far] * near_cos[..., near] + cos[..., far] * near_sin[..., near]
        return factors[..., 0] @ whole_cos + factors[..., 1] @ whole_sin


def in_few_planes(vector: Tensor, rotary: Rotary, most: int = MOST_PLANES) -> Tensor:
    """A constant (..., key_dim) with nothing in all but the planes in which it is largest; all of it that RoPE leaves alone.

    What is left out stays in the keys, which a few weak planes hardly make larger, and a kernel has less to add.
    """
    partners = planes(rotary, vector.shape[-1], vector.device)
    if partners is None:
        return vector
    partner, channel = (
        torch.tensor(partners, device=vector.device),
        torch.arange(len(partners), device=vector.device),
    )
    first = channel[channel < partner]
    if len(first) <= most:
        return vector
    energy = vector[..., first].float().square() + vector[..., partner[first]].float().square()
    weak = first[energy.argsort(-1, descending=True)[..., most:]]
    return vector.scatter(-1, weak, 0).scatter(-1, partner[weak], 0)


class Turns(NamedTuple):
    """RoPE at the positions of a segment; float32 but for the first two. A turned x is cos * x + sin * x[partner]."""

    partner: Tensor
    """(key_dim,) int64: the other channel of each channel's plane; its own where RoPE leaves it alone"""
    first: Tensor
    """(key_dim,) bool: the first channel of its plane"""
    coarse_cos: Tensor
    coarse_sin: Tensor
    """(coarse, key_dim)"""
    fine_cos: Tensor
    fine_sin: Tensor
    """(FINE, key_dim)"""
    fine: Tensor
    """(FINE, key_dim padded to LANES): cosines at first channels, sines at second ones; rounded to halves (`fine_rows`)"""
    scale: float
    """The model's factor on every turned vector, not in the tables"""

    def factors(self, query: Tensor, vector: Tensor) -> Tensor:
        """Of `fine`, for query (kv_heads, n, key_dim) and vector (kv_heads, key_dim), both float32."""
        vector = vector[:, None] * self.scale
        other, product = vector[..., self.partner], query * vector
        second = torch.where(self.first[self.partner], 0, product[..., self.partner])
        return torch.where(self.first, product + second, query * other - query[..., self.partner] * vector)


def planes(rotary: Rotary, dim: int, device: torch.device) -> tuple[int, ...] | None:
    """The other channel of each channel's plane (its own where there is none), or None if RoPE does not turn planes."""
    known = _planes.setdefault(rotary, {})
    if dim not in known:
        known[dim] = _find_planes(rotary, dim, device)
    return known[dim]


def _find_planes(rotary: Rotary, dim: int, device: torch.device) -> tuple[int, ...] | None:
    one = torch.ones(1, dtype=torch.long, device=device)
    matrix = rotary.rotate(torch.eye(dim, device=device)[:, None], one)[:, 0].cpu() / rotary.scale
    mixed = matrix - matrix.diag().diag()
    partner = torch.where(mixed.any(1), mixed.abs().argmax(1), torch.arange(dim))
    rebuilt = torch.zeros_like(mixed).scatter_(1, partner[:, None], mixed.gather(1, partner[:, None]))
    cos, sin = matrix.diag(), mixed.gather(1, partner[:, None])[:, 0]
    turned = torch.allclose(cos[partner], cos, atol=1e-5) and torch.allclose(sin[partner], -sin, atol=1e-5)
    if not turned or not torch.equal(rebuilt, mixed) or not torch.equal(partner[partner], torch.arange(dim)):
        return None
    return tuple(partner.tolist())


def turns(rotary: Rotary, dim: int, tokens: int, shift: int, device: torch.device) -> Turns:
    """Tables for `tokens` positions from `shift` on; the layers of a step share them, where the rotary has `shared`.

    Raises
    ------
    ValueError
        RoPE does not turn planes of two channels.
    """
    name, shared = ("turns", dim, tokens, shift, device), getattr(rotary, "shared", None)
    if shared is None:
        return _turns(rotary, dim, tokens, shift, device)
    found: Turns = shared(name, lambda: _turns(rotary, dim, tokens, shift, device))
    return found


def _turns(rotary: Rotary, dim: int, tokens: int, shift: int, device: torch.device) -> Turns:
    found = planes(rotary, dim, device)
    if found is None:
        raise ValueError("this model's rotary embedding does not turn planes of two channels")
    partner, channel = torch.tensor(found, device=device), torch.arange(dim, device=device)
    first = channel <= partner

    def at(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        table = rotary.rotate(first.float().expand(len(positions), -1), positions) / rotary.scale
        cos, sin = torch.where(first, table, table[:, partner]), torch.where(first, -table[:, partner], table)
        return table, cos, sin.masked_fill(partner == channel, 0)

    _, coarse_cos, coarse_sin = at(torch.arange(shift, shift + max(tokens, 1), FINE, device=device))
    table, fine_cos, fine_sin = at(torch.arange(FINE, device=device))
    fine = pad(_to_halves(table), (0, -dim % LANES))
    return Turns(partner, first, coarse_cos, coarse_sin, fine_cos, fine_sin, fine, rotary.scale)


def fine_rows(vector: Tensor, t: Turns) -> tuple[Tensor, Tensor]:
    """The constant (kv_heads, key_dim) at the fine turns, and its planes' other channels: (kv_heads, FINE, key_dim) each.

    At position `coarse * FINE + fine` it is the first times the coarse cosines plus the second times the coarse sines.
    Cosines and sines of fine turns are rounded to halves: what is taken out and put back need not be RoPE's to the last bit,
    only the same, and products take halves as they are. (Where segments are joined a token's fine turn becomes another: the
    difference, 2^-12 of the constant, is an eighth of what bfloat16 keys are rounded by.)
    """
    near = vector[:, None] * t.scale
    near = near * _to_halves(t.fine_cos) + near[..., t.partner] * _to_halves(t.fine_sin)
    return near, near[..., t.partner]


def coarse_pairs(t: Turns) -> Tensor:
    """Cosines and sines of the coarse turns at first channels, (coarse, key_dim, 2)."""
    return torch.stack([t.coarse_cos, t.coarse_sin[:, t.partner]], -1)


def _to_halves(x: Tensor) -> Tensor:
    return x.half().float()


def turned_rows(
    vector: Tensor, rotary: Rotary, tokens: int, shift: int, span: slice | Tensor | None = None
) -> Tensor:
    """The constant at every position.

    Parameters
    ----------
    vector : (kv_heads, key_dim) float32
    rotary : Rotary
    tokens : int
    shift : int
        RoPE position of index 0.
    span : slice or (n,) int64, optional
        Only these indices.

    Returns
    -------
    (kv_heads, tokens of the span, key_dim) float32
    """
    heads, dim = vector.shape
    t = turns(rotary, dim, tokens, shift, vector.device)
    if isinstance(span, Tensor):
        near, crossed = (part[:, span % FINE] for part in fine_rows(vector, t))
        far = span // FINE
        return torch.mul(near, t.coarse_cos[far]).addcmul_(crossed, t.coarse_sin[far])
    start, stop = (0, tokens) if span is None else (span.start, span.stop)
    coarse = slice(start // FINE, max(-(-stop // FINE), 1))
    first = coarse.start * FINE
    near, crossed = (part[:, None, : max(stop - first, 1)] for part in fine_rows(vector, t))
    rows = torch.mul(near, t.coarse_cos[coarse, None]).addcmul_(crossed, t.coarse_sin[coarse, None])
    return rows.view(heads, -1, dim)[:, start - first : stop - first]


def position_logits(query: Tensor, vector: Tensor, rotary: Rotary, tokens: int, shift: int) -> Tensor:
    """Products of queries with the constant at every position.

    Parameters
    ----------
    query : (kv_heads, n, key_dim) float32
    vector : (kv_heads, key_dim) float32
    rotary : Rotary
    tokens : int
    shift : int
        RoPE position of index 0.

    Returns
    -------
    (kv_heads, n, tokens) float32
    """
    heads, count, dim = query.shape
    if count > FINE:
        return query @ turned_rows(vector, rotary, tokens, shift).transpose(1, 2)
    t = turns(rotary, dim, tokens, shift, query.device)
    factors = t.factors(query, vector)[:, :, None]
    back = torch.mul(factors, t.coarse_cos).addcmul_(factors[..., t.partner], t.coarse_sin, value=-1)
    return (back.view(heads, -1, dim) @ t.fine[:, :dim].t()).view(heads, count, -1)[..., :tokens]
