"""A loaded cache is the saved one: every tensor, and every token generated from it."""

from __future__ import annotations

import copy
import gc
import os
import pickle

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

import kvfold
from kvfold import METHODS, Full, attach, fold, make_method
from kvfold.artifact import load, load_stores, read_manifest, save
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.hf.fingerprint import fingerprint
from kvfold.hf.layer import FoldedLayer
from tests.tiny import ARCHITECTURES, left_pad, prompt, tiny_model


def generate(model, ids, cache, tokens=6, **options):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **{CACHE_KEYWORD: cache}, **options)


def tensors_of(cache):
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, FoldedLayer):
            found.update({f"{index}.tail.{n}": t for n, t in enumerate(layer.tail_tensors())})
            for number, segment in enumerate(layer.segments):
                found.update({f"{index}.{number}.{n}": t for n, t in segment.store.tensors().items()})
        else:
            found.update({f"{index}.{n}": t for n, t in vars(layer).items() if isinstance(t, torch.Tensor)})
    return found


def assert_same_cache(first, second):
    one, two = tensors_of(first), tensors_of(second)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name
    assert first.get_seq_length() == second.get_seq_length()
    assert first.ledger() == second.ledger()
    assert (first.method, first.report, first.prompt_hash) == (
        second.method,
        second.report,
        second.prompt_hash,
    )


def check(model, cache, path, ids, **options):
    """Save, load, compare, and continue both for two turns, then save again."""
    before = {name: tensor.clone() for name, tensor in tensors_of(cache).items()}
    save(cache, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(cache).items())
    loaded = load(path, model)
    assert_same_cache(cache, loaded)
    again = f"{path}.again"
    save(loaded, again)
    with open(path, "rb") as one, open(again, "rb") as two:
        assert one.read() == two.read()
    twin = loaded.fork()
    rows = ids.shape[0]
    mask = options.pop("attention_mask", None)
    for turn in (1, 2):
        ids = torch.cat([ids, prompt(5, rows, seed=turn)], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(rows, ids.shape[1] - mask.shape[1])], 1)
            options["attention_mask"] = mask
        expected = generate(model, ids, cache, **options)
        assert torch.equal(expected, generate(model, ids, loaded, **options))
        assert torch.equal(expected, generate(model, ids, twin, **options))
        ids = expected
    assert_same_cache(cache, loaded)
    save(loaded, again)
    assert_same_cache(cache, load(again, model))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name, tmp_path):
    model, ids = tiny_model(name), prompt(24)
    check(model, fold(model, ids, Full()), tmp_path / "doc.kvf", ids)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_padded_batch_in_bfloat16(name, tmp_path):
    model = tiny_model(name, dtype=torch.bfloat16)
    ids, mask = left_pad(prompt(24, 3), [7, 0, 15])
    check(model, fold(model, ids, Full(), mask), tmp_path / "doc.kvf", ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for method in METHODS
        for name in ("llama", "gemma3_text", "deepseek_v3")
        # Two refuse latents, and one needs trained gates.
        if (method, name) not in {("shadowkv", "deepseek_v3"), ("kvsculpt", "deepseek_v3")}
        and method != "dbtrimkv"
    ],
)
def test_every_method(method, name, tmp_path):
    model, ids = tiny_model(name), prompt(160)
    try:
        method = make_method(method, keep=0.5)
    except ValueError:
        method = make_method(method)
    cache = fold(model, ids, method)
    assert cache.folded_layers[0].segments
    check(model, cache, tmp_path / "doc.kvf", ids)


def test_half_a_block_of_generated_tokens(tmp_path):
    """What the next fold of generated tokens has seen so far is saved too."""
    model, ids = tiny_model("llama"), prompt(24)
    for new in (3, 5, 7, 9, 12):
        cache = fold(model, ids, Full(block_tokens=4))
        more = generate(model, torch.cat([ids, prompt(1)], 1), cache, tokens=new)
        check(model, cache, tmp_path / "doc.kvf", more)


def test_rows_shared_by_a_batch(tmp_path):
    model, ids = tiny_model("llama"), prompt(24, 2)
    cache = fold(model, ids, Full())
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 1, 3]))
    assert cache.folded_layers[0].segments[0].rows is not None
    check(model, cache, tmp_path / "doc.kvf", ids[[0, 0, 1]])


def test_other_ways_to_fill_a_cache(tmp_path):
    model, ids = tiny_model("gemma3_text"), prompt(24)
    cache = FoldedCache(Full())
    check(model, cache, tmp_path / "bare.kvf", generate(model, ids, cache))
    with attach(model, Full()) as folding:
        more = model.generate(ids, max_new_tokens=4, do_sample=False)
    check(model, folding.cache, tmp_path / "attached.kvf", more)
    model = tiny_model("llama")
    cache = FoldedCache(Full())
    more = generate(model, ids, cache, prompt_lookup_num_tokens=3)
    check(model, cache, tmp_path / "assisted.kvf", more)


def test_prompt_too_short_to_fold(tmp_path):
    model, ids = tiny_model("llama"), prompt(1)
    cache = fold(model, ids, Full())
    assert not cache.folded_layers[0].segments
    check(model, cache, tmp_path / "doc.kvf", ids)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_linear_layers(name, tmp_path):
    """Whatever a stock layer holds is saved, states of linear attention too."""
    options = {
        "lfm2": dict(
            layer_types=["full_attention", "conv", "full_attention"], block_auto_adjust_ff_dim=False
        ),
        "qwen3_next": dict(
            layer_types=["full_attention", "linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
        ),
    }[name]
    model, ids = tiny_model.__wrapped__(name, **options), prompt(24)
    check(model, fold(model, ids, Full()), tmp_path / "doc.kvf", ids)


def test_urls(tmp_path):
    model, ids = tiny_model("llama"), prompt(24)
    cache = fold(model, ids, Full())
    expected = generate(model, torch.cat([ids, prompt(4)], 1), cache.fork())
    for url in ("memory://doc.kvf", "memory://folder/doc.kvf", f"file://{tmp_path}/doc.kvf"):
        save(cache, url)
        save(cache, url, extra={"title": "Zweitens ✓"})
        assert read_manifest(url)["extra"] == {"title": "Zweitens ✓"}
        loaded = load(url, model)
        assert_same_cache(cache, loaded)
        assert torch.equal(expected, generate(model, torch.cat([ids, prompt(4)], 1), loaded))
        assert load_stores(url)[1][0][0].tokens == 24
    assert os.listdir(tmp_path) == ["doc.kvf"]
    assert not [name for name in MemoryFileSystem.store if "tmp" in name]


def test_the_file_is_plain_safetensors(tmp_path):
    model, ids = tiny_model("gemma3_text"), prompt(24)
    cache = fold(model, ids, Full())
    cache.save(tmp_path / "doc.kvf")
    ours, theirs = tensors_of(cache), load_file(tmp_path / "doc.kvf")
    assert len(ours) == len(theirs)
    assert torch.equal(theirs["layers.1.segments.0.store.keys"], ours["1.0.keys"])
    manifest, stores = load_stores(tmp_path / "doc.kvf")
    assert manifest == read_manifest(tmp_path / "doc.kvf")
    assert [len(layer) for layer in stores] == [0, 1, 0]
    assert torch.equal(stores[1][0].keys, ours["1.0.keys"])
    assert manifest["tokens"] == 24 and manifest["model"]["facts"]["model_type"] == "gemma3_text"
    assert manifest["ledger"]["total"] == cache.ledger().total
    kvfold.load(tmp_path / "doc.kvf", model)


def test_no_unpickling(tmp_path, monkeypatch):
    model = tiny_model("llama")
    save(fold(model, prompt(24), Full()), tmp_path / "doc.kvf")

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    load(tmp_path / "doc.kvf", model)


def test_each_tensor_has_its_own_storage(tmp_path):
    model = tiny_model("gemma3_text")
    save(fold(model, prompt(24), Full()), tmp_path / "doc.kvf")
    tensors = list(tensors_of(load(tmp_path / "doc.kvf", model)).values())
    assert sum(t.untyped_storage().nbytes() for t in tensors) == sum(
        t.numel() * t.element_size() for t in tensors
    )
    assert len({t.untyped_storage().data_ptr() for t in tensors if t.numel()}) == sum(
        t.numel() > 0 for t in tensors
    )


def test_the_model_may_be_gone(tmp_path):
    model = tiny_model.__wrapped__("llama")
    cache = fold(model, prompt(24), Full())
    save(cache, tmp_path / "with.kvf")
    del model
    gc.collect()
    assert cache.folded_layers[0].module() is None
    save(cache, tmp_path / "without.kvf")
    with_model, without = read_manifest(tmp_path / "with.kvf"), read_manifest(tmp_path / "without.kvf")
    assert with_model["model"]["fingerprint"] == without["model"]["fingerprint"]
    assert_same_cache(cache, load(tmp_path / "without.kvf", tiny_model("llama")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_between_devices(name, tmp_path):
    """The same weights on another device are the same model; each layer lands where its module is."""
    here, there = tiny_model(name), copy.deepcopy(tiny_model(name)).cuda()
    assert fingerprint(here) == fingerprint(there)
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    there.model.layers[-1].self_attn.to(last)
    save(fold(here, prompt(24), Full()), tmp_path / "doc.kvf")
    loaded = load(tmp_path / "doc.kvf", there)
    assert [layer.keys.device for layer in loaded.layers] == [torch.device("cuda", 0)] * 2 + [last]
    save(loaded, tmp_path / "again.kvf")
    assert (tmp_path / "doc.kvf").read_bytes() == (tmp_path / "again.kvf").read_bytes()


def test_replacing_keeps_links_and_leaves_nothing_beside(tmp_path):
    cache = fold(tiny_model("llama"), prompt(24), Full())
    (tmp_path / "real.kvf").write_bytes(b"old")
    (tmp_path / "link.kvf").symlink_to("real.kvf")
    save(cache, tmp_path / "link.kvf")
    assert (tmp_path / "link.kvf").is_symlink()
    assert read_manifest(tmp_path / "real.kvf")["tokens"] == 24
    assert sorted(os.listdir(tmp_path)) == ["link.kvf", "real.kvf"]


def test_offloaded_weights(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain = tiny_model("llama")
    save(fold(plain, prompt(24), Full()), tmp_path / "doc.kvf")
    offloaded = accelerate.cpu_offload(tiny_model.__wrapped__("llama"), execution_device=torch.device("cpu"))
    ids = torch.cat([prompt(24), prompt(4, seed=1)], 1)
    expected = generate(plain, ids, load(tmp_path / "doc.kvf", plain))
    loaded = load(tmp_path / "doc.kvf", offloaded)
    assert loaded.layers[0].keys.device.type == "cpu"
    assert torch.equal(expected, generate(offloaded, ids, loaded))
