"""Select+Fit and Attention Matching against their definitions, with SciPy and NumPy as solvers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from kvfold.errors import BudgetError
from kvfold.methods import AttentionMatching, KVSculpt, SelectFit
from kvfold.methods.fit import future_queries
from kvfold.stores.base import AttendContext
from tests.methods.baselines.views import view
from tests.methods.test_fit import logits_by_hand

SMALL = dict(keep=0.45, sinks=2, window=6, sampled=64, horizon=16)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def split(tokens, scores, count, sinks, window):
    """Indices kept exact, and the best of the others, in order."""
    exact = [i for i in range(len(tokens)) if i < sinks or i >= len(tokens) - window]
    others = sorted((i for i in range(len(tokens)) if i not in exact), key=lambda i: -scores[i])
    return sorted(others[: count - len(exact)]), exact


def content(store, row, head):
    kept = store.kept(row, head)
    return {
        int(position): (key.numpy(), value.numpy(), 0.0 if kept.bias is None else float(kept.bias[index]))
        for index, (position, key, value) in enumerate(
            zip(kept.positions, kept.keys, kept.values, strict=True)
        )
    }


@pytest.mark.parametrize("ridge_to", ["zero", "own"])
def test_select_fit(ridge_to):
    one = view(pads=(0, 17))
    method = SelectFit(ridge_to=ridge_to, ridge=1e-2, **SMALL)
    (store,) = method.fold([one])
    assert store.nbytes <= 0.45 * store.full_bytes
    for row in range(2):
        for head in range(2):
            logits, tokens = logits_by_hand(one, row, head, 6, 16)
            found = content(store, row, head)
            weights = softmax(logits)
            chosen, exact = split(tokens, weights.sum(0), len(found), 2, 6)
            assert sorted(found) == sorted(tokens[i] for i in chosen + exact)
            values = one.values[row, head, tokens].double().numpy()
            after = softmax(logits[:, chosen + exact])
            a, wanted = after[:, : len(chosen)], weights @ values - after[:, len(chosen) :] @ values[exact]
            towards = values[chosen] if ridge_to == "own" else np.zeros_like(values[chosen])
            root = np.sqrt(1e-2)
            fitted, *_ = np.linalg.lstsq(
                np.vstack([a, root * np.eye(len(chosen))]), np.vstack([wanted, root * towards]), rcond=None
            )
            for i, value in [*zip(chosen, fitted), *zip(exact, values[exact])]:
                key, stored, _ = found[tokens[i]]
                assert np.allclose(key, one.keys[row, head, tokens[i]], atol=2e-3)
                assert np.allclose(stored, value, atol=2e-2)


def test_attention_matching():
    one = view(pads=(0, 17))
    (store,) = AttentionMatching(**SMALL).fold([one])
    assert store.nbytes <= 0.45 * store.full_bytes
    for row in range(2):
        for head in range(2):
            logits, tokens = logits_by_hand(one, row, head, 6, 16)
            found = content(store, row, head)
            weights = softmax(logits)
            chosen, exact = split(tokens, np.sqrt((weights**2).mean(0)), len(found), 2, 6)
            assert sorted(found) == sorted(tokens[i] for i in chosen + exact)
            mass = np.exp(logits - logits.max(-1, keepdims=True))
            wanted = mass.sum(-1) - mass[:, exact].sum(-1)
            best = lsq_linear(mass[:, chosen], wanted, bounds=(np.exp(-3), np.exp(3)), tol=1e-12).x
            bias = np.array([found[tokens[i]][2] for i in chosen])
            loss = np.square(mass[:, chosen] @ np.exp(bias) - wanted).sum()
            assert loss <= np.square(mass[:, chosen] @ best - wanted).sum() * 1.02 + 1e-3
            assert all(found[tokens[i]][2] == 0 for i in exact)
            # Values: no others give less error with these biases.
            values = one.values[row, head, tokens].double().numpy()
            biases = np.concatenate([bias, np.zeros(len(exact))])
            after = softmax(logits[:, chosen + exact] + biases)
            a, lacking = after[:, : len(chosen)], weights @ values - after[:, len(chosen) :] @ values[exact]
            fitted, *_ = np.linalg.lstsq(a, lacking, rcond=None)
            stored = np.stack([found[tokens[i]][1] for i in chosen])
            error, least = (np.square(a @ v - lacking).sum() for v in (stored, fitted))
            assert error <= least * 1.05 + 1e-2


def test_biases_give_back_the_mass_that_eviction_takes():
    one = view(tokens=120)
    query, context = future_queries(one, 0, 16)[None], AttendContext(one.scaling)
    logits = query.unflatten(1, (2, 2)) @ one.keys[:, :, None].transpose(-1, -2) * one.scaling
    exact = logits.logsumexp(-1).flatten(1, 2)
    lacks = []
    for method in (SelectFit(**SMALL), AttentionMatching(**SMALL)):
        (store,) = method.fold([one])
        lacks.append(float((store.attend(query, None, context)[1] - exact).mean()))
    assert lacks[0] < -0.1
    assert abs(lacks[1]) < 0.2 * abs(lacks[0])


@pytest.mark.parametrize("method", [SelectFit, AttentionMatching])
def test_a_whole_budget_keeps_everything_as_it_is(method):
    one = view(pads=(0, 50))
    (store,) = method(**{**SMALL, "keep": 1.0, "sinks": 10, "window": 8}).fold([one])
    assert torch.equal(store.kept(1, 0).positions, torch.arange(50, 60))
    assert torch.allclose(store.kept(1, 0).values, one.values[1, 0, 50:], atol=4e-3)
    (store,) = method(tokens=500, sinks=2, window=8).fold([one])
    assert len(store.kept(0, 0).positions) == 60


@pytest.mark.parametrize("method", [SelectFit, AttentionMatching, KVSculpt])
@pytest.mark.parametrize("tokens", [100, 200, 301, 480, 7300])
def test_the_least_budget_that_is_told_is_enough(method, tokens):
    with pytest.raises(BudgetError, match="at least keep=") as error:
        method(keep=0.001).check(tokens, 2, 64, 48)
    least = float(str(error.value).split("keep=")[1].split()[0])
    method(keep=least).check(tokens, 2, 64, 48)
    with pytest.raises(BudgetError):
        method(keep=least - 2e-4).check(tokens, 2, 64, 48)


@pytest.mark.parametrize("method", [SelectFit, AttentionMatching])
def test_bad_input(method):
    with pytest.raises(BudgetError, match="too short to be folded so"):
        method(keep=0.5).check(37, 2, 16, 16)
    for options in ({"window": 0}, {"ridge": -1.0}, {"ridge": np.nan}, {"bound": np.nan}, {"bound": 1000.0}):
        if all(name in method.__dataclass_fields__ for name in options):
            with pytest.raises(ValueError, match=next(iter(options))):
                method(keep=0.3, **options)
    with pytest.raises(ValueError, match="exactly one"):
        method()
