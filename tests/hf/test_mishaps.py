"""Copies, interruptions and reuse: what goes wrong around a cache must not go wrong in it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from kvfold import RDKV, Full, SnapKV, fold
from kvfold.errors import CacheMismatchError, KvfoldError, UnsupportedModelError
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.hf.layer import FoldedLayer
from tests.tiny import prompt, tiny_model


def generate(model, ids, cache, **options):
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, **{CACHE_KEYWORD: cache}, **options)


def interrupt(model, ids, cache, layer=1):
    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].mlp.register_forward_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(ids, **{CACHE_KEYWORD: cache})
    finally:
        hook.remove()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("extra", [1, 5])
def test_copies_go_their_own_ways(architecture, duplicate, extra):
    model = tiny_model(architecture)
    ids = prompt(24)
    cache = fold(model, ids, Full())
    twin = duplicate(cache)
    questions = [torch.cat([ids, prompt(extra, seed=seed)], 1) for seed in (2, 4)]
    expected = [generate(model, q, DynamicCache(config=model.config)) for q in questions]
    assert torch.equal(expected[0], generate(model, questions[0], twin))
    assert torch.equal(expected[1], generate(model, questions[1], cache))


def test_a_deep_copy_outlives_its_source():
    model = tiny_model("llama")
    twin = copy.deepcopy([fold(model, prompt(24), Full())])[0]
    question = torch.cat([prompt(24), prompt(5, seed=2)], 1)
    assert torch.equal(
        generate(model, question, DynamicCache(config=model.config)), generate(model, question, twin)
    )


def test_pickle_says_what_to_do():
    with pytest.raises(KvfoldError, match=r"cache\.save"):
        pickle.dumps(fold(tiny_model("llama"), prompt(24), Full()))


@pytest.mark.parametrize("architecture, failing", [("llama", "cat"), ("deepseek_v3", "expand_kv")])
def test_out_of_memory_before_attention_leaves_the_model_alone(architecture, failing, monkeypatch):
    model = tiny_model(architecture)
    ids = prompt(24)
    cache = fold(model, ids, Full())
    stock = prompt(10, seed=5)
    expected = generate(model, stock, DynamicCache(config=model.config))

    def fail(*_, **__):
        raise torch.OutOfMemoryError

    if failing == "cat":
        from kvfold.hf import layer as module

        monkeypatch.setattr(module.torch, "cat", fail)
    else:
        monkeypatch.setattr(type(model.model.layers[0].self_attn), failing, fail)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, cache, prompt(1, seed=2), ids.shape[1])
    monkeypatch.undo()
    assert torch.equal(expected, generate(model, stock, DynamicCache(config=model.config)))


def step(model, cache, token, position):
    """One decode step."""
    with torch.no_grad():
        model(token, position_ids=torch.tensor([[position]]), **{CACHE_KEYWORD: cache})


@pytest.mark.parametrize("told", [False, True])
def test_an_interrupted_pass_is_refused_until_mended(told):
    model = tiny_model("llama")
    ids = prompt(24)
    question = torch.cat([ids, prompt(5, seed=2)], 1)
    expected = generate(model, question, DynamicCache(config=model.config))
    cache = FoldedCache(Full(), prompt_tokens=24 if told else None)
    with torch.no_grad():
        model(ids, **{CACHE_KEYWORD: cache})
    interrupt(model, question[:, 24:], cache)
    with pytest.raises(CacheMismatchError, match=r"interrupted.*cache\.crop\(24\)"):
        generate(model, question, cache)
    cache.crop(24)
    assert torch.equal(expected, generate(model, question, cache))


@pytest.mark.parametrize("scope", ["stream", "model", "layer"])
def test_an_interrupted_fold_and_reset_give_the_same_bytes(scope):
    model = tiny_model("llama")
    method = RDKV(keep=0.5, window=16, scope=scope)
    expected = fold(model, prompt(120), method)
    cache = FoldedCache(method)
    interrupt(model, prompt(120), cache)
    cache.reset()
    with torch.no_grad():
        model(prompt(120), **{CACHE_KEYWORD: cache})
    for layer, other in zip(cache.folded_layers, expected.folded_layers, strict=True):
        for name, tensor in layer.segments[0].store.tensors().items():
            assert torch.equal(tensor, other.segments[0].store.tensors()[name]), name


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "cohere2", "deepseek_v3"])
@pytest.mark.parametrize("configured", [True, False])
def test_a_cache_that_was_reset_answers_as_a_new_one(architecture, configured):
    model = tiny_model(architecture)
    cache = FoldedCache(Full(), model.config if configured else None)
    generate(model, prompt(40), cache)
    cache.reset()
    assert cache.ledger().total == FoldedCache(Full(), model.config).ledger().total
    assert cache.get_seq_length() == 0
    expected = generate(model, prompt(30, seed=2), DynamicCache(config=model.config))
    assert torch.equal(expected, generate(model, prompt(30, seed=2), cache))


def test_sliding_layers_that_cannot_be_cropped_leave_the_cache_as_it_is():
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny_model.__wrapped__("cohere2", layer_types=types)
    question = torch.cat([prompt(24), prompt(5, seed=2)], 1)
    expected = generate(model, question, DynamicCache(config=model.config))
    cache = fold(model, prompt(24), Full())
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-3)
    assert torch.equal(expected, generate(model, question, cache.fork()))
    interrupt(model, prompt(3, seed=3), cache, layer=0)
    with pytest.raises(CacheMismatchError, match=r"cache\.reset\(\)"):
        generate(model, question, cache)
    cache.reset()
    assert torch.equal(expected, generate(model, question, cache))


@pytest.mark.parametrize("left", [30, 0])
def test_what_follows_a_prompt_that_was_cut_is_no_prompt(left, tmp_path):
    model, method = tiny_model("llama"), SnapKV(keep=0.3, window=8)
    cache = fold(model, prompt(60), method)
    cache.crop(left - 60)
    if left:
        cache.save(tmp_path / "cut.kvf")
        question = torch.cat([prompt(60)[:, :30], prompt(1, seed=2)], 1)
        generate(model, question, cache, max_new_tokens=40)
        assert [(layer.folded_tokens, layer.tail) for layer in cache.folded_layers] == [(30, 40)] * 3
    else:
        generate(model, prompt(50, seed=2), cache, max_new_tokens=20)
        assert [(layer.folded_tokens, layer.tail) for layer in cache.folded_layers] == [(50, 19)] * 3


def test_a_chunk_that_is_read_again_is_of_the_prompt():
    model, method = tiny_model("llama"), SnapKV(keep=0.3, window=8)
    cache = FoldedCache(method, model.config, prompt_tokens=60)
    with torch.no_grad():
        model(prompt(60)[:, :40], **{CACHE_KEYWORD: cache})
        interrupt(model, prompt(20, seed=2), cache)
        cache.crop(40)
        model(prompt(60)[:, 40:], **{CACHE_KEYWORD: cache})
    assert [layer.folded_tokens for layer in cache.folded_layers] == [60] * 3


def test_reset_is_a_new_cache():
    model = tiny_model("llama")
    cache = fold(model, prompt(60), Full())
    cache.reset()
    assert (cache.report, cache.prompt_end, cache.prompt_hash, cache.get_seq_length()) == ([], None, None, 0)
    generate(model, prompt(40, seed=3), cache)
    assert [entry["tokens"] for entry in cache.report] == [40]
    assert all(isinstance(layer, FoldedLayer) and layer.segments for layer in cache.layers)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("told", [None, 24, 40])
def test_assisted_decoding_whatever_was_told(told, chunk):
    model = tiny_model("llama")
    expected = generate(model, prompt(24), DynamicCache(config=model.config))
    cache = FoldedCache(Full(), prompt_tokens=told)
    found = generate(model, prompt(24), cache, prompt_lookup_num_tokens=3, prefill_chunk_size=chunk)
    assert torch.equal(expected, found)
    for entry in cache.report:
        assert entry["real_tokens"] <= entry["tokens"]


@pytest.mark.parametrize(
    "architecture, options",
    [
        ("diffllama", {"num_key_value_heads": 4}),
        ("doge", {}),
        ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
        ("minimax", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            "gemma3n_text",
            {
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "vocab_size_per_layer_input": 128,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "activation_sparsity_pattern": [0.0] * 6,
                "sliding_window": 8,
            },
        ),
    ],
)
def test_attention_to_anything_but_the_own_cache_is_refused(architecture, options):
    model = tiny_model.__wrapped__(architecture, **options)
    with pytest.raises(UnsupportedModelError, match="cannot read a folded cache"):
        fold(model, prompt(24), Full())


def test_a_prompt_shorter_than_the_cache_is_refused():
    model = tiny_model("llama")
    cache = fold(model, prompt(40), Full())
    with pytest.raises(KvfoldError, match="holds 40 already"):
        generate(model, prompt(40)[:, :20], cache)
    # Nothing is lost: the right prompt still works.
    assert generate(model, prompt(41), cache).shape[1] > 41


@pytest.mark.parametrize("told", [None, 60])
def test_drafts_are_no_part_of_the_folded_prompt(told):
    model = tiny_model("llama")
    cache = FoldedCache(RDKV(keep=0.5, window=16), prompt_tokens=told)
    cache.activate_past_recording()
    with torch.no_grad():
        model(prompt(63), **{CACHE_KEYWORD: cache})
    cache.crop(-3)
    assert [(entry["tokens"], entry["real_tokens"]) for entry in cache.report] == [(60, 60)]
    assert cache.ledger().folded_ratio <= 0.5
