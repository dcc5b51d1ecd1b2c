"""Stores that evict nothing: every token of a rectangular segment, decoded a block of tokens at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvfold.kernels.reference import Part, attend, merge, soft_cap, softmax_part
from kvfold.stores.base import AttendContext, Kept, Rotary, Store

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class TokenwiseLayout:
    """What is not a tensor.

    Attributes
    ----------
    tokens : int
        Logical length of the segment.
    real_tokens : tuple of int
    shifts : tuple of int
        RoPE position minus logical index, for each row.
    kv_heads, key_dim, value_dim : int
    """

    tokens: int
    real_tokens: tuple[int, ...]
    shifts: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int


class TokenwiseStore(Store):
    """Every token of every row, padding included and masked.

    A subclass says how a block of tokens decodes, perhaps into a basis of its own: queries are then taken to that basis,
    and outputs back from it, once a call instead of once a token.

    Parameters
    ----------
    layout : TokenwiseLayout
    buffers : mapping of str to Tensor
        Those named in `per_token` are (rows, tokens, ...), the others (rows, ...). "valid" (rows, tokens) bool is left
        out when no token is padding.

    Raises
    ------
    ValueError
        A buffer's shape and the layout disagree.
    """

    per_token: ClassVar[frozenset[str]]
    changing: ClassVar[frozenset[str]] = frozenset()
    """Buffers of the tokens that have no dimension for them."""
    block = 2048
    """Tokens decoded at a time."""

    def __init__(self, layout: Any, buffers: Mapping[str, Tensor]):
        self.layout, self.buffers = layout, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads, self.key_dim, self.value_dim = layout.kv_heads, layout.key_dim, layout.value_dim
        self._check()

    def _check(self) -> None:
        for name, tensor in self.buffers.items():
            shape = (self.rows, self.tokens) if name in self._by_token else (self.rows,)
            if tensor.shape[: len(shape)] != shape:
                raise ValueError(f"buffer {name} is {tuple(tensor.shape)}, the layout says {shape}")

    @property
    def _by_token(self) -> frozenset[str]:
        return self.per_token | {"valid"}

    # ---- what a subclass fills in ----

    @abstractmethod
    def coded_keys(self, row: int, span: slice) -> Tensor:
        """Keys (kv_heads, n, coded_dim) float32 of some tokens, in the store's basis."""

    @abstractmethod
    def coded_values(self, row: int, span: slice) -> Tensor:
        """Values (kv_heads, n, value_dim) float32 of some tokens, in the store's basis."""

    def query_to_basis(self, row: int, query: Tensor) -> Tensor:
        """Take queries (kv_heads, n, key_dim) to the basis of `coded_keys`."""
        return query

    def value_from_basis(self, row: int, value: Tensor) -> Tensor:
        """Take mixtures (kv_heads, n, value_dim) of `coded_values` out of their basis."""
        return value

    def more_logits(self, row: int, query: Tensor, context: AttendContext) -> Tensor | None:
        """Logits (kv_heads, n, tokens) to add to those of the codes."""
        return None

    @abstractmethod
    def decode(self, row: int, span: slice, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Keys and values (kv_heads, n, key_dim | value_dim) float32 of some tokens."""

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        return attend_rows(query, rows, lambda row, q: self._attend_row(row, q, context))

    def _spans(self) -> Iterator[slice]:
        for start in range(0, self.tokens, self.block):
            yield slice(start, min(start + self.block, self.tokens))

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        valid = self.buffers["valid"][row] if "valid" in self.buffers else None
        if context.expand is not None:
            parts = []
            for span in self._spans():
                keys, values = self.decode(row, span, context.rotary)
                keys, values = context.expand(keys[None], values[None])
                mask = None if valid is None else valid[None, None, None, span]
                parts.append(attend(query[None], keys, values, context.scaling, mask, context.softcap))
            output, lse = merge(parts)
            return output[0], lse[0]
        heads, count, dim = query.shape
        q = query.reshape(self.kv_heads, -1, dim) * context.scaling
        limit = max(1, (1 << 24) // max(self.tokens, 1))
        done = []
        for start in range(0, q.shape[1], limit):
            part = q[:, start : start + limit]
            done.append(merge(self._parts(row, part, valid, context)))
        output = self.value_from_basis(row, torch.cat([part[0] for part in done], 1))
        return output.view(heads, count, -1), torch.cat([part[1] for part in done], 1).view(heads, count)

    def _parts(self, row: int, query: Tensor, valid: Tensor | None, context: AttendContext) -> list[Part]:
        coded, more = self.query_to_basis(row, query), self.more_logits(row, query, context)
        parts = []
        for span in self._spans():
            scores = coded @ self.coded_keys(row, span).transpose(1, 2)
            if more is not None:
                scores += more[..., span]
            scores = soft_cap(scores, context.softcap)
            if valid is not None:
                scores = scores.masked_fill(~valid[span], -torch.inf)
            parts.append(softmax_part(scores, self.coded_values(row, span)))
        return parts

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        blocks = [self.decode(row, span, rotary) for span in self._spans()]
        keys, values = (torch.cat([block[part][head] for block in blocks]) for part in (0, 1))
        positions = torch.arange(self.tokens, device=keys.device)
        if "valid" in self.buffers:
            positions = positions[self.buffers["valid"][row, : self.tokens]]
        return Kept(positions, keys[positions], values[positions])

    def crop(self, tokens: int) -> Self:
        gone = self.tokens - tokens
        layout = replace(
            self.layout, tokens=tokens, real_tokens=tuple(max(count - gone, 0) for count in self.real_tokens)
        )
        buffers = {
            name: tensor[:, :tokens].clone() if name in self._by_token else tensor
            for name, tensor in self.buffers.items()
        }
        return type(self)(layout, buffers)

    def select(self, rows: Tensor) -> Self:
        chosen = rows.tolist()
        layout = replace(
            self.layout,
            real_tokens=tuple(self.real_tokens[row] for row in chosen),
            shifts=tuple(self.layout.shifts[row] for row in chosen),
        )
        return type(self)(layout, {name: tensor[rows] for name, tensor in self.buffers.items()})

    def join(self, following: Store) -> Self | None:
        if not isinstance(following, type(self)) or not self._continues(following):
            return None
        constants = self.buffers.keys() - self._by_token
        if any(self.buffers[name].dtype != following.buffers[name].dtype for name in self.per_token):
            return None
        buffers = {name: self.buffers[name] for name in constants}
        for name in self.per_token:
            buffers[name] = torch.cat([self.buffers[name], following.buffers[name]], 1)
        if "valid" in self.buffers or "valid" in following.buffers:
            buffers["valid"] = torch.cat([self._valid(), following._valid()], 1)
        real = tuple(a + b for a, b in zip(self.real_tokens, following.real_tokens, strict=True))
        layout = replace(self.layout, tokens=self.tokens + following.tokens, real_tokens=real)
        return type(self)(layout, buffers)

    def _continues(self, following: TokenwiseStore) -> bool:
        """Whether layout and constants of the store after this one are the same."""
        both = (self.layout, following.layout)
        first, second = (replace(one, tokens=0, real_tokens=(), shifts=()) for one in both)
        constants = self.buffers.keys() - self._by_token - self.changing
        if first != second or constants != following.buffers.keys() - self._by_token - self.changing:
            return False
        return all(torch.equal(self.buffers[name], following.buffers[name]) for name in constants)

    def _valid(self) -> Tensor:
        if "valid" in self.buffers:
            return self.buffers["valid"]
        device = next(iter(self.buffers.values())).device
        return torch.ones(self.rows, self.tokens, dtype=torch.bool, device=device)

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    def meta(self) -> dict[str, Any]:
        return dict(vars(self.layout))


def attend_rows(query: Tensor, rows: Tensor | None, attend_row: Callable[[int, Tensor], Part]) -> Part:
    """Attention row by row; batch rows that read the same store row are more queries to it.

    Parameters
    ----------
    query : (batch, heads, queries, query_dim)
    rows : (batch,) int64 or None
    attend_row : callable
        From a store row and its queries (heads, n, query_dim) float32 to their part.

    Returns
    -------
    (output (batch, heads, queries, value_dim) float32, log-sum-exp (batch, heads, queries) float32)
    """
    batch, _, queries, _ = query.shape
    sources = list(range(batch)) if rows is None else rows.tolist()
    outputs: list[Tensor | None] = [None] * batch
    lses: list[Tensor | None] = [None] * batch
    for row in sorted(set(sources)):
        index = [position for position, source in enumerate(sources) if source == row]
        # A slice needs no index on the device, so a step that is captured does not wait for the host.
        own = query[index[0] : index[0] + 1] if len(index) == 1 else query[index]
        output, lse = attend_row(row, own.float().transpose(0, 1).flatten(1, 2))
        for position, one, its in zip(
            index, output.unflatten(1, (-1, queries)).unbind(1), lse.unflatten(1, (-1, queries)).unbind(1)
        ):
            outputs[position], lses[position] = one, its
    return torch.stack(outputs), torch.stack(lses)  # type: ignore[arg-type]


def shifts_of(positions: Tensor) -> tuple[int, ...]:
    """RoPE position minus logical index of each row, from positions (rows, tokens)."""
    return tuple(int(last) - positions.shape[1] + 1 for last in positions[:, -1])


def padding_of(valid: Tensor) -> dict[str, Tensor]:
    """The "valid" buffer, if it is needed, from valid (rows, kv_heads, tokens)."""
    if valid.stride(-1) == 0:  # one value for all tokens
        return {}
    seen = valid.any(1)
    return {} if bool(seen.all()) else {"valid": seen.contiguous()}


def rotary_for(turned: bool, rotary: Rotary | None) -> Rotary | None:
    """The rotary embedding that keys were coded relative to, None if they were not.

    Raises
    ------
    ValueError
        They were, and it is not there.
    """
    if turned and rotary is None:
        raise ValueError(
            "keys were coded relative to RoPE, but this model's rotary embedding cannot be found"
        )
    return rotary if turned else None
