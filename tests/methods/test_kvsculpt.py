"""KVSculpt: its budgets, what it keeps, and that moved keys serve queries it has not seen."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfold.errors import BudgetError, UnsupportedModelError
from kvfold.methods import KVSculpt, kvsculpt, pieces
from kvfold.methods.queries import Training, training
from kvfold.methods.work import Work
from tests.methods.baselines.views import view

SMALL = dict(keep=0.45, sinks=2, window=6, horizon=16)


def prompt(tokens=160, seed=0, rank=3, **options):
    """Keys and values that follow few directions, and queries of every token: something to distil."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    rows, heads = 1, 4
    hidden = draw(rows, 2, tokens, rank)
    keys = hidden @ draw(2, rank, 16) + 0.1 * draw(rows, 2, tokens, 16)
    values = torch.tanh(hidden @ draw(2, rank, 24)) + 0.1 * draw(rows, 2, tokens, 24)
    sampled = draw(rows, heads, tokens, rank) @ draw(heads, rank, 16) * 0.3
    fields = dict(
        keys=keys,
        values=values,
        queries=sampled[:, :, -8:],
        sampled=sampled,
        sampled_index=torch.arange(tokens),
        rotary=False,
        tokens=tokens,
    )
    return view(**{**fields, **options})


def error(one, store, source="reread"):
    """Squared output error over all of its training queries, head by head, in float64 from the stored content."""
    found = []
    for head in range(2):
        asked = training(one, 0, head, source, 0, 16)
        kept = store.kept(0, head)
        logits = asked.queries.double() @ kept.keys.double().T * one.scaling
        share = torch.cat([logits, asked.beside_lse.double()[:, None]], 1).softmax(-1)
        output = share[:, :-1] @ kept.values.double() + share[:, -1:] * asked.beside_output.double()
        found.append(float((output - asked.attend()[0]).square().mean()))
    return np.array(found)


def test_ends_stay_and_bytes_are_the_budgets():
    one = view(pads=(0, 17))
    (store,) = KVSculpt(**SMALL).fold([one])
    assert store.nbytes <= 0.45 * store.full_bytes
    uniform = KVSculpt(**SMALL, heads="uniform").fold([one])[0].buffers["counts"]
    counts = store.buffers["counts"]
    assert torch.equal(counts.sum(1), uniform.sum(1))
    for row, first in enumerate((0, 17)):
        for head in range(2):
            kept = store.kept(row, head)
            ends = [first, first + 1, *range(54, 60)]
            assert kept.positions[-8:].tolist() == ends
            assert torch.allclose(kept.keys[-8:], one.keys[row, head, ends], atol=4e-3)
            assert torch.allclose(kept.values[-8:], one.values[row, head, ends], atol=4e-3)
            others = kept.positions[:-8].tolist()
            assert others == sorted(set(others) - set(ends)) and others[0] > first


@pytest.mark.parametrize("queries", ["reread", "future"])
def test_free_keys_beat_those_of_tokens(queries):
    one = prompt()
    options = dict(tokens=16, sinks=2, window=6, horizon=16, heads="uniform", queries=queries, lse=0.0)
    fixed = error(one, KVSculpt(**options, steps=0).fold([one])[0], queries)
    free = error(one, KVSculpt(**options, steps=40).fold([one])[0], queries)
    assert (free < 0.75 * fixed).all()


@pytest.mark.parametrize("every", [1, 2, 5])
def test_no_steps_keep_the_keys_of_the_most_attended_tokens(every):
    """Where not every token's query was taken, those near the most attended ones."""
    whole, index, half = prompt(tokens=163), torch.arange(0, 163, every), every // 2
    one = replace(whole, sampled=whole.sampled[:, :, index], sampled_index=index)
    (store,) = KVSculpt(**SMALL, heads="uniform", steps=0).fold([one])
    for head in range(2):
        kept, asked = store.kept(0, head), training(one, 0, head, "reread", 6, 16)
        mass = asked.apart(asked.attend(), slice(2, 157))[0].square().sum(0).tolist()
        mass = mass[half:0:-1] + mass + mass[-2 : -half - 2 : -1]
        near = torch.tensor([sum(mass[i : i + 2 * half + 1]) for i in range(155)])
        best = sorted((near.argsort(descending=True)[: len(kept.positions) - 8] + 2).tolist())
        assert kept.positions[:-8].tolist() == best
        assert torch.allclose(kept.keys[:-8], one.keys[0, head, best], atol=4e-3)


def test_values_of_what_is_stored_cannot_be_better():
    """The last ridge is solved for the keys as they are in float16."""
    one = prompt(seed=2)
    options = dict(tokens=16, sinks=2, window=6, horizon=16, heads="uniform", ridge=1e-6)
    (store,) = KVSculpt(**options).fold([one])
    kept, asked = store.kept(0, 0), training(one, 0, 0, "reread", 6, 16)
    logits = asked.queries.double() @ kept.keys.double().T * one.scaling
    logits[asked.logits(kept.positions).isinf()] = -torch.inf
    share = torch.cat([logits, asked.beside_lse.double()[:, None]], 1).softmax(-1)
    rest = share[:, 8:-1] @ kept.values[8:].double() + share[:, -1:] * asked.beside_output
    lacking = (asked.attend()[0] - rest).numpy()
    best, *_ = np.linalg.lstsq(share[:, :8].numpy(), lacking, rcond=None)
    least = np.square(share[:, :8].numpy() @ best - lacking).mean()
    found = np.square(share[:, :8].numpy() @ kept.values[:8].double().numpy() - lacking).mean()
    assert found <= least * 1.02 + 1e-7


def test_a_head_that_only_gets_worse_stays_the_fit(monkeypatch):
    """Keys that are thrown away by an optimiser gone wrong never reach the store."""

    class Wild:
        def __init__(self, x, **options):
            self.x = x.clone()

        def run(self, objective, iterations):
            self.x[0] += 50
            self.x[1] = torch.nan

    one = prompt()
    options = dict(tokens=16, sinks=2, window=6, horizon=16, heads="uniform")
    (fit,) = KVSculpt(**options, steps=0).fold([one])
    monkeypatch.setattr(kvsculpt, "LBFGS", Wild)
    (found,) = KVSculpt(**options).fold([one])
    for name, tensor in fit.buffers.items():
        assert torch.equal(found.buffers[name], tensor)
    told = one.said[-2:]
    assert [head["keys_of_tokens"] for head in told] == [1, 1]
    assert [head["diverged"] for head in told] == [False, True]


def test_what_is_told_of_heads():
    """Errors of the fit and of what is kept, beside those of the stored content by hand."""
    one = prompt()
    options = dict(tokens=16, sinks=2, window=6, horizon=16, heads="uniform", lse=0.0)
    KVSculpt(**options, steps=0).fold([one])
    assert [head["head"] for head in one.said] == [0, 1] and "held_out" not in one.said[0]
    (store,) = KVSculpt(**options, steps=40).fold([one])
    for told in one.said[2:]:
        assert told["tokens"] == [152, 8] and told["pieces"] == 1 and not told["diverged"]
        assert told["held_out"][1] < 0.9 * told["held_out"][0] and told["keys_of_tokens"] == 0
        # The last values are fitted to all queries, those reported to the ones trained on.
        both = told["trained"][1] * 7 / 8 + told["held_out"][1] / 8
        assert error(one, store)[told["head"]] == pytest.approx(both, rel=0.5)


def test_keys_that_leave_float16_are_named(monkeypatch, caplog):
    class Far:
        def __init__(self, x, **options):
            self.x = x.clone()

        def run(self, objective, iterations):
            self.x[0] *= 1e6

    monkeypatch.setattr(kvsculpt, "LBFGS", Far)
    fewer = lambda self, keys, values: 1 / keys.abs().amax((1, 2))[:, None].expand(-1, 2)  # noqa: E731
    monkeypatch.setattr(kvsculpt.Batch, "errors", fewer)
    with caplog.at_level(logging.WARNING):
        (store,) = KVSculpt(tokens=16, sinks=2, window=6, heads="uniform").fold([prompt()])
    assert "layer 0, KV head 0" in caplog.text and "head 1" not in caplog.text
    assert bool(store.kept(0, 0).keys.isfinite().all())


def test_controls_are_what_they_say():
    one = prompt()
    options = dict(tokens=16, sinks=2, window=6, horizon=16, heads="uniform")
    lbfgs = error(one, KVSculpt(**options, lse=0.0, steps=30).fold([one])[0])
    adam = error(one, KVSculpt(**options, lse=0.0, steps=30, optimiser="adam").fold([one])[0])
    fixed = error(one, KVSculpt(**options, lse=0.0, steps=0).fold([one])[0])
    assert lbfgs.sum() < 0.9 * adam.sum() and adam.sum() < 0.9 * fixed.sum()


@pytest.mark.parametrize("chunk", [None, 60])
def test_changed_queries_are_to_get_what_exact_ones_got(chunk):
    """Of a second reading that asks something else altogether: values against least squares, and what it is answered."""
    one, other = prompt(seed=2), prompt(seed=3)
    heard = []

    def again(index, positions, answer):
        assert torch.equal(index, one.sampled_index) and positions.shape == (1, 160)
        heard.append(answer(0, other.sampled, None, None))

    one.again = again
    options = dict(tokens=16, sinks=2, window=6, horizon=16, heads="uniform", steps=0, chunk=chunk)
    (store,) = KVSculpt(**options, ridge=1e-6, cascade=True).fold([one])
    changed = replace(one, sampled=other.sampled)
    causal = torch.ones(160, 160, dtype=torch.bool).tril()
    for head in range(2):
        exact, now = (training(view, 0, head, "reread", 6, 16) for view in (one, changed))
        kept = store.kept(0, head)
        logits = now.queries.double() @ kept.keys.double().T * one.scaling
        logits[now.logits(kept.positions).isinf()] = -torch.inf
        share = torch.cat([logits, now.beside_lse.double()[:, None]], 1).softmax(-1)
        output = share[:, :-1] @ kept.values.double() + share[:, -1:] * now.beside_output
        if chunk is None:
            lacking = exact.attend()[0] - output + share[:, :8] @ kept.values[:8].double()
            best = torch.linalg.lstsq(share[:, :8], lacking).solution
            least = float((share[:, :8] @ best - lacking).square().mean())
            found = float((output - exact.attend()[0]).square().mean())
            assert found <= least * 1.02 + 1e-7
        change = (output - exact.attend()[0]).unflatten(0, (2, -1))[:, :160]
        logits = one.sampled[0, 2 * head : 2 * head + 2] @ one.keys[0, head].T * one.scaling
        first = logits.masked_fill(~causal, -torch.inf).softmax(-1) @ one.values[0, head]
        assert torch.allclose(heard[0][0, 2 * head : 2 * head + 2].double(), first + change, atol=2e-3)


def test_heads_get_what_they_need():
    """A head of many directions gets more than one of few, and an early layer more than the same one later."""
    few, many = prompt(rank=2), prompt(rank=12)
    one = prompt(
        keys=torch.cat([few.keys[:, :1], many.keys[:, :1]], 1),
        values=torch.cat([few.values[:, :1], many.values[:, :1]], 1),
    )
    views = [one, prompt(keys=one.keys, values=one.values, layer_idx=1, num_layers=2)]
    one.num_layers = 2
    method = KVSculpt(keep=0.3, sinks=2, window=6, horizon=16, steps=0)
    counts = torch.cat([store.buffers["counts"] for store in method.fold(views)])
    assert bool((counts[:, 1] > counts[:, 0]).all())
    assert bool((counts[0] > counts[1]).all())
    uniform = method._count(160, 160, 16, 24)
    assert int(counts.sum()) == 4 * uniform
    even = KVSculpt(keep=0.3, sinks=2, window=6, horizon=16, steps=0, layers="even")
    counts = torch.cat([store.buffers["counts"] for store in even.fold(views)])
    assert torch.equal(counts[0], counts[1])


def test_the_main_run_starts_where_the_pilot_ended(monkeypatch):
    starts = []

    class Noted(kvsculpt.LBFGS):
        def __init__(self, x, **options):
            starts.append(x.clone())
            super().__init__(x, **options)

    monkeypatch.setattr(kvsculpt, "LBFGS", Noted)
    one = prompt()
    KVSculpt(tokens=20, sinks=2, window=6, horizon=16, damping=0.0, pilot_steps=10, lse=0.0).fold([one])
    tokens, moved = starts
    # Without damping's differences the budget is the same, and so are the tokens.
    assert tokens.shape == moved.shape and not torch.allclose(tokens, moved, atol=1e-2)
    one_pilot = [torch.unique(x.view(2, -1, 16)[0], dim=0) for x in starts]
    assert len(one_pilot[1]) == len(one_pilot[0])


@pytest.mark.parametrize("chunk", [None, 60])
def test_slices_do_not_change_what_comes_out(monkeypatch, chunk):
    """Nor does it which layers are distilled together."""
    views = [prompt(num_layers=2), prompt(seed=1, layer_idx=1, num_layers=2)]
    solved, real = [], KVSculpt._solve
    monkeypatch.setattr(KVSculpt, "_solve", lambda *given: solved.append(1) or real(*given))
    method = KVSculpt(keep=0.3, sinks=2, window=6, horizon=16, chunk=chunk)
    together = method.fold(views)
    few = len(solved)
    monkeypatch.setattr(kvsculpt, "SLICE_BYTES", (1, 1))
    for whole, sliced in zip(together, method.fold(views), strict=True):
        for name, tensor in whole.buffers.items():
            assert torch.allclose(sliced.buffers[name].float(), tensor.float(), atol=2e-2), name
    assert len(solved) - few == 2 * 4 * (1 if chunk is None else 3) > few


@pytest.mark.parametrize("chunk", [20, 47, 1])
def test_pieces_keep_the_budget_the_ends_and_the_order(chunk):
    one = view(pads=(0, 17))
    (whole,) = KVSculpt(**SMALL).fold([one])
    (store,) = KVSculpt(**SMALL, chunk=chunk).fold([one])
    assert torch.equal(store.buffers["counts"].sum(1), whole.buffers["counts"].sum(1))
    for row, first in enumerate((0, 17)):
        for head in range(2):
            kept = store.kept(row, head)
            ends = [first, first + 1, *range(54, 60)]
            assert kept.positions[-8:].tolist() == ends
            assert torch.allclose(kept.values[-8:], one.values[row, head, ends], atol=4e-3)
            others = kept.positions[:-8].tolist()
            assert others == sorted(set(others) - set(ends))


def test_one_large_chunk_is_the_whole():
    one = prompt()
    options = dict(keep=0.3, sinks=2, window=6, horizon=16)
    (whole,), (same,) = (KVSculpt(**options, chunk=chunk).fold([one]) for chunk in (None, 152))
    assert all(torch.equal(same.buffers[name], tensor) for name, tensor in whole.buffers.items())


def test_pieces_together_give_the_whole_output():
    """Each answers for its part of it, so that what is gained in parts is gained in all."""
    one = prompt()
    options = dict(tokens=56, sinks=2, window=6, horizon=16, heads="uniform", chunk=40, lse=0.0)
    fit = error(one, KVSculpt(**options, steps=0).fold([one])[0])
    free = error(one, KVSculpt(**options, steps=40).fold([one])[0])
    nothing = error(one, KVSculpt(**{**options, "chunk": None, "tokens": 12}, steps=0).fold([one])[0])
    assert (free < 0.75 * fit).all() and (fit < 0.1 * nothing).all()


def test_values_of_all_pieces_are_solved_for_once_more(monkeypatch):
    """Each piece's for what all others leave, later ones included."""
    one = prompt()
    method = KVSculpt(tokens=56, sinks=2, window=6, horizon=16, heads="uniform", chunk=40, steps=2)
    settled = error(one, method.fold([one])[0])
    monkeypatch.setattr(KVSculpt, "_settled", lambda self, standing, parts: list(parts))
    apart = error(one, method.fold([one])[0])
    assert (settled < 0.9 * apart).all()


def test_pieces_get_what_they_need():
    """Of one head, the half that is hardly attended to gets less."""
    keys, sampled = prompt().keys.clone(), prompt().sampled.clone()
    sampled[..., 0] = 3
    keys[..., 0] = 0
    keys[:, :, 80:, 0] = -5
    one = prompt(keys=keys, sampled=sampled, queries=sampled[:, :, -8:])
    (store,) = KVSculpt(keep=0.3, sinks=2, window=6, steps=0, chunk=76).fold([one])
    for head in range(2):
        positions = store.kept(0, head).positions[:-8]
        assert (positions < 78).sum() > 1.5 * (positions >= 78).sum()


def test_pieces_have_the_tokens_that_the_whole_would_choose():
    """Without steps; but for what weighs about the same, once pieces before have changed."""
    one, options = prompt(), dict(tokens=32, sinks=2, window=6, horizon=16, heads="uniform", steps=0)
    (whole,) = KVSculpt(**options).fold([one])
    (apart,) = KVSculpt(**options, chunk=40).fold([one])
    for head in range(2):
        both = [set(store.kept(0, head).positions.tolist()) for store in (apart, whole)]
        assert len(both[0] ^ both[1]) <= 2
    scores = [torch.tensor([9.0, 8.0, 7.0, 6.0]), torch.tensor([0.1, 0.2]), torch.tensor([5.0, 0.3, 4.0])]
    assert pieces.shares(3, scores) == [1, 1, 1]
    assert pieces.shares(5, scores) == [3, 1, 1]
    assert pieces.shares(7, scores) == [3, 1, 3]


def test_logits_of_a_piece_at_a_time_are_all_that_is_held(monkeypatch):
    widths = []

    def noted(self, tokens, real=Training.logits):
        found = real(self, tokens)
        widths.append(found.shape[1])
        return found

    monkeypatch.setattr(Training, "logits", noted)
    monkeypatch.setattr("kvfold.methods.queries.BLOCK", 25)
    KVSculpt(keep=0.3, sinks=2, window=6, horizon=16, chunk=30).fold([prompt()])
    assert max(widths) <= 34
    # Of two heads, for pilot and main run: all tokens, those of the pieces, and once more when a piece is done.
    assert sum(widths) <= 2 * (2 * (160 + 152) + 152 + 40)


class Kept(Work):
    """Parts in memory; stops the fold when so many have been kept."""

    def __init__(self, stop=None):
        super().__init__(lambda *told: self.heard.append(told))
        self.parts, self.heard, self.stop = {}, [], stop

    def kept(self, name):
        return self.parts.get(name)

    def keep(self, name, tensors):
        self.parts[name] = {key: tensor.clone() for key, tensor in tensors.items()}
        if len(self.parts) == self.stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("chunk, stop", [(None, 1), (None, 6), (76, 3), (76, 11)])
def test_a_stopped_fold_goes_on_from_what_was_finished(monkeypatch, chunk, stop):
    monkeypatch.setattr(kvsculpt, "SLICE_BYTES", (1, 1))
    method = KVSculpt(keep=0.3, sinks=2, window=6, horizon=16, steps=2, pilot_steps=1, chunk=chunk)
    one, two = prompt(num_layers=2), prompt(seed=1, layer_idx=1, num_layers=2)
    whole = method.fold([one, two])
    solved, real = [], KVSculpt._solve
    monkeypatch.setattr(KVSculpt, "_solve", lambda *given: solved.append(1) or real(*given))
    one.work = two.work = work = Kept(stop)
    with pytest.raises(KeyboardInterrupt):
        method.fold([one, two])
    work.stop, before = None, len(solved)
    again = method.fold([one, two])
    assert before == stop and len(solved) == len(work.parts) == 2 * 4 * (1 if chunk is None else 2)
    for first, second in zip(whole, again, strict=True):
        assert all(torch.equal(second.buffers[name], tensor) for name, tensor in first.buffers.items())


def test_parts_of_other_counts_are_not_taken():
    one = prompt()
    one.work = Kept()
    KVSculpt(tokens=40, sinks=2, window=6, horizon=16).fold([one])
    (found,) = KVSculpt(tokens=50, sinks=2, window=6, horizon=16).fold([one])
    (right,) = KVSculpt(tokens=50, sinks=2, window=6, horizon=16).fold([prompt()])
    assert torch.equal(found.buffers["keys"], right.buffers["keys"])


def test_tells_how_far_it_is():
    one = prompt()
    one.work = Kept()
    KVSculpt(keep=0.3, sinks=2, window=6, horizon=16, pilot_steps=5).fold([one])
    done = [at for at, _ in one.work.heard]
    assert done == sorted(done) and len(done) >= 6
    assert {total for _, total in one.work.heard} == {done[-1]}


def test_short_and_whole():
    one = view(pads=(0, 50))
    (store,) = KVSculpt(keep=1.0, sinks=10, window=8).fold([one])
    assert torch.equal(store.kept(1, 0).positions, torch.arange(50, 60))
    assert torch.allclose(store.kept(1, 0).values, one.values[1, 0, 50:], atol=4e-3)
    (store,) = KVSculpt(tokens=500, sinks=2, window=8).fold([one])
    assert len(store.kept(0, 0).positions) == 60


def test_heads_of_fewer_tokens_than_stay():
    """Of a prompt folded before, a head may have few left; unchecked budgets may be small. The newest are kept."""
    one = view()
    valid = one.valid.clone()
    valid[0, 0, :55] = False
    one.valid = valid
    (store,) = KVSculpt(tokens=3, sinks=2, window=6).fold([one])
    assert [store.kept(0, head).positions.tolist() for head in (0, 1)] == [[57, 58, 59]] * 2


def test_bad_input():
    with pytest.raises(BudgetError, match="at least keep="):
        KVSculpt(keep=0.1).check(200, 2, 64, 64)
    for options, name in (
        ({"steps": -1}, "steps"),
        ({"every": 0}, "every"),
        ({"lse": float("nan")}, "lse"),
        ({"rate": 0.0}, "rate"),
        ({"damping": 2.0}, "damping"),
        ({"floor": 1.5}, "floor"),
        ({"cap": 0.5}, "cap"),
        ({"chunk": 0}, "chunk"),
    ):
        with pytest.raises(ValueError, match=name):
            KVSculpt(keep=0.3, **options)
    with pytest.raises(UnsupportedModelError, match="latent"):
        KVSculpt(keep=0.3).fold([view(expand=lambda keys, values: (keys, values))])
