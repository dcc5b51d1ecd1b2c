"""Later turns of every length, by every method: none is lost, and what the budget cannot pay for stays exact for a while."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold import RDKV, SnapKV, fold, load
from kvfold.errors import BudgetError
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.hf import cache as caches
from kvfold.methods import BlockGTQ, DBTrimKV
from tests.hf.test_methods import METHODS, READ_SOME, SELECTIONS, assert_counted, generate
from tests.methods.test_dbtrimkv import gates_file  # noqa: F401
from tests.tiny import left_pad, prompt, tiny_model

EVERY = {**METHODS, **SELECTIONS, **READ_SOME}
TIGHT = {
    "rdkv": RDKV(keep=0.12, window=8, block_tokens=8),
    "rdkv-model": RDKV(keep=0.12, window=8, scope="model", block_tokens=8),
    "blockgtq": BlockGTQ(keep=0.12, block_tokens=16),
}
"""They fold 200 tokens, and not a turn of `FEW`."""
FEW = {"rdkv": 20, "rdkv-model": 20, "blockgtq": 51}
tight = pytest.mark.parametrize("name", TIGHT)


@torch.no_grad()
def read(model, cache, ids, mask=None):
    """Logits of one call, (batch, tokens, vocabulary)."""
    options = {}
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        options = {"attention_mask": mask, "position_ids": positions}
    return model(ids, use_cache=True, **{CACHE_KEYWORD: cache}, **options).logits


def parts(cache):
    """Tokens of each segment of a layer, then of its tail: the same in all layers."""
    of_layers = [[*(s.store.tokens for s in layer.segments), layer.tail] for layer in cache.folded_layers]
    assert all(found == of_layers[0] for found in of_layers)
    return of_layers[0]


def exact(cache):
    """A cache that goes on from here and folds nothing more."""
    fork = cache.fork()
    fork.keep_exact()
    return fork


def tightest(model, method, ids, mask=None):
    """A prompt folded within the smallest of some budgets that pays for it."""
    for keep in (0.12, 0.2, 0.3, 0.4):
        if getattr(method, "keep", None) is None:
            break
        try:
            return fold(model, ids, replace(method, keep=keep), mask)
        except BudgetError:
            pass
    return fold(model, ids, method, mask)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_turns_of_every_length(name, padded):
    model, ids, mask = tiny_model("llama"), prompt(200, 2), None
    if padded:
        ids, mask = left_pad(ids, [0, 10])
    first = tightest(model, EVERY[name], ids, mask)
    for tokens in (2, 5, 20, 60):
        later = prompt(tokens, 2, seed=tokens)
        if padded:
            later, more = left_pad(later, [tokens // 2, 0])
            more = torch.cat([mask, more], 1)
        cache, twin = first.fork(), exact(first)
        wanted = read(model, twin, later, more if padded else None)
        assert torch.equal(read(model, cache, later, more if padded else None), wanted)
        assert cache.get_seq_length() == 200 + tokens
        assert_counted(cache)
        told, found = cache.report[-1], parts(cache)
        assert len(cache.report) == 2 and told["folded"] == (len(found) == 3)
        if not told["folded"]:
            assert told["why"]
            wide = torch.cat([more, more.new_ones(2, 1)], 1) if padded else None
            step = prompt(1, 2, seed=9)
            assert torch.equal(read(model, cache, step, wide), read(model, twin, step, wide))


@pytest.mark.parametrize("name", EVERY)
def test_generating_after_a_turn(name):
    model = tiny_model("llama")
    first = tightest(model, EVERY[name], prompt(200))
    for tokens in (5, 20, 60):
        cache = first.fork()
        question = torch.cat([prompt(200), prompt(tokens, seed=1)], 1)
        ids = generate(model, question, cache, max_new_tokens=4)
        assert cache.get_seq_length() == ids.shape[1] - 1
        assert_counted(cache)


@tight
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("told", [True, False])
def test_a_turn_that_stayed_exact_is_folded_with_the_next(name, chunk, told, tmp_path):
    model, method, few = tiny_model("llama"), TIGHT[name], FEW[name]
    cache = fold(model, prompt(200), method)
    read(model, cache, prompt(1, seed=1))
    later = prompt(few, seed=2)
    if told:
        cache.expect(201 + few)
    for piece in later.split(chunk or few, 1):
        read(model, cache, piece)
    assert parts(cache) == [200, 1 + few] and not cache.report[-1]["folded"]
    assert "budget" in cache.report[-1]["why"]
    cache.save(tmp_path / "cache.kvf")
    loaded, long = load(tmp_path / "cache.kvf", model), prompt(300, seed=3)
    assert parts(loaded) == parts(cache) and loaded.report == cache.report
    for one in (cache, loaded):
        if told:
            one.expect(501 + few)
    wanted = read(model, exact(cache), long)
    for one in (cache, loaded):
        assert torch.equal(read(model, one, long), wanted)
        assert parts(one) == [200, 301 + few, 0] and one.report[-1]["folded"]
        assert_counted(one)


@tight
def test_an_exact_turn_is_folded_while_an_answer_grows(name):
    model, method = tiny_model("llama"), TIGHT[name]
    cache = fold(model, prompt(200), method)
    generate(model, torch.cat([prompt(200), prompt(FEW[name], seed=1)], 1), cache, max_new_tokens=60)
    assert all(layer.tail < 2 * method.block for layer in cache.folded_layers)
    assert not cache.report[1]["folded"] and all(entry["folded"] for entry in cache.report[2:])
    assert_counted(cache)


@tight
@pytest.mark.parametrize("late", [True, False])
def test_a_conversation_that_begins_with_few_tokens(name, late, monkeypatch):
    if late:
        monkeypatch.setattr(caches, "folds_late", lambda view: not view.generated and view.previous is None)
    model, method = tiny_model("llama"), TIGHT[name]
    cache = FoldedCache(method, model.config)
    read(model, cache, prompt(method.shortest))
    for turn in (1, 2):
        read(model, cache, prompt(5, seed=turn))
    assert parts(cache) == [method.shortest + 10]
    assert "budget" in cache.report[-1]["why"] and len(cache.report) == 3
    read(model, cache, prompt(300, seed=3))
    assert parts(cache) == [method.shortest + 310, 0]
    assert_counted(cache)


@pytest.mark.parametrize("refolds", [False, True])
def test_generated_tokens_before_anything_is_folded(refolds, gates_file, monkeypatch):  # noqa: F811
    """A block that its budget cannot pay for is tried again when another is complete, not at every step."""
    model, tries = tiny_model("llama"), []
    method = TIGHT["rdkv"]
    if refolds:
        method = DBTrimKV(keep=0.006, gates=gates_file(model), buffer=40, sinks=0, recent=0, least=0)
    folds = type(method).fold
    monkeypatch.setattr(
        type(method), "fold", lambda self, views: tries.append(views[0].layer_idx) or folds(self, views)
    )
    cache = FoldedCache(method, model.config)
    cache.watch(model)
    generate(model, prompt(8), cache, max_new_tokens=90)
    told = [entry["folded"] for entry in cache.report if entry["generated"]]
    if refolds:  # all together, twice as many tokens
        assert parts(cache) == [80, 17]
        assert told == [False, True] and tries == [0, 0]
    else:
        assert parts(cache) == [97]
        assert told and not any(told) and tries == [0] * len(told) and len(told) < 97 // method.block


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("reopened", [True, False])
def test_from_the_layer_that_is_beyond_the_budget_on_all_stay_exact(failing, reopened, monkeypatch):
    """Layers may differ in what they cost; each of them goes on."""
    folds, model, method = SnapKV.fold, tiny_model("llama"), SnapKV(keep=0.3, window=8)

    def fail(self, views):
        if views[0].layer_idx == failing:
            raise BudgetError("the budget is too small")
        return folds(self, views)

    cache = FoldedCache(method, model.config)
    read(model, cache, prompt(100))
    if not reopened:
        read(model, cache, prompt(1, seed=1))
    before = cache.get_seq_length()
    twin = exact(cache)
    later, long = prompt(30, seed=2), prompt(80, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(SnapKV, "fold", fail)
        assert torch.equal(read(model, cache, later), read(model, twin, later))
    for layer in cache.folded_layers[failing:]:
        assert layer.folded_tokens == 100 and torch.equal(
            layer.keys, twin.folded_layers[layer.layer_idx].keys
        )
        assert [s.store for s in layer.segments] == [
            s.store for s in twin.folded_layers[layer.layer_idx].segments
        ]
    for layer in cache.folded_layers[:failing]:
        assert layer.tail == 0
    told = cache.report[-1]
    assert told["folded"] == (failing > 0) and told["why"] == "the budget is too small"
    assert not failing or told["exact_layers"] == [*range(failing, 3)]
    read(model, cache, long)
    assert cache.get_seq_length() == before + 110
    assert all(layer.tail == 0 for layer in cache.folded_layers)
    assert_counted(cache)


def test_a_first_prompt_is_refused_whole():
    model = tiny_model("llama")
    cache = FoldedCache(TIGHT["rdkv"], model.config)
    with pytest.raises(BudgetError):
        read(model, cache, prompt(20))
    assert not cache.get_seq_length() and not cache.report
