"""Attention that forgets, against its dense formula in float64, and inside whole models."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from kvfold.hf.support import folds, stock_layers
from kvfold.methods.gates import GateConfig, RetentionGates
from kvfold.training.attention import attend, best_backend, forgetting
from tests.tiny import prompt, tiny_model


def dense(query, key, value, log_beta, scaling, softcap=None):
    heads, tokens = query.shape[1:3]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    log_beta = log_beta.repeat_interleave(heads // log_beta.shape[1], 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    scores = scores + age * log_beta[:, :, None]
    return scores.masked_fill(age < 0, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("gates", [1, 2])
def test_attend_and_its_gradients(gates, softcap):
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 21, 8), (2, 2, 21, 8), (2, 2, 21, 6))
    leaves = [torch.randn(shape, generator=draw) for shape in shapes]
    leaves.append(-torch.rand(2, gates, 21, generator=draw) / 4)
    twins = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    found = attend(*leaves, 0.7, softcap, block=8)
    expected = dense(*twins, 0.7, softcap)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    weight = torch.randn(found.shape, generator=draw)
    for one, two in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), twins),
        strict=True,
    ):
        assert torch.allclose(one.double(), two, atol=1e-4)


def gates_of(model, bias, heads=2):
    layers = tuple(index for index, layer in enumerate(stock_layers(model.config)) if folds(layer))
    config = GateConfig(layers=layers, hidden_size=64, kv_heads=heads, width=16, features=4, bias=bias)
    return RetentionGates(config, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3", "deepseek_v3", "glm4"])
def test_a_model_that_forgets_nothing_is_the_model(name):
    model, ids = tiny_model(name), prompt(40, 2)
    gates = gates_of(model, 60.0, heads=1 if name == "deepseek_v3" else 2)
    before = AttentionInterface.get_interface
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with forgetting(model, gates) as seen:
            found = model(ids, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert set(seen) == set(gates.config.layers)
    assert AttentionInterface.get_interface is before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_forgets_at_once_sees_one_token():
    """With a log beta of -1000 every query attends to its own key only, as in a text of one token."""
    model, ids = tiny_model("llama", num_hidden_layers=1), prompt(20)
    with torch.no_grad(), forgetting(model, gates_of(model, -1000.0)):
        found = model(ids, use_cache=False).logits
        alone = torch.cat([model(ids[:, i : i + 1], use_cache=False).logits for i in range(20)], 1)
    assert torch.allclose(found, alone, atol=1e-4)


def test_gates_see_what_attention_is_given():
    model, ids = tiny_model("llama"), prompt(12)
    gates = gates_of(model, 2.0)
    given = {}
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: given.update({module.layer_idx: kwargs["hidden_states"]}),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    try:
        with torch.no_grad(), forgetting(model, gates) as seen:
            model(ids, use_cache=False)
            for index, log_beta in seen.items():
                assert torch.equal(log_beta, gates(given[index], index))
    finally:
        for handle in handles:
            handle.remove()


def test_flex_attention_is_for_gpus():
    assert best_backend(tiny_model("llama")) == "blocks"
