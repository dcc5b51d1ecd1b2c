"""Block-GTQ against its steps written out in numpy, token by token, and its budgets against the bytes of its stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold import fold
from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.rotation import hadamard
from kvfold.errors import BudgetError, KvfoldError
from kvfold.hf.bias import key_bias_of
from kvfold.methods import BlockGTQ, TurboQuant
from tests.methods.baselines.views import view
from tests.tiny import prompt, tiny_model


def skewed(**options):
    """A view in which some planes matter much more than others, differently in each head."""
    one = view(**options)
    for states in (one.keys, one.queries, one.sampled):
        heads, dim = states.shape[1], states.shape[-1]
        size = torch.linspace(1.5, -1.5, dim // 2).exp().repeat_interleave(2)
        for head in range(heads):
            states[:, head] *= size.roll(2 * (head * one.keys.shape[1] // heads))
    return one


def stepwise(one, row, head, bits, score, norms):
    """Steps 1 to 4 of the paper for one head's keys; its blocks here are channels (2i, 2i + 1)."""
    keys, queries = one.keys[row, head].double().numpy(), one.sampled[row].double().numpy()
    group = queries.shape[0] // one.keys.shape[1]
    queries = queries[head * group : (head + 1) * group]
    blocks = keys.shape[1] // 2
    q2 = [np.mean([np.sum(q[2 * i : 2 * i + 2] ** 2) for h in queries for q in h]) for i in range(blocks)]
    k2 = [np.mean([np.sum(k[2 * i : 2 * i + 2] ** 2) for k in keys]) for i in range(blocks)]
    worth = [a * b if score == "product" else (a + b) / 2 for a, b in zip(q2, k2)]
    widths = [1] * blocks
    for _ in range(int(bits * blocks) - blocks):
        widths[int(np.argmax([s * 4.0**-b if b < 8 else -1 for s, b in zip(worth, widths)]))] += 1
    distinct = sorted(set(widths), reverse=True)
    members = [[i for i in range(blocks) if widths[i] == width] for width in distinct]
    channels = [[c for i in group for c in (2 * i, 2 * i + 1)] for group in members]
    shares = [np.sqrt(sum(k2[i] for i in group) / sum(k2)) for group in members]
    result = np.zeros_like(keys)
    for t, key in enumerate(keys):
        coded = []
        for g, (width, index) in enumerate(zip(distinct, channels)):
            turn = hadamard(len(index), g).double().numpy()
            own = norms == "group" or len(distinct) == 1
            levels = (
                integer_levels(width, len(index)) if own else integer_levels(width) / len(index) ** 0.5
            ).numpy()
            length = np.linalg.norm(key[index]) if norms == "group" else np.linalg.norm(key) * shares[g]
            found = np.array([levels[np.abs(levels - y).argmin()] for y in turn @ key[index] / length])
            if norms == "group":
                found = found * float(np.float16(length / np.linalg.norm(found)))
            else:
                found = found * float(np.float16(shares[g]))
            coded.append((index, turn, found))
        scale = 1.0
        if norms == "token":
            scale = float(
                np.float16(np.linalg.norm(key) / np.linalg.norm(np.concatenate([c[2] for c in coded])))
            )
        for index, turn, found in coded:
            result[t, index] = turn.T @ found * scale
    return result, widths


@pytest.mark.parametrize("norms", ["group", "token"])
@pytest.mark.parametrize("score", ["sum", "product"])
def test_the_papers_steps(norms, score):
    one = skewed()
    (store,) = BlockGTQ(bits=2.5, norms=norms, score=score, bias="in").fold([one])
    for head in range(2):
        expected, widths = stepwise(one, 0, head, 2.5, score, norms)
        assert len(set(widths)) > 2
        found = store.kept(0, head).keys.numpy()
        # A value between two levels may fall to either.
        error = np.abs(found - expected).max(-1)
        assert (error < 0.02 * np.abs(expected).max()).mean() > 0.95
        told = {width: 2 * widths.count(width) for width in set(widths)}
        assert store.widths()[head]["keys"] == told


def test_more_bits_where_queries_look_make_better_logits():
    one = skewed(tokens=200)
    errors = {}
    for name, method in {
        "uniform": TurboQuant(bits=2),
        "token": BlockGTQ(bits=2, bias="in"),
        "group": BlockGTQ(bits=2, bias="in", norms="group"),
    }.items():
        (store,) = method.fold([one])
        lost = store.kept(0, 0).keys - one.keys[0, 0]
        errors[name] = float((one.sampled[0, :2] @ lost.T).abs().mean())
    assert errors["token"] < 0.7 * errors["uniform"] and errors["group"] < errors["token"]


@pytest.mark.parametrize("norms", ["group", "token"])
@pytest.mark.parametrize("pads", [(0,), (13, 0)])
@pytest.mark.parametrize("share", ["head", "layer"])
def test_budgets_count_every_byte(norms, pads, share):
    one = skewed(tokens=300, pads=pads, key_dim=64, value_dim=64)
    full = 4 * sum(one.real_tokens) * 2 * 64
    for keep in (0.15, 0.25, 0.4):
        (store,) = BlockGTQ(keep=keep, norms=norms, share=share).fold([one])
        assert 0.93 * keep < store.nbytes / full <= keep
        (store,) = BlockGTQ(bits_per_element=16 * keep, norms=norms, share=share).fold([one])
        assert 0.93 * keep < store.nbytes / full <= keep


@pytest.mark.parametrize(("bits", "limit"), [(2, 2.6), (3, 3.6), (4, 4.5)])
def test_bits_per_element_are_physical(bits, limit):
    one = skewed(tokens=1024, key_dim=128, value_dim=128)
    (store,) = BlockGTQ(bits=bits).fold([one])
    assert 8 * store.nbytes / (1024 * 2 * 256) < limit


def test_tiles_and_few_widths():
    one = skewed(key_dim=64)
    (store,) = BlockGTQ(bits=3, tile=16, most_widths=2).fold([one])
    for head in store.widths():
        assert len(head["keys"]) == 2 and all(count % 16 == 0 for count in head["keys"].values())


def test_a_generated_block_keeps_its_prompts_widths():
    method = BlockGTQ(bits=3, bias="mean")
    one, two = skewed(), skewed(seed=5)
    (first,) = method.fold([one])
    two.positions = two.positions + 60
    two.previous, two.generated, two.sampled = (first, None), True, None
    (second,) = method.fold([two])
    assert first.join(second).tokens == 120


@pytest.mark.parametrize("cls", [BlockGTQ, TurboQuant])
def test_the_key_bias_is_the_models_and_is_taken_out(cls):
    model = tiny_model("qwen2")
    biases = [layer.self_attn.k_proj.bias for layer in model.model.layers]
    saved = [bias.detach().clone() for bias in biases]
    try:
        for bias in biases:
            bias.data.mul_(20)
        stores = {}
        for bias in ("in", "out"):
            cache = fold(model, prompt(90), cls(bits=3, bias=bias))
            stores[bias] = cache.folded_layers[1].segments[0].store
        taken = stores["out"].buffers["key_mean"]
        assert torch.allclose(taken[0].float().flatten(), biases[1].detach(), rtol=1e-3)
        assert stores["out"].layout.turned and "key_mean" not in stores["in"].buffers
    finally:
        for bias, before in zip(biases, saved):
            bias.data.copy_(before)


def test_where_there_is_no_key_bias_to_take_out():
    assert key_bias_of(tiny_model("llama").model.layers[0].self_attn, 2, 16) is None
    normed = tiny_model("qwen3", attention_bias=True).model.layers[0].self_attn
    assert normed.k_proj.bias is not None and key_bias_of(normed, 2, 16) is None
    (store,) = BlockGTQ().fold([skewed()])
    assert "key_mean" not in store.buffers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0.5}, "average from 1 to 8"),
        ({"bits": 3, "keep": 0.2}, "give one of"),
        ({"keep": 2.0}, "keep"),
        ({"value_bits": 9}, "value_bits"),
        ({"most_widths": 0}, "most_widths"),
        ({"tile": 3}, "even number"),
        ({"recent": -1}, "recent"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        BlockGTQ(**options)


def test_what_does_not_fit_is_told_before_work():
    with pytest.raises(KvfoldError, match="do not divide into tiles of 16"):
        BlockGTQ(tile=16).check(100, 2, 24, 24)
    with pytest.raises(BudgetError, match="at least") as error:
        fold(tiny_model("llama"), prompt(90), BlockGTQ(keep=0.05))
    least = float(str(error.value).split("keep=")[1].split()[0]) + 1e-4
    assert fold(tiny_model("llama"), prompt(90), BlockGTQ(keep=least)).ledger().folded_ratio <= least
    with pytest.raises(BudgetError, match="padding is stored too"):
        BlockGTQ(keep=0.2).fold([skewed(pads=(50, 50))])
