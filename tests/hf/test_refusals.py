"""What a method cannot fold is refused before any work, whichever way it comes; model and cache stay as they were."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from kvfold import attach, fold, stream
from kvfold.errors import BudgetError, NonFiniteError, UnsupportedModelError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, bridge
from kvfold.methods import RDKV, TOVA, XKV, Full, KVSculpt, ShadowKV, TurboQuant
from tests.hf.test_hybrid import hybrid
from tests.hf.test_methods import METHODS, READ_SOME, SELECTIONS
from tests.tiny import ARCHITECTURES, left_pad, prompt, tiny_model

EVERY = {**METHODS, **SELECTIONS, **READ_SOME}
KEYS = {
    "kvsculpt": KVSculpt(keep=0.001),
    "shadowkv": ShadowKV(),
    "xkv": XKV(keep=0.5, sparse_budget=64),
    "kvsculpt, chained": KVSculpt(keep=0.5) >> TurboQuant(bits=4),
}
"""They need the keys of each head, which latent attention does not cache."""
SMALL = {
    name: replace(method, keep=0.0001) for name, method in EVERY.items() if getattr(method, "keep", None)
} | {"chain": replace(SELECTIONS["chain"], first=replace(SELECTIONS["chain"].first, keep=0.0001))}
"""No prompt is long enough for these budgets."""


@contextmanager
def no_forward(model, first=0):
    """Inside, no layer from the first that folds on may be run through; the model answers as before."""
    question, begun = prompt(9, seed=8), []
    expected = generate(model, question, DynamicCache(config=model.config))
    parts = [model] if first is None else [layer.mlp for layer in model.model.layers[first:]]
    hooks = [part.register_forward_pre_hook(lambda *_: begun.append(1)) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert not begun
    assert torch.equal(expected, generate(model, question, DynamicCache(config=model.config)))


def generate(model, ids, cache=None, **options):
    given = {} if cache is None else {CACHE_KEYWORD: cache}
    return model.generate(ids, max_new_tokens=3, do_sample=False, **given, **options)


def unused(cache, model):
    """Whether a cache is as it was made."""
    fresh = FoldedCache(Full(), model.config)
    assert cache.ledger().total in (0, fresh.ledger().total)
    return not cache.report and not cache.get_seq_length()


# ---- latents ----


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("method", KEYS.values(), ids=KEYS)
def test_latents_are_refused_by_name(architecture, method):
    model = tiny_model(architecture, **ARCHITECTURES["deepseek_v3"])
    calls = [
        lambda: fold(model, prompt(90), method),
        lambda: attach(model, method).__enter__(),
        lambda: stream(model, prompt(90), method),
        lambda: FoldedCache(method, model.config),
    ]
    with no_forward(model, None):
        for call in calls:
            with pytest.raises(
                UnsupportedModelError, match=rf"{method.parts[0].name} .*latent attention \(MLA\)"
            ):
                call()
    assert not bridge.installed() and "generate" not in vars(model)
    cache = FoldedCache(method)
    with no_forward(model), pytest.raises(UnsupportedModelError, match="latent attention"):
        generate(model, prompt(90), cache)
    assert unused(cache, model)


@pytest.mark.parametrize("method", EVERY.values(), ids=EVERY)
def test_latents_are_folded_or_refused_before_any_work(method):
    """Of all methods: what is not said by `refuses_latent` must be no surprise after a layer has been read."""
    model = tiny_model("deepseek_v3")
    if all(part.refuses_latent is None for part in method.parts):
        assert fold(model, prompt(90), method).report[0]["folded"]
    else:
        with no_forward(model, None), pytest.raises(UnsupportedModelError, match=method.name):
            fold(model, prompt(90), method)


# ---- budgets ----


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("method", SMALL.values(), ids=SMALL)
def test_budgets_that_cannot_be_met(architecture, method):
    model = tiny_model(architecture)
    if architecture == "deepseek_v3" and any(part.refuses_latent for part in method.parts):
        return
    ids, mask = left_pad(prompt(90, 2), [20, 0])
    with pytest.raises(BudgetError) as said:
        fold(model, ids, method, mask)
    with attach(model, method) as folding:
        with no_forward(model, None):
            for given in ({"attention_mask": mask}, {"attention_mask": mask, "prefill_chunk_size": 31}):
                with pytest.raises(BudgetError) as error:
                    model.generate(ids, **given)
                assert str(error.value) == str(said.value) and folding.cache is None
            with pytest.raises(BudgetError):
                model.generate(prompt(90))
            with pytest.raises(BudgetError):
                model.generate(inputs_embeds=torch.zeros(1, 90, 64))
        # A prompt that is not folded at all passes.
        generate(model, prompt(method.shortest))
        assert not folding.cache.report[0]["folded"]
    with no_forward(model, None), pytest.raises(BudgetError) as error:
        stream(model, ids, method, attention_mask=mask)
    assert str(error.value) == str(said.value)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("chunk", [None, 31, 10])
@pytest.mark.parametrize("method", [SMALL["rdkv"], SMALL["xkv"]], ids=lambda method: method.name)
def test_a_cache_that_was_told_its_prompt_refuses_it(architecture, configured, chunk, method):
    """Where `generate` finds the padding, only its first forward call tells how long a prompt is."""
    model = hybrid() if architecture == "qwen3_next" else tiny_model(architecture)
    configured |= architecture == "qwen3_next"
    first = FoldedCache(method, model.config).folded_layers[0].layer_idx
    ids, mask = left_pad(prompt(90, 2), [20, 0])
    with pytest.raises(BudgetError) as said:
        fold(model, ids, method, mask)
    cache = FoldedCache(method, model.config if configured else None, prompt_tokens=90)
    for given in ({}, {"attention_mask": mask}):
        with no_forward(model, first), pytest.raises(BudgetError) as error:
            generate(model, ids, cache, prefill_chunk_size=chunk, **given)
        if chunk != 10:  # of the first row that is padding alone
            assert str(error.value) == str(said.value)
        assert cache.prompt_end == 90 and unused(cache, model)
    with attach(model, method), no_forward(model, first), pytest.raises(BudgetError):
        generate(model, ids, prefill_chunk_size=chunk)
    # The cache serves for what it can fold.
    cache.method = Full()
    expected = generate(model, ids, DynamicCache(config=model.config), attention_mask=mask)
    assert torch.equal(expected, generate(model, ids, cache, attention_mask=mask))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("scope", ["layer", "stream", "model"])
def test_a_cache_that_was_told_nothing_is_empty_after_a_budget_too_small(architecture, scope):
    """More of the prompt might have come: only its fold finds out."""
    model, cache = tiny_model(architecture), FoldedCache(RDKV(keep=0.001, scope=scope))
    with pytest.raises(BudgetError):
        generate(model, prompt(90), cache)
    assert unused(cache, model)
    cache.method = Full()
    expected = generate(model, prompt(40), DynamicCache(config=model.config))
    assert torch.equal(expected, generate(model, prompt(40), cache))


def test_a_later_turn_and_what_stays_exact_are_not_refused():
    model, method = tiny_model("llama"), TOVA(keep=0.3)
    cache = fold(model, prompt(90), method)
    assert generate(model, torch.cat([prompt(90), prompt(40, seed=1)], 1), cache).shape[1] == 133
    cache = FoldedCache(TOVA(keep=0.0001))
    cache.keep_exact()
    assert generate(model, prompt(90), cache).shape[1] == 93 and not cache.report


# ---- numbers ----


@pytest.mark.parametrize("method", EVERY.values(), ids=EVERY)
def test_views_made_by_hand_must_be_numbers(method, monkeypatch):
    seen = []

    def spy(self, views):
        seen.extend(views)
        return Full().fold(views)

    with monkeypatch.context() as patch:
        patch.setattr(type(method), "fold", spy)
        fold(tiny_model("llama"), prompt(90), method)
    count = 1 + next(number for number in range(len(seen)) if method.complete(number, len(seen)))
    for part in ("keys", "values"):
        for token, bad in ((0, torch.inf), (50, torch.nan), (89, -torch.inf)):
            views = [replace(view, account={}) for view in seen[:count]]
            states = getattr(views[-1], part).clone()
            states[0, 1, token, 3] = bad
            views[-1] = replace(views[-1], **{part: states})
            with pytest.raises(
                NonFiniteError, match=f"layer {count - 1}: the {part} to fold hold NaN or infinity"
            ):
                method.fold(views)
