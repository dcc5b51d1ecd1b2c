"""What is folded and asked, and answers from folded caches, against plain token-by-token loops."""

from __future__ import annotations

import random

import pytest
import torch

from kvfold import KIVI, RDKV, Full, SnapKV
from kvfold.errors import KvfoldError
from kvfold.evaluate.metrics import fidelity
from kvfold.evaluate.prefill import Prefill, continue_logits
from kvfold.evaluate.protocol import Reader, Script, room, script_of
from kvfold.evaluate.tasks import make_task
from kvfold.evaluate.tasks.base import Sample, Turn
from kvfold.hf import CACHE_KEYWORD

from .conftest import Letters

SAMPLE = Sample(
    context="Once there was a lamp.",
    turns=(Turn("What was there?", ("lamp",), "There was", 5), Turn("When?", ("Once",), "", 3)),
    instruction="Read.",
)


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_chat_prompt(tokenizer):
    script = script_of(tokenizer, SAMPLE, "unseen", "chat")
    assert text_of(tokenizer, script.folded) == "<s>user\nRead.\n\nOnce there was a lamp."
    assert text_of(tokenizer, script.asked[0]) == "\n\nWhat was there?</s>\n<s>assistant\nThere was"
    assert text_of(tokenizer, script.asked[1]) == "</s>\n<s>user\nWhen?</s>\n<s>assistant\n"
    assert script.limits == [5, 3] and script.stop == ""


def test_plain_prompt(tokenizer):
    script = script_of(tokenizer, SAMPLE, "unseen", "plain")
    assert text_of(tokenizer, script.folded) == "Read.\n\nOnce there was a lamp."
    assert text_of(tokenizer, script.asked[0]) == "\n\nQuestion: What was there?\nAnswer: There was"
    assert script.stop == "\n\n"


@pytest.mark.parametrize("form", ["chat", "plain"])
def test_in_view_is_the_same_text_and_leaves_one_token_to_read(tokenizer, form):
    unseen, seen = (script_of(tokenizer, SAMPLE, view, form) for view in ("unseen", "in view"))
    assert seen.folded + seen.asked[0] == unseen.folded + unseen.asked[0]
    assert len(seen.asked[0]) == 1 and seen.asked[1:] == unseen.asked[1:]


def test_a_published_prompt_stays_as_it_is(tokenizer):
    sample = Sample(context="Code:\nx = 1", turns=(Turn("\nNext line:\n", ("y",), "", 4),), verbatim=True)
    script = script_of(tokenizer, sample, "unseen", "plain")
    assert text_of(tokenizer, script.folded + script.asked[0]) == "Code:\nx = 1\nNext line:\n"
    assert script.stop == ""
    chat = script_of(tokenizer, sample, "unseen", "chat")
    assert text_of(tokenizer, chat.folded + chat.asked[0]) == (
        "<s>user\nCode:\nx = 1\nNext line:\n</s>\n<s>assistant\n"
    )


def test_a_continuation_begins_with_the_last_token_of_the_document(tokenizer):
    sample = Sample(context="Once there was ", continuation="a lamp")
    script = script_of(tokenizer, sample, "unseen", "plain")
    assert text_of(tokenizer, script.folded + script.asked[0]) == "Once there was"
    assert len(script.asked[0]) == 1
    assert text_of(tokenizer, script.continuation) == " a lamp"


def test_images_and_empty_samples_are_refused(tokenizer):
    with pytest.raises(KvfoldError, match="images"):
        script_of(tokenizer, Sample(context="a", turns=SAMPLE.turns, images=(b"",)), "unseen", "chat")
    with pytest.raises(KvfoldError, match="neither"):
        script_of(tokenizer, Sample(context="a"), "unseen", "chat")


@pytest.mark.parametrize("form", ["chat", "plain"])
@pytest.mark.parametrize("label", ["needle", "letters"])
def test_prompts_fill_the_length_asked_for(tokenizer, form, label, letters):
    left, count = room(tokenizer, 400, form)
    task = make_task(label)
    sample = task.sample(0, left, count, random.Random(0))
    script = script_of(tokenizer, sample, "unseen", form)
    used = len(script.folded + script.asked[0]) - count(sample.turns[0].answer_prefix)
    assert 360 <= used <= 400


def dialogue(model, tokenizer, turns, method, tokens=300, exact=True, in_view=False):
    """A prefill folded by a method, the full cache's own dialogue, and a reader."""
    left, count = room(tokenizer, tokens, "chat")
    sample = Letters(turns=turns).sample(0, left, count, random.Random(3))
    script = script_of(tokenizer, sample, "in view" if in_view else "unseen", "chat")
    prefill = Prefill(model, torch.tensor([script.folded]), [method, Full()])
    reader = Reader(model, tokenizer, exact=True)
    cache, chunks = prefill.fold(Full()), []
    for asked, limit in zip(script.asked, script.limits):
        if chunks:
            asked = reader.unread(chunks[-1][1]) + asked
        chunks.append((asked, reader.answer(cache, asked, limit, script.stop)))
    return prefill, script, chunks, Reader(model, tokenizer, exact)


@pytest.mark.parametrize("in_view", [False, True])
def test_the_full_cache_answers_as_the_model_does(model, tokenizer, in_view):
    prefill, script, chunks, reader = dialogue(model, tokenizer, 2, Full(), in_view=in_view)
    ids, rows, right = list(script.folded), [], []
    for asked, answer in chunks:
        ids += asked
        rows += range(len(ids) - 1, len(ids) - 1 + len(answer))
        right += answer
        ids += answer[:-1]
    with torch.no_grad():
        whole = model(torch.tensor([ids])).logits[0, rows]
    # Greedy: each answer token is the most likely one after everything before it.
    assert whole.argmax(-1).tolist() == right
    torch.testing.assert_close(reader.forced(prefill.fold(Full()), chunks), whole, atol=2e-3, rtol=1e-3)


def slow_answers(model, tokenizer, cache, script, exact):
    """Greedy answers, every answer token by a call of its own."""
    answers, unread = [], []
    with torch.no_grad():
        for asked, limit in zip(script.asked, script.limits):
            cache.keep_exact()
            step, answer = unread + asked, []
            while True:
                logits = model(torch.tensor([step]), **{CACHE_KEYWORD: cache}).logits
                answer.append(int(logits[0, -1].argmax()))
                if len(answer) == limit or answer[-1] == tokenizer.eos_token_id:
                    break
                cache.keep_exact(exact)
                step = answer[-1:]
            unread = [] if answer[-1] == tokenizer.eos_token_id else answer[-1:]
            answers.append(answer)
    return answers


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "method",
    [SnapKV(keep=0.12, window=4), RDKV(keep=0.06, window=8), KIVI(bits=2, group=16, residual=16)],
    ids=lambda method: method.name,
)
def test_confirmed_answers_are_the_greedy_ones(model, tokenizer, method, exact):
    prefill, script, chunks, reader = dialogue(model, tokenizer, 3, method, exact=exact)
    cache = prefill.fold(method)
    preferred = reader.forced(cache.fork(), chunks).argmax(-1).tolist()
    answers = reader.follow(cache.fork(), chunks, preferred, script)
    assert answers == slow_answers(model, tokenizer, cache, script, exact)


def test_some_of_those_answers_differ_from_the_full_cache(model, tokenizer):
    method = SnapKV(keep=0.12, window=4)
    prefill, script, chunks, reader = dialogue(model, tokenizer, 3, method)
    cache = prefill.fold(method)
    preferred = reader.forced(cache.fork(), chunks).argmax(-1).tolist()
    assert reader.follow(cache, chunks, preferred, script) != [answer for _, answer in chunks]
    assert reader.steps > 0


def test_generated_tokens_fold_only_while_generating(model, tokenizer):
    method = KIVI(bits=2, group=16, residual=16)
    prefill, script, _, _ = dialogue(model, tokenizer, 1, method)
    tails = {}
    for exact in (True, False):
        cache = prefill.fold(method)
        before = cache.layers[0].folded_tokens
        reader = Reader(model, tokenizer, exact)
        reader.ends = frozenset()
        made = reader.answer(cache, script.asked[0], 60, "")
        assert len(made) == 60
        tails[exact] = cache.layers[0].folded_tokens - before, cache.layers[0].tail
    assert tails[True][0] == 0
    assert tails[False][0] > 0 and tails[False][1] < 32
    assert sum(tails[True]) == sum(tails[False])


def test_an_answer_ends_at_the_context(model, tokenizer):
    method = Full()
    prefill, script, _, reader = dialogue(model, tokenizer, 1, method, tokens=600)
    reader.ends = frozenset()
    made = reader.answer(prefill.fold(method), script.asked[0], 500, "")
    used = len(script.folded) + len(script.asked[0])
    assert len(made) == model.config.max_position_embeddings - used


def test_an_answer_ends_at_the_stop_text(tokenizer, model):
    reader = Reader(model, tokenizer, exact=True)
    ids = tokenizer("\n\nyes\n\nno", add_special_tokens=False)["input_ids"]
    assert reader.text(ids, "\n\n") == "\n\nyes"
    assert Script([1], [[2]], [4]).tokens == 6


def test_fidelity_by_its_definition():
    torch.manual_seed(0)
    full, folded = torch.randn(70, 11) * 3, torch.randn(70, 11) * 3
    folded[:40] = full[:40] + 0.1 * torch.randn(40, 11)
    tokens = torch.randint(0, 11, (70,))
    found = fidelity(full, folded, tokens)
    kl = nll = full_nll = same = error = size = 0.0
    for p, q, token in zip(full.double(), folded.double(), tokens.tolist()):
        a, b = p.exp() / p.exp().sum(), q.exp() / q.exp().sum()
        kl += float((a * (a / b).log()).sum())
        nll -= float(b[token].log())
        full_nll -= float(a[token].log())
        same += int(p.argmax()) == int(q.argmax())
        error += float(((q - q.mean()) - (p - p.mean())).pow(2).sum())
        size += float((p - p.mean()).pow(2).sum())
    assert found.kl == pytest.approx(kl / 70, rel=1e-5)
    assert found.nll == pytest.approx(nll / 70, rel=1e-5)
    assert found.full_nll == pytest.approx(full_nll / 70, rel=1e-5)
    assert found.top1 == same / 70 and 0.5 < found.top1 < 1
    assert found.logit_error == pytest.approx((error / size) ** 0.5, rel=1e-5)
    assert found.tokens == 70


def test_fidelity_refuses_nan():
    logits = torch.zeros(2, 3)
    with pytest.raises(KvfoldError, match="NaN"):
        fidelity(logits, torch.full((2, 3), torch.nan), torch.zeros(2, dtype=torch.int64))


def test_a_method_sees_the_same_beside_others_as_alone(model, tokenizer):
    """Queries of the window, samples of them, and their mass: whatever the others ask for."""
    from kvfold import PublishedRDKV, fold

    methods = [
        RDKV(keep=0.3, window=8, sampled=50),
        RDKV(keep=0.3, window=16, sampled=7),
        PublishedRDKV(keep=0.3, queries="all"),
        SnapKV(keep=0.3),
    ]
    ids = torch.randint(2, 250, (1, 300), generator=torch.Generator().manual_seed(1))
    prefill = Prefill(model, ids, methods)
    for method in methods:
        alone, beside = fold(model, ids, method), prefill.fold(method)
        for one, other in zip(alone.folded_layers, beside.folded_layers, strict=True):
            first, second = one.segments[0].store.tensors(), other.segments[0].store.tensors()
            assert first.keys() == second.keys()
            for name in first:
                torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


def test_a_fold_of_a_shared_prefill_saves_like_any_other(model, tmp_path):
    from kvfold import fold, load

    ids = torch.randint(2, 250, (1, 120), generator=torch.Generator().manual_seed(2))
    method = RDKV(keep=0.3, window=8)
    Prefill(model, ids, [method]).fold(method).save(tmp_path / "shared.kvf")
    fold(model, ids, method).save(tmp_path / "own.kvf")
    shared, own = load(tmp_path / "shared.kvf", model), load(tmp_path / "own.kvf", model)
    assert shared.prompt_hash == own.prompt_hash
    assert shared.ledger() == own.ledger()
    torch.testing.assert_close(
        continue_logits(model, shared, ids[:, :3]), continue_logits(model, own, ids[:, :3])
    )
