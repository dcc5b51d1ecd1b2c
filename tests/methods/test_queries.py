"""Training queries against a loop over them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold.methods import queries
from kvfold.methods.queries import training
from tests.methods.baselines.views import view
from tests.stores.checks import Turn


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("source", ["reread", "future"])
def test_by_hand(source, rotary):
    """Each query at its new position: what it sees of the prompt, and what it brings along."""
    one, turn = view(pads=(0, 25), rotary=rotary), Turn()
    for row, head in [(0, 0), (0, 1), (1, 1)]:
        found = training(one, row, head, source, window=6, horizon=7)
        real = [t for t in range(60) if one.valid[row, head, t]]
        logits_found = found.logits(slice(None))
        assert found.positions.tolist() == real
        at, line = one.positions[row], 0
        for member in range(2):
            query_head, number = head * 2 + member, 0
            for sample, index in enumerate(one.sampled_index.tolist()):
                if index not in real:
                    continue
                query, ahead = one.sampled[row, query_head, sample], number % 7
                moved = query
                if rotary:
                    moved = turn.unrotate(query[None], at[index : index + 1])
                    moved = turn.rotate(moved, torch.tensor([int(at[-1]) + 1 + ahead]))[0]
                assert torch.allclose(found.queries[line], moved, atol=1e-4)
                expected = one.keys[row, head, real] @ moved * one.scaling
                assert torch.allclose(logits_found[line], expected, atol=1e-3)
                near = [t for t in real if index - ahead <= t <= index] if source == "reread" else []
                if near:
                    logits = (one.keys[row, head, near] @ query * one.scaling).double().numpy()
                    assert float(found.beside_lse[line]) == pytest.approx(
                        np.log(np.exp(logits).sum()), abs=1e-4
                    )
                    output = softmax(logits) @ one.values[row, head, near].double().numpy()
                    assert np.allclose(found.beside_output[line].numpy(), output, atol=1e-4)
                else:
                    assert float(found.beside_lse[line]) == -np.inf
                number, line = number + 1, line + 1
            for step in range(6):
                where = 54 + step
                query = one.queries[row, query_head, 2 + step]
                expected = [
                    float(query @ one.keys[row, head, t]) * one.scaling if t <= where else -np.inf
                    for t in real
                ]
                assert np.allclose(logits_found[line].numpy(), expected, atol=1e-4)
                assert float(found.beside_lse[line]) == -np.inf and not found.held[line]
                line += 1
        assert line == len(found.queries)


def test_a_token_read_again_relates_to_its_neighbours_as_it_did():
    """RoPE knows differences only, so that what is beside a query may be taken where it was."""
    one, turn = view(), Turn()
    ahead, index = 4, 27
    end = int(one.positions[0, -1]) + 1
    query = turn.rotate(
        turn.unrotate(one.sampled[0, 0, 9:10], torch.tensor([index])), torch.tensor([end + ahead])
    )
    near = torch.arange(index - ahead, index + 1)
    keys = turn.rotate(turn.unrotate(one.keys[0, 0, near], near), end + torch.arange(ahead + 1))
    found = training(one, 0, 0, "reread", window=6, horizon=5)
    logits = query @ keys.T * one.scaling
    assert torch.allclose(found.beside_lse[9], logits.logsumexp(-1)[0], atol=1e-4)


def exact(found, index):
    """(weights, output, log-sum-exp) over some tokens and what is beside the prompt, in float64."""
    logits = found.logits(index).double()
    both = torch.cat([logits, found.beside_lse.double()[:, None]], 1)
    share = both.softmax(-1)
    output = share[:, :-1] @ found.values[index].double() + share[:, -1:] * found.beside_output.double()
    return share[:, :-1], output, both.logsumexp(-1)


def test_attention_is_over_prompt_and_what_is_beside_it(monkeypatch):
    found = training(view(softcap=3.0), 0, 1, "reread", window=6, horizon=16)
    _, output, lse = exact(found, slice(None))
    for block in (queries.BLOCK, 7):
        monkeypatch.setattr(queries, "BLOCK", block)
        whole = found.attend()
        assert torch.allclose(whole[0].double(), output, atol=1e-5)
        assert torch.allclose(whole[1].double(), lse, atol=1e-5)
    assert float(found.logits(slice(None))[:20].abs().max()) <= 3


def test_tokens_apart_from_all_else():
    found = training(view(), 0, 1, "reread", window=6, horizon=16)
    whole = found.attend()
    for tokens in (slice(4, 50), torch.tensor([3, 17, 40])):
        weights, (rest, rest_lse) = found.apart(whole, tokens)
        others = torch.ones(60, dtype=torch.bool)
        others[tokens] = False
        _, output, lse = exact(found, others.nonzero().flatten())
        assert torch.allclose(weights.double(), exact(found, slice(None))[0][:, tokens], atol=1e-5)
        share = (lse - whole[1]).exp()
        assert torch.allclose((rest_lse - whole[1]).exp().double(), share, atol=1e-5)
        # What counts is the rest's part of the whole, however little of it there is.
        assert torch.allclose(rest.double() * share[:, None], output * share[:, None], atol=1e-5)
    weights, (rest, rest_lse) = found.apart(whole, slice(0, 60))
    assert bool(rest.isfinite().all()) and bool(rest_lse.isfinite().all())


def test_what_is_beside_does_not_depend_on_how_many_at_a_time(monkeypatch):
    one = view(pads=(0, 25), softcap=3.0)
    whole = training(one, 1, 0, "reread", window=6, horizon=7)
    monkeypatch.setattr(queries, "BESIDE", (2, 2))
    parts = training(one, 1, 0, "reread", window=6, horizon=7)
    assert torch.allclose(whole.beside_lse, parts.beside_lse, atol=1e-5)
    assert torch.allclose(whole.beside_output, parts.beside_output, atol=1e-5)


def test_held_out_queries_are_spans_of_an_eighth():
    index = torch.arange(800)
    one = view(tokens=800, sampled=torch.randn(1, 4, 800, 16), sampled_index=index)
    held = training(one, 0, 0, "reread", window=8, horizon=128).held.view(2, -1)
    assert torch.equal(held[0], held[1])
    assert not held[0, 800:].any()
    runs = torch.diff(held[0, :800].nonzero().flatten())
    assert (runs == 1).sum() > 0.9 * len(runs)
    assert 0.1 < held[0, :800].float().mean() < 0.15


def test_synthetic_queries_are_one_a_position():
    one = view(tokens=90, sampled=torch.randn(1, 4, 90, 16), sampled_index=torch.arange(90), rotary=False)
    found = training(one, 0, 0, "synthetic", window=6, horizon=16)
    assert found.queries.shape == (2 * (16 + 6), 16)
    source = [(one.sampled[0, 0] == query).all(-1).nonzero().item() for query in found.queries[:16]]
    assert len(set(source)) == 16
    assert bool((found.beside_lse == -torch.inf).all())
