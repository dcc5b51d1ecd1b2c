"""Block energies against each model's own projections and the keys that it caches itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from kvfold import attach, fold
from kvfold.errors import KvfoldError
from kvfold.evaluate.energies import block_energies
from kvfold.evaluate.prefill import Prefill
from kvfold.methods import BlockGTQ
from kvfold.methods.energies import KIND, Energies, Energy, EnergyObserver, partner_of
from tests.hf.test_rotary import NAMES, model_of, views_of
from tests.stores.checks import Turn
from tests.tiny import prompt, tiny_model

CPU = torch.device("cpu")


class Halves(Turn):
    """Turns channels (i, i + 3) of the first six."""

    def _turn(self, x, positions, sign):
        order = [0, 3, 1, 4, 2, 5]
        x = x.clone()
        x[..., order] = super()._turn(x[..., order], positions, sign)
        return x


def test_channels_that_rope_leaves_alone_go_by_worth():
    ones = torch.ones(1, 10)
    key = torch.tensor([[1.0, 1, 1, 1, 1, 1, 5, 2, 7, 3]])

    def blocks(rotary, score="product", query=ones):
        return Energy(query, key, partner_of(rotary, 10, CPU)).blocks(score)[0].tolist()

    assert blocks(Halves()) == [[0, 3], [1, 4], [2, 5], [8, 6], [9, 7]]
    assert blocks(Turn()) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert blocks(None)[:2] == [[8, 6], [9, 7]]
    # Product and sum put different channels first.
    query, key[0, 8] = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 6, 1, 1]]), 9
    assert blocks(Halves(), "product", query)[3:] == [[7, 8], [6, 9]]
    assert blocks(Halves(), "sum", query)[3:] == [[8, 7], [6, 9]]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_planes_that_the_model_turns(name):
    """Cached keys of one repeated token differ by RoPE alone: it moves energy within planes, never between them."""
    for view in views_of(name):
        keys = view.keys[0].float()
        partner = partner_of(view.rotary, keys.shape[-1], CPU)
        energy = Energy(keys.square().mean(1), keys.square().mean(1), partner)
        blocks = energy.blocks("product")[:, None].expand(-1, keys.shape[1], -1, -1)
        assert sorted(blocks[0, 0].flatten().tolist()) == list(range(keys.shape[-1]))
        channels = keys.square().gather(-1, blocks.flatten(2)).unflatten(-1, (-1, 2))
        if view.rotary is None:
            assert torch.equal(partner, torch.arange(len(partner)))
            continue
        largest = channels.sum(-1).max()
        moved = (channels - channels[:, :1]).abs().amax((0, 1)) / largest
        assert ((channels.sum(-1) - channels.sum(-1)[:, :1]).abs() < 1e-4 * largest).all()
        turned = partner != torch.arange(len(partner))
        assert turned.any() and moved[: int(turned.sum()) // 2].amax() > 1e-3
        assert (moved[int(turned.sum()) // 2 :] < 1e-4).all()
        # A vector of one channel goes nowhere but to its partner.
        positions = torch.tensor([1, 5, 40])
        there = view.rotary.rotate(torch.eye(len(partner))[:, None].expand(-1, 3, -1), positions)
        allowed = torch.eye(len(partner), dtype=torch.bool)
        allowed |= allowed[partner]
        assert (there.amax(1)[~allowed] == 0).all() and (there.abs().amax(1)[allowed] > 0).all()


def projected(model, ids, windows=1):
    """What projections, or the norms after them, give after the sinks: (tokens, heads, head_dim) before RoPE."""
    found = {"q": {}, "k": {}}
    hooks = []
    for layer in model.model.layers:
        attention = layer.self_attn
        for kind in "qk":
            source = getattr(attention, f"{kind}_norm", None) or getattr(attention, f"{kind}_proj")

            def keep(module, inputs, output, kind=kind, index=attention.layer_idx):
                found[kind].setdefault(index, []).append(
                    output[0, SINKS:].unflatten(-1, (-1, 16)).view(-1, *SHAPES[kind])
                )

            hooks.append(source.register_forward_hook(keep))
    with torch.no_grad():
        for piece in ids.tensor_split(windows, 1):
            model(piece)
    for hook in hooks:
        hook.remove()
    return {
        kind: {index: torch.cat(parts).double() for index, parts in by.items()} for kind, by in found.items()
    }


SHAPES, SINKS = {"q": (4, 16), "k": (2, 16)}, 4


@pytest.mark.parametrize(
    ("name", "bias", "told"),
    [
        ("llama", "out", "none"),
        ("llama", "mean", "mean"),
        ("qwen2", "out", "out"),
        ("qwen2", "in", "in"),
        ("qwen3", "out", "none"),
        ("llama yarn", "out", "none"),
    ],
)
@pytest.mark.parametrize("windows", [1, 3])
def test_energies_are_those_of_the_projections(name, bias, told, windows):
    model, ids = model_of(name), prompt(150)
    energies = block_energies(model, ids, bias=bias, text="some", window=-(-150 // windows))
    assert (energies.bias, energies.tokens, energies.text) == (told, 150, "some")
    states = projected(model, ids, windows)
    # YaRN makes turned vectors longer.
    scale = views_of(name)[0].rotary.scale ** 2
    for index, energy in energies.layers.items():
        query, key = states["q"][index], states["k"][index]
        if told == "out":
            key = key - model.model.layers[index].self_attn.k_proj.bias.detach().view(2, 16)
        if told == "mean":
            pieces = key.tensor_split(windows)
            key = torch.cat([piece - piece.mean(0) for piece in pieces])
        q2 = query.square().unflatten(1, (2, 2)).mean((0, 2))
        k2 = key.square().mean(0)
        for found, expected in zip(energy.in_blocks(energy.blocks("sum")), (q2, k2)):
            expected = (expected[:, :8] + expected[:, 8:]) * scale
            # The bias that is taken out has 16 bits.
            torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0)


def test_chunks_do_not_matter():
    model, ids = tiny_model("qwen2"), prompt(90)
    whole, chunked = EnergyObserver(), EnergyObserver()
    fold(model, ids, whole)
    fold(model, ids, chunked, chunk_size=17)
    for index, found in whole.found.items():
        again = chunked.found[index]
        assert found.tokens == again.tokens == 90 - SINKS and found.biased and again.biased
        torch.testing.assert_close(again.mean.query, found.mean.query)
        torch.testing.assert_close(again.mean.key, found.mean.key)


def test_latents():
    """Multi-head latent attention: its rotary part is what has blocks; every query head looks at it."""
    energies = block_energies(tiny_model("deepseek_v3"), prompt(60), bias="out", sinks=0)
    view = Prefill(tiny_model("deepseek_v3"), prompt(60), [BlockGTQ(sampled=60)]).views[1]
    energy = energies.layers[1]
    assert energy.key.shape == (1, 8)
    torch.testing.assert_close(energy.query[0], view.sampled[0, ..., -8:].square().mean((0, 1)))
    assert energy.blocks("sum").tolist() == [[[i, i + 4] for i in range(4)]]


@pytest.fixture(scope="module")
def energies(tmp_path_factory):
    path = tmp_path_factory.mktemp("energies") / "energies.safetensors"
    path.write_bytes(block_energies(tiny_model("qwen2"), prompt(90), bias="out", text="a text").to_bytes())
    return path


def test_a_file_is_read_as_it_was_written(energies):
    written = block_energies(tiny_model("qwen2"), prompt(90), bias="out", text="a text")
    read = Energies.load(energies)
    assert replace(read, layers={}) == replace(written, layers={})
    assert read.layers.keys() == written.layers.keys() == {0, 1, 2}
    for index, energy in written.layers.items():
        for name, tensor in vars(energy).items():
            assert torch.equal(vars(read.layers[index])[name], tensor)


def test_the_file_decides_the_widths(energies):
    model = tiny_model("qwen2")

    def stores(ids, **options):
        cache = fold(model, ids, BlockGTQ(bits=3, bias="out", **options))
        return [layer.segments[0].store for layer in cache.folded_layers]

    own, given = stores(prompt(90), sampled=90), stores(prompt(90), calibration=str(energies))
    for one, two in zip(own, given):
        assert one.tensors().keys() == two.tensors().keys()
        assert all(torch.equal(one.tensors()[name], two.tensors()[name]) for name in one.tensors())
    # Another prompt has energies of its own.
    other, given = (
        stores(prompt(90, seed=5), sampled=90),
        stores(prompt(90, seed=5), calibration=str(energies)),
    )
    assert any(one.layout.keys != two.layout.keys for one, two in zip(other, given))
    assert all(one.layout.keys == two.layout.keys for one, two in zip(own, given))


def refusals(energies, tmp_path):
    good = Energies.load(energies)

    def written(name, **changes):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(replace(good, **changes).to_bytes())
        return path

    layer = good.layers[0]
    (tmp_path / "text.safetensors").write_text("not tensors at all, but long enough to have a header")
    (tmp_path / "other.safetensors").write_bytes(save({"x": torch.ones(2)}))
    (tmp_path / "empty.safetensors").write_bytes(save({}, {"kind": KIND}))
    (tmp_path / "cut.safetensors").write_bytes(energies.read_bytes()[:-40])
    shape = replace(layer, query=layer.query[:, :6])
    planes = replace(layer, partner=torch.arange(16).roll(1))
    types = replace(layer, partner=layer.partner.float())
    return [
        (written("model", fingerprint="0" * 64), "another model"),
        (written("bias", bias="in"), "bias='in'"),
        (written("shape", layers={0: shape}), "wrong shapes"),
        (written("negative", layers={0: replace(layer, key=-layer.key)}), "negative"),
        (written("types", layers={0: types}), "wrong types"),
        (written("planes", layers={0: planes}), "two channels"),
        (tmp_path / "text.safetensors", "no file of block energies"),
        (tmp_path / "other.safetensors", "holds no block energies"),
        (tmp_path / "empty.safetensors", "no file of block energies"),
        (tmp_path / "cut.safetensors", "no file of block energies"),
        (tmp_path / "missing.safetensors", "cannot be read"),
        (tmp_path, "cannot be read"),
    ]


def test_what_is_refused_is_refused_before_work(energies, tmp_path):
    model = tiny_model("qwen2")

    def works(*_):
        raise AssertionError("the model has run")

    hook = model.register_forward_pre_hook(works)
    try:
        for path, message in refusals(energies, tmp_path):
            method = BlockGTQ(bias="out", calibration=str(path))
            for use in (
                lambda method=method: fold(model, prompt(90), method),
                lambda method=method: attach(model, method).__enter__(),
                lambda method=method: Prefill(model, prompt(90), [method]),
            ):
                with pytest.raises(KvfoldError, match=message):
                    use()
    finally:
        hook.remove()
    assert "generate" not in vars(model)


def test_layers_of_another_shape(energies):
    # A cache that was made by hand does not know its model before the first layer.
    for name, held in (("deepseek_v3", r"\(2, 16\)"), ("llama", "no such layer")):
        view = replace(views_of(name)[0], layer_idx=7 if name == "llama" else 0)
        with pytest.raises(KvfoldError, match=f"another model's: layer . has .*the calibration {held}"):
            Energies.load(energies).layer(view)


def test_too_short():
    with pytest.raises(KvfoldError, match="at least 32"):
        block_energies(tiny_model("llama"), prompt(31))
