"""Losses against their dense formulas in float64."""

from __future__ import annotations

import pytest
import torch

from kvfold.training.loss import capacity_loss, next_token_losses, soft_size


def dense_size(log_beta):
    """The whole tokens x tokens matrix of beta^(t - i)."""
    steps = torch.arange(log_beta.shape[-1])
    age = steps[:, None] - steps
    return torch.where(age >= 0, (age.clamp_min(0) * log_beta[..., None, :]).exp(), 0.0).sum(-1)


def betas(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return -(torch.randn(shape, generator=draw) * 2 - 3).exp()


@pytest.mark.parametrize(("tokens", "block"), [(1, 4), (64, 16), (61, 16), (40, 64)])
def test_soft_size_and_its_gradient(tokens, block):
    log_beta = betas(2, 3, tokens).requires_grad_()
    twin = log_beta.detach().double().requires_grad_()
    weight = torch.randn(2, 3, tokens, generator=torch.Generator().manual_seed(1))
    found, expected = soft_size(log_beta, block), dense_size(twin)
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.allclose(
        log_beta.grad.double(), twin.grad, rtol=1e-5, atol=1e-5 * float(twin.grad.abs().max())
    )


@pytest.mark.parametrize("scope", ["model", "head"])
def test_capacity_is_the_hinge_of_the_formula(scope):
    log_beta = betas(2, 6, 50).requires_grad_()
    twin = log_beta.detach().double().requires_grad_()
    found = capacity_loss(soft_size(log_beta, 16), 5, scope)
    expected = twin.new_zeros(())
    for size in dense_size(twin):  # (heads, tokens)
        for t in range(50):
            if scope == "model":
                expected = expected + (size[:, t].sum() - 5 * 6).clamp_min(0) / (6 * (t + 1))
            else:
                expected = expected + (size[:, t] - 5).clamp_min(0).mean() / (t + 1)
    expected = expected / (2 * 50)
    assert abs(found.item() - expected.item()) < 1e-5 * expected.item()
    found.backward()
    expected.backward()
    assert torch.allclose(log_beta.grad.double(), twin.grad, rtol=1e-5, atol=1e-8)
    assert expected.item() > 0.01, "a hinge that is not at work would pass"


def test_heads_may_share_a_budget_but_not_the_other_way_round():
    sizes = torch.tensor([[[9.0], [1.0]]])
    assert float(capacity_loss(sizes, 5, "model")) == 0
    assert float(capacity_loss(sizes, 5, "head")) == 2


@pytest.mark.parametrize("block", [3, 100])
def test_next_token_losses(block):
    draw = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(2, 10, 7, generator=draw) for _ in range(2))
    student.requires_grad_()
    ids = torch.randint(7, (2, 10), generator=draw)
    kl, ntp = next_token_losses(teacher, student, ids, block)
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    apart = (p * (p / q).log()).sum(-1).mean()
    missed = -q[:, :-1].gather(2, ids[:, 1:, None]).log().mean()
    assert kl.item() == pytest.approx(apart.item(), rel=1e-5)
    assert ntp.item() == pytest.approx(missed.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(kl + ntp, student)
    (expected,) = torch.autograd.grad(apart + missed, student)
    assert torch.allclose(gradient.double(), expected.double(), atol=1e-6)
