"""Masks that are not left padding, and caches that live side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from transformers import DynamicCache

import kvfold
from kvfold import RDKV, Full, SnapKV
from kvfold.hf.support import CACHE_KEYWORD
from tests.tiny import prompt, tiny_model

TOKENS = 60


def right_padded() -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 50:] = 0
    return mask


def with_holes() -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, 10:14] = 0
    mask[1, :3] = 0
    return mask


def next_logits(model, cache, ids, mask):
    """Logits of one more token after a masked prompt."""
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    positions = mask.cumsum(-1)[:, -1:] - 1
    with torch.no_grad():
        return model(
            input_ids=ids[:, :1], attention_mask=mask, position_ids=positions, **{CACHE_KEYWORD: cache}
        ).logits


@pytest.mark.parametrize("mask", [right_padded(), with_holes()], ids=["right padded", "holes"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "glm4"])
def test_lossless_under_any_mask(name, mask):
    model, ids = tiny_model(name), prompt(TOKENS, 2)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
            **{CACHE_KEYWORD: stock},
        )
    folded = kvfold.fold(model, ids, Full(), attention_mask=mask)
    torch.testing.assert_close(
        next_logits(model, folded, ids, mask), next_logits(model, stock, ids, mask), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("mask", [right_padded(), with_holes()], ids=["right padded", "holes"])
def test_a_masked_row_folds_as_it_would_alone(mask):
    """What is masked is neither kept nor paid for: each row is folded as its real tokens by themselves."""
    model, ids, method = tiny_model("llama"), prompt(TOKENS, 2), RDKV(keep=0.5, window=16)
    together = kvfold.fold(model, ids, method, attention_mask=mask)
    assert together.ledger().folded_ratio <= 0.5
    logits = next_logits(model, together, ids, mask)
    for row in range(2):
        alone = kvfold.fold(model, ids[row : row + 1, mask[row].bool()], method)
        with torch.no_grad():
            expected = model(input_ids=ids[row : row + 1, :1], **{CACHE_KEYWORD: alone}).logits
        torch.testing.assert_close(logits[row : row + 1], expected, atol=2e-2, rtol=2e-2)


def test_threads_do_not_meet():
    model, method = tiny_model("llama"), RDKV(keep=0.5, window=16)

    def answer(seed: int) -> torch.Tensor:
        ids = prompt(TOKENS, seed=seed)
        cache = kvfold.fold(model, ids, method)
        return model.generate(
            torch.cat([ids, ids[:, :1]], 1), max_new_tokens=8, do_sample=False, **{CACHE_KEYWORD: cache}
        )

    expected = [answer(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(answer, range(6)))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_the_inner_attach_decides():
    model, ids = tiny_model("llama"), prompt(TOKENS)
    with kvfold.attach(model, Full()):
        before = model.generate(ids, max_new_tokens=6, do_sample=False)
        with kvfold.attach(model, SnapKV(keep=0.3, window=8)):
            inner = model.generate(ids, max_new_tokens=6, do_sample=False)
        after = model.generate(ids, max_new_tokens=6, do_sample=False)
    with kvfold.attach(model, SnapKV(keep=0.3, window=8)):
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(before, after)
    assert torch.equal(inner, expected)


def test_threads_that_attach_at_once_keep_apart():
    """Blocks that end in the order they began, each thread's calls for its own, other threads' for the newest."""
    model, barrier = tiny_model("llama"), Barrier(2, timeout=60)
    methods = [SnapKV(keep=0.3, window=8), Full()]

    def work(number):
        if number:
            barrier.wait()  # the other is open
        with kvfold.attach(model, methods[number]) as folding:
            if not number:
                barrier.wait()
            barrier.wait()
            tokens = model.generate(prompt(TOKENS, seed=number), max_new_tokens=6, do_sample=False)
            barrier.wait()
            if number:
                with ThreadPoolExecutor(1) as other:
                    other.submit(model.generate, prompt(TOKENS), max_new_tokens=1).result()
                assert folding.cache.get_seq_length() == TOKENS
                barrier.wait()
        if not number:
            barrier.wait()  # this one is closed
        return tokens, folding.cache.method

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    assert "generate" not in vars(model)
    for number, (tokens, method) in enumerate(found):
        assert method == methods[number]
        with kvfold.attach(model, method):
            expected = model.generate(prompt(TOKENS, seed=number), max_new_tokens=6, do_sample=False)
        assert torch.equal(tokens, expected)


def test_a_generate_of_the_models_own_is_given_back():
    model = tiny_model.__wrapped__("llama")
    own, seen = model.generate, []

    def generate(*args, **kwargs):
        seen.append(len(args))
        return own(*args, **kwargs)

    model.generate = generate
    with kvfold.attach(model, Full()) as outer, kvfold.attach(model, Full()) as inner:
        model.generate(prompt(TOKENS), max_new_tokens=1)
    assert model.generate is generate and len(seen) == 1
    assert outer.cache is None and inner.cache.get_seq_length() == TOKENS
