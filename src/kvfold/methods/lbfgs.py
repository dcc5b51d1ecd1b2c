"""Limited-memory BFGS for many problems at once, each with its own step, history and end."""

from __future__ import annotations

from collections.abc import Callable

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
        Pairs kept for each problem.
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
        problems, size = x.shape
        self._steps, self._turns = (x.new_zeros(history, problems, size) for _ in range(2))
        # 1 / (step . turn); 0 where there is no pair, which takes it out of the recursion.
        self._inverse = x.new_zeros(history, problems)
        self._scale = x.new_zeros(problems)
        self._newest = torch.zeros(problems, dtype=torch.int64, device=x.device)
        self.evaluations = 0

    def run(self, objective: Objective, iterations: int) -> Tensor:
        """Take up to `iterations` steps; returns the losses reached, (problems,).

        May be called again with a function that has changed a little: histories are kept.
        """
        every = torch.arange(len(self.x), device=self.x.device)
        loss, gradient = self._evaluate(objective, self.x, every)
        alive = loss.isfinite() & gradient.isfinite().all(1)
        for _ in range(iterations):
            alive &= gradient.abs().amax(1) > self.tolerance_grad
            index = alive.nonzero().flatten()
            if not len(index):
                break
            before, slope_from = loss[index], gradient[index]
            direction, fresh = self._direction(slope_from, index)
            length = torch.where(fresh, 1 / slope_from.norm(dim=1).clamp_min(1e-30), torch.ones_like(before))
            step, after, slope_to = self._search(objective, index, direction, length, before, slope_from)
            moved = step > 0
            # No step along the quasi-Newton direction: once more from the gradient alone, then no more.
            self._inverse[:, index[~moved]] = 0
            alive[index[~moved & fresh]] = False
            index, step, direction = index[moved], step[moved], direction[moved]
            change = step[:, None] * direction
            self.x[index] += change
            self._remember(index, change, slope_to[moved] - slope_from[moved])
            loss[index], gradient[index] = after[moved], slope_to[moved]
            fall = before[moved] - after[moved]
            alive[index] = fall > self.tolerance_change * before[moved].abs()
        return loss

    def _evaluate(self, objective: Objective, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluations += 1
        return objective(x, index)

    def _direction(self, gradient: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where to go from here, and which problems have no history to tell (they go down the gradient)."""
        history = len(self._inverse)
        slots = [(self._newest[index] - age) % history for age in range(history)]
        used, d = [], -gradient
        for slot in slots:
            share = self._inverse[slot, index] * (self._steps[slot, index] * d).sum(1)
            d = d - share[:, None] * self._turns[slot, index]
            used.append(share)
        fresh = (self._inverse[:, index] == 0).all(0)
        d = d * torch.where(fresh, torch.ones_like(self._scale[index]), self._scale[index])[:, None]
        for slot, share in zip(reversed(slots), reversed(used), strict=True):
            back = self._inverse[slot, index] * (self._turns[slot, index] * d).sum(1)
            d = d + (share - back)[:, None] * self._steps[slot, index]
        wrong = (d * gradient).sum(1) >= 0
        if bool(wrong.any()):
            self._inverse[:, index[wrong]] = 0
            d, fresh = torch.where(wrong[:, None], -gradient, d), fresh | wrong
        return d, fresh

    def _remember(self, index: Tensor, step: Tensor, turn: Tensor) -> None:
        product, square = (step * turn).sum(1), turn.square().sum(1)
        good = product > torch.finfo(step.dtype).eps * square
        index, product = index[good], product[good]
        slot = self._newest[index] = (self._newest[index] + 1) % len(self._inverse)
        self._steps[slot, index], self._turns[slot, index] = step[good], turn[good]
        self._inverse[slot, index], self._scale[index] = 1 / product, product / square[good]

    def _search(
        self,
        objective: Objective,
        index: Tensor,
        direction: Tensor,
        length: Tensor,
        loss: Tensor,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps that meet the strong Wolfe conditions, else the best tried that lowers the loss, else 0.

        Returns
        -------
        (step (n,), loss there (n,), gradient there (n, size))
        """
        slope = (gradient * direction).sum(1)
        slack = 2 * torch.finfo(loss.dtype).eps * loss.abs()
        best, best_loss, best_gradient = torch.zeros_like(length), loss.clone(), gradient.clone()
        # What is known at either end of the bracket: step, loss, slope. `high` is infinite until something was too far.
        low = torch.stack([torch.zeros_like(length), loss, slope])
        high = torch.full_like(low, torch.inf)
        step, searching = length.clone(), torch.arange(len(index), device=index.device)
        for _ in range(self.searches):
            at, s = step[searching], searching
            found, there = self._evaluate(objective, self.x[index[s]] + at[:, None] * direction[s], index[s])
            slope_there = (there * direction[s]).sum(1)
            fell = found <= loss[s] + self.armijo * at * slope[s] + slack[s]
            limit = -self.curvature * slope[s]
            far, near = ~fell | (slope_there > limit), fell & (slope_there < -limit)
            better = fell & (found < best_loss[s]) | fell & ~far & ~near
            chosen = s[better]
            best[chosen], best_loss[chosen], best_gradient[chosen] = at[better], found[better], there[better]
            known = torch.stack([at, found, slope_there])
            high[:, s[far]], low[:, s[near]] = known[:, far], known[:, near]
            searching = s[far | near]
            if not len(searching):
                break
            step[searching] = _between(low[:, searching], high[:, searching])
        return best, best_loss, best_gradient


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
