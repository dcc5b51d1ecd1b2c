"""The spine: a lossless fold must give DynamicCache's tokens in every scenario, on every architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvfold import Full, attach, fold
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from tests.tiny import ARCHITECTURES, left_pad, prompt, tiny_model

NEW = 8


def generate(model, ids, cache, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, **{CACHE_KEYWORD: cache}, **options)


def caches(model, **options):
    return DynamicCache(config=model.config), FoldedCache(Full(), **options)


def same(model, ids, cache_options=None, **options):
    reference, folded = caches(model, **(cache_options or {}))
    expected = generate(model, ids, reference, **options)
    found = generate(model, ids, folded, **options)
    assert torch.equal(expected, found)
    assert any(layer.segments for layer in folded.folded_layers), "nothing was folded"
    return reference, folded, found


def greedy(model):
    same(model, prompt(24))


def sampling(model):
    for seed in range(2):
        results = []
        for cache in caches(model):
            torch.manual_seed(seed)
            results.append(generate(model, prompt(24), cache, do_sample=True, top_k=20))
        assert torch.equal(*results)


def padded(model):
    ids, mask = left_pad(prompt(24, 3), [7, 0, 15])
    _, _, together = same(model, ids, attention_mask=mask)
    for row, pads in enumerate([7, 0, 15]):
        alone = generate(model, ids[row : row + 1, pads:], FoldedCache(Full()))
        assert torch.equal(alone[0], together[row, pads:])


def beams(model):
    same(model, prompt(20, 2), num_beams=3)


def several_returns(model):
    results = []
    for cache in caches(model):
        torch.manual_seed(5)
        results.append(generate(model, prompt(20), cache, do_sample=True, num_return_sequences=3))
    assert torch.equal(*results)


def chunked(model):
    ids = prompt(23)
    same(model, ids, prefill_chunk_size=5)
    same(model, ids, {"prompt_tokens": 23}, prefill_chunk_size=5)
    ids, mask = left_pad(prompt(23, 2), [3, 0])
    same(model, ids, {"prompt_tokens": 23}, prefill_chunk_size=7, attention_mask=mask)


def turns(model):
    reference, folded, ids = same(model, prompt(24))
    for turn in (1, 2):
        ids = torch.cat([ids, prompt(6, seed=turn)], 1)
        expected = generate(model, ids, reference)
        found = generate(model, ids, folded)
        assert torch.equal(expected, found)
        assert folded.get_seq_length() == found.shape[1] - 1
        ids = found


def padded_turns(model):
    ids, mask = left_pad(prompt(20, 2), [5, 0])
    reference, folded, ids = same(model, ids, attention_mask=mask)
    more, more_mask = left_pad(prompt(6, 2, seed=3), [0, 2])
    ids = torch.cat([ids, more], 1)
    mask = torch.cat([mask, mask.new_ones(2, NEW), more_mask], 1)
    expected = generate(model, ids, reference, attention_mask=mask)
    assert torch.equal(expected, generate(model, ids, folded, attention_mask=mask))


def cropped(model):
    if any(reference_layer.is_sliding for reference_layer in DynamicCache(config=model.config).layers):
        pytest.skip("transformers cannot crop a sliding layer that is past its window")
    for remove in (3, 12):
        reference, folded, ids = same(model, prompt(24))
        reference.crop(-remove)
        folded.crop(-remove)
        assert folded.get_seq_length() == reference.get_seq_length()
        ids = torch.cat([ids[:, : reference.get_seq_length()], prompt(4, seed=9)], 1)
        assert torch.equal(generate(model, ids, reference), generate(model, ids, folded))


def assisted(model):
    for options in ({}, {"prompt_tokens": 24}):
        same(model, prompt(24), options, prompt_lookup_num_tokens=3)
        assistant = tiny_model("llama", num_hidden_layers=1)
        same(model, prompt(24), options, assistant_model=assistant)


def batch_operations(model):
    ids = prompt(20, 2)
    reference, folded = caches(model)
    for cache in (reference, folded):
        with torch.no_grad():
            model(ids, use_cache=True, **{CACHE_KEYWORD: cache})
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
    rows = ids[[0, 0, 1]]
    ids = torch.cat([rows, prompt(3, 3, seed=4)], 1)
    assert torch.equal(generate(model, ids, reference), generate(model, ids, folded))


def attached(model):
    ids, mask = left_pad(prompt(24, 2), [4, 0])
    expected = generate(model, ids, DynamicCache(config=model.config), attention_mask=mask)
    with attach(model, Full()) as folding:
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=9
        )
    assert torch.equal(expected, found)
    assert folding.cache is not None and folding.cache.report[0]["tokens"] == 24
    assert "generate" not in vars(model)


def folded_first(model):
    ids, mask = left_pad(prompt(24, 2), [4, 0])
    for chunk in (None, 7):
        cache = fold(model, ids, Full(), mask, chunk_size=chunk)
        question = torch.cat([ids, prompt(5, 2, seed=8)], 1)
        full_mask = torch.cat([mask, mask.new_ones(2, 5)], 1)
        expected = generate(model, question, DynamicCache(config=model.config), attention_mask=full_mask)
        twin = cache.fork()
        assert torch.equal(expected, generate(model, question, cache, attention_mask=full_mask))
        assert torch.equal(expected, generate(model, question, twin, attention_mask=full_mask))


def long_generation(model):
    reference, folded = DynamicCache(config=model.config), FoldedCache(Full(block_tokens=4))
    expected = generate(model, prompt(12), reference, max_new_tokens=22)
    assert torch.equal(expected, generate(model, prompt(12), folded, max_new_tokens=22))
    assert all(layer.tail < 8 for layer in folded.folded_layers)
    assert [entry["tokens"] for entry in folded.report] == [12, 4, 4, 4, 4]


SCENARIOS = [
    greedy,
    sampling,
    padded,
    beams,
    several_returns,
    chunked,
    turns,
    padded_turns,
    cropped,
    assisted,
    batch_operations,
    attached,
    folded_first,
    long_generation,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_tokens(architecture, scenario):
    scenario(tiny_model(architecture))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_same_tokens_eager(architecture, scenario):
    scenario(tiny_model(architecture, "eager"))
