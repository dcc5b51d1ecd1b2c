"""Eviction at fixed addresses: what the engine keeps in pages is what evicting step by step keeps."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from kvfold import DBTrimKV, fold
from kvfold.engine import Engine, stream
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from kvfold.ledger import tensor_bytes
from tests.methods.test_dbtrimkv import Account, gates_file, kept_by  # noqa: F401
from tests.tiny import left_pad, prompt, tiny_model

METHODS = {
    "tokens": dict(tokens=12, buffer=10),
    "total": dict(total=50, least=0, buffer=5),
    "memory": dict(memory=5000, buffer=9),
    "keep": dict(keep=0.3, buffer=7, lookahead=3, sinks=2, recent=4),
    "threshold": dict(threshold=0.5, buffer=12),
    "head": dict(tokens=20, scope="head", buffer=6),
    "no eviction": dict(tokens=20, buffer=0),
}


def run(model, ids, method, reserve=9, **options):
    """Decode dry; the iterator, at its end, and the most that was reserved."""
    options = {"do_sample": False, **options}
    decoding = stream(model, ids, method, engine=Engine(graph="dry", reserve=reserve), **options)
    sizes = []
    for _ in decoding:
        if decoding.step is not None:
            assert decoding.step.fixed.paging is not None
            sizes.append(decoding.cache.ledger().by_purpose["reserved"])
    assert sizes and decoding.reason == "it was not asked for"
    return decoding, sizes


@pytest.mark.parametrize("which", [*METHODS, "sliding"])
def test_same_tokens_and_same_evictions(which, gates_file):  # noqa: F811
    """A padded batch against transformers' loop, which writes what is kept anew at each eviction."""
    model = tiny_model("gemma3_text" if which == "sliding" else "llama")
    options = METHODS["keep" if which == "sliding" else which]
    ids, mask = left_pad(prompt(60, 2), [20, 0])
    method = DBTrimKV(gates=gates_file(model), **options)
    reference = FoldedCache(method, prompt_tokens=60)
    reference.watch(model)
    loop = {CACHE_KEYWORD: reference, "attention_mask": mask, "do_sample": False, "max_new_tokens": 30}
    tokens = model.generate(ids, **loop)
    decoding, _ = run(model, ids, method, attention_mask=mask, max_new_tokens=30)
    cache = decoding.cache
    assert torch.equal(decoding.sequences, tokens)
    assert cache.report == reference.report
    assert cache.ledger() == reference.ledger()
    for one, two in zip(cache.folded_layers, reference.folded_layers, strict=True):
        assert one.get_seq_length() == two.get_seq_length() == 89 and one.tail == two.tail
        stores = one.segments[0].store, two.segments[0].store
        for buffer, tensor in stores[0].buffers.items():
            assert torch.allclose(tensor.float(), stores[1].buffers[buffer].float(), atol=1e-3)
        assert torch.equal(*(store.buffers["positions"] for store in stores))
        # A kept state that rounds to the next of 16 bits moves what comes after it.
        assert torch.allclose(one.keys, two.keys, atol=1e-3)
        assert torch.allclose(one.values, two.values, atol=1e-3)
        assert (one.gates is None) == (two.gates is None or not two.tail)
    # And on, the other way: what one engine left, the other's loop goes on with.
    more = torch.cat([tokens, prompt(1, 2, seed=3)], 1)
    mask = torch.cat([mask, mask.new_ones(2, 31)], 1)
    loop |= {"attention_mask": mask, "max_new_tokens": 9}
    ends = [model.generate(more, **{**loop, CACHE_KEYWORD: c}) for c in (cache, reference)]
    assert torch.equal(*ends)


def test_a_prompt_too_short_to_evict_from(gates_file):  # noqa: F811
    """Its first tokens are read step by step, then more is given to it until its budget is full."""
    model, ids = tiny_model("llama"), prompt(7)
    method = DBTrimKV(tokens=25, gates=gates_file(model), buffer=6)
    reference = FoldedCache(method, prompt_tokens=7)
    reference.watch(model)
    tokens = model.generate(ids, **{CACHE_KEYWORD: reference}, do_sample=False, max_new_tokens=50)
    decoding, sizes = run(model, ids, method, max_new_tokens=50)
    assert torch.equal(decoding.sequences, tokens)
    assert decoding.cache.report == reference.report and decoding.cache.ledger() == reference.ledger()
    assert sizes[0] < sizes[-1]


def test_what_is_kept_by_a_slow_account(gates_file):  # noqa: F811
    model, ids = tiny_model("llama"), prompt(60, 2)
    path = gates_file(model)
    method = DBTrimKV(tokens=12, gates=path, buffer=10, sinks=0, least=0)
    account = Account(model, path, method, [0, 0])
    try:
        cache = fold(model, ids[:, :-1], method)
        account.evict(12 * 6)
        decoding = stream(model, ids, cache, engine=Engine(graph="dry"), do_sample=False, max_new_tokens=41)
        for number, _ in enumerate(decoding):
            if number % 10 == 9:  # 59 tokens were folded, one more is read for each that comes
                account.evict(12 * 6)
        assert cache.get_seq_length() == 100 and cache.folded_layers[0].tail == 1
        for row in range(2):
            assert kept_by(cache, row) == account.kept[row]
    finally:
        account.close()


def test_memory_does_not_grow(gates_file):  # noqa: F811
    """In one reservation, though it is for more tokens than `reserve`; and no tensor is alive that the ledger lacks."""
    model, ids = tiny_model("llama"), prompt(80)
    method = DBTrimKV(tokens=16, gates=gates_file(model), buffer=8)

    def live():
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    run(model, ids, method, max_new_tokens=10)
    decoding = stream(
        model, ids, method, engine=Engine(graph="dry", reserve=9), do_sample=False, max_new_tokens=60
    )
    sizes, steps = set(), set()
    for number, _ in enumerate(decoding):
        if decoding.step is not None:
            sizes.add(decoding.cache.ledger().total)
            steps.add(id(decoding.step))
        if number == 50:
            pool = decoding.step.fixed.paging.tensors()
            assert sum(map(tensor_bytes, pool)) == decoding.cache.ledger().by_purpose["reserved"]
            owned = {tensor.untyped_storage().data_ptr() for tensor in decoding.cache.reserved}
            held = live()
            assert sum(held[pointer] for pointer in owned) == decoding.cache.ledger().total
    assert len(steps) == 1 and len(sizes) == 1
    # 16 tokens in each of 6 heads, 8 to come and less than a page: two keys and values of 16 float32, position, log beta;
    # and what the gates of three layers will read of 8 tokens.
    assert max(sizes) <= 6 * (16 + 8 + 15) * (128 + 8) + 3 * 8 * 64 * 4 + 1000


def test_a_step_that_fails_midway(gates_file):  # noqa: F811
    model, ids = tiny_model("llama"), prompt(60)
    method = DBTrimKV(tokens=12, gates=gates_file(model), buffer=10)
    cache, calls = fold(model, ids[:, :-1], method), []
    twin = cache.fork()
    # 17 tokens are read.
    stream(model, ids, twin, engine=Engine(graph="dry"), do_sample=False, max_new_tokens=17).run()

    def fail(*_):
        calls.append(None)
        if len(calls) == 18:
            raise RuntimeError("out of memory, say")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        decoding = stream(model, ids, cache, engine=Engine(graph="dry"), do_sample=False, max_new_tokens=40)
        with pytest.raises(RuntimeError, match="say"):
            decoding.run()
    finally:
        handle.remove()
    assert not cache.reserved and cache.ledger() == twin.ledger()
    for one, two in zip(cache.folded_layers, twin.folded_layers, strict=True):
        assert one.get_seq_length() == two.get_seq_length() == 76
        assert torch.equal(one.keys, two.keys) and torch.equal(one.gates, two.gates)
        stores = one.segments[0].store.buffers, two.segments[0].store.buffers
        assert all(torch.equal(tensor, stores[1][name]) for name, tensor in stores[0].items())


def test_what_is_decoded_without_pages(gates_file):  # noqa: F811
    """Latents, which are expanded before attention, and tokens that are to stay exact."""
    model, ids = tiny_model("deepseek_v3"), prompt(60)
    method = DBTrimKV(tokens=12, gates=gates_file(model), buffer=10)
    decoding = stream(model, ids, method, engine=Engine(graph="dry"), do_sample=False, max_new_tokens=15)
    decoding.run()
    assert "latents" in decoding.reason
    model = tiny_model("llama")
    cache = fold(model, ids[:, :-1], DBTrimKV(tokens=12, gates=gates_file(model), buffer=10))
    cache.keep_exact()
    decoding = stream(model, ids, cache, engine=Engine(graph="dry"), do_sample=False, max_new_tokens=15)
    decoding.run()
    assert "exact" in decoding.reason and cache.folded_layers[0].tail == 15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_graph(options, gates_file):  # noqa: F811
    """A graph that is captured once, over several evictions, against the same steps one by one."""
    method = DBTrimKV(gates=gates_file(tiny_model("llama")), **options)
    model = copy.deepcopy(tiny_model("llama")).cuda()
    ids, mask = (x.cuda() for x in left_pad(prompt(60, 2), [20, 0]))
    loop = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 45}
    # With as many pages: sums over more of them are rounded otherwise.
    dry, _ = run(model, ids, method, reserve=Engine().reserve, **loop)
    decoding = stream(model, ids, method, engine=Engine(), **loop)
    found = decoding.run()
    assert decoding.reason is None
    assert torch.equal(found, dry.sequences)
    for one, two in zip(decoding.cache.folded_layers, dry.cache.folded_layers, strict=True):
        stores = one.segments[0].store.buffers, two.segments[0].store.buffers
        assert all(torch.equal(tensor, stores[1][name]) for name, tensor in stores[0].items())
        assert torch.equal(one.keys, two.keys)
    reference = FoldedCache(method, prompt_tokens=60)
    reference.watch(model)
    tokens = model.generate(ids, **{**loop, CACHE_KEYWORD: reference, "max_new_tokens": 12})
    assert torch.equal(tokens, found[:, :72])
