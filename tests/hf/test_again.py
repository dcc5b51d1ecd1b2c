"""A second reading of the prompt: the same states where attention is answered as it was, and what depends on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold import KVSculpt, fold
from kvfold.artifact import SavedWork
from kvfold.errors import KvfoldError, UnsupportedModelError
from kvfold.evaluate.prefill import Prefill
from kvfold.hf import CACHE_KEYWORD, FoldedCache, bridge
from kvfold.hf.again import Again
from kvfold.kernels.reference import attend
from kvfold.methods import kvsculpt
from kvfold.methods.queries import first_reading, repeated, training
from tests.tiny import left_pad, prompt, tiny_model

OPTIONS = dict(tokens=20, sinks=2, window=6, horizon=16, steps=3)


def views_of(model, ids, mask=None, sampled=40):
    """What prefill hands to KVSculpt, with a second reading."""
    views = Prefill(model, ids, [KVSculpt(**OPTIONS, sampled=sampled)], mask).views
    for view in views:
        view.again = Again(model, ids)
    return views


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3"])
def test_what_was_answered_once_leads_to_the_same_states(name):
    model = tiny_model(name)
    ids, mask = left_pad(prompt(90, batch=2), [0, 13])
    views = views_of(model, ids, mask)
    index, asked = views[0].sampled_index, []

    def answer(layer, query, key, value):
        asked.append(layer)
        for row, first in enumerate((0, 13)):
            real = index >= first
            assert torch.allclose(query[row, :, real], views[layer].sampled[row, :, real], atol=2e-4)
            own = views[layer].keys[row][:, index[real]], views[layer].values[row][:, index[real]]
            assert torch.allclose(key[row, :, real], own[0], atol=2e-4)
            assert torch.allclose(value[row, :, real], own[1], atol=2e-4)
        return first_reading(views[layer])

    views[0].again(index, views[0].positions[:, index], answer)
    assert asked == list(range(3)) and len(index) < 90
    assert not bridge.installed() or not any(type(cache).__name__ == "_Asking" for cache in bridge._live)


def drift(view, store, changed):
    """What the changed queries get of a store and the exact ones got of all, (output error, queries) by hand in float64."""
    found = []
    for head in range(view.keys.shape[1]):
        exact, now = (
            training(one, 0, head, "reread", 0, 16) for one in (view, replace(view, sampled=changed))
        )
        kept = store.kept(0, head)
        logits = now.queries.double() @ kept.keys.double().T * view.scaling
        share = torch.cat([logits, now.beside_lse.double()[:, None]], 1).softmax(-1)
        output = share[:, :-1] @ kept.values.double() + share[:, -1:] * now.beside_output
        found.append((output - exact.attend()[0]).unflatten(0, (2, -1)))
    return torch.cat(found)


@pytest.mark.parametrize("chunk", [None, 30])
def test_layers_are_distilled_for_what_those_below_lead_to(monkeypatch, chunk):
    """The second layer's queries are those of embeddings that got the first layer's error on top of its attention."""
    model, ids = tiny_model("llama"), prompt(90)
    views = views_of(model, ids, sampled=90)
    seen, real = {}, KVSculpt._distil

    def noted(self, *given, **named):
        if given[-1] is not None and len(given) == 6:
            seen.update(given[-1])
        return real(self, *given, **named)

    monkeypatch.setattr(KVSculpt, "_distil", noted)
    options = {**OPTIONS, "heads": "uniform", "chunk": chunk, "steps": 0, "ridge": 1e-4, "ridge_to": "zero"}
    plain, stores = (KVSculpt(**options, cascade=cascade).fold(views) for cascade in (False, True))
    for name, tensor in plain[0].buffers.items():
        assert torch.equal(stores[0].buffers[name], tensor), "nothing is below the first layer"
    layer, turn = model.model.layers[0], model.model.rotary_emb
    with torch.no_grad():
        hidden = model.model.embed_tokens(ids)
        change = drift(views[0], stores[0], views[0].sampled)
        causal = torch.ones(90, 90, dtype=torch.bool).tril()[None, None]
        attention = (
            attend(views[0].sampled, views[0].keys, views[0].values, views[0].scaling, causal)[0]
            + change.float()
        )
        hidden = hidden + layer.self_attn.o_proj(attention.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        after = model.model.layers[1]
        query = after.self_attn.q_proj(after.input_layernorm(hidden)).view(1, 90, 4, 16).transpose(1, 2)
        cos, sin = turn(query, torch.arange(90)[None])
        half = torch.cat([-query[..., 8:], query[..., :8]], -1)
        query = query * cos[:, None] + half * sin[:, None]
    assert torch.allclose(seen[1], query, atol=3e-3)
    assert not torch.allclose(seen[1], views[1].sampled, atol=0.1)
    # And for those it is the better one.
    errors = [float(drift(views[1], store[1], query).square().mean()) for store in (plain, stores)]
    assert errors[1] < errors[0]


def test_rows_and_heads_that_are_kept_whole_change_nothing():
    model = tiny_model("llama")
    ids, mask = left_pad(prompt(60, batch=2), [0, 42])
    views = views_of(model, ids, mask, sampled=60)
    options = {**OPTIONS, "heads": "uniform"}
    plain = KVSculpt(**options).fold(views)
    stores = KVSculpt(**options, cascade=True).fold(views)
    for one, two in zip(plain, stores, strict=True):
        for head in range(2):  # the short row fits in its budget
            assert len(one.kept(1, head).positions) == 18
            assert torch.equal(one.kept(1, head).values, two.kept(1, head).values)
    assert not torch.equal(plain[2].buffers["values"], stores[2].buffers["values"])


def test_a_stopped_cascade_goes_on_where_it_was(tmp_path, monkeypatch):
    model, ids, method = tiny_model("llama"), prompt(90), KVSculpt(**OPTIONS, cascade=True)
    whole = fold(model, ids, method)
    solved, real = [], KVSculpt._solve

    def counting(*given):
        if len(solved) == 3:
            raise KeyboardInterrupt
        solved.append(1)
        return real(*given)

    monkeypatch.setattr(kvsculpt, "SLICE_BYTES", (1, 1))
    monkeypatch.setattr(KVSculpt, "_solve", counting)
    work = SavedWork(tmp_path / "parts", model, ids, method)
    with pytest.raises(KeyboardInterrupt):
        fold(model, ids, method, work=work)
    monkeypatch.setattr(KVSculpt, "_solve", real)
    again = fold(model, ids, method, work=SavedWork(tmp_path / "parts", model, ids, method))
    for one, two in zip(whole.layers, again.layers, strict=True):
        tensors = two.segments[0].store.tensors()
        for name, tensor in one.segments[0].store.tensors().items():
            assert torch.allclose(tensors[name].float(), tensor.float(), atol=2e-2)


def test_repeated_queries_are_those_of_the_text_read_again():
    """Against a prefill of the prompt and its first span after it."""
    model, ids = tiny_model("llama"), prompt(60)
    span = ids[:, :16]
    views = views_of(model, ids, sampled=60)
    both = Prefill(model, torch.cat([ids, span], 1), [KVSculpt(**OPTIONS, sampled=100)]).views
    for (view, beside), whole in zip(repeated(views, 32, 16), both, strict=True):
        assert view.sampled_index.tolist() == [*range(16), *range(44, 60)]
        later = whole.sampled[:, :, 60:]
        assert torch.allclose(view.sampled[:, :, :16], later, atol=2e-4)
        for head in range(2):
            members = slice(2 * head, 2 * head + 2)
            asked = training(view, 0, head, "repeat", 6, 16, (beside[0][0, members], beside[1][0, members]))
            found = asked.attend()[0].unflatten(0, (2, -1))[:, :16]
            mask = (torch.arange(76) <= torch.arange(60, 76)[:, None])[None, None]
            exact, _ = attend(later, whole.keys, whole.values, whole.scaling, mask)
            assert torch.allclose(found, exact[0, members], atol=2e-4)


def test_repeated_queries_do_not_see_padding():
    """Whatever tokens stand in the padding, real ones are read again alike."""
    model, ids = tiny_model("llama"), prompt(60, batch=2)
    found = []
    for padding in (0, 7):
        padded, mask = left_pad(ids, [9, 0])
        padded = torch.where(mask.bool(), padded, padding)
        found.append(repeated(views_of(model, padded, mask, sampled=60), 32, 16))
    for (view, beside), (other, its) in zip(*found, strict=True):
        real = view.valid[0, 0, view.sampled_index]
        assert 0 < int(real.sum()) < len(real)
        for one, two in ((view.sampled, other.sampled), *zip(beside, its, strict=True)):
            assert torch.allclose(one[0, :, real], two[0, :, real], atol=1e-5)
            assert torch.allclose(one[1], two[1], atol=1e-5)


def test_padding_takes_no_position_when_read_again():
    """A padded row has the queries that it has alone."""
    model, ids = tiny_model("llama"), prompt(60, batch=2)
    padded, mask = left_pad(ids, [23, 0])
    together = repeated(views_of(model, padded, mask, sampled=60), 60, 64)
    alone = repeated(views_of(model, ids[:1, 23:], sampled=60), 60, 64)
    for (view, beside), (other, its) in zip(together, alone, strict=True):
        for one, two in ((view.sampled, other.sampled), *zip(beside, its, strict=True)):
            assert torch.allclose(one[:1, :, 23:], two, atol=1e-4)


def test_a_fold_for_repeated_queries_has_its_bytes():
    model, ids = tiny_model("llama"), prompt(90)
    method = KVSculpt(keep=0.4, sinks=2, window=6, horizon=16, steps=2)
    plain, found = (fold(model, ids, one) for one in (method, replace(method, queries="repeat")))
    stores = [[layer.segments[0].store for layer in cache.layers] for cache in (plain, found)]
    assert sum(store.nbytes for store in stores[0]) == sum(store.nbytes for store in stores[1])
    assert not torch.equal(stores[0][0].buffers["values"][:10], stores[1][0].buffers["values"][:10])
    places = [(head["layer"], head["head"]) for head in found.report[0]["heads"]]
    assert places == [(layer, head) for layer in range(3) for head in range(2)]


@pytest.mark.parametrize("options", [{"cascade": True}, {"queries": "repeat"}])
def test_who_cannot_read_again_says_so(options):
    method, ids = KVSculpt(**OPTIONS, **options), prompt(60)
    with pytest.raises(UnsupportedModelError, match="not full attention"):
        fold(tiny_model("gemma3_text"), ids, method)
    model = tiny_model("llama")
    with pytest.raises(KvfoldError, match=r"with kvfold\.fold"):
        model(ids, past_key_values=FoldedCache(method, model.config, prompt_tokens=60))
    bridge.forget()


@pytest.mark.parametrize("options", [{"cascade": True}, {"queries": "repeat"}])
def test_a_later_turn_is_refused_before_it_is_read_or_stays_exact(options):
    model, ids, later = tiny_model("llama"), prompt(90), prompt(40, seed=1)
    cache = fold(model, ids, KVSculpt(**OPTIONS, **options))
    expected = model(later, use_cache=True, **{CACHE_KEYWORD: exact(cache)}).logits
    with pytest.raises(KvfoldError, match=r"call cache\.keep_exact\(\)"):
        model(later, use_cache=True, **{CACHE_KEYWORD: cache})
    assert all(layer.get_seq_length() == 90 and len(layer.segments) == 1 for layer in cache.folded_layers)
    cache.keep_exact()
    assert torch.equal(model(later, use_cache=True, **{CACHE_KEYWORD: cache}).logits, expected)
    assert all(layer.tail == 40 and len(layer.segments) == 1 for layer in cache.folded_layers)
    short = fold(model, ids, KVSculpt(**OPTIONS, **options))  # too short to fold is exact in any case
    model(later[:, :8], use_cache=True, **{CACHE_KEYWORD: short})
    assert short.get_seq_length() == 98


def exact(cache):
    fork = cache.fork()
    fork.keep_exact()
    return fork


def test_cascade_goes_with_sampled_queries_only():
    with pytest.raises(ValueError, match="cascade goes with"):
        KVSculpt(keep=0.3, cascade=True, queries="synthetic")
