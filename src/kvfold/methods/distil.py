"""What keys and values are moved towards: attention with few of them against attention over the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold
from torch.nn.utils.rnn import pad_sequence

from kvfold.kernels.reference import Part, soft_cap
from kvfold.methods.fit import ridge_values
from kvfold.methods.queries import Training

WEIGHTS_BYTES = (1 << 29, 1 << 26)
"""Of attention weights that are held at once: where many cores want work, and on a CPU."""
NOTHING = 1e-20
"""Attention weights below are none: products with what is no normal number take a CPU eight times as long."""


@dataclass(frozen=True)
class Questions:
    """Queries of one KV head, their exact attention, and that over what stays as it is.

    Attributes
    ----------
    queries : (queries, key_dim) float32
        Scaled.
    output, lse : (queries, value_dim) and (queries,) float32
        Exact attention over the prompt and what is beside it.
    rest_output, rest_lse : (queries, value_dim) and (queries,) float32
        That over everything but the tokens to be replaced.
    learned, held : (queries,) float32
        What each query counts for in means over those trained on, and over those held out.
    """

    queries: Tensor
    output: Tensor
    lse: Tensor
    rest_output: Tensor
    rest_lse: Tensor
    learned: Tensor
    held: Tensor

    @classmethod
    def of(cls, training: Training, whole: Part, rest: Part) -> Questions:
        """From training queries, their exact attention, and that over all but the tokens to be replaced."""
        held = training.held
        learned = ~held if bool((~held).any()) else held
        held = held if bool(held.any()) else learned
        return cls(
            training.queries * training.scaling, *whole, *rest, learned / learned.sum(), held / held.sum()
        )

    @staticmethod
    def stack(each: Sequence[Questions]) -> Questions:
        """A batch of heads, shorter ones padded by queries that count for nothing."""
        columns = zip(*(vars(one).values() for one in each), strict=True)
        return Questions(*(pad_sequence(list(column), batch_first=True) for column in columns))


class Batch:
    """Heads of one model that are distilled together; the objective of `lbfgs.LBFGS`.

    Parameters
    ----------
    asked : sequence of Questions
        One a head.
    keys, values : sequences of (kept, key_dim | value_dim) float32
        Of the tokens that each head starts from.
    softcap : float or None
    lse : float
        Weight of the squared log-sum-exp error.

    Attributes
    ----------
    keys, values : (heads, most kept, key_dim | value_dim) float32
        Those given, padded. `values` are constant in the objective; `solve` finds better ones.
    """

    def __init__(
        self,
        asked: Sequence[Questions],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        softcap: float | None,
        lse: float,
    ):
        self.asked, self.softcap, self.lse = Questions.stack(asked), softcap, lse
        self.keys, self.values = (pad_sequence(list(each), batch_first=True) for each in (keys, values))
        device = self.keys.device
        self.counts = [len(each) for each in keys]
        self.absent = torch.arange(self.keys.shape[1], device=device) >= torch.tensor(
            self.counts, device=device
        ).unsqueeze(1)

    def pad(self, keys: Sequence[Tensor]) -> Tensor:
        """Keys of each head, as `keys` has them."""
        return pad_sequence(list(keys), batch_first=True)

    def _attend(self, keys: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(weights of the keys, log-sum-exp, weight of the rest, slope of the cap) of some heads."""
        logits = self.asked.queries[index] @ keys.transpose(1, 2)
        slope = None
        if self.softcap is not None:
            logits = soft_cap(logits, self.softcap)
            slope = 1 - (logits / self.softcap).square()
        logits = logits.masked_fill_(self.absent[index][:, None], -torch.inf)
        rest = self.asked.rest_lse[index]
        lse = torch.logaddexp(logits.logsumexp(-1), rest)
        weights = threshold(logits.sub_(lse[..., None]).exp_(), NOTHING, 0.0)
        return weights, lse, (rest - lse).exp_(), slope

    def _parts(self, index: Tensor, copies: int = 1) -> Sequence[Tensor]:
        """Heads whose weights are held at once, in as many float32 copies."""
        each = 4 * copies * self.asked.queries.shape[1] * self.keys.shape[1]
        return index.split(max(WEIGHTS_BYTES[index.device.type == "cpu"] // each, 1))

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient of the flattened keys x (n, kept * key_dim) of the heads of an index (n,).

        The mean squared error of the output (KVSculpt, equation of the objective) and `lse` times that of the
        log-sum-exp.
        """
        losses, gradients, start = [], [], 0
        for part in self._parts(index):
            keys = x[start : start + len(part)].unflatten(1, self.keys.shape[1:])
            start += len(part)
            weights, lse, rest, slope = self._attend(keys, part)
            values, share = self.values[part], self.asked.learned[part]
            output = weights @ values + rest[..., None] * self.asked.rest_output[part]
            error, off = output - self.asked.output[part], lse - self.asked.lse[part]
            losses.append((share * (error.square().mean(-1) + self.lse * off.square())).sum(1))
            # d loss / d logit = weight * (d loss / d output . (value - output) + d loss / d log-sum-exp)
            by_output = (2 / error.shape[-1]) * share[..., None] * error
            push = by_output @ values.transpose(1, 2)
            push += (2 * self.lse * share * off - (by_output * output).sum(-1))[..., None]
            push *= weights
            if slope is not None:
                push *= slope
            gradients.append((push.transpose(1, 2) @ self.asked.queries[part]).flatten(1))
        return torch.cat(losses), torch.cat(gradients)

    def solve(self, keys: Tensor, ridge: float, towards: Tensor, everything: bool = False) -> Tensor:
        """Values (heads, most kept, value_dim) by ridge regression on what is trained on, or on the held-out as well.

        Parameters
        ----------
        keys : (heads, most kept, key_dim)
        ridge : float
        towards : (heads, most kept, value_dim)
            What values are drawn to.
        everything : bool

        Returns
        -------
        Zeros for heads whose keys are not finite.
        """
        finite = keys.isfinite().flatten(1).all(1)
        used = (self.asked.learned > 0) | ((self.asked.held > 0) & everything)
        used &= finite[:, None]
        values, start = [], 0
        for part in self._parts(torch.arange(len(keys), device=keys.device), copies=4):  # two are in float64
            most = max(self.counts[start : start + len(part)])
            start += len(part)
            weights, _, rest, _ = self._attend(keys[part], part)
            lacking = self.asked.output[part] - rest[..., None] * self.asked.rest_output[part]
            some = used[part].any(0).nonzero().flatten()
            own = used[part][:, some, None]
            fitted = ridge_values(
                torch.where(own, weights[:, some, :most], 0),
                torch.where(own, lacking[:, some], 0),
                ridge,
                towards[part, :most],
            )
            values.append(pad(fitted, (0, 0, 0, keys.shape[1] - most)))
        return torch.cat(values).masked_fill_((self.absent | ~finite[:, None])[..., None], 0)

    def errors(self, keys: Tensor, values: Tensor) -> Tensor:
        """Mean squared output error (heads, 2) for the queries trained on and for those held out."""
        found = []
        for part in self._parts(torch.arange(len(keys), device=keys.device)):
            weights, _, rest, _ = self._attend(keys[part], part)
            output = weights @ values[part] + rest[..., None] * self.asked.rest_output[part]
            error = (output - self.asked.output[part]).square().mean(-1)
            shares = torch.stack([self.asked.learned[part], self.asked.held[part]], 1)
            found.append((shares * error[:, None]).sum(2))
        return torch.cat(found)
