"""Widths chosen by measured distortion: the best of the sets, kept by generated tokens and by saved files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold import PublishedRDKV, fold, load
from kvfold.evaluate.prefill import Prefill
from kvfold.hf import CACHE_KEYWORD
from kvfold.methods.rdkv_published import WIDTH_SETS
from tests.tiny import left_pad, prompt, tiny_model

AUTO = PublishedRDKV(keep=0.3, window=8, widths="auto", block_tokens=8)


def chosen(cache):
    """Value widths of each segment of each layer."""
    return [
        [segment.store.layout.value_widths for segment in layer.segments] for layer in cache.folded_layers
    ]


def attention_errors(view, store):
    """Relative squared error of the newest queries' output over a store's decoded tokens, in float64."""
    error = norm = 0.0
    batch, heads = view.queries.shape[:2]
    for row in range(batch):
        for head in range(heads):
            kv_head = head * view.keys.shape[1] // heads
            query = view.queries[row, head].double()
            outputs = []
            kept = store.kept(row, kv_head)
            real = view.valid[row, kv_head]
            for keys, values in (
                (view.keys[row, kv_head, real], view.values[row, kv_head, real]),
                (kept.keys, kept.values),
            ):
                weights = (query @ keys.double().T * view.scaling).softmax(-1)
                outputs.append(weights @ values.double())
            error += float((outputs[1] - outputs[0]).square().sum())
            norm += float(outputs[0].square().sum())
    return error / norm


def test_takes_the_set_with_the_least_measured_error():
    taken = set()
    for name, keep in [("llama", 0.15), ("qwen2", 0.6)]:
        ids, mask = left_pad(prompt(96, 2), [0, 30])
        method = replace(AUTO, keep=keep)
        prefill = Prefill(tiny_model(name), ids, [method], mask)
        auto = prefill.fold(method)
        fixed = [prefill.fold(replace(method, widths=widths)) for widths in WIDTH_SETS]
        for index, view in enumerate(prefill.views):
            errors = [attention_errors(view, cache.folded_layers[index].segments[0].store) for cache in fixed]
            best = errors.index(min(errors))
            store = auto.folded_layers[index].segments[0].store
            same = fixed[best].folded_layers[index].segments[0].store
            assert store.layout == same.layout
            for tensor, name in zip(store.tensors().values(), same.tensors()):
                assert torch.equal(tensor, same.tensors()[name])
            taken.add(WIDTH_SETS[best])
        assert auto.ledger().folded_bytes <= keep * auto.ledger().folded_full_bytes
    assert len(taken) > 1


def test_one_set_for_a_shared_budget():
    method = replace(AUTO, scope="model")
    prefill = Prefill(tiny_model("qwen2"), prompt(96), [method])
    sums = []
    for widths in WIDTH_SETS:
        layers = prefill.fold(replace(method, widths=widths)).folded_layers
        sums.append(
            sum(attention_errors(view, layer.segments[0].store) for view, layer in zip(prefill.views, layers))
        )
    assert chosen(prefill.fold(method)) == [[WIDTH_SETS[sums.index(min(sums))]]] * 3


def test_latent_attention():
    cache = fold(tiny_model("deepseek_v3"), prompt(96), AUTO)
    assert all(segments[0] in WIDTH_SETS for segments in chosen(cache))


def test_generated_tokens_and_saved_files_keep_the_choice(tmp_path):
    model, ids = tiny_model("qwen2"), prompt(96)
    cache = fold(model, ids, replace(AUTO, keep=0.15))
    first = chosen(cache)
    assert {widths for (widths,) in first} != {WIDTH_SETS[0]}
    cache.save(tmp_path / "doc.kvf")
    loaded = load(tmp_path / "doc.kvf", model)
    assert loaded.method == cache.method and loaded.method.widths == "auto"
    assert chosen(loaded) == first
    ids = torch.cat([ids, prompt(1)], 1)
    for each in (cache, loaded):
        more = model.generate(ids, max_new_tokens=30, do_sample=False, **{CACHE_KEYWORD: each})
        assert all(len(segments) > 1 for segments in chosen(each))
        assert [set(segments) for segments in chosen(each)] == [set(segments) for segments in first]
    assert more.shape[1] == ids.shape[1] + 30


def test_refused():
    with pytest.raises(ValueError, match=r"widths must be .*auto"):
        PublishedRDKV(keep=0.3, widths="fine")
    with pytest.raises(ValueError, match=r"no entry for width \[2\]"):
        PublishedRDKV(keep=0.3, widths="auto", value_error=((0, 1.0), (4, 0.01), (8, 1e-5)))
