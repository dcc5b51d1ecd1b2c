"""The rotary helper against each model's own keys.

A prompt of one repeated token has the same hidden state at every position of every layer: attention averages equal values.
So whatever differs between its cached keys is RoPE, and un-rotated keys must all be equal.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvfold import RDKV
from kvfold.evaluate.prefill import Prefill
from kvfold.hf.rotary import rotary_of, uses_rotary
from tests.tiny import ARCHITECTURES, tiny_model

TOKENS = 48
CPU = torch.device("cpu")
SCALED = {
    "llama yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.7,
    },
    "llama llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama linear": {"rope_type": "linear", "factor": 2.0},
    "llama dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
MORE = {
    "exaone4": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "gpt_neox": dict(rotary_pct=0.25),
    # Their files split the heads before they turn them, or turn one tensor at a time.
    "persimmon": dict(partial_rotary_factor=0.5),
    "phi": dict(partial_rotary_factor=0.5),
    "stablelm": dict(partial_rotary_factor=0.25),
    "gemma4_unified_text": dict(layer_types=["full_attention"] * 3),
}
NAMES = [*ARCHITECTURES, *MORE, *SCALED]


@cache
def model_of(name):
    if name in SCALED:
        parameters = {"rope_theta": 10000.0, **SCALED[name]}
        return tiny_model.__wrapped__("llama", rope_parameters=parameters)
    return tiny_model.__wrapped__(name, **MORE[name]) if name in MORE else tiny_model(name)


def views_of(name, tokens=TOKENS):
    ids = torch.full((1, tokens), 7)
    return Prefill(model_of(name), ids, [RDKV(keep=0.5)]).views


def attention_modules(name):
    return {
        module.layer_idx: module
        for module in model_of(name).modules()
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__
    }


@pytest.mark.parametrize("name", NAMES)
def test_repeated_tokens_have_one_key(name):
    views = views_of(name)
    assert views
    for view in views:
        module = attention_modules(name)[view.layer_idx]
        keys = view.keys[0].float()
        spread = (keys - keys[:, :1]).abs().max() / keys.abs().max()
        if view.rotary is None:
            # No RoPE in this layer, or a kind that cannot be undone; the latter must not look like the former.
            assert (spread < 1e-4) == (not uses_rotary(module))
            continue
        assert spread > 0.05, "RoPE does nothing to these keys, so the test shows nothing"
        plain = view.rotary.unrotate(keys, view.positions[0])
        assert torch.allclose(plain, plain[:, :1].expand_as(plain), atol=1e-4 * float(keys.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_unrotate_is_the_inverse(name):
    for view in views_of(name):
        if view.rotary is None:
            continue
        x = torch.randn(3, TOKENS, view.keys.shape[-1], generator=torch.Generator().manual_seed(0))
        positions = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:TOKENS]
        for there, back in (
            (view.rotary.rotate, view.rotary.unrotate),
            (view.rotary.unrotate, view.rotary.rotate),
        ):
            assert torch.allclose(back(there(x, positions), positions), x, atol=1e-4)
        # Logits depend on distances only.
        scores = view.rotary.rotate(x, positions) @ view.rotary.rotate(x, positions).transpose(-1, -2)
        later = view.rotary.rotate(x, positions + 37)
        assert torch.allclose(later @ later.transpose(-1, -2), scores, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_which_models_have_one(name):
    without = {"cohere2", "exaone4", "llama dynamic"}
    found = {view.rotary is not None for view in views_of(name)}
    # Of smollm3 only every other layer has RoPE.
    assert found == ({False} if name in without else {True, False} if name == "smollm3" else {True})


def test_scaling_of_attention_is_kept():
    rotary = rotary_of(attention_modules("llama yarn, attention factor")[0], CPU)
    assert rotary.scale == pytest.approx(1.7)
    x = torch.ones(1, 1, 16)
    assert torch.allclose(rotary.rotate(x, torch.zeros(1, dtype=torch.long)), 1.7 * x)


def test_none_where_there_is_no_rope():
    model = tiny_model.__wrapped__("gpt2", n_embd=64, n_layer=2, n_head=4, hidden_size=64)
    module = next(module for module in model.modules() if "Attention" in type(module).__name__)
    assert rotary_of(module, CPU) is None
