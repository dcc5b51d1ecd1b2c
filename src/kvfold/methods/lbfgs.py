"""Limited-memory BFGS for many problems at once, each with its own step, history and end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x (n, size), which problems (n,) int64) -> (losses (n,), gradients (n, size)); called for some of the problems."""


class LBFGS:
    """Minimise independent functions of equal size with one batched call for each step of all of them.

    Two-loop recursion with a strong-Wolfe line search (bracketing, then safeguarded cubic interpolation). A pair whose
    curvature is not positive is left out of its problem's history; where a loss is not finite the step is too long. A problem
    ends when its gradient vanishes, its loss stops falling, or no step lowers it: it then keeps its last good x.

    Parameters
    ----------
    x : (problems, size) float32 or float64
        Where to start; not changed.
    history : int
        Newest iterations whose pairs are kept.
    armijo, curvature : float
        Line search: share of the decrease that the slope promises, and share of the slope that may be left.
    tolerance_grad : float
        Largest gradient element of a problem that is done.
    tolerance_change : float
        Fall of the loss in one step, relative to the loss, of a problem that is done.
    searches : int
        Evaluations in one line search, at most.

    Attributes
    ----------
    x : (problems, size)
        Where the problems are.
    evaluations : int
        Calls of the objective, each for some of the problems.

    References
    ----------
    Nocedal and Wright, Numerical Optimization, algorithms 7.4 and 3.5.
    """

    def __init__(
        self,
        x: Tensor,
        *,
        history: int = 10,
        armijo: float = 1e-4,
        curvature: float = 0.9,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        searches: int = 20,
    ):
        if x.dim() != 2 or not x.is_floating_point():
            raise ValueError(f"x must be (problems, size) of a float dtype, got {tuple(x.shape)} {x.dtype}")
        if history < 1 or searches < 1 or not 0 < armijo < curvature < 1:
            raise ValueError(
                "history and searches must be at least 1, and armijo below curvature, both in (0, 1)"
            )
        self.x = x.clone()
        self.armijo, self.curvature, self.searches = armijo, curvature, searches
        self.tolerance_grad, self.tolerance_change = tolerance_grad, tolerance_change
        self._history = history
        self._pairs: list[
            tuple[Tensor, Tensor]
        ] = []  # (step, turn of the gradient) of all problems, the oldest first
        # 1 / (step . turn), (pairs, problems); 0 where there is no pair, which takes it out of the recursion.
        self._inverse = x.new_zeros(0, len(x))
        self._scale = x.new_ones(len(x))
        self.evaluations = 0

    def run(self, objective: Objective, iterations: int) -> Tensor:
        """Take up to `iterations` steps; returns the losses reached, (problems,).

        May be called again with a function that has changed a little: histories are kept.
        """
        every = torch.arange(len(self.x), device=self.x.device)
        loss, gradient = self._evaluate(objective, self.x, every)
        alive = loss.isfinite() & gradient.isfinite().all(1)
        # All problems take part in all but evaluations: on a GPU choosing among them would wait for it every time.
        for _ in range(iterations):
            alive &= gradient.abs().amax(1) > self.tolerance_grad
            if not bool(alive.any()):
                break
            direction, fresh = self._direction(gradient)
            length = torch.where(fresh, 1 / gradient.norm(dim=1).clamp_min(1e-30), 1)
            step, after, slope_to = self._search(objective, alive, direction, length, loss, gradient)
            moved = step > 0
            # No step along the quasi-Newton direction: once more from the gradient alone, then no more.
            self._inverse.masked_fill_(alive & ~moved, 0)
            change = torch.where(moved[:, None], step[:, None] * direction, 0)
            self.x += change
            self._remember(change, torch.where(moved[:, None], slope_to - gradient, 0))
            alive &= torch.where(moved, loss - after > self.tolerance_change * loss.abs(), ~fresh)
            loss, gradient = after, slope_to
        return loss

    def _evaluate(self, objective: Objective, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluations += 1
        return objective(x, index)

    def _direction(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Where to go from here, and which problems have no history to tell (they go down the gradient)."""
        used, d = [], -gradient
        pairs = [(*pair, inverse) for pair, inverse in zip(self._pairs, self._inverse, strict=True)]
        for step, turn, inverse in reversed(pairs):
            share = (inverse * (step * d).sum(1))[:, None]
            d = torch.addcmul(d, share, turn, value=-1)
            used.append(share)
        fresh = (self._inverse == 0).all(0)
        d = d * torch.where(fresh, 1, self._scale)[:, None]
        for (step, turn, inverse), share in zip(pairs, reversed(used), strict=True):
            back = (inverse * (turn * d).sum(1))[:, None]
            d = torch.addcmul(d, share - back, step)
        wrong = (d * gradient).sum(1) >= 0
        self._inverse.masked_fill_(wrong, 0)
        return torch.where(wrong[:, None], -gradient, d), fresh | wrong

    def _remember(self, step: Tensor, turn: Tensor) -> None:
        product, square = (step * turn).sum(1), turn.square().sum(1)
        good = product > torch.finfo(step.dtype).eps * square
        self._pairs = [*self._pairs, (step, turn)][-self._history :]
        self._inverse = torch.cat([self._inverse, torch.where(good, 1 / product, 0)[None]])[-self._history :]
        self._scale = torch.where(good, product / square, self._scale)

    def _search(
        self,
        objective: Objective,
        searching: Tensor,
        direction: Tensor,
        length: Tensor,
        loss: Tensor,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps that meet the strong Wolfe conditions, else the best tried that lowers the loss, else 0.

        Parameters
        ----------
        searching : (problems,) bool
            Which problems take a step; the others' is 0.

        Returns
        -------
        (step (problems,), loss there (problems,), gradient there (problems, size))
        """
        slope = (gradient * direction).sum(1)
        slack = 2 * torch.finfo(loss.dtype).eps * loss.abs()
        best, best_loss, best_gradient = torch.zeros_like(length), loss, gradient
        # What is known at either end of the bracket: step, loss, slope. `high` is infinite until something was too far.
        low = torch.stack([best, loss, slope])
        high = torch.full_like(low, torch.inf)
        step, limit = length, -self.curvature * slope
        for tried in range(self.searches):
            index = searching.nonzero().flatten()
            if not len(index):
                break
            if tried:
                step = torch.where(searching, _between(low, high), step)
            of = partial(_of, index)
            along = of(direction)
            found, there = self._evaluate(objective, of(self.x) + of(step)[:, None] * along, index)
            known = torch.stack(
                [step, _with(loss, index, found), _with(slope, index, (there * along).sum(1))]
            )
            fell = searching & (known[1] <= loss + self.armijo * step * slope + slack)
            far, near = searching & (~fell | (known[2] > limit)), fell & (known[2] < -limit)
            better = fell & ((known[1] < best_loss) | ~far & ~near)
            best, best_loss = torch.where(better, step, best), torch.where(better, known[1], best_loss)
            chosen = torch.where(of(better)[:, None], there, of(best_gradient))
            best_gradient = _with(best_gradient, index, chosen)
            high, low = torch.where(far, known, high), torch.where(near, known, low)
            searching = far | near
        return best, best_loss, best_gradient


def _of(index: Tensor, each: Tensor) -> Tensor:
    """Those of some problems."""
    return each if len(index) == len(each) else each[index]


def _with(each: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """Those of all problems, some of them new."""
    return new if len(index) == len(each) else each.index_copy(0, index, new)


def _between(low: Tensor, high: Tensor) -> Tensor:
    """The next step to try: the cubic's minimum well inside the bracket, or four times as far without an upper end."""
    (near, f0, g0), (far, f1, g1) = low, high
    width = far - near
    a = g0 + g1 - 3 * (f1 - f0) / width
    root = (a.square() - g0 * g1).clamp_min(0).sqrt()
    cubic = far - width * (g1 + root - a) / (g1 - g0 + 2 * root)
    inside = torch.maximum(torch.minimum(cubic, far - 0.1 * width), near + 0.1 * width)
    inside = torch.where(inside.isfinite(), inside, (near + far) / 2)
    return torch.where(far.isfinite(), inside, 4 * near)
