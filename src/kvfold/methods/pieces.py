"""What KVSculpt distils: heads in pieces, what is asked of them, what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.kernels.reference import Part, merge, soft_cap, softmax_part
from kvfold.methods.base import LayerView
from kvfold.methods.distil import Questions
from kvfold.methods.queries import Training
from kvfold.methods.scores import smooth
from kvfold.stores.base import Kept


@dataclass(frozen=True, eq=False)
class Head:
    """One KV head of one row of one layer.

    Attributes
    ----------
    view : LayerView
    row, head : int
    stays : (n,) int64
        Which of its tokens stay as they are.
    others : slice
        Those that do not.
    free : int
        Keys and values that these are distilled to.
    beside : Part or None
        Attention of the view's sampled queries over what they see beside the prompt, where they bring that along.
    """

    view: LayerView
    row: int
    head: int
    stays: Tensor
    others: slice
    free: int
    beside: Part | None = None

    @property
    def members(self) -> slice:
        """Its query heads."""
        assert self.view.sampled is not None
        group = self.view.sampled.shape[1] // self.view.keys.shape[1]
        return slice(self.head * group, (self.head + 1) * group)

    @property
    def bytes(self) -> int:
        """What `Standing` holds of it, about: queries with three outputs, keys and values, in float32."""
        view = self.view
        assert view.sampled is not None
        queries = (self.members.stop - self.members.start) * view.sampled.shape[2]
        key_dim, value_dim = view.keys.shape[-1], view.values.shape[-1]
        return 4 * (queries * (key_dim + 3 * value_dim) + view.tokens * (key_dim + value_dim))

    def pieces(self, chunk: int | None) -> list[Piece]:
        """Its other tokens in pieces of about a chunk, each with as large a share of the tokens as of the budget."""
        tokens = self.others.stop - self.others.start
        number = min(math.ceil(tokens / (chunk or tokens)), self.free) if tokens else 0
        ends = [self.free * i // number for i in range(number + 1)] if number else []
        cuts = [self.others.start + tokens * end // self.free for end in ends]
        return [Piece(self, i, slice(*cuts[i : i + 2]), ends[i + 1] - ends[i]) for i in range(len(ends) - 1)]

    def kept(self, parts: Sequence[Distilled]) -> Kept:
        """Distilled keys and values, then the tokens that stay."""
        positions = self.view.valid[self.row, self.head].nonzero().flatten()
        chosen = [part.chosen.to(positions.device) for part in parts]
        own = positions[self.stays]
        keys, values = self.view.keys[self.row, self.head], self.view.values[self.row, self.head]
        return Kept(
            positions[torch.cat([*chosen, self.stays])],
            torch.cat([*(part.keys.to(keys.device) for part in parts), keys[own]]),
            torch.cat([*(part.values.to(keys.device) for part in parts), values[own]]),
        )


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of a head that are distilled together, and how many they become if all get the same."""

    head: Head
    number: int
    tokens: slice
    uniform: int

    @property
    def size(self) -> int:
        """Tokens before."""
        return int(self.tokens.stop - self.tokens.start)

    def bytes(self, count: int) -> int:
        """What its distillation holds, about: queries with their targets, and keys with histories of 10 pairs."""
        view = self.head.view
        assert view.sampled is not None
        queries = view.sampled.shape[1] // view.keys.shape[1] * view.sampled.shape[2]
        key_dim, value_dim = view.keys.shape[-1], view.values.shape[-1]
        return 4 * (queries * (key_dim + 2 * value_dim) + 30 * count * key_dim)


@dataclass
class Standing:
    """Training queries of a head, the attention they are to have, and what they have with what is distilled so far."""

    asked: Training
    whole: Part
    now: Part

    def take(self, piece: Piece, distilled: Distilled) -> None:
        """A piece is distilled."""
        _, rest = self.asked.apart(self.now, piece.tokens)
        self.now = merge([rest, softmax_part(self.scores(distilled), distilled.values.float())])

    def change(self, tokens: slice, parts: Sequence[Distilled]) -> Tensor:
        """What it changes in the output (queries, value_dim) that these parts are there instead of some tokens."""
        attention = self.asked.attend()
        if parts:
            _, rest = self.asked.apart(attention, tokens)
            own = (softmax_part(self.scores(part), part.values.float()) for part in parts)
            attention = merge([rest, *own])
        return attention[0] - self.whole[0]

    def scores(self, distilled: Distilled) -> Tensor:
        """Logits (queries, n) of distilled keys."""
        scores = (self.asked.queries * self.asked.scaling) @ distilled.keys.float().t()
        return soft_cap(scores, self.asked.softcap)


@dataclass(frozen=True)
class Problem:
    """A piece, what its tokens weigh, those chosen to start from, their keys and values, the first keys, what is asked.

    The rest of the prompt is there, too, so that an error is one of the whole output.
    """

    piece: Piece
    scores: Tensor
    chosen: Tensor
    keys: Tensor
    values: Tensor
    start: Tensor
    asked: Questions

    @classmethod
    def of(cls, piece: Piece, count: int, standing: Standing, pilot: Distilled | None) -> Problem:
        """From what is asked of its head, and what of that is distilled already."""
        full = standing.asked
        weights, rest = full.apart(standing.now, piece.tokens)
        # Squared errors count, so squared attention does.
        scores = weights.square_().sum(0)
        if full.every > 1:
            # What comes after a token is mostly asked for by that token's query: where that was not taken, a neighbour's tells.
            all_there = torch.ones((), dtype=torch.bool, device=scores.device).expand(1, 1, len(scores))
            scores = smooth(scores[None, None], all_there, full.every // 2 * 2 + 1)[0, 0]
        chosen = scores.topk(count).indices.sort().values + piece.tokens.start
        keys, values = full.keys[chosen], full.values[chosen]
        start = keys if pilot is None else pilot.moved(chosen, keys)
        return cls(piece, scores, chosen, keys, values, start, Questions.of(full, standing.whole, rest))


@dataclass(frozen=True)
class Distilled:
    """What became of a piece: the tokens it started from, their new keys and values in 16 bits.

    `errors` (2, 2) are mean squared output errors of the fit and of what was kept, for queries trained on and held out;
    `sound` (a bool) says whether the optimiser stayed within the numbers. A pilot also says what all of its tokens weigh.
    """

    chosen: Tensor
    keys: Tensor
    values: Tensor
    errors: Tensor
    sound: Tensor
    scores: Tensor

    @property
    def error(self) -> Tensor:
        """That for queries held out."""
        return self.errors[1, 1]

    def moved(self, chosen: Tensor, keys: Tensor) -> Tensor:
        """Keys of other tokens, where this one has moved them: as it has."""
        both = torch.isin(chosen, self.chosen)
        keys = keys.clone()
        keys[both] = self.keys[torch.searchsorted(self.chosen, chosen[both])].to(keys.dtype)
        return keys


def shares(count: int, scores: Sequence[Tensor]) -> list[int]:
    """How many of the best tokens are in each piece; at least one."""
    if len(scores) == 1:
        return [count]
    piece = torch.arange(len(scores)).repeat_interleave(torch.tensor([len(each) for each in scores]))
    best = torch.cat(list(scores)).topk(count).indices.cpu()
    own = piece[best].bincount(minlength=len(scores)).clamp_min(1)
    for _ in range(int(own.sum()) - count):
        own[own.argmax()] -= 1
    found: list[int] = own.tolist()
    return found


def packed(parts: Sequence[Distilled]) -> dict[str, Tensor]:
    """Finished parts, to be kept."""
    names = ("chosen", "keys", "values", "scores")
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    one_each = {name: torch.stack([getattr(part, name) for part in parts]) for name in ("errors", "sound")}
    return {**tensors, **one_each}


def unpacked(
    kept: Mapping[str, Tensor] | None, counts: Sequence[int], sizes: Sequence[int], device: torch.device
) -> list[Distilled] | None:
    """What `packed` made of pieces with such counts, and scores of such sizes, else None."""
    if kept is None or [len(kept[name]) for name in ("errors", "chosen", "scores")] != [
        len(counts),
        sum(counts),
        sum(sizes),
    ]:
        return None
    on = {name: tensor.to(device) for name, tensor in kept.items()}
    columns = (on[name].split(list(counts)) for name in ("chosen", "keys", "values"))
    scores = on["scores"].split(list(sizes))
    return [Distilled(*each) for each in zip(*columns, on["errors"], on["sound"], scores, strict=True)]


def slices(
    counts: Sequence[int], sizes: Sequence[int], turns: Sequence[object], room: int
) -> Iterator[slice]:
    """Runs of one turn that memory allows together, and whose counts do not pad each other by more than a quarter."""
    start = used = 0
    for i, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        alike = turns[i] == turns[start] and count >= 0.75 * counts[start]
        if i > start and (used + size > room or not alike):
            yield slice(start, i)
            start, used = i, 0
        used += size
    if counts:
        yield slice(start, len(counts))
