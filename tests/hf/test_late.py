"""Layers that are folded while the device works on the next one: the same fold, one layer later."""

from __future__ import annotations

import pytest
import torch

from kvfold import RDKV, fold
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.hf import cache as caches
from kvfold.methods import BlockGTQ, KVSculpt, SnapKV, TurboQuant
from tests.hf.test_mishaps import interrupt
from tests.tiny import left_pad, prompt, tiny_model

METHODS = {
    "rdkv": RDKV(keep=0.3, window=8),
    "blockgtq": BlockGTQ(keep=0.3),
    "turboquant": TurboQuant(bits=3),
    "snapkv": SnapKV(keep=0.3, window=8),
    "kvsculpt": KVSculpt(keep=0.5, sinks=2, window=8, steps=2, every=2, heads="uniform"),
    "chain": SnapKV(keep=0.5, window=8) >> BlockGTQ(bits=4),
}


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(caches, "folds_late", lambda view: not view.generated and view.previous is None)


def tensors(cache, first=0):
    return [
        tensor
        for layer in cache.folded_layers[first:]
        for segment in layer.segments
        for tensor in segment.store.tensors().values()
    ]


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scenario", ["plain", "padded", "chunks", "hybrid"])
def test_same_fold(name, scenario, request):
    model = tiny_model("gemma3_text" if scenario == "hybrid" else "llama")
    ids, mask = prompt(40, batch=2), None
    if scenario == "padded":
        ids, mask = left_pad(ids, [0, 7])
    options = {"chunk_size": 16} if scenario == "chunks" else {}
    expected = tensors(fold(model, ids, METHODS[name], attention_mask=mask, **options))
    request.getfixturevalue("late")
    cache = fold(model, ids, METHODS[name], attention_mask=mask, **options)
    assert cache._late is None and all(layer.segments for layer in cache.folded_layers)
    same(tensors(cache), expected)
    assert cache.report[0]["folded"] and len(cache.report) == 1


def test_one_layer_waits(late):
    model, held = tiny_model("llama"), []
    cache = FoldedCache(SnapKV(keep=0.3, window=8), model.config)
    cache.progress = lambda layer, layers: held.append(
        (layer, [one.layer_idx for one in cache.folded_layers if one.tail])
    )
    with torch.no_grad():
        model(prompt(40), **{CACHE_KEYWORD: cache})
    last = model.config.num_hidden_layers - 1
    assert held == [(layer, [layer + 1]) for layer in range(last)] + [(last, [])]


def test_an_interrupted_round_leaves_nothing(late):
    def folded(interrupted):
        cache = FoldedCache(SnapKV(keep=0.3, window=8), model.config, prompt_tokens=40)
        with torch.no_grad():
            model(prompt(40)[:, :16], **{CACHE_KEYWORD: cache})
        if interrupted:
            interrupt(model, prompt(24, seed=3), cache, layer=0)
            assert cache._late is not None
            cache.crop(16)
        with torch.no_grad():
            model(prompt(40)[:, 16:], **{CACHE_KEYWORD: cache})
        assert [segment.store.tokens for segment in cache.folded_layers[0].segments] == [40]
        return tensors(cache, 1)  # the first layer saw the chunk before the interruption no more

    model = tiny_model("llama")
    same(folded(True), folded(False))


@pytest.mark.parametrize("how", ["late", "failing"])
def test_a_segment_reopened_for_a_fold_that_never_came_is_put_back(how, request, monkeypatch):
    """Its evicted tokens, zeros while it is open, must not be attended to."""

    def fail(*_):
        raise KeyboardInterrupt

    model, ids = tiny_model("llama"), prompt(60)
    cache = FoldedCache(SnapKV(keep=0.3, window=8), model.config)
    with torch.no_grad():
        model(ids[:, :40], **{CACHE_KEYWORD: cache})
    expected, twin = tensors(cache), cache.fork()
    if how == "late":
        request.getfixturevalue("late")
        interrupt(model, ids[:, 40:], cache, layer=0)
    else:
        monkeypatch.setattr(SnapKV, "fold", fail)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(ids[:, 40:], **{CACHE_KEYWORD: cache})
        monkeypatch.undo()
    cache.crop(40)
    same(tensors(cache), expected)
    with torch.no_grad():
        found, wanted = (model(prompt(1, seed=3), **{CACHE_KEYWORD: one}).logits for one in (cache, twin))
    assert torch.equal(found, wanted)


def test_going_on_after_the_last_layer_failed_to_fold_a_reopened_prompt(monkeypatch):
    fold_, model, ids = SnapKV.fold, tiny_model("llama"), prompt(60)

    def fail(method, views):
        if views[0].layer_idx == 2:
            raise KeyboardInterrupt
        return fold_(method, views)

    cache = FoldedCache(SnapKV(keep=0.3, window=8), model.config)
    with torch.no_grad():
        model(ids[:, :40], **{CACHE_KEYWORD: cache})
        expected = tensors(cache, 2)
        monkeypatch.setattr(SnapKV, "fold", fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 40:], **{CACHE_KEYWORD: cache})
        model(prompt(1, seed=3), **{CACHE_KEYWORD: cache})
    assert [(layer.folded_tokens, layer.tail) for layer in cache.folded_layers] == [
        (60, 1),
        (60, 1),
        (40, 21),
    ]
    same(tensors(cache, 2), expected)


def test_prompts_of_speculative_decoding(request):
    def folded():
        cache = FoldedCache(RDKV(keep=0.3, window=8), model.config)
        cache.activate_past_recording()
        with torch.no_grad():
            model(prompt(44), **{CACHE_KEYWORD: cache})
        cache.crop(-4)
        assert all(layer.segments for layer in cache.folded_layers)
        return tensors(cache)

    model = tiny_model("llama")
    expected, _ = folded(), request.getfixturevalue("late")
    same(folded(), expected)


def test_an_error_of_the_method_comes_out(late):
    class Breaking(SnapKV):
        def fold(self, views):
            raise torch.OutOfMemoryError("no room for it")

    model = tiny_model("llama")
    cache = FoldedCache(Breaking(keep=0.3, window=8), model.config)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="no room"):
        model(prompt(40), **{CACHE_KEYWORD: cache})
    assert cache._late is None
    cache.reset()
    cache.method = SnapKV(keep=0.3, window=8)
    with torch.no_grad():
        model(prompt(40), **{CACHE_KEYWORD: cache})
    same(tensors(cache), tensors(fold(model, prompt(40), SnapKV(keep=0.3, window=8))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["rdkv", "blockgtq"])
def test_same_fold_on_a_gpu(name, monkeypatch):
    """Beside a busy device, and with memory that is used again at once."""
    model = tiny_model("llama", dtype=torch.bfloat16).cuda()
    ids = prompt(400, batch=2).cuda()
    folded = []
    for bytes_ in (0, caches.LATE, caches.LATE):
        monkeypatch.setattr(caches, "LATE", bytes_)
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 64
        folded.append(tensors(fold(model, ids, METHODS[name])))
    same(folded[1], folded[0])
    same(folded[2], folded[0])
