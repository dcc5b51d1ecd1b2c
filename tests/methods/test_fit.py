"""What values and biases are fitted to, and the fits, against loops, NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear, nnls

from kvfold.methods.fit import bounded_least_squares, future_queries, ridge_values, targets
from tests.methods.baselines.views import view
from tests.stores.checks import Turn


def logits_by_hand(one, row, head, window, horizon):
    """(query, token) logits of one KV head: sampled queries turned past the end, then the newest, one by one."""
    group = one.queries.shape[1] // one.keys.shape[1]
    tokens = [t for t in range(one.tokens) if one.valid[row, head, t]]
    lines, at = [], Turn()
    for member in range(group):
        query_head, number = head * group + member, 0
        for sample, index in enumerate(one.sampled_index.tolist()):
            if index not in tokens:
                continue
            query = one.sampled[row, query_head, sample][None]
            if one.rotary is not None:
                end = int(one.positions[row, -1]) + 1 + number % horizon
                query = at.rotate(
                    at.unrotate(query, one.positions[row, index : index + 1]), torch.tensor([end])
                )
            number += 1
            lines.append([float(query[0] @ one.keys[row, head, t]) * one.scaling for t in tokens])
        for step in range(window):
            where = one.tokens - window + step
            if where not in tokens:
                continue
            query = one.queries[row, query_head, one.queries.shape[2] - window + step]
            lines.append(
                [
                    float(query @ one.keys[row, head, t]) * one.scaling if t <= where else -np.inf
                    for t in tokens
                ]
            )
    return np.array(lines), tokens


@pytest.mark.parametrize("rotary", [True, False])
def test_targets_by_hand(rotary):
    one = view(pads=(0, 55), rotary=rotary)
    for row in range(2):
        for head, target in enumerate(targets(one, row, window=8, horizon=7)):
            expected, tokens = logits_by_hand(one, row, head, 8, 7)
            assert target.positions.tolist() == tokens
            assert target.logits.shape == expected.shape
            assert np.allclose(target.logits.numpy(), expected, atol=1e-3)
            assert torch.equal(target.values, one.values[row, head, tokens])


def test_capped_logits():
    target = next(targets(view(softcap=2.0), 0, 8, 16))
    plain = next(targets(view(), 0, 8, 16))
    assert torch.allclose(target.logits[:20], 2 * torch.tanh(plain.logits[:20] / 2), atol=1e-5)


def test_future_queries_keep_what_rope_leaves_alone():
    """A query wider than the keys (latent attention) is turned in its last channels only."""
    one = view(sampled=torch.randn(1, 4, 20, 24))
    found = future_queries(one, 0, 128)
    assert torch.equal(found[..., :8], one.sampled[0, ..., :8])
    assert not torch.allclose(found[..., 8:], one.sampled[0, ..., 8:], atol=0.1)


@pytest.mark.parametrize(("queries", "tokens"), [(60, 20), (12, 20)])
@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_ridge_is_the_augmented_least_squares(queries, tokens, ridge):
    rng = np.random.default_rng(0)
    weights, wanted = rng.dirichlet(np.ones(tokens), queries), rng.normal(size=(queries, 5))
    towards = rng.normal(size=(tokens, 5))
    augmented = np.vstack([weights, np.sqrt(ridge) * np.eye(tokens)])
    expected, *_ = np.linalg.lstsq(augmented, np.vstack([wanted, np.sqrt(ridge) * towards]), rcond=None)
    arrays = [torch.tensor(x, dtype=torch.float32) for x in (weights, wanted, towards)]
    found = ridge_values(arrays[0], arrays[1], ridge, arrays[2])
    assert np.allclose(found.numpy(), expected, atol=2e-3 * np.abs(expected).max())


def test_no_ridge_is_least_squares():
    rng = np.random.default_rng(0)
    weights, wanted = rng.dirichlet(np.ones(8), 60), rng.normal(size=(60, 5))
    expected, *_ = np.linalg.lstsq(weights, wanted, rcond=None)
    arrays = [torch.tensor(x, dtype=torch.float32) for x in (weights, wanted)]
    assert np.allclose(ridge_values(*arrays, 0, torch.zeros(8, 5)).numpy(), expected, atol=1e-3)
    # Two tokens that no query tells apart: finite all the same.
    twice = torch.cat([arrays[0], arrays[0][:, :1]], 1)
    found = ridge_values(twice, arrays[1], 0, torch.zeros(9, 5))
    assert bool(torch.isfinite(found).all())
    assert np.allclose(twice @ found, weights @ expected, atol=1e-2)


@pytest.mark.parametrize("high", [np.inf, 0.5])
def test_bounded_least_squares_is_scipys(high):
    rng = np.random.default_rng(1)
    a = np.exp(rng.normal(size=(80, 12)) * 2)
    b = a @ np.maximum(rng.normal(size=12), 0) + rng.normal(size=80)
    if high == np.inf:
        expected, _ = nnls(a, b)
        assert (expected == 0).any()
        low = 0.0
    else:
        low = float(np.exp(-3))
        expected = lsq_linear(a, b, bounds=(low, high), tol=1e-12).x
        assert (expected > high - 1e-6).any() and (expected < low + 1e-6).any()
    # Beside another problem, whose steps are others.
    other = np.exp(rng.normal(size=(80, 12)))
    both = torch.tensor(np.stack([other, a])), torch.tensor(np.stack([other.sum(1), b]))
    gram, moment = both[0].mT @ both[0], (both[0].mT @ both[1][..., None])[..., 0]
    first, found = bounded_least_squares(gram, moment, low, high).numpy()
    assert high < 1 or np.allclose(first, 1, atol=0.02)
    assert (found >= low * 0.999).all() and (found <= high * 1.001).all()
    loss = np.square(a @ found - b).sum()
    assert loss <= np.square(a @ expected - b).sum() * (1 + 1e-4)
    assert np.allclose(found, expected, atol=0.02)
