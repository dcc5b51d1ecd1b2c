"""The engine generates transformers' tokens: step by step, at fixed addresses, and as a CUDA graph."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, linear, silu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from kvfold import RDKV, Full, SnapKV, fold
from kvfold.engine import Engine, generate, stream
from kvfold.engine.step import FixedStep
from kvfold.errors import KvfoldError, UnsupportedModelError
from kvfold.hf import CACHE_KEYWORD, FoldedCache
from tests.hf.test_methods import METHODS, READ_SOME, SELECTIONS
from tests.tiny import ARCHITECTURES, left_pad, prompt, tiny_model

NEW = 12
EVERY = {**METHODS, **SELECTIONS, **READ_SOME}
DRY = Engine(graph="dry")
SHORT = Engine(graph="dry", reserve=5)
ENGINES = pytest.mark.parametrize("engine", [Engine(), DRY, SHORT], ids=["auto", "dry", "short"])
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def expected(model, ids, cache=None, **options):
    """What transformers' own loop makes of the same cache."""
    cache = FoldedCache(Full()) if cache is None else cache
    return model.generate(ids, **{CACHE_KEYWORD: cache, "do_sample": False, "max_new_tokens": NEW, **options})


def decoded(model, ids, cache=None, engine=DRY, **options):
    """Decode with the engine; a dry run must not have fallen back."""
    decoding = stream(
        model, ids, cache, engine=engine, **{"do_sample": False, "max_new_tokens": NEW, **options}
    )
    sequences = decoding.run()
    if engine.graph == "dry":
        assert decoding.reason == "it was not asked for"
    return sequences, decoding.cache


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_tokens(architecture):
    model = tiny_model(architecture)
    ids, mask = left_pad(prompt(24, 3), [7, 0, 15])
    reference = expected(model, ids, attention_mask=mask)
    for engine in (Engine(), DRY, SHORT):
        found, cache = decoded(model, ids, engine=engine, attention_mask=mask)
        assert torch.equal(found, reference)
        assert cache.get_seq_length() == found.shape[1] - 1


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_store_and_every_block_folded(method):
    """Room ends in the middle of blocks; what is folded, and from which observations, must not depend on that."""
    model = tiny_model("qwen2", num_hidden_layers=2)
    ids, mask = left_pad(prompt(48, 2), [0, 9])
    reference = FoldedCache(method, prompt_tokens=48)
    tokens = expected(model, ids, reference, attention_mask=mask, max_new_tokens=35)
    engine = Engine(graph="dry", reserve=9)
    found, cache = decoded(model, ids, method, engine, attention_mask=mask, max_new_tokens=35)
    assert torch.equal(found, tokens)
    assert cache.report == reference.report
    assert cache.ledger() == reference.ledger()
    assert cache.widths() == reference.widths()


@pytest.mark.parametrize("method", [Full(), RDKV(keep=0.5), *READ_SOME.values()])
def test_a_step_again(method):
    """A step run again gives its logits, and leaves the decoding as it was."""
    model, ids = tiny_model("llama"), prompt(60)
    whole, _ = decoded(model, ids, fold(model, ids[:, :-1], method))
    decoding = stream(
        model, ids, fold(model, ids[:, :-1], method), engine=DRY, do_sample=False, max_new_tokens=NEW
    )
    tokens = [next(decoding) for _ in range(4)]
    assert decoding.step is not None
    for _ in range(2):
        assert torch.equal(decoding.step.again(tokens[-2]), decoding.step.logits)
    assert not torch.equal(decoding.step.again(tokens[-2] + 1), decoding.step.logits)
    decoding.step.again(tokens[-2])  # puts the key and value of what was really read back
    assert torch.equal(decoding.run(), whole)


@ENGINES
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.7}, {"repetition_penalty": 1.5}, {"min_p": 0.1}],
)
def test_same_samples(engine, options):
    model = tiny_model("llama")
    ids = prompt(24, 2)
    torch.manual_seed(3)
    reference = expected(model, ids, do_sample=True, **options)
    torch.manual_seed(3)
    found, _ = decoded(model, ids, engine=engine, do_sample=True, **options)
    assert torch.equal(found, reference)
    torch.manual_seed(4)
    assert not torch.equal(decoded(model, ids, engine=engine, do_sample=True, **options)[0], reference)


@ENGINES
def test_an_end_in_one_row(engine):
    model = tiny_model("llama")
    ids = prompt(24, 3)
    free = expected(model, ids)
    ends = [int(free[0, 27]), int(free[2, 25])]
    reference = expected(model, ids, eos_token_id=ends, pad_token_id=0)
    found, _ = decoded(model, ids, engine=engine, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(found, reference)
    assert not torch.equal(found, free) and (found[0, 28:] == 0).all()


class Sum(StoppingCriteria):
    """Ends a row when its last tokens' sum is even: needs the whole sequence, and calls for the host."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return (input_ids[:, -3:].sum(1) % 5 == 0) & (input_ids.shape[1] > 26)


@ENGINES
def test_stopping_criteria(engine):
    model = tiny_model("llama")
    ids = prompt(24, 2, seed=5)
    reference = expected(model, ids, stopping_criteria=StoppingCriteriaList([Sum()]), max_new_tokens=30)
    criterion = Sum()
    found, _ = decoded(
        model, ids, engine=engine, stopping_criteria=StoppingCriteriaList([criterion]), max_new_tokens=30
    )
    assert torch.equal(found, reference)
    assert 26 < found.shape[1] < 54 and criterion.calls == found.shape[1] - 24


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        assert value.device.type == "cpu" and not self.ended
        self.tokens.append(value)

    def end(self):
        self.ended = True


@ENGINES
def test_streams(engine):
    model = tiny_model("llama")
    ids = prompt(24)
    heard, reference = Heard(), Heard()
    expected(model, ids, streamer=reference)
    found, _ = decoded(model, ids, engine=engine, streamer=heard)
    assert heard.ended and reference.ended
    assert all(torch.equal(a, b) for a, b in zip(heard.tokens, reference.tokens, strict=True))
    tokens = [int(token) for token in stream(model, ids, engine=engine, max_new_tokens=NEW, do_sample=False)]
    assert tokens == found[0, 24:].tolist()


@ENGINES
def test_ended_early_and_gone_on(engine):
    model = tiny_model("llama")
    ids = prompt(24)
    whole = expected(model, ids)
    decoding = stream(model, ids, engine=engine, max_new_tokens=NEW, do_sample=False)
    first = [int(next(decoding)) for _ in range(4)]
    decoding.close()
    assert decoding.cache.get_seq_length() == 24 + 3, "the last token has not been read"
    assert list(decoding) == []
    ids = torch.cat([ids, torch.tensor([first])], 1)
    found, _ = decoded(model, ids, decoding.cache, engine, max_new_tokens=NEW - 4)
    assert torch.equal(found, whole)


@ENGINES
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_turns(engine, architecture):
    """A second question, given whole and as new tokens only, on a cache that the engine has decoded on."""
    model = tiny_model(architecture)
    ids, mask = left_pad(prompt(24, 2), [5, 0])
    reference, cache = FoldedCache(Full()), FoldedCache(Full())
    for turn in range(3):
        tokens = expected(model, ids, reference, attention_mask=mask)
        seen = cache.get_seq_length()
        given = ids[:, seen:] if turn == 2 else ids
        found, _ = decoded(model, given, cache, engine, attention_mask=mask)
        assert torch.equal(found[:, -NEW:], tokens[:, -NEW:])
        ids = torch.cat([tokens, prompt(6, 2, seed=turn)], 1)
        mask = torch.cat([mask, mask.new_ones(2, NEW + 6)], 1)


def test_a_folded_document_and_forks():
    model = tiny_model("llama")
    document = prompt(48)
    cache = fold(model, document, SnapKV(keep=0.3, window=8))
    for seed in range(2):
        ids = torch.cat([document, prompt(5, seed=seed)], 1)
        reference = expected(model, ids, cache.fork())
        assert torch.equal(decoded(model, ids, cache.fork(), SHORT)[0], reference)
    assert cache.get_seq_length() == 48


def test_a_long_exact_tail_is_read_where_it_lies():
    """More exact tokens than room: they become history, and the room behind them holds new ones only."""
    model = tiny_model("qwen2")
    ids, mask = left_pad(prompt(40, 2), [3, 0])
    method = RDKV(keep=0.3, window=64, block_tokens=0)  # too short to fold
    reference = expected(model, ids, FoldedCache(method), attention_mask=mask)
    decoding = stream(
        model, ids, method, engine=SHORT, attention_mask=mask, max_new_tokens=NEW, do_sample=False
    )
    for _ in range(3):
        next(decoding)
    assert {tensor.shape[2] for tensor in decoding.cache.reserved} == {5}
    assert torch.equal(decoding.run(), reference)


@ENGINES
def test_several_samples_of_one_prompt(engine):
    model = tiny_model("llama")
    options = dict(do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    reference = expected(model, prompt(20), **options)
    torch.manual_seed(0)
    assert torch.equal(decoded(model, prompt(20), engine=engine, **options)[0], reference)


def test_chunked_prefill():
    model = tiny_model("llama")
    ids = prompt(23)
    found, cache = decoded(model, ids, SnapKV(keep=0.5, window=8), prefill_chunk_size=7)
    assert [entry["tokens"] for entry in cache.report] == [23]
    reference = FoldedCache(SnapKV(keep=0.5, window=8), prompt_tokens=23)
    assert torch.equal(found, expected(model, ids, reference, prefill_chunk_size=7))


def test_return_dict():
    model = tiny_model("llama")
    result = generate(model, prompt(20), max_new_tokens=3, return_dict_in_generate=True, engine=DRY)
    assert result.sequences.shape == (1, 23) and isinstance(result.past_key_values, FoldedCache)


def test_the_ledger_counts_what_is_reserved():
    model = tiny_model("llama")
    decoding = stream(
        model, prompt(48), SnapKV(keep=0.3, window=8), engine=DRY, max_new_tokens=40, do_sample=False
    )
    for _ in range(5):
        next(decoding)
    ledger = decoding.cache.ledger()
    rooms = [layer.keys.numel() + layer.values.numel() for layer in decoding.cache.folded_layers]
    assert rooms == [0, 0, 0], "what is decoded lies in the reserved room"
    assert (
        ledger.by_purpose["reserved"] == 3 * 2 * 4 * 2 * 16 * 39
    )  # layers, K and V, float32, heads, dim, steps
    decoding.close()
    assert "reserved" not in decoding.cache.ledger().by_purpose
    assert decoding.cache.ledger().by_purpose["tail"] == 3 * 2 * 4 * 2 * 16 * 4


# ---- what a graph may not hold ----


class OnDevice(TorchDispatchMode):
    """Refuses what makes a GPU wait for the host or the host for a GPU."""

    HOST = (
        "_local_scalar_dense",
        "nonzero",
        "equal",
        "is_nonzero",
        "lift_fresh",
        "masked_select",
        "_unique2",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        ):
            name = "nonzero"  # what a mask as index is turned into
        assert name not in self.HOST, f"a decode step calls {name}"
        return func(*args, **(kwargs or {}))


WAITING = {"minicache", "shadowkv"}
"""Methods that choose on the host what to read: eager, with the reason."""


@pytest.mark.parametrize("name", sorted(set(EVERY) - WAITING))
def test_a_step_never_waits(name, monkeypatch):
    monkeypatch.setenv("KVFOLD_CPU_KERNEL", "0")  # the C loop is the CPU's own
    run, steps = FixedStep._run, 0

    def watched(self):
        nonlocal steps
        steps += 1
        if self.fixed.taken:  # the first step may build tables
            with OnDevice():
                return run(self)
        return run(self)

    monkeypatch.setattr(FixedStep, "_run", watched)
    ids, mask = left_pad(prompt(64, 2), [0, 9])
    options = dict(do_sample=True, top_k=5, temperature=0.8) if name < "q" else {}
    method = EVERY[name]
    decoded(
        tiny_model("qwen2", num_hidden_layers=2),
        ids,
        method,
        attention_mask=mask,
        max_new_tokens=5,
        **options,
    )
    assert steps > 1


@pytest.mark.parametrize("name", sorted(WAITING))
def test_what_waits_is_seen(name, monkeypatch):
    with pytest.raises(AssertionError, match="a decode step calls nonzero"):
        test_a_step_never_waits(name, monkeypatch)
    gc.collect()


# ---- what cannot be decoded at fixed addresses, and what is refused ----


def reason(model, ids, cache=None, **options):
    decoding = stream(model, ids, cache, engine=DRY, **{"do_sample": False, "max_new_tokens": 5, **options})
    return decoding.run(), decoding.reason


def test_a_model_that_asks_for_the_length():
    model = tiny_model("llama")
    inner = model.model.forward

    def asks(*args, **kwargs):
        kwargs[CACHE_KEYWORD].get_seq_length()
        return inner(*args, **kwargs)

    model.model.forward = asks
    try:
        found, why = reason(model, prompt(20))
    finally:
        del model.model.forward
    assert why == "LlamaForCausalLM cannot be captured: its forward pass asks for the length of the cache"
    assert torch.equal(found, expected(model, prompt(20), max_new_tokens=5))


def test_caches_without_fixed_addresses():
    model = tiny_model("llama")
    found, why = reason(model, prompt(20), DynamicCache(config=model.config))
    assert why == "a DynamicCache has no fixed addresses"
    assert torch.equal(found, expected(model, prompt(20), max_new_tokens=5))
    cache = fold(model, prompt(20), Full())
    cache.batch_repeat_interleave(2)
    ids = torch.cat([prompt(20), prompt(3)], 1).repeat(2, 1)
    _, why = reason(model, ids, cache)
    assert why == "batch rows share the rows of a folded prompt"
    _, why = reason(model, prompt(20), FoldedCache(Full(), prompt_tokens=40))
    assert why == "the cache waits for the rest of its prompt"


@ENGINES
def test_a_step_that_fails_loses_nothing(engine):
    """The sixth step fails: the cache holds what was read, and decoding goes on from there."""
    model = tiny_model("gemma3_text")
    ids = prompt(24)
    whole = expected(model, ids)
    calls, inner = 0, model.lm_head.forward

    def fails(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("out of luck")
        return inner(*args, **kwargs)

    decoding = stream(model, ids, engine=engine, max_new_tokens=NEW, do_sample=False)
    model.lm_head.forward = fails
    made = []
    try:
        with pytest.raises(RuntimeError, match="out of luck"):
            made += [int(token) for token in iter(lambda: made.append(int(next(decoding))) or 0, 1)]
    finally:
        del model.lm_head.forward
    assert made == whole[0, 24 : 24 + 5].tolist()
    if engine.graph == "dry":
        assert decoding.cache.get_seq_length() == 24 + 4
        ids = whole[:, : 24 + 5]
        assert torch.equal(decoded(model, ids, decoding.cache, engine, max_new_tokens=NEW - 5)[0], whole)


def test_refuses_other_ways_of_generating():
    model = tiny_model("llama")
    with pytest.raises(KvfoldError, match="not by beam search: use model"):
        generate(model, prompt(8), num_beams=2)
    with pytest.raises(KvfoldError, match="does not return output_scores"):
        generate(model, prompt(8), output_scores=True, return_dict_in_generate=True)
    with pytest.raises(KvfoldError, match="must be a kvfold Method"):
        generate(model, prompt(8), "rdkv")
    with pytest.raises(KvfoldError, match="no new tokens: the cache holds 8"):
        generate(model, prompt(8), fold(model, prompt(8), Full()))
    with pytest.raises(KvfoldError, match="graph must be"):
        Engine(graph="yes")
    with pytest.raises(KvfoldError, match="reserve must be at least 1"):
        Engine(reserve=0)
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        generate(tiny_model("bloom", "eager", n_head=4, n_layer=2), prompt(8))


def test_nothing_is_reserved_afterwards():
    model = tiny_model("llama")
    decoding = stream(model, prompt(24), engine=DRY, max_new_tokens=NEW, do_sample=False)
    decoding.run()
    cache = decoding.cache
    del decoding
    assert cache.reserved == []
    assert sum(layer.tail for layer in cache.folded_layers) == 3 * (NEW - 1)


# ---- fused small operations ----


def test_fusing_puts_everything_back(monkeypatch):
    import transformers.models.qwen3.modeling_qwen3 as file

    from kvfold.engine import fuse

    model = tiny_model("qwen3")
    layer = model.model.layers[0]
    before = file.apply_rotary_pos_emb
    monkeypatch.setattr(fuse, "fast", lambda weight: True)
    with pytest.raises(KeyError), fuse.fused(model, {type(layer.self_attn)}):
        assert file.apply_rotary_pos_emb is not before
        replaced = {name for name, module in layer.named_modules() if "forward" in vars(module)}
        norms = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
        projections = {f"self_attn.{name}_proj" for name in "qkvo"}
        assert replaced == norms | projections | {"mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
        raise KeyError
    assert file.apply_rotary_pos_emb is before
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text"])
def test_fused_modules_compute_the_same(architecture, monkeypatch):
    """With the kernel's plain twin, so that what is tested here is which module is computed how."""
    from kvfold.engine import fuse

    calls = []

    def gated(x, gate, up, activation):
        calls.append(activation)
        act = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}[activation]
        return act(linear(x, gate)) * linear(x, up)

    monkeypatch.setattr(fuse, "fast", lambda weight: True)
    monkeypatch.setattr(fuse.matvec, "gated", gated)
    monkeypatch.setattr(fuse.matvec, "linear", lambda *args: calls.append("linear") or linear(*args))
    together = lambda x, weights: calls.append("together") or [linear(x, weight) for weight in weights]  # noqa: E731
    monkeypatch.setattr(fuse.matvec, "together", together)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = tiny_model(architecture)
    found, _ = decoded(model, prompt(24), engine=Engine(graph="dry", fuse=True))
    assert torch.equal(found, expected(model, prompt(24)))
    biased = architecture == "qwen2"  # its queries, keys and values have biases
    assert len(set(calls)) == 2 + (not biased)
    assert calls.count("linear") == 3 * (5 if biased else 2) * (NEW - 1)
    assert calls.count("together") == (0 if biased else 3 * (NEW - 1))
    many, _ = decoded(model, prompt(24, 5), engine=Engine(graph="dry", fuse=True))
    assert torch.equal(many, expected(model, prompt(24, 5))), "more rows than the kernel takes"


# ---- on a GPU ----


def on_gpu(name, **options):
    import copy

    return copy.deepcopy(tiny_model(name, **options)).cuda()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graph_same_tokens(architecture):
    model = on_gpu(architecture)
    ids, mask = (x.cuda() for x in left_pad(prompt(24, 3), [7, 0, 15]))
    options = dict(attention_mask=mask, max_new_tokens=20)
    reference = expected(model, ids, **options)
    for reserve in (256, 6):
        decoding = stream(model, ids, engine=Engine(reserve=reserve), do_sample=False, **options)
        assert torch.equal(decoding.run(), reference)
        assert decoding.reason is None


@pytest.mark.parametrize("name", EVERY)
def test_graph_every_store(name):
    model, method = on_gpu("qwen2"), EVERY[name]
    ids = prompt(64, 2).cuda()
    reference = expected(model, ids, FoldedCache(method, prompt_tokens=64), max_new_tokens=30)
    decoding = stream(model, ids, method, max_new_tokens=30, do_sample=False)
    assert torch.equal(decoding.run(), reference)
    if name in WAITING:
        assert decoding.reason.startswith("capture failed")
        assert torch.rand(3, device="cuda").isfinite().all(), (
            "a failed capture must leave the generator usable"
        )
    else:
        assert decoding.reason is None


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.5}])
def test_graph_same_samples(options):
    model, ids = on_gpu("llama"), prompt(24, 2).cuda()
    torch.manual_seed(3)
    reference = expected(model, ids, do_sample=True, max_new_tokens=20, **options)
    torch.manual_seed(3)
    decoding = stream(model, ids, do_sample=True, max_new_tokens=20, **options)
    assert torch.equal(decoding.run(), reference)
    assert decoding.reason is None


def test_graph_fused():
    model, ids = on_gpu("qwen3"), prompt(24, 2).cuda()
    reference = expected(model, ids, max_new_tokens=20)
    decoding = stream(model, ids, engine=Engine(fuse=True), do_sample=False, max_new_tokens=20)
    assert torch.equal(decoding.run(), reference)
    assert decoding.reason is None


for _name, _test in list(vars().items()):
    if _name.startswith("test_graph"):
        for _mark in gpu:
            vars()[_name] = _mark(vars()[_name])
