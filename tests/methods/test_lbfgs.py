"""Batched L-BFGS against torch's and SciPy's on single problems."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from kvfold.methods.lbfgs import LBFGS


def rosenbrock(x):
    """(n, size) -> (n,)"""
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


class Fits:
    """Softmax fits of different scales: the shape of the problem that keys are moved by."""

    def __init__(self, problems=4, size=12, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.q, self.v = draw(problems, 40, 3), draw(problems, size // 3, 2)
        self.y = draw(problems, 40, 2) * 0.5
        self.scale = 10.0 ** torch.arange(problems)
        self.start = draw(problems, size)

    def __call__(self, x, index):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            keys = x.view(len(x), -1, 3)
            out = (self.q[index] @ keys.transpose(1, 2)).softmax(-1) @ self.v[index]
            losses = (out - self.y[index]).square().mean((1, 2)) * self.scale[index]
            (gradient,) = torch.autograd.grad(losses.sum(), x)
        return losses.detach(), gradient

    def alone(self, problem):
        """For SciPy: one problem's loss and gradient."""

        def value(x):
            loss, gradient = self(torch.tensor(x)[None], torch.tensor([problem]))
            return float(loss), gradient[0].numpy()

        return value


def with_gradient(function):
    def objective(x, index):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            losses = function(x)
            (gradient,) = torch.autograd.grad(losses.sum(), x)
        return losses.detach(), gradient

    return objective


def test_quadratics_of_any_condition_end_at_their_minima():
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, 3, 6, dtype=torch.float64)[None] ** torch.tensor([[0.0], [0.5], [1.0]])
    target = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    solver = LBFGS(torch.zeros(3, 6, dtype=torch.float64), tolerance_grad=1e-10)
    loss = solver.run(
        lambda x, i: ((scales[i] * (x - target[i]) ** 2).sum(1), 2 * scales[i] * (x - target[i])), 60
    )
    assert torch.allclose(solver.x, target, atol=1e-6)
    assert float(loss.max()) < 1e-9


def test_rosenbrock_as_far_as_torch_and_scipy():
    start = torch.tensor([[-1.2, 1.0, -1.2, 1.0], [0.0, 0.0, 0.0, 0.0], [2.0, -1.5, 0.5, 3.0]]).double()
    solver = LBFGS(start, tolerance_grad=1e-8, tolerance_change=0)
    solver.run(with_gradient(rosenbrock), 100)
    for problem, x in enumerate(start):
        single = x.clone().requires_grad_()
        theirs = torch.optim.LBFGS([single], max_iter=100, line_search_fn="strong_wolfe", history_size=10)

        def closure(single=single, theirs=theirs):
            theirs.zero_grad()
            loss = rosenbrock(single[None]).sum()
            loss.backward()
            return loss

        theirs.step(closure)
        scipys = minimize(
            lambda v: float(rosenbrock(torch.tensor(v)[None])),
            x.numpy(),
            jac=lambda v: with_gradient(rosenbrock)(torch.tensor(v)[None], None)[1][0].numpy(),
            method="L-BFGS-B",
        )
        assert torch.allclose(solver.x[problem], single.detach(), atol=1e-4)
        assert np.allclose(solver.x[problem].numpy(), scipys.x, atol=1e-3)


def test_softmax_fits_of_many_scales_reach_what_single_runs_reach():
    fits = Fits()
    solver = LBFGS(fits.start, tolerance_grad=1e-9, tolerance_change=0)
    found = solver.run(fits, 300)
    for problem in range(4):
        theirs = minimize(
            fits.alone(problem),
            fits.start[problem].numpy(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 300},
        )
        assert float(found[problem]) <= theirs.fun * 1.01
    assert solver.evaluations < 600


def test_each_problem_goes_its_own_way():
    """A problem's path is the same alone as among others that end earlier, fail, or are harder."""
    fits = Fits()
    together = LBFGS(fits.start)
    together.run(fits, 15)
    for problem in range(4):
        alone = LBFGS(fits.start[problem : problem + 1])
        alone.run(lambda x, i, problem=problem: fits(x, i + problem), 15)
        assert torch.allclose(alone.x[0], together.x[problem], atol=1e-9)


def test_losses_never_rise_and_curvature_stays_positive():
    fits = Fits(seed=3)
    solver, last = LBFGS(fits.start.float(), history=4), torch.full((4,), torch.inf)
    single = lambda x, i: tuple(t.float() for t in fits(x.double(), i))  # noqa: E731
    for _ in range(20):
        now = solver.run(single, 1)
        assert bool((now <= last * (1 + 1e-5)).all())
        assert bool((solver._inverse >= 0).all())
        last = now


def test_steps_meet_strong_wolfe():
    fits = Fits(seed=1)
    solver = LBFGS(fits.start, armijo=1e-4, curvature=0.5)
    index = torch.arange(4)
    for _ in range(5):
        loss, gradient = fits(solver.x, index)
        direction, fresh = solver._direction(gradient)
        length = torch.where(fresh, 1 / gradient.norm(dim=1), 1.0)
        step, after, there = solver._search(fits, index >= 0, direction, length, loss, gradient)
        slope = (gradient * direction).sum(1)
        assert bool((after <= loss + 1e-4 * step * slope + 1e-12).all())
        assert bool(((there * direction).sum(1).abs() <= 0.5 * slope.abs() + 1e-12).all())
        solver.run(fits, 1)


def test_a_problem_that_is_not_finite_stays_where_it_is():
    def objective(x, index):
        loss, gradient = x.square().sum(1), 2 * x
        bad = index == 1
        return loss.masked_fill(bad, torch.nan), gradient.masked_fill(bad[:, None], torch.nan)

    solver = LBFGS(torch.ones(3, 5))
    loss = solver.run(objective, 10)
    assert torch.equal(solver.x[1], torch.ones(5))
    assert bool(loss[1].isnan())
    assert torch.allclose(solver.x[[0, 2]], torch.zeros(2, 5), atol=1e-4)


def test_a_wall_of_infinity_is_not_crossed():
    """-log(x) + x beyond which nothing is defined: long steps come back."""

    def objective(x, index):
        inside = x > 0
        loss = torch.where(inside, x - x.clamp_min(1e-30).log(), torch.inf).sum(1)
        return loss, torch.where(inside, 1 - 1 / x, torch.nan)

    solver = LBFGS(torch.tensor([[1e-2, 30.0], [5.0, 5.0]], dtype=torch.float64))
    solver.run(objective, 50)
    assert torch.allclose(solver.x, torch.ones(2, 2, dtype=torch.float64), atol=1e-4)


def test_what_is_done_is_not_asked_again():
    asked = []

    def objective(x, index):
        asked.append(index.tolist())
        scale = torch.tensor([1.0, 100.0])[index, None] ** torch.arange(6)
        return (scale * x.square()).sum(1), 2 * scale * x

    LBFGS(torch.ones(2, 6, dtype=torch.float64)).run(objective, 60)
    assert asked[0] == [0, 1] and asked[-1] == [1]


@pytest.mark.parametrize("options", [{"history": 0}, {"armijo": 0.95}, {"curvature": 1.0}, {"searches": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="at least 1"):
        LBFGS(torch.zeros(1, 2), **options)


def test_bad_x():
    with pytest.raises(ValueError, match="problems, size"):
        LBFGS(torch.zeros(3))
    with pytest.raises(ValueError, match="float"):
        LBFGS(torch.zeros(3, 2, dtype=torch.int64))
