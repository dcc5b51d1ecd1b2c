"""Training: it learns, can be stopped anywhere, and leaves the model as it was."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kvfold.errors import KvfoldError
from kvfold.hf.fingerprint import fingerprint
from kvfold.training.data import batch_of
from kvfold.training.trainer import TrainConfig, Trainer
from tests.tiny import prompt, tiny_model

CONFIG = TrainConfig(
    budget=8, steps=6, accumulate=2, lr=3e-3, warmup=2, width=16, features=4, bias=4.0, seed=3
)
ROWS = prompt(40, 7, seed=9)


def weights(gates):
    return {name: tensor.clone() for name, tensor in gates.gates.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("tie", "scope"), [("all", "model"), ("layers", "head"), ("none", "model")])
def test_the_cache_shrinks(tie, scope):
    model = tiny_model("llama")
    trainer = Trainer(model, ROWS, replace(CONFIG, tie=tie, scope=scope, steps=20, lr=3e-2))
    trainer.train()
    first, last = trainer.history[0], trainer.history[-1]
    assert first.size > 20, "it begins with nearly all"
    assert last.capacity < 0.6 * first.capacity
    assert last.size < 0.8 * first.size and last.beta < first.beta
    assert all(1 <= figures.smallest <= figures.size <= figures.largest <= 40 for figures in trainer.history)


def test_only_gates_change():
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Trainer(model, ROWS, replace(CONFIG, steps=2)).train()
    assert same(before, model.state_dict())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_gradient_is_the_slope_of_the_loss():
    """Through attention, later layers and the capacity: against central differences in the last bias."""
    model = tiny_model("qwen2", dtype=torch.float64)
    trainer = Trainer(model, ROWS, replace(CONFIG, kl=2.0, ntp=0.5, capacity=3.0, accumulate=1))

    def loss():
        kl, ntp, over, *_ = trainer._backward(ROWS[:2]).tolist()
        return 2.0 * kl + 0.5 * ntp + 3.0 * over

    loss()
    slope = float(trainer.gates.bias.grad)
    values = []
    for step in (0.05, -0.1):
        with torch.no_grad():
            trainer.gates.bias += step
        values.append(loss())
    assert slope == pytest.approx((values[0] - values[1]) / 0.1, rel=0.02)


@pytest.fixture(scope="module")
def uninterrupted():
    trainer = Trainer(tiny_model("llama"), ROWS, CONFIG)
    return weights(trainer.train()), [replace(figures, seconds=0) for figures in trainer.history]


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    # In backward passes, two an update, six updates; in saves, each file written but not yet in its place.
    [(Trainer, "_backward", n) for n in (0, 3, 4, 9)] + [(os, "replace", n) for n in range(3)],
)
def test_a_run_that_was_killed_gives_the_same_gates(owner, name, call, tmp_path, monkeypatch, uninterrupted):
    class Killed(BaseException):
        pass

    left, run = [None] * call, getattr(owner, name)

    def dies(*args, **kwargs):
        if not left:
            raise Killed
        left.pop()
        return run(*args, **kwargs)

    def start():
        return Trainer(tiny_model("llama"), ROWS, CONFIG, folder=tmp_path, save_every=2)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, dies)
        start().train()
    again = start()
    assert again.step == 2 * (call if owner is os else call // 4), "what was saved last"
    expected, history = uninterrupted
    assert same(expected, weights(again.train()))
    assert [replace(figures, seconds=0) for figures in again.history] == history


def test_another_run_is_not_gone_on_with(tmp_path):
    model = tiny_model("llama")
    Trainer(model, ROWS, CONFIG, folder=tmp_path).train(until=1)
    for other, word in (
        (lambda: Trainer(model, ROWS, replace(CONFIG, lr=1e-3), folder=tmp_path), "settings"),
        (lambda: Trainer(model, ROWS + 1, CONFIG, folder=tmp_path), "texts"),
        (lambda: Trainer(tiny_model("llama", rope_theta=5e4), ROWS, CONFIG, folder=tmp_path), "model"),
        (lambda: Trainer(model, ROWS, replace(CONFIG, width=8), folder=tmp_path), "cannot be gone on with"),
    ):
        with pytest.raises(KvfoldError, match=word):
            other()
    (tmp_path / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(KvfoldError, match="cannot be gone on with"):
        Trainer(model, ROWS, CONFIG, folder=tmp_path)


def test_checkpointing_changes_nothing():
    model = tiny_model("llama")
    plain = Trainer(model, ROWS, replace(CONFIG, steps=2))
    less = Trainer(model, ROWS, replace(CONFIG, steps=2), checkpointing=True)
    one, two = weights(plain.train()), weights(less.train())
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)
    assert not model.is_gradient_checkpointing and not model.training


def test_accumulation_is_a_larger_batch():
    model = tiny_model("llama")
    one = Trainer(model, ROWS, replace(CONFIG, steps=1, batch=4, accumulate=1))
    two = Trainer(model, ROWS, replace(CONFIG, steps=1, batch=1, accumulate=4))
    a, b = one.train(), two.train()
    assert one.history[0].kl == pytest.approx(two.history[0].kl, rel=1e-4)
    assert torch.allclose(a.gates.bias.grad, b.gates.bias.grad, rtol=1e-3)


def test_every_row_is_seen_once_a_round():
    rows = torch.arange(7)[:, None]
    seen = torch.cat([batch_of(rows, number, 3, seed=1) for number in range(7)])[:, 0]
    assert all(sorted(seen[start : start + 7].tolist()) == list(range(7)) for start in (0, 7, 14))
    assert not torch.equal(seen[:7], seen[7:14])


def test_what_gates_are_told():
    model = tiny_model("llama")
    gates = Trainer(model, ROWS, replace(CONFIG, steps=1)).train()
    assert gates.fingerprint == fingerprint(model)
    assert gates.facts["train"]["budget"] == 8 and gates.facts["tokens"] == 40 and gates.facts["step"] == 1


@pytest.mark.parametrize(
    "options", [{"budget": 0}, {"lr": 0}, {"lr": float("nan")}, {"kl": -1}, {"scope": "layer"}, {"steps": 0}]
)
def test_bad_settings(options):
    with pytest.raises(ValueError):
        TrainConfig(**options)
