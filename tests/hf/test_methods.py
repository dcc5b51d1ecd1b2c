"""Every method in every scenario: right against attention over its own decoded content, and honest in bytes."""

from __future__ import annotations

import gc

import pytest
import torch

from kvfold import KIVI, RDKV, PublishedRDKV, SnapKV, attach, fold, make_method
from kvfold.errors import BudgetError, CacheMismatchError, KvfoldError, NonFiniteError, UnsupportedModelError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, bridge
from kvfold.hf.segment import Segment
from kvfold.ledger import tensors_in
from kvfold.methods import (
    RKV,
    TOVA,
    XKV,
    AdaKV,
    AttentionMatching,
    BlockGTQ,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    KVSculpt,
    MiniCache,
    PyramidKV,
    Random,
    SelectFit,
    ShadowKV,
    StreamingLLM,
    TurboQuant,
    Uniform,
)
from kvfold.stores.base import Store
from tests.tiny import left_pad, prompt, tiny_model

METHODS = {
    "rdkv": RDKV(keep=0.3, window=8),
    "rdkv-layer": RDKV(
        keep=0.3, window=8, scope="layer", queries="window", widths=(1, 2, 3, 5, 8), block_tokens=16
    ),
    "rdkv-head": RDKV(keep=0.3, window=8, scope="head", queries="future", grades=(16.0, 128.0)),
    "published": PublishedRDKV(keep=0.3, window=8),
    "published-all": PublishedRDKV(
        keep=0.3, window=8, queries="all", scope="layer", key_group=32, value_group=8, distortion="linear"
    ),
    "published-model": PublishedRDKV(
        keep=0.3, window=8, queries="blend", scope="model", key_tile=8, widths=(3, 4, 8), distortion="square"
    ),
    "snapkv": SnapKV(keep=0.3, window=8),
    "snapkv-int4": SnapKV(keep=0.3, window=8, bits=4, group=16),
    "kivi": KIVI(bits=4, group=16, residual=8),
    "uniform": Uniform(bits=4, group=16, block_tokens=16),
    "turboquant": TurboQuant(bits=3, bias="mean", block_tokens=16),
    "blockgtq": BlockGTQ(keep=0.3, block_tokens=16),
    "select-fit": SelectFit(keep=0.35, sinks=2, window=8, ridge_to="own"),
    "kvsculpt": KVSculpt(keep=0.35, sinks=2, window=8, steps=4, every=2),
    "minicache": MiniCache(start=0, gamma=0.2),
    "shadowkv": ShadowKV(rank=12, chunk=4, outlier_chunks=3, local_chunks=2),
    "xkv": XKV(keep=0.3, layers=2),
}
SELECTIONS = {
    "adakv": AdaKV(keep=0.3, window=8),
    "expected-attention": ExpectedAttention(keep=0.3, bits=4, group=16),
    "keydiff": KeyDiff(keep=0.3),
    "knorm": Knorm(keep=0.3, bits=8),
    "pyramidkv": PyramidKV(keep=0.3, window=8),
    "random": Random(keep=0.3),
    "rkv": RKV(keep=0.3, block_tokens=16),
    "streaming-llm": StreamingLLM(keep=0.3),
    "tova": TOVA(keep=0.3),
    "turboquant-prod": TurboQuant(bits=4, variant="prod", rotation="haar"),
    "turboquant-out": TurboQuant(bits=4, bias="out"),
    "turboquant-buffer": TurboQuant(bits=4, value_bits=3, sinks=4, recent=5),
    "blockgtq-group": BlockGTQ(keep=0.4, norms="group", score="sum", share="layer", bias="mean"),
    "blockgtq-tile": BlockGTQ(bits=2.5, tile=4, most_widths=2, bias="in", recent=5, rotation="haar"),
    "xkv-plain": XKV(
        key_rank=24,
        value_rank=24,
        widths=(16,),
        basis_bits=16,
        metric="plain",
        centre=False,
        sinks=0,
        recent=0,
    ),
    "chain": SnapKV(keep=0.4, window=8) >> BlockGTQ(bits=4),
    "chain-fit": SelectFit(keep=0.4, sinks=2, window=8) >> TurboQuant(bits=3, bias="out"),
    "attention-matching": AttentionMatching(keep=0.35, sinks=2, window=8, ridge=1e-2),
}
"""They fold by the same code as a method above, so a few architectures will do."""
READ_SOME = {
    "xkv-sparse": XKV(keep=0.5, layers=2, sparse_budget=16, chunk=4, outlier_chunks=2, sinks=2, recent=2)
}
"""A query reads less than they keep, so that what they keep does not tell what attention gives."""
REFUSED = {("kvsculpt", "deepseek_v3"), ("shadowkv", "deepseek_v3")}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def methods_and(*selections):
    """Every method, and some of the selections."""
    table = {**METHODS, **{name: SELECTIONS[name] for name in selections}}
    return pytest.mark.parametrize("method", table.values(), ids=table)


def methods_on(*architectures, selections_on):
    """Every method on every architecture; the selections on some."""
    cases = [
        pytest.param(architecture, method, id=f"{architecture}-{name}")
        for table, names in ((METHODS, architectures), (SELECTIONS, selections_on))
        for architecture in names
        for name, method in table.items()
        if (name, architecture) not in REFUSED
    ]
    return pytest.mark.parametrize(("architecture", "method"), cases)


ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3_text", "glm4", "deepseek_v3", "smollm3"]
NEW = 6


class DecodedStore(Store):
    """A store's decoded content, attended to in float64, row by row and head by head."""

    kind = "decoded (test)"
    purposes = {}

    def __init__(self, store):
        self.store = store
        self.tokens, self.real_tokens = store.tokens, store.real_tokens
        self.kv_heads, self.key_dim, self.value_dim = store.kv_heads, store.key_dim, store.value_dim

    def attend(self, query, rows, context):
        outputs, lses = [], []
        for b in range(query.shape[0]):
            source = b if rows is None else int(rows[b])
            output, lse = [], []
            for h in range(query.shape[1]):
                kept = self.kept(source, h * self.kv_heads // query.shape[1], context.rotary)
                keys, values = kept.keys, kept.values
                if context.expand is not None:
                    keys, values = (x[0, h] for x in context.expand(keys[None, None], values[None, None]))
                scores = query[b, h].double() @ keys.double().T * context.scaling
                if context.softcap is not None:
                    scores = torch.tanh(scores / context.softcap) * context.softcap
                if kept.bias is not None:
                    scores = scores + kept.bias.double()
                output.append(scores.softmax(-1) @ values.double())
                lse.append(scores.logsumexp(-1))
            outputs.append(torch.stack(output))
            lses.append(torch.stack(lse))
        return torch.stack(outputs).float(), torch.stack(lses).float()

    def kept(self, row, head, rotary=None):
        return self.store.kept(row, head, rotary)

    def crop(self, tokens):
        return DecodedStore(self.store.crop(tokens))

    def select(self, rows):
        return DecodedStore(self.store.select(rows))

    def tensors(self):
        return {}

    def meta(self):
        return {}

    @classmethod
    def from_state(cls, tensors, meta):
        raise ValueError("test only")


def decoded(cache):
    """A twin of the cache whose segments are plain decoded content."""
    twin = cache.fork()
    for layer in twin.folded_layers:
        layer.segments = [Segment(DecodedStore(segment.store), segment.rows) for segment in layer.segments]
    return twin


def generate(model, ids, cache, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, **{CACHE_KEYWORD: cache}, **options)


def assert_within(cache, method):
    keep = getattr(method, "keep", None)
    if keep is not None:
        assert cache.ledger().folded_ratio <= keep
    assert_counted(cache)


def assert_counted(cache):
    """The ledger is the storage of the live tensors."""
    storages = {}
    for layer in cache.folded_layers:
        for tensor in [
            *layer.tail_tensors(),
            *(t for s in layer.segments for t in s.store.tensors().values()),
        ]:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for tensor in cache.rotary_tables():
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for layer in cache.layers:
        if layer not in cache.folded_layers:
            for tensor in tensors_in(vars(layer)):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert cache.ledger().total == sum(storages.values())


@methods_on(*ARCHITECTURES, selections_on=["glm4", "deepseek_v3"])
def test_question_after_a_folded_padded_batch(architecture, method):
    model = tiny_model(architecture)
    ids, mask = left_pad(prompt(90, 3), [20, 0, 35])
    cache = fold(model, ids, method, mask)
    assert cache.report[0]["folded"]
    assert_within(cache, method)
    twin = decoded(cache)
    alone = [fold(model, ids[row : row + 1, pads:], method) for row, pads in enumerate([20, 0, 35])]
    question = torch.cat([ids, prompt(5, 3, seed=3)], 1)
    full_mask = torch.cat([mask, mask.new_ones(3, 5)], 1)
    # One token at a time, so that the question itself stays exact and both paths are the decode path.
    found = steps(model, cache, question[:, 90:], full_mask)
    assert torch.allclose(found, steps(model, twin, question[:, 90:], full_mask), atol=2e-3)
    if "blockgtq" in (method.name, getattr(method, "then", method).name):
        return  # The rows of a batch share their widths.
    if method.name == "kivi":
        return  # One residual for the whole batch: a padded row's groups of 16 start elsewhere than when alone.
    for row in range(3):
        single = steps(model, alone[row], question[row : row + 1, 90:], None)
        assert torch.allclose(found[row], single[0], atol=2e-3), (
            f"row {row} differs from the same prompt alone"
        )


@torch.no_grad()
def steps(model, cache, ids, mask):
    """Logits of several single-token calls, (batch, tokens, vocabulary)."""
    logits = []
    for index in range(ids.shape[1]):
        seen = cache.get_seq_length()
        options = {}
        if mask is not None:
            options["attention_mask"] = mask[:, : seen + 1]
            options["position_ids"] = mask[:, : seen + 1].sum(-1, keepdim=True) - 1
        logits.append(
            model(ids[:, index : index + 1], use_cache=True, **{CACHE_KEYWORD: cache}, **options).logits
        )
    return torch.cat(logits, 1)


@pytest.mark.parametrize("method", [*METHODS.values(), *SELECTIONS.values()], ids=[*METHODS, *SELECTIONS])
def test_widths_tell_every_head(method):
    model = tiny_model("llama")
    cache = fold(model, prompt(96), method)
    found = cache.widths()
    assert len(found) == len(cache.folded_layers)
    for heads in found:
        assert len(heads) == 2
        for head in heads:
            assert all(0 <= bits <= 16 for bits in [*head["keys"], *head["values"]])
            assert 0 < sum(head["values"].values()) <= 96
            assert sum(head["keys"].values()) > 0


@methods_on("llama", "gemma3_text", "deepseek_v3", selections_on=["llama"])
def test_chunks_change_nothing(architecture, method):
    model = tiny_model(architecture)
    ids, mask = left_pad(prompt(90, 2), [12, 0])
    whole = fold(model, ids, method, mask)
    for size in (7, 31, 89):
        chunked = fold(model, ids, method, mask, chunk_size=size)
        assert chunked.ledger().by_purpose == whole.ledger().by_purpose
        for left, right in zip(chunked.folded_layers, whole.folded_layers, strict=True):
            a, b = left.segments[0].store, right.segments[0].store
            assert a.widths() == b.widths()
            for name in ("positions", "order"):
                if name in a.tensors():
                    assert torch.equal(a.tensors()[name], b.tensors()[name])
    if getattr(method, "keep", None) is not None:
        untold = FoldedCache(method)
        generate(model, ids, untold, attention_mask=mask, prefill_chunk_size=30, max_new_tokens=1)
        assert len(untold.folded_layers[0].segments) == 1
        ledger = untold.ledger()
        assert ledger.folded_full_bytes == whole.ledger().folded_full_bytes
        # A width more for one block of each head is a large part of so small a prompt.
        assert 0.85 * method.keep < ledger.folded_ratio <= method.keep


@methods_on("llama", "gemma3_text", "deepseek_v3", selections_on=["llama"])
def test_turns_fold_again(architecture, method):
    model = tiny_model(architecture)
    cache = FoldedCache(method)
    ids = generate(model, prompt(80), cache)
    for turn in (1, 2):
        ids = generate(model, torch.cat([ids, prompt(60, seed=turn)], 1), cache)
        assert cache.get_seq_length() == ids.shape[1] - 1
    assert [entry["folded"] for entry in cache.report if not entry["generated"]] == [True] * 3
    assert_within(cache, method)


@methods_on("llama", "deepseek_v3", selections_on=[])
def test_beams_crop_and_batch_operations(architecture, method):
    model = tiny_model(architecture)
    ids = prompt(80, 2)
    cache = fold(model, ids, method)
    question = torch.cat([ids, prompt(1, 2, seed=5)], 1).repeat_interleave(3, 0)
    cache.batch_repeat_interleave(3)
    twin = decoded(cache)
    assert torch.equal(generate(model, question, cache), generate(model, question, twin))
    beams = fold(model, ids, method)
    beams.batch_repeat_interleave(3)
    twin = decoded(beams)
    question = torch.cat([ids, prompt(1, 2, seed=6)], 1)
    assert torch.equal(
        generate(model, question, beams, num_beams=3), generate(model, question, twin, num_beams=3)
    )
    cropped = fold(model, ids, method)
    before = cropped.ledger().total
    cropped.crop(-13)
    assert cropped.get_seq_length() == 67 and cropped.ledger().total <= before
    cropped.batch_select_indices(torch.tensor([1]))
    assert cropped.ledger().total < before
    twin = decoded(cropped)
    question = torch.cat([ids[1:, :67], prompt(1, seed=7)], 1)
    assert torch.equal(generate(model, question, cropped), generate(model, question, twin))


@methods_and("rkv")
def test_long_generation_stays_small(method):
    model = tiny_model("llama")
    if not method.block:
        method = type(method)(**vars(method))
    cache = FoldedCache(method)
    generate(model, prompt(60), cache, max_new_tokens=4 * max(method.block, 8))
    if method.block:
        assert all(layer.tail < 2 * method.block + 8 for layer in cache.folded_layers)
        assert sum(entry["generated"] for entry in cache.report) >= 2
        if method.name == "rdkv":
            assert all(len(layer.segments) == 2 for layer in cache.folded_layers), "blocks are joined"
    assert_within(cache, method)


@methods
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_head_shapes(head_dim, kv_heads, method):
    model = tiny_model(
        "llama", num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    cache = fold(model, prompt(100), method)
    assert_within(cache, method)
    twin = decoded(cache)
    ids = prompt(2, seed=3)
    assert torch.allclose(steps(model, cache, ids, None), steps(model, twin, ids, None), atol=2e-3)


@methods
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, method):
    model = tiny_model("qwen2", dtype=dtype)
    ids, mask = left_pad(prompt(90, 2), [30, 0])
    cache = fold(model, ids, method, mask)
    assert_within(cache, method)
    twin = decoded(cache)
    full_mask = torch.cat([mask, mask.new_ones(2, 3)], 1)
    question = prompt(3, 2, seed=3)
    found = steps(model, cache, question, full_mask)
    assert bool(torch.isfinite(found).all())
    assert torch.allclose(found, steps(model, twin, question, full_mask), atol=0.15)


@methods
def test_the_ledger_is_every_live_byte(method):
    """Counted apart from the ledger: all tensors that appear with the cache and vanish with it."""
    model = tiny_model("llama")
    ids = prompt(90)

    def live():
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    # Code books and rotations are made once for the process, not for a cache.
    generate(model, torch.cat([ids, prompt(1, seed=1)], 1), fold(model, ids, method), max_new_tokens=20)
    before = live()
    cache = fold(model, ids, method)
    generate(model, torch.cat([ids, prompt(1, seed=1)], 1), cache, max_new_tokens=20)
    after = live()
    appeared = sum(count for pointer, count in after.items() if pointer not in before)
    assert appeared == cache.ledger().total


@methods_and(*SELECTIONS)
def test_short_prompts_pass_through(method):
    model = tiny_model("llama")
    for tokens in (1, 5):
        with attach(model, method) as folding:
            expected = model.generate(prompt(tokens), max_new_tokens=3, do_sample=False)
        reference = model.generate(prompt(tokens), max_new_tokens=3, do_sample=False)
        assert torch.equal(expected, reference)
        assert folding.cache.report[0]["folded"] is False and "too short" in folding.cache.report[0]["why"]


def test_a_short_row_in_a_batch_is_kept_whole():
    model = tiny_model("llama")
    method = RDKV(keep=0.1, window=16)
    ids, mask = left_pad(prompt(200, 2), [190, 0])
    cache = fold(model, ids, method, mask)
    for layer in cache.folded_layers:
        rotary = cache.rotary(layer.module(), ids.device)
        assert len(layer.segments[0].store.kept(0, 0, rotary).positions) == 10
        assert len(layer.segments[0].store.kept(1, 0, rotary).positions) < 200


@methods_and(*SELECTIONS)
def test_very_short_rows_beside_a_long_one(method):
    """Shorter than what a method keeps exact anyway."""
    model = tiny_model("llama")
    ids, mask = left_pad(prompt(90, 3), [89, 0, 86])
    if method.name == "blockgtq" and method.keep:  # padding is stored
        with pytest.raises(BudgetError, match="padding"):
            fold(model, ids, method, mask)
        return
    cache = fold(model, ids, method, mask)
    assert cache.report[0]["folded"]
    twin, question = decoded(cache), prompt(3, 3, seed=3)
    mask = torch.cat([mask, mask.new_ones(3, 3)], 1)
    found = steps(model, cache, question, mask)
    assert torch.allclose(found, steps(model, twin, question, mask), atol=2e-3)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, "empty"),
        (torch.zeros(5, dtype=torch.long), None, "input_ids must be"),
        (prompt(5), torch.ones(1, 4), "shape of input_ids"),
        (prompt(5), torch.zeros(1, 5), "all zeros"),
        (prompt(5).tolist(), None, "int64 tensor .* not list"),
        (prompt(5).float(), None, "int64 tensor .* not torch.float32"),
    ],
)
def test_bad_prompts(ids, mask, message):
    with pytest.raises(KvfoldError, match=message):
        fold(tiny_model("llama"), ids, RDKV(keep=0.5), mask)
    assert not bridge.installed()


@pytest.mark.parametrize("method", ["rdkv", RDKV, None, {"keep": 0.1}])
def test_what_is_no_method(method):
    model = tiny_model("llama")
    for call in (fold, lambda *_: attach(model, method).__enter__()):
        with pytest.raises(KvfoldError, match=r"must be a kvfold Method, such as RDKV\(keep=0.1\)"):
            call(model, prompt(20), method)


@pytest.mark.parametrize("chunk_size", [0, -3])
def test_chunks_of_nothing(chunk_size):
    with pytest.raises(KvfoldError, match="chunk_size must be at least 1"):
        fold(tiny_model("llama"), prompt(20), RDKV(keep=0.5), chunk_size=chunk_size)


@pytest.mark.parametrize("name", ["input_ids", "past_key_values", "cache", "labels", "use_cache"])
def test_inputs_that_fold_gives_itself(name):
    with pytest.raises(KvfoldError, match=f"leave {name} out"):
        fold(tiny_model("llama"), prompt(20), RDKV(keep=0.5), inputs={name: None})


@pytest.mark.parametrize(
    "options", [{}, {"keep": 0}, {"keep": 1.2}, {"keep": 0.1, "tokens": 3}, {"keep": float("nan")}]
)
def test_bad_budgets(options):
    with pytest.raises(ValueError):
        RDKV(**options)


def test_a_budget_below_the_metadata_names_the_smallest():
    model = tiny_model("llama")
    with pytest.raises(BudgetError, match="at least") as error:
        fold(model, prompt(100), RDKV(keep=0.001))
    least = float(str(error.value).split("keep=")[1].split()[0])
    assert fold(model, prompt(100), RDKV(keep=least)).ledger().folded_ratio <= least
    assert not bridge.installed()


@pytest.mark.parametrize(
    "method", [RDKV(keep=0.5), XKV(keep=0.5), KVSculpt(keep=0.8)], ids=lambda method: method.name
)
@pytest.mark.parametrize("states", ["keys", "values", "queries"])
def test_overflow_names_the_layer(method, states):
    """The last one, whose states no later layer shows."""
    model = tiny_model("llama", num_hidden_layers=2)
    weight = getattr(model.model.layers[1].self_attn, f"{states[0]}_proj").weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.inf)
    try:
        with pytest.raises(NonFiniteError, match=f"layer 1: the {states}"):
            fold(model, prompt(200), method)
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert not bridge.installed()


@pytest.mark.parametrize("name", ["select-fit", "kvsculpt", "attention-matching"])
def test_tokens_below_those_that_stay_are_told_in_tokens(name):
    with pytest.raises(BudgetError, match=r"at least tokens=13 is needed"):
        fold(tiny_model("llama"), prompt(100), make_method(name, tokens=12, sinks=4, window=8))
    fold(tiny_model("llama"), prompt(100), make_method(name, tokens=13, sinks=4, window=8))


@pytest.mark.parametrize("states", ["k", "v"])
@pytest.mark.parametrize(
    "method",
    [
        KVSculpt(keep=0.5, window=6),
        KVSculpt(keep=0.5, window=6, steps=0, chunk=30, heads="uniform"),
        KVSculpt(keep=0.5, window=6, steps=1, cascade=True),
        KVSculpt(keep=0.5, window=6, steps=1) >> BlockGTQ(bits=4),
        *(make_method(name, keep=0.5, window=6) for name in ("select-fit", "attention-matching", "snapkv")),
        XKV(keep=0.5),
        RDKV(keep=0.5, window=6),
        RDKV(keep=0.5, window=6, tile=16, scope="model"),
    ],
    ids=lambda method: method.name,
)
def test_a_float32_model_beyond_float16(method, states):
    """Sixteen bits are then those of bfloat16."""
    model, ids = tiny_model("llama"), prompt(100)
    weight = getattr(model.model.layers[1].self_attn, f"{states}_proj").weight
    with torch.no_grad():
        weight.mul_(2**20)  # and back, to the bit
    try:
        cache = fold(model, ids, method)
        with torch.no_grad():
            logits = model(prompt(3, seed=2), **{CACHE_KEYWORD: cache}).logits
    finally:
        with torch.no_grad():
            weight.div_(2**20)
    assert logits.isfinite().all()
    assert cache.ledger().folded_ratio <= 0.5


@pytest.mark.parametrize("name", ["bloom", "falcon"])
def test_unsupported_attention_is_refused_before_work(name):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name](vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError):
        fold(model, prompt(50), RDKV(keep=0.5))
    with pytest.raises(UnsupportedModelError), attach(model, RDKV(keep=0.5)):
        pass
    assert "generate" not in vars(model) and not bridge.installed()


def test_a_bare_cache_refuses_an_unsupported_model():
    from transformers import AutoModelForCausalLM, BloomConfig

    model = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)
    ).eval()
    with pytest.raises(UnsupportedModelError):
        generate(model, prompt(50), FoldedCache(RDKV(keep=0.5)))


def test_another_model_dtype_or_batch_is_refused():
    model = tiny_model("llama")
    cache = fold(model, prompt(60), RDKV(keep=0.5))
    question = prompt(61)
    with pytest.raises(CacheMismatchError, match="another model"):
        generate(tiny_model("llama", head_dim=32), question, cache.fork())
    with pytest.raises(CacheMismatchError, match="bfloat16"):
        generate(tiny_model("llama", dtype=torch.bfloat16), question, cache.fork())
    with pytest.raises(CacheMismatchError, match="batch_repeat_interleave"):
        generate(model, prompt(61, 2), cache.fork())
    bridge.forget()


def test_attach_leaves_nothing_behind_on_failure():
    model = tiny_model("llama")
    with pytest.raises(ZeroDivisionError), attach(model, RDKV(keep=0.5)):
        raise ZeroDivisionError
    assert "generate" not in vars(model)
    with pytest.raises(Exception), attach(model, RDKV(keep=0.5)):  # noqa: B017
        model.generate(prompt(50), max_new_tokens=-4)
    assert "generate" not in vars(model) and not bridge.installed()


def test_an_offloaded_model():
    """With accelerate a module's parameters are elsewhere between its calls: what kvfold keeps follows the states."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    offloaded = accelerate.cpu_offload(tiny_model.__wrapped__("llama"), execution_device=torch.device("cpu"))
    ids, question = prompt(80), prompt(3, seed=2)
    for method in (RDKV(keep=0.3, window=8), PublishedRDKV(keep=0.3, window=8)):
        found = steps(offloaded, fold(offloaded, ids, method), question, None)
        assert torch.equal(found, steps(model, fold(model, ids, method), question, None))


@pytest.mark.parametrize(
    "method",
    [
        RDKV(keep=0.1),
        BlockGTQ(keep=0.07),
        PublishedRDKV(keep=0.1, window=4),
        XKV(keep=0.1),
        SnapKV(keep=0.1, window=4),
    ],
)
def test_no_budget_above_one_is_asked_for(method):
    """Whatever the length: a budget that helps, or the word that the prompt is too short."""
    model, said = tiny_model("llama"), set()
    for tokens in range(method.shortest + 1, 200, 9):
        try:
            method.check(tokens, model.config.num_key_value_heads, 16, 16)
        except BudgetError as error:
            text = str(error)
            said.add("too short" in text)
            assert "too short" in text or float(text.split("keep=")[1].split()[0]) <= 1, text
    assert said, "no length was too short for so small a budget"
