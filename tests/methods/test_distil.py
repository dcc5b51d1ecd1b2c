"""The objective against autograd over attention written out, and its values against least squares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold.methods import distil
from kvfold.methods.distil import Batch, Questions
from kvfold.methods.queries import training
from tests.methods.baselines.views import view

STAYS = torch.tensor([0, 1, 57, 58, 59])


def others(head, stay):
    """Index of a head's tokens that do not stay."""
    mask = torch.ones(len(head.positions), dtype=torch.bool)
    mask[stay] = False
    return mask.nonzero().flatten()


def batch(softcap=None, lse=0.3, counts=(9, 5), pads=(0, 17)):
    """Two heads of unequal queries and keys, and what they were made of."""
    one = view(pads=pads, softcap=softcap)
    heads = [training(one, row, row, "reread", window=6, horizon=16) for row in (0, 1)]
    stays = [STAYS, STAYS[:4] - 17]
    stays[1] = torch.cat(
        [torch.tensor([0]), torch.arange(len(heads[1].positions) - 4, len(heads[1].positions))]
    )
    asked = [
        Questions.of(head, head.attend(), head.apart(head.attend(), others(head, stay))[1])
        for head, stay in zip(heads, stays, strict=True)
    ]
    generator = torch.Generator().manual_seed(5)
    keys = [torch.randn(count, 16, generator=generator) for count in counts]
    values = [torch.randn(count, 24, generator=generator) for count in counts]
    return Batch(asked, keys, values, softcap, lse), heads, stays, one


def loss_by_hand(head, stay, keys, values, scaling, softcap, weight):
    """(output error, log-sum-exp error) of each query, float64, from logits over everything it sees."""
    cap = (lambda x: x) if softcap is None else (lambda x: softcap * torch.tanh(x / softcap))
    new = cap(head.queries.double() @ keys.T * scaling)
    beside = head.beside_lse.double()[:, None]
    logits = torch.cat([new, head.logits(stay).double(), beside], 1)
    share = logits.softmax(-1)
    output = share[:, : len(keys)] @ values + share[:, len(keys) : -1] @ head.values[stay].double()
    output = output + share[:, -1:] * head.beside_output.double()
    full = torch.cat([head.logits(slice(None)).double(), beside], 1)
    exact = full.softmax(-1)[:, :-1] @ head.values.double() + full.softmax(-1)[:, -1:] * head.beside_output
    off = logits.logsumexp(-1) - full.logsumexp(-1)
    return (output - exact).square().mean(-1), weight * off.square()


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_loss_and_gradient(softcap, monkeypatch):
    made, heads, stays, one = batch(softcap)
    x = made.keys.flatten(1)
    for room in (distil.WEIGHTS_BYTES, (1, 1)):
        monkeypatch.setattr(distil, "WEIGHTS_BYTES", room)
        losses, gradients = made(x, torch.tensor([0, 1]))
        for i, count in enumerate((9, 5)):
            keys = made.keys[i, :count].double().requires_grad_()
            errors = loss_by_hand(
                heads[i], stays[i], keys, made.values[i, :count].double(), one.scaling, softcap, 0.3
            )
            expected = sum(errors)[~heads[i].held].mean()
            expected.backward()
            assert float(losses[i]) == pytest.approx(float(expected.detach()), rel=1e-4)
            found = gradients[i].view(9, 16)
            assert torch.allclose(
                found[:count].double(), keys.grad, atol=1e-4 * float(keys.grad.abs().max()) + 1e-7
            )
            assert not found[count:].any()
        alone, one_gradient = made(x[1:], torch.tensor([1]))
        assert float(alone) == pytest.approx(float(losses[1])) and torch.allclose(
            one_gradient[0], gradients[1]
        )


def test_errors_of_queries_trained_on_and_held_out():
    made, heads, stays, one = batch()
    found = made.errors(made.keys, made.values)
    for i, count in enumerate((9, 5)):
        output, _ = loss_by_hand(
            heads[i],
            stays[i],
            made.keys[i, :count].double(),
            made.values[i, :count].double(),
            one.scaling,
            None,
            0,
        )
        assert 0 < int(heads[i].held.sum()) < len(output)
        expected = [float(output[~heads[i].held].mean()), float(output[heads[i].held].mean())]
        assert found[i].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("everything", [True, False])
def test_values_are_the_ridge_solution(everything):
    made, heads, stays, one = batch()
    towards = torch.randn(made.values.shape, generator=torch.Generator().manual_seed(1))
    found = made.solve(made.keys, 1e-2, towards, everything)
    for i, count in enumerate((9, 5)):
        head, stay = heads[i], stays[i]
        used = torch.ones_like(head.held) if everything else ~head.held
        new = head.queries @ made.keys[i, :count].T * one.scaling
        logits = torch.cat([new, head.logits(stay), head.beside_lse[:, None]], 1).double()
        share = logits.softmax(-1)[used].numpy()
        exact, _ = head.attend()
        lacking = exact[used].double().numpy() - share[:, count:-1] @ head.values[stay].double().numpy()
        lacking -= share[:, -1:] * head.beside_output[used].double().numpy()
        expected, *_ = np.linalg.lstsq(
            np.vstack([share[:, :count], 0.1 * np.eye(count)]),
            np.vstack([lacking, 0.1 * towards[i, :count].double().numpy()]),
            rcond=None,
        )
        assert np.allclose(found[i, :count].numpy(), expected, atol=2e-3)
        assert not found[i, count:].any()


def test_every_token_kept_leaves_no_error():
    one = view()
    head = training(one, 0, 0, "reread", window=3, horizon=16)
    replaced = others(head, STAYS)
    made = Batch(
        [Questions.of(head, head.attend(), head.apart(head.attend(), replaced)[1])],
        [head.keys[replaced]],
        [head.values[replaced]],
        None,
        1.0,
    )
    losses, gradients = made(made.keys.flatten(1), torch.tensor([0]))
    assert float(losses) < 1e-9 and float(gradients.abs().max()) < 1e-5
