"""One folded cache, many conversations: its memory is shared, and nothing touches it."""

from __future__ import annotations

import hashlib

import pytest
import torch

import kvfold
from kvfold import KIVI, RDKV, BlockGTQ, Full, KVSculpt, fold, load
from kvfold.hf import CACHE_KEYWORD
from tests.tiny import prompt, tiny_model

METHODS = [Full(), KIVI(bits=4), RDKV(keep=0.4), BlockGTQ(bits=4), KVSculpt(keep=0.5, steps=2)]


def held(cache):
    """Every tensor of a cache: those of the folded prompt, and the tails."""
    folded, tails = {}, {}
    for index, layer in enumerate(cache.layers):
        tails.update({(index, n): tensor for n, tensor in enumerate(layer.tail_tensors())})
        for number, segment in enumerate(layer.segments):
            named = segment.store.tensors().items()
            folded.update({(index, number, name): tensor for name, tensor in named})
    return folded, tails


def storage(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_conversations_share_the_folded_prompt_and_leave_it_as_it_was(method, tmp_path):
    model, ids, path = tiny_model("llama"), prompt(150), tmp_path / "doc.kvf"
    fold(model, ids, method).save(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    cache = load(path, model)
    folded, tails = held(cache)
    before = {key: tensor.clone() for key, tensor in {**folded, **tails}.items()}

    answers, forks = [], []
    for question in (prompt(7, seed=1), prompt(9, seed=2), prompt(7, seed=1)):
        fork = cache.fork()
        mine, tail = held(fork)
        # Until it is written to, all of it is the loaded cache's memory.
        assert storage([*mine.values(), *tail.values()]) == storage([*folded.values(), *tails.values()])
        whole = torch.cat([ids, question], 1)
        answers.append(model.generate(whole, max_new_tokens=8, do_sample=False, **{CACHE_KEYWORD: fork}))
        forks.append(fork)
    assert torch.equal(answers[0], answers[2])

    # All alive at once, they hold the prompt once: beyond the loaded cache there are only their new tokens.
    mine = storage(folded.values())
    for fork in forks:
        assert mine.items() <= storage(held(fork)[0].values()).items()
        assert fork.get_seq_length() > cache.get_seq_length()
    after_folded, after_tails = held(cache)
    for key, tensor in {**after_folded, **after_tails}.items():
        assert torch.equal(tensor, before[key]), key
        assert tensor.data_ptr() == {**folded, **tails}[key].data_ptr()

    again = tmp_path / "again.kvf"
    cache.save(again)
    assert hashlib.sha256(again.read_bytes()).hexdigest() == digest
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_the_fast_loop_leaves_it_as_it_was_too():
    model, ids = tiny_model("llama"), prompt(100)
    cache = fold(model, ids, KIVI(bits=4))
    before = [tensor.clone() for part in held(cache) for tensor in part.values()]
    whole = torch.cat([ids, prompt(5, seed=1)], 1)
    first, second = (kvfold.generate(model, whole, cache.fork(), max_new_tokens=6) for _ in range(2))
    assert torch.equal(first, second)
    after = [tensor for part in held(cache) for tensor in part.values()]
    assert len(before) == len(after) and all(map(torch.equal, before, after))
