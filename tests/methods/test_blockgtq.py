"""Block-GTQ against its steps written out in numpy, token by token, and its budgets against the bytes of its stores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfold import fold
from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.rotation import hadamard
from kvfold.errors import BudgetError, KvfoldError
from kvfold.evaluate.energies import block_energies
from kvfold.hf.bias import key_bias_of
from kvfold.hf.support import CACHE_KEYWORD
from kvfold.methods import BlockGTQ, SnapKV, TurboQuant
from kvfold.methods.energies import Energies, worth
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
    paper = BlockGTQ(bits=2.5, norms=norms, norm_bits=16, score=score, most_widths=None, bias="in", sinks=0)
    (store,) = paper.fold([one])
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
        "token": BlockGTQ(bits=2, bias="in", norms="token"),
        "group": BlockGTQ(bits=2, bias="in"),
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


@pytest.mark.parametrize(("bits", "limit"), [(2, 2.25), (3, 3.25), (4, 4.25)])
def test_bits_per_element_are_physical(bits, limit):
    """Everything counted, an eighth of a bit for norms; the paper's own path has 4.9 for 3."""
    one = skewed(tokens=2048, key_dim=128, value_dim=128)
    (store,) = BlockGTQ(bits=bits).fold([one])
    assert bits < 8 * store.nbytes / (2048 * 2 * 256) < limit


def test_tiles_and_few_widths():
    one = skewed(key_dim=64)
    (store,) = BlockGTQ(bits=3, tile=16, most_widths=2, widths=(1, 2, 4)).fold([one])
    for head in store.widths():
        assert len(head["keys"]) == 2 and all(count % 16 == 0 for count in head["keys"].values())
        assert set(head["keys"]) <= {1, 2, 4}


def test_a_generated_block_keeps_its_prompts_widths():
    method = BlockGTQ(bits=3, sinks=0)
    one, two = skewed(), skewed(seed=5)
    (first,) = method.fold([one])
    two.positions = two.positions + 60
    two.previous, two.generated, two.sampled = (first, None), True, None
    (second,) = method.fold([two])
    assert first.join(second).tokens == 120


def test_first_and_newest_tokens_stay_exact():
    """Each row's first real tokens in the store, and the newest of a prompt in the cache's tail."""
    one = skewed(pads=(7, 0))
    (store,) = BlockGTQ(bits=2, sinks=3, recent=10).fold([one])
    assert store.tokens == 50
    for row, pad in enumerate((7, 0)):
        kept = store.kept(row, 1, one.rotary)
        assert torch.allclose(kept.keys[:3], one.keys[row, 1, pad : pad + 3], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(kept.keys[3:6], one.keys[row, 1, pad + 3 : pad + 6], rtol=1e-3, atol=1e-3)
    cache = fold(tiny_model("llama"), prompt(90), BlockGTQ(sinks=3, recent=10))
    assert [layer.tail for layer in cache.folded_layers] == [10] * len(cache.folded_layers)


def test_sinks_do_not_move_the_mean_or_the_widths():
    one, two = skewed(), skewed()
    two.keys[:, :, :4] *= 100
    stores = [BlockGTQ(bits=3).fold([view])[0] for view in (one, two)]
    assert torch.equal(stores[0].buffers["key_mean"], stores[1].buffers["key_mean"])
    assert stores[0].widths() == stores[1].widths()


@torch.no_grad()
def test_generated_tokens_coded_at_once():
    """No buffer: each token is coded as soon as the next one has come, and reads as one coded with its whole block."""
    model = tiny_model("llama")
    ids, caches = prompt(100), {}
    for block in (1, 10):
        cache = caches[block] = fold(model, ids[:, :80], BlockGTQ(bits=4, block_tokens=block))
        for position in range(80, 100):
            model(input_ids=ids[:, position : position + 1], use_cache=True, **{CACHE_KEYWORD: cache})
    for at_once, later in zip(caches[1].folded_layers, caches[10].folded_layers, strict=True):
        assert (at_once.tail, later.tail) == (1, 10)
        (_, ones), (_, tens) = at_once.segments, later.segments
        assert ones.store.tokens == 19 and tens.store.tokens == 10
        rotary = at_once.cache.rotary(at_once.module(), torch.device("cpu"))
        a, b = ones.store.kept(0, 0, rotary), tens.store.kept(0, 0, rotary)
        # Earlier steps read other tails, so that states differ a little.
        assert torch.nn.functional.cosine_similarity(a.keys[:10], b.keys).min() > 0.97


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_constant_and_zero_states(value):
    one = view(tokens=60)
    one.keys.fill_(value), one.values.fill_(value)
    for bias in ("in", "mean"):
        (store,) = BlockGTQ(bits=3, bias=bias).fold([one])
        kept = store.kept(0, 0, one.rotary)
        for name in ("keys", "values"):
            found, given = getattr(kept, name), getattr(one, name)[0, 0]
            assert (found - given).square().sum() <= 0.2 * given.square().sum()


def test_norms_beyond_float16():
    one, two = skewed(), skewed()
    two.keys, two.values = one.keys * 1e6, one.values * 1e6
    for norm_bits in (8, 16):
        a, b = (BlockGTQ(bits=3, bias="in", norm_bits=norm_bits).fold([v])[0].kept(0, 0) for v in (one, two))
        for name in ("keys", "values"):
            same = torch.isclose(getattr(b, name) / 1e6, getattr(a, name), rtol=1e-2, atol=1e-2)
            assert same.double().mean() > 0.98


def test_short_prompts_stay_exact():
    method = BlockGTQ(bits=2, recent=30)
    cache = fold(tiny_model("llama"), prompt(method.shortest), method)
    assert all(layer.tail == method.shortest and not layer.segments for layer in cache.folded_layers)
    folded = fold(tiny_model("llama"), prompt(method.shortest + 1), method)
    assert all(layer.tail == 30 for layer in folded.folded_layers)


@pytest.mark.parametrize("key_dim", [2, 6, 80, 96, 256])
def test_head_sizes(key_dim):
    one = view(tokens=60, key_dim=key_dim, value_dim=key_dim + 2)
    (store,) = BlockGTQ(bits=8, norm_bits=16).fold([one])
    kept = store.kept(0, 1, one.rotary)
    assert torch.allclose(kept.keys, one.keys[0, 1], atol=0.08 * float(one.keys.norm(dim=-1).max()))
    assert torch.allclose(kept.values, one.values[0, 1], atol=0.08 * float(one.values.norm(dim=-1).max()))


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
    (store,) = BlockGTQ(bias="out").fold([skewed()])
    assert "key_mean" not in store.buffers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0.5}, "average from 1 to 8"),
        ({"bits": 3, "keep": 0.2}, "give one of"),
        ({"keep": 2.0}, "keep"),
        ({"value_bits": 9}, "value_bits"),
        ({"bits": 8.5}, "average from 1 to 8"),
        ({"bits": 1.5, "widths": (2, 3, 4, 8)}, "within widths"),
        ({"widths": (0, 2)}, "chosen from 1 to 8"),
        ({"most_widths": 0}, "most_widths"),
        ({"norm_bits": 12}, "norm_bits"),
        ({"sinks": -1}, "sinks"),
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
    with pytest.raises(KvfoldError, match="keys of 7 channels"):
        BlockGTQ().check(100, 2, 7, 8)
    with pytest.raises(BudgetError, match="at least") as error:
        fold(tiny_model("llama"), prompt(90), BlockGTQ(keep=0.05))
    least = float(str(error.value).split("keep=")[1].split()[0]) + 1e-4
    assert fold(tiny_model("llama"), prompt(90), BlockGTQ(keep=least)).ledger().folded_ratio <= least
    with pytest.raises(BudgetError, match="padding is stored too"):
        BlockGTQ(keep=0.2).fold([skewed(pads=(50, 50))])


# ---- what once went wrong ----


@pytest.mark.parametrize("dim", [64, 256, 512])
def test_wide_heads(dim):
    """Channels past 256 have indices too."""
    model = tiny_model("llama", head_dim=dim, num_hidden_layers=2)
    ids, more = prompt(80), prompt(5, seed=1)

    def logits(cache):
        with torch.no_grad():
            return model(more, **{CACHE_KEYWORD: cache}).logits

    with torch.no_grad():
        full = model(torch.cat([ids, more], 1)).logits[:, 80:]
    cache = fold(model, ids, BlockGTQ(bits=8, norm_bits=16))
    for layer in cache.folded_layers:
        order = layer.segments[0].store.tensors()["key_order"]
        assert (order.long().sort(-1).values == torch.arange(dim)).all()
    assert (logits(cache) - full).norm() < 0.01 * full.norm()
    kept = fold(model, ids, SnapKV(keep=1.0))
    exact = logits(kept)
    coded = logits(fold(model, ids, SnapKV(keep=1.0) >> BlockGTQ(bits=8, norm_bits=16)))
    assert (coded - exact).norm() < 0.01 * exact.norm()


def test_padding_does_not_move_the_units_of_norms():
    padded = view(tokens=60, pads=(40,))
    padded.keys[:, :, :40] *= 30
    padded.values[:, :, :40] *= 30
    alone = replace(
        padded,
        keys=padded.keys[:, :, 40:],
        values=padded.values[:, :, 40:],
        valid=padded.valid[:, :, 40:],
        positions=padded.positions[:, 40:],
        sampled=padded.sampled[:, :, 14:],
        sampled_index=padded.sampled_index[14:] - 40,
    )
    method = BlockGTQ(bits=4, bias="in", sinks=0)
    units = [method.fold([one])[0].tensors() for one in (padded, alone)]
    for name in ("key_units", "value_units"):
        assert torch.allclose(units[0][name], units[1][name], rtol=1e-3)


@pytest.mark.parametrize("short", [1, 2, 3])
def test_short_rows_have_a_mean_of_their_own(short):
    one = view(tokens=2500, pads=(2500 - short, 0), kv_heads=1, group=1)
    one.keys += 40
    (store,) = BlockGTQ(bits=4, bias="mean", sinks=0).fold([one])
    kept, want = store.kept(0, 0, one.rotary), one.keys[0, 0, -short:]
    assert (kept.keys - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "options", [dict(), dict(tile=16), dict(tile=8, norm_bits=16), dict(norms="token", tile=4)]
)
def test_the_least_budget_that_is_named_is_enough(batch, options):
    model = tiny_model("llama")
    with pytest.raises(BudgetError, match="at least") as error:
        fold(model, prompt(100, batch), BlockGTQ(keep=0.001, **options))
    least = float(str(error.value).split("keep=")[1].split()[0]) + 1e-4
    assert fold(model, prompt(100, batch), BlockGTQ(keep=least, **options)).ledger().folded_ratio <= least


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_energies_whose_product_is_no_float(tmp_path, scale):
    model, path = tiny_model("llama"), tmp_path / "energies.safetensors"
    found = block_energies(model, prompt(90), bias="mean", text="t")
    layers = {
        index: replace(one, query=one.query * scale, key=one.key * scale)
        for index, one in found.layers.items()
    }
    path.write_bytes(replace(found, layers=layers).to_bytes())

    def codes(**options):
        cache = fold(model, prompt(90), BlockGTQ(bits=3, **options))
        return [layer.segments[0].store.layout.keys for layer in cache.folded_layers]

    assert codes(calibration=str(path)) == codes(sampled=90)


def calibrated(model, tmp_path):
    """A file of energies, of which the second layer's are larger."""
    path = tmp_path / "energies.safetensors"
    found = block_energies(model, prompt(90), bias="mean", text="t")
    layers = {
        index: replace(one, query=one.query * 16**index, key=one.key * 16**index)
        for index, one in found.layers.items()
    }
    path.write_bytes(replace(found, layers=layers).to_bytes())
    return str(path)


@pytest.mark.parametrize("score", ["product", "sum"])
def test_all_layers_share_one_sum_of_bits(tmp_path, score):
    """Widths are those of the greedy over all heads of all layers, and the sum of bits is that of equal shares."""
    model = tiny_model("llama")
    path = calibrated(model, tmp_path)
    options = dict(bits=3, calibration=path, score=score, most_widths=None)
    found, equal = (
        [
            sum(
                width * channels
                for code in layer.segments[0].store.layout.keys
                for width, channels in code.groups
            )
            for layer in fold(model, prompt(90), BlockGTQ(share=share, **options)).folded_layers
        ]
        for share in ("model", "layer")
    )
    energies = Energies.load(path)
    worths = []
    for layer, one in energies.layers.items():
        query, key = one.in_blocks(one.blocks(score))
        worths += [(layer, float(x)) for x in worth(query, key, score).flatten()]
    widths = [1] * len(worths)
    for _ in range(2 * len(worths)):
        gains = [x * 4.0**-width if width < 8 else -1.0 for (_, x), width in zip(worths, widths)]
        widths[int(np.argmax(gains))] += 1
    wanted = [
        2 * sum(width for (own, _), width in zip(worths, widths) if own == layer) for layer in energies.layers
    ]
    assert found == wanted and sum(found) == sum(equal) and found != equal


def test_sharing_over_the_model_wants_energies_and_bits(tmp_path):
    path = calibrated(tiny_model("llama"), tmp_path)
    for options in (dict(bits=3), dict(keep=0.2, calibration=path), dict()):
        with pytest.raises(ValueError, match=r"share='model'.*bits and calibration"):
            BlockGTQ(share="model", **options)
