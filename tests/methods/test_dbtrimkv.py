"""DBTrimKV against a slow account of its own: every token's gate worked out apart, every eviction by sorting a list."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from itertools import product

import pytest
import torch

from kvfold import BlockGTQ, attach, fold, load
from kvfold.allocate.ranking import best_first, ranks
from kvfold.errors import BudgetError, KvfoldError
from kvfold.hf import FoldedCache
from kvfold.hf.fingerprint import fingerprint
from kvfold.hf.support import CACHE_KEYWORD, cache_shape, folds, stock_layers
from kvfold.methods.dbtrimkv import DBTrimKV, future_worth
from kvfold.methods.gates import (
    SHIPPED,
    GateConfig,
    RetentionGates,
    TrainedGates,
    gates_from_released,
    load_gates,
)
from kvfold.stores.base import AttendContext
from tests.hf.test_methods import assert_within, decoded, generate, steps
from tests.tiny import left_pad, prompt, tiny_model


def random_gates(model, **options):
    """Gates whose betas spread from 0.9 to almost 1, by token, head and layer."""
    layers = tuple(index for index, layer in enumerate(stock_layers(model.config)) if folds(layer))
    heads = cache_shape(model.config).kv_heads
    options = {"width": 16, "features": 8, "bias": 4.0, **options}
    config = GateConfig(layers=layers, hidden_size=64, kv_heads=heads, **options)
    gates = RetentionGates(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in gates.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(15)
    return gates.requires_grad_(False)


@pytest.fixture(scope="session")
def gates_file(tmp_path_factory):
    """Path of a file of random gates for a tiny model."""
    folder, made = tmp_path_factory.mktemp("gates"), {}

    def path(model, **options):
        key = id(model), *sorted(options.items())
        if key not in made:
            made[key] = folder / f"{len(made)}.safetensors"
            gates = TrainedGates(random_gates(model, **options), fingerprint(model))
            made[key].write_bytes(gates.to_bytes(torch.float32))
        return str(made[key])

    return path


# ---- gates ----


@pytest.mark.parametrize("tie", ["all", "layers", "none"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_gate_is_its_formula(tie, depth):
    config = GateConfig(
        layers=(0, 3), hidden_size=10, kv_heads=2, width=6, depth=depth, features=4, tie=tie, bias=1.0
    )
    gates = RetentionGates(config, torch.Generator().manual_seed(1))
    x = torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(2)) * 20
    state = {name: tensor.double() for name, tensor in gates.state_dict().items()}
    for place, layer in enumerate(config.layers):
        h = x.double()
        for index in range(depth):
            h = h @ state[f"trunks.{layer}.{2 * index}.weight"].T + state[f"trunks.{layer}.{2 * index}.bias"]
            h = h * h.sigmoid()
        for head in range(2):
            if tie == "all":
                logit = h[..., 4 * head : 4 * head + 4] @ state["weight"] + state["bias"]
            elif tie == "layers":
                logit = h @ state["weight"][head] + state["bias"][head]
            else:
                logit = h @ state["weight"][place, head] + state["bias"][place, head]
            found = gates(x, layer)[:, head].double()
            assert torch.allclose(found, -(1 + (-logit).exp()).log(), atol=1e-6)
    assert (
        sum(p.numel() for n, p in gates.named_parameters() if n in ("weight", "bias"))
        == {
            "all": 5,
            "layers": 14,
            "none": 28,
        }[tie]
    )


def test_a_gate_that_forgets_almost_nothing_still_ranks():
    """In a 16-bit dtype every one of these betas would be 1."""
    gates = RetentionGates(GateConfig(layers=(0,), hidden_size=8, kv_heads=1, width=8, features=2))
    log_beta = gates(torch.randn(1, 50, 8).bfloat16() * 30, 0)
    assert log_beta.dtype == torch.float32
    assert len(log_beta.unique()) > 25 and bool((log_beta < 0).all()) and float(log_beta.min()) > -1e-7


@pytest.mark.parametrize(("depth", "tied"), [(1, False), (2, True), (2, False)])
@pytest.mark.parametrize("prefix", ["model.layers", "model.language_model.layers"])
def test_released_checkpoints(depth, tied, prefix):
    draw = torch.Generator().manual_seed(0)
    state = {"model.embed_tokens.weight": torch.zeros(3, 3)}
    ends = [(torch.randn(2, 6, generator=draw), torch.randn(2, generator=draw)) for _ in range(3)]
    for layer in range(3):
        name = f"{prefix}.{layer}.self_attn.retention_gate"
        for index in range(depth):
            inputs = 10 if index == 0 else 6
            state[f"{name}.linear{index + 1}.weight"] = torch.randn(6, inputs, generator=draw)
            state[f"{name}.linear{index + 1}.bias"] = torch.randn(6, generator=draw)
        last, bias = ends[0 if tied else layer]
        state[f"{name}.linear{depth + 1}.weight"], state[f"{name}.bias"] = last.clone(), bias.clone()
    gates = gates_from_released({name: tensor.bfloat16() for name, tensor in state.items()})
    assert gates.config.tie == ("layers" if tied else "none") and gates.config.depth == depth
    x = torch.randn(1, 4, 10, generator=draw)
    for layer in range(3):
        name, h = f"{prefix}.{layer}.self_attn.retention_gate", x.double()
        for index in range(depth):
            weight, bias = (
                state[f"{name}.linear{index + 1}.{part}"].bfloat16().double() for part in ("weight", "bias")
            )
            h = torch.nn.functional.silu(h @ weight.T + bias)
        logits = h @ state[f"{name}.linear{depth + 1}.weight"].bfloat16().double().T
        logits = logits + state[f"{name}.bias"].bfloat16().double()
        expected = -(1 + (-logits).exp()).log().transpose(1, 2)
        assert torch.allclose(gates(x, layer).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.0.mlp.up_proj.weight"], "no gates"),
        (["model.layers.0.self_attn.retention_gate.gate_proj.weight"], "not known"),
    ],
)
def test_other_checkpoints(names, message):
    with pytest.raises(KvfoldError, match=message):
        gates_from_released({name: torch.zeros(2, 2) for name in names})


def test_gates_in_a_file(tmp_path):
    model = tiny_model("llama")
    gates = TrainedGates(random_gates(model), "abc", {"step": 3})
    path = tmp_path / "gates.safetensors"
    path.write_bytes(gates.to_bytes())
    again = load_gates(path)
    assert again.fingerprint == "abc" and again.facts == {"step": 3} and load_gates(path) is again
    x = torch.randn(1, 5, 64)
    assert torch.allclose(again(x, 2), gates(x, 2), rtol=0.05)
    for content, message in ((b"nothing", "no file of retention gates"), (b"", "no file of retention gates")):
        path.write_bytes(content)
        with pytest.raises(KvfoldError, match=message):
            load_gates(path)
    with pytest.raises(KvfoldError, match="train-gates"):
        load_gates(tmp_path / "missing.safetensors")
    with pytest.raises(KvfoldError, match="cannot be read"):
        load_gates("no-such-model")


# ---- worth and ranks ----


def test_ranks_are_those_of_a_sorted_list():
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(4, (60,), generator=draw).float()
    positions, groups = (torch.randint(n, (60,), generator=draw) for n in (9, 5))
    groups[groups == 3] = 4  # one is empty
    ahead = torch.rand(60, generator=draw) < 0.2
    order = best_first(scores, positions)
    for split, first in product((groups, None), (ahead, None)):
        found = ranks(order, split, first)
        for group in range(5) if split is not None else [None]:
            members = [i for i in range(60) if group is None or groups[i] == group]
            members.sort(
                key=lambda i: (first is not None and not first[i], -float(scores[i]), -int(positions[i]), i)
            )
            assert [int(found[i]) for i in members] == list(range(len(members)))


@pytest.mark.parametrize("lookahead", [1, 2, 50])
def test_future_worth_is_a_sum(lookahead):
    age = torch.tensor([1, 1, 3, 40, 1000])
    log_beta = torch.tensor([-1e-8, -5.0, -0.7, -0.01, -1e-4])
    expected = [
        math.log(sum(math.exp((a + s) * b) for s in range(lookahead)))
        for a, b in zip(age.tolist(), log_beta.double().tolist())
    ]
    found = future_worth(age, log_beta, lookahead).tolist()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---- eviction ----


class Account:
    """What should be kept, worked out token by token from the inputs of a run's own attention modules."""

    def __init__(self, model, gates, method, pads):
        self.gates, self.method, self.pads = load_gates(gates).gates, method, pads
        self.given = defaultdict(list)
        self.handles = [
            module.register_forward_pre_hook(self._see, with_kwargs=True)
            for module in model.modules()
            if getattr(module, "layer_idx", None) in self.gates.config.layers and hasattr(module, "o_proj")
        ]
        self.kept, self.seen = None, 0

    def _see(self, module, args, kwargs):
        self.given[module.layer_idx].append(kwargs["hidden_states"].detach())

    def evict(self, limit):
        """Keep the best `limit` entries of each row."""
        with torch.no_grad():
            beta = {layer: self.gates(torch.cat(x, 1), layer).double() for layer, x in self.given.items()}
        tokens = next(iter(beta.values())).shape[-1]
        rows = next(iter(beta.values())).shape[0]
        kept = []
        for row in range(rows):
            new = {
                (layer, head, token)
                for layer, found in beta.items()
                for head in range(found.shape[1])
                for token in range(max(self.seen, self.pads[row]), tokens)
            }
            pool = sorted(new | (self.kept[row] if self.kept else set()))
            worth = {e: (tokens - e[2]) * float(beta[e[0]][row, e[1], e[2]]) for e in pool}
            pool.sort(key=lambda entry: (-worth[entry], -entry[2]))
            kept.append(set(pool[:limit]))
        self.kept, self.seen = kept, tokens

    def close(self):
        for handle in self.handles:
            handle.remove()


def kept_by(cache, row):
    return {
        (layer.layer_idx, head, int(position))
        for layer in cache.folded_layers
        for head in range(layer.kv_heads)
        for position in layer.segments[0].store.kept(row, head).positions
    }


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_evictions_one_after_the_other(name, gates_file):
    """A padded batch: the prompt, then ten tokens at a time while generating."""
    model = tiny_model(name)
    pads = [20, 0]
    ids, mask = left_pad(prompt(60, 2), pads)
    path = gates_file(model)
    method = DBTrimKV(tokens=12, gates=path, buffer=10, sinks=0, least=0)
    account = Account(model, path, method, pads)
    try:
        cache = fold(model, ids, method, mask)
        heads = len(cache.folded_layers) * 2
        account.evict(12 * heads)
        for row in range(2):
            assert kept_by(cache, row) == account.kept[row]
        full_mask = torch.cat([mask, mask.new_ones(2, 35)], 1)
        question = prompt(35, 2, seed=4)
        for start in range(0, 30, 10):
            steps(model, cache, question[:, start : start + 10], full_mask)
            account.evict(12 * heads)
            assert cache.folded_layers[0].tail == 0
            for row in range(2):
                assert kept_by(cache, row) == account.kept[row]
        steps(model, cache, question[:, 30:], full_mask)
        assert cache.folded_layers[0].tail == 5 and cache.get_seq_length() == 95
    finally:
        account.close()
    counts = [layer.segments[0].store.buffers["counts"] for layer in cache.folded_layers]
    assert len(torch.stack(counts).unique()) > 2, "heads compete"


def test_kept_states_are_the_prompts_own(gates_file):
    from kvfold import Full

    model, ids = tiny_model("llama"), prompt(60, 2)
    full = fold(model, ids, Full())
    cache = fold(model, ids, DBTrimKV(tokens=10, gates=gates_file(model)))
    for one, two in zip(cache.folded_layers, full.folded_layers, strict=True):
        for row in range(2):
            for head in range(2):
                kept = one.segments[0].store.kept(row, head)
                whole = two.segments[0].store.kept(row, head)
                for name in ("keys", "values"):
                    states = getattr(whole, name)[kept.positions].half().float()
                    assert torch.equal(getattr(kept, name), states)


METHODS = {
    "keep": dict(keep=0.3, buffer=16),
    "lookahead": dict(keep=0.3, lookahead=8, sinks=2, recent=5, least=2),
    "head": dict(tokens=20, scope="head", buffer=0),
    "threshold": dict(threshold=0.5),
    "chunks": dict(keep=0.4, chunks=True, buffer=8),
}
options_of = pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)


@options_of
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_padded_batch_and_its_rows_alone(name, options, gates_file):
    model = tiny_model(name)
    method = DBTrimKV(gates=gates_file(model), **options)
    pads = [20, 0, 35]
    ids, mask = left_pad(prompt(90, 3), pads)
    cache = fold(model, ids, method, mask)
    assert cache.report[0]["folded"]
    assert_within(cache, method)
    alone = [fold(model, ids[row : row + 1, count:], method) for row, count in enumerate(pads)]
    question, full_mask = prompt(5, 3, seed=3), torch.cat([mask, mask.new_ones(3, 5)], 1)
    twin = decoded(cache)
    found = steps(model, cache, question, full_mask)
    assert torch.allclose(found, steps(model, twin, question, full_mask), atol=2e-3)
    for row in range(3):
        single = steps(model, alone[row], question[row : row + 1], None)
        assert torch.allclose(found[row], single[0], atol=2e-3)


@options_of
def test_generating_on_and_on(options, gates_file):
    model = tiny_model("llama")
    method = DBTrimKV(gates=gates_file(model), **options)
    cache = FoldedCache(method)
    cache.watch(model)
    ids = generate(model, prompt(60), cache, max_new_tokens=40)
    ids = generate(model, torch.cat([ids, prompt(50, seed=1)], 1), cache, max_new_tokens=30)
    assert cache.get_seq_length() == ids.shape[1] - 1
    assert all(len(layer.segments) == 1 for layer in cache.folded_layers)
    assert all(layer.tail < max(method.buffer, 31) for layer in cache.folded_layers)
    assert_within(cache, method)
    if method.tokens:
        kept = sum(len(layer.segments[0].store.buffers["keys"]) for layer in cache.folded_layers)
        assert kept == method.tokens * 6


def test_memory_is_freed(gates_file):
    """All tensors that appear with the cache and vanish with it, counted apart from the ledger."""
    model, ids = tiny_model("llama"), prompt(200)
    method = DBTrimKV(tokens=16, gates=gates_file(model), buffer=8)

    def live():
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    fold(model, ids, method)  # gates are read once for the process
    before = live()
    cache = fold(model, ids, method)
    generate(model, torch.cat([ids, prompt(1, seed=1)], 1), cache, max_new_tokens=20)
    appeared = sum(count for pointer, count in live().items() if pointer not in before)
    assert appeared == cache.ledger().total
    # 16 tokens in each of 6 heads, up to 7 new ones in the tail: keys and values of 16 channels, in 2 and 4 bytes.
    assert appeared <= 6 * (16 * (64 + 4 + 2 + 4) + 7 * (128 + 4)) + 3 * 8


def test_chunks_bound_the_peak(gates_file):
    model, ids = tiny_model("llama"), prompt(160)
    for chunks, peak in ((True, 6 * (20 + 16)), (False, 6 * 160)):
        method = DBTrimKV(tokens=20, gates=gates_file(model), chunks=chunks)
        held = []

        class Watched(DBTrimKV):
            def fold(self, views, held=held):
                held.append(
                    sum(int(view.valid.sum()) for view in views)
                    + sum(len(view.previous[0].buffers["keys"]) for view in views if view.previous)
                )
                return super().fold(views)

        cache = fold(model, ids, Watched(**vars(method)), chunk_size=16)
        assert max(held) <= peak + 6 * 16 and (chunks or max(held) == peak)
        assert cache.report[-1]["tokens"] == cache.get_seq_length() == 160
        assert sum(len(layer.segments[0].store.buffers["keys"]) for layer in cache.folded_layers) == 6 * 20


def test_reading_in_chunks_changes_nothing_without_the_option(gates_file):
    model, (ids, mask) = tiny_model("gemma3_text"), left_pad(prompt(90, 2), [12, 0])
    method = DBTrimKV(keep=0.3, gates=gates_file(model))
    whole = fold(model, ids, method, mask)
    for size in (7, 31, 89):
        chunked = fold(model, ids, method, mask, chunk_size=size)
        assert [kept_by(chunked, row) for row in range(2)] == [kept_by(whole, row) for row in range(2)]


def test_budgets(gates_file):
    model, ids = tiny_model("llama"), prompt(100)
    path = gates_file(model)
    for options, entries in (
        (dict(tokens=10), 60),
        (dict(total=77), 77),
        (dict(total=7), 7),
        (dict(memory=6 * 4 + 50 * (64 + 2 + 4) + 9), 50),
        (dict(tokens=10, scope="head"), 60),
        (dict(total=77, scope="head"), 72),
    ):
        cache = fold(model, ids, DBTrimKV(gates=path, **options))
        counts = torch.cat([layer.segments[0].store.buffers["counts"] for layer in cache.folded_layers])
        assert int(counts.sum()) == entries
        assert ("scope" in options) == (len(counts.unique()) == 1) and int(counts.min()) >= 1
    cache = fold(model, ids, DBTrimKV(gates=path, total=77, least=12))
    counts = torch.cat([layer.segments[0].store.buffers["counts"] for layer in cache.folded_layers])
    assert int(counts.min()) == 12 and int(counts.sum()) == 77
    cache = fold(model, ids, DBTrimKV(gates=path, tokens=10, sinks=3, recent=4))
    for layer in cache.folded_layers:
        for head in range(2):
            positions = set(layer.segments[0].store.kept(0, head).positions.tolist())
            assert {0, 1, 2, 96, 97, 98, 99} <= positions


def test_a_threshold_is_what_a_token_is_worth(gates_file):
    model, ids = tiny_model("llama"), prompt(80)
    path = gates_file(model)
    low, high = (fold(model, ids, DBTrimKV(gates=path, threshold=t, sinks=0, least=0)) for t in (0.2, 0.6))
    assert kept_by(high, 0) < kept_by(low, 0)
    for cache, threshold in ((low, 0.2), (high, 0.6)):
        for layer in cache.folded_layers:
            buffers = layer.segments[0].store.buffers
            worth = ((80 - buffers["positions"].double()) * buffers["log_beta"].double()).exp()
            assert float(worth.min()) >= threshold - 1e-6


def test_an_emptied_head_is_no_trouble(gates_file):
    """Its queries see the tail alone; on any device."""
    model, ids = tiny_model("llama"), prompt(60)
    cache = fold(model, ids, DBTrimKV(gates=gates_file(model), total=9, sinks=0, least=0))
    counts = torch.cat([layer.segments[0].store.buffers["counts"] for layer in cache.folded_layers])
    assert int(counts.min()) == 0 and int(counts.sum()) == 9
    twin = decoded(cache)
    found = steps(model, cache, prompt(3, seed=2), None)
    assert bool(torch.isfinite(found).all())
    assert torch.allclose(found, steps(model, twin, prompt(3, seed=2), None), atol=2e-3)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_all_heads_at_once_are_the_heads_one_by_one(name, gates_file):
    """What a GPU runs, here."""
    model = tiny_model(name)
    cache = fold(model, prompt(90, 3), DBTrimKV(gates=gates_file(model), total=100, sinks=0, least=0))
    layer = cache.folded_layers[0]
    store, module = layer.segments[0].store, layer.module()
    store.block = 16
    expand = None
    if name == "deepseek_v3":

        def expand(keys, values):
            return module.expand_kv(values.float(), keys.float())

    dim = 24 if expand else 16
    context = AttendContext(0.3, 4.0, expand)
    for rows, batch in ((None, 3), (torch.tensor([2, 0, 0, 1]), 4)):
        query = torch.randn(batch, 4, 2, dim, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            one, two = store.attend(query, rows, context), store.attend_padded(query, rows, context)
        assert torch.allclose(one[0], two[0], atol=1e-5) and torch.allclose(one[1], two[1], atol=1e-5)


# ---- what caches go through ----


def test_beams_crops_and_rows(gates_file):
    model, ids = tiny_model("llama"), prompt(80, 2)
    method = DBTrimKV(keep=0.3, gates=gates_file(model), buffer=8)
    beams = fold(model, ids, method)
    beams.batch_repeat_interleave(3)
    question = torch.cat([ids, prompt(1, 2, seed=6)], 1)
    generate(model, question, beams, num_beams=3, max_new_tokens=20)
    assert_within(beams, method)
    cropped = fold(model, ids, method)
    before = cropped.ledger().total
    cropped.crop(-13)
    assert cropped.get_seq_length() == 67 and cropped.ledger().total <= before
    cropped.batch_select_indices(torch.tensor([1]))
    generate(model, torch.cat([ids[1:, :67], prompt(1, seed=7)], 1), cropped, max_new_tokens=20)
    assert_within(cropped, method)
    some = fold(model, ids, method)
    steps(model, some, prompt(5, 2, seed=8), None)
    some.crop(-3)
    assert some.folded_layers[0].gates.shape[2] == 2
    steps(model, some, prompt(6, 2, seed=8), None)
    assert some.folded_layers[0].tail == 0 and some.get_seq_length() == 88


def test_saved_between_evictions(gates_file, tmp_path):
    model, ids = tiny_model("llama"), prompt(80, 2)
    cache = fold(model, ids, DBTrimKV(keep=0.3, gates=gates_file(model), buffer=8))
    steps(model, cache, prompt(5, 2, seed=1), None)
    cache.save(tmp_path / "one.kvf")
    again, twin = load(tmp_path / "one.kvf", model), cache.fork()
    expected = steps(model, cache, prompt(12, 2, seed=2), None)
    assert torch.equal(expected, steps(model, again, prompt(12, 2, seed=2), None))
    assert torch.equal(expected, steps(model, twin, prompt(12, 2, seed=2), None))
    assert [kept_by(again, row) for row in range(2)] == [kept_by(cache, row) for row in range(2)]


def test_hooks_are_gone_with_the_last_cache(gates_file):
    model = tiny_model("llama")
    method = DBTrimKV(keep=0.3, gates=gates_file(model))

    def hooks():
        gc.collect()
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    cache = fold(model, prompt(60), method)
    twin = cache.fork()
    assert hooks() == 6
    del cache
    assert hooks() == 6
    steps(model, twin, prompt(3), None)
    del twin
    assert hooks() == 0
    with attach(model, method) as folding:
        model.generate(prompt(60), max_new_tokens=3, do_sample=False)
        assert folding.cache.report[0]["folded"]
    del folding
    assert hooks() == 0


def test_short_prompts_and_rows_are_whole(gates_file):
    model = tiny_model("llama")
    method = DBTrimKV(tokens=20, gates=gates_file(model))
    with attach(model, method) as folding:
        found = model.generate(prompt(20), max_new_tokens=3, do_sample=False)
    assert torch.equal(found, model.generate(prompt(20), max_new_tokens=3, do_sample=False))
    assert folding.cache.report[0]["folded"] is False
    ids, mask = left_pad(prompt(100, 2), [85, 0])
    cache = fold(model, ids, method, mask)
    assert len(kept_by(cache, 0)) == 15 * 6 and len(kept_by(cache, 1)) == 20 * 6


@pytest.mark.parametrize("scope", ["model", "head"])
def test_in_the_code_of_another_method(scope, gates_file, tmp_path):
    model, ids = tiny_model("llama"), prompt(200)
    method = DBTrimKV(tokens=60, gates=gates_file(model), scope=scope)
    chain = method >> BlockGTQ(bits=4)
    alone, coded = fold(model, ids, method), fold(model, ids, chain)
    assert kept_by(coded, 0) == kept_by(alone, 0)
    assert coded.ledger().folded_bytes < 0.7 * alone.ledger().folded_bytes
    coded.save(tmp_path / "doc.kvf")
    assert kept_by(load(tmp_path / "doc.kvf", model), 0) == kept_by(alone, 0)
    with pytest.raises(KvfoldError, match=r"calibration of dbtrimkv.*another model"):
        fold(tiny_model("qwen3"), ids, chain)


# ---- bad input ----


def test_gates_of_another_model(gates_file):
    model = tiny_model("llama")
    path = gates_file(tiny_model("qwen3"))
    for call in (
        lambda: fold(model, prompt(60), DBTrimKV(gates=path)),
        lambda: attach(model, DBTrimKV(gates=path)).__enter__(),
    ):
        with pytest.raises(KvfoldError, match=r"another model.*kvfold train-gates"):
            call()
    assert "generate" not in vars(model)


def test_gates_of_another_shape(tmp_path):
    """They do not say whose they are."""
    model, path = tiny_model("llama"), tmp_path / "gates.safetensors"
    for options, message in (
        (dict(layers=(0, 1, 2), hidden_size=64, kv_heads=4), "4 KV heads, the model has 2"),
        (dict(layers=(0, 1, 2), hidden_size=32, kv_heads=2), "of 32 channels, not for layer 0 of 64"),
        (dict(layers=(0, 1), hidden_size=64, kv_heads=2), "not for layer 2"),
    ):
        gates = RetentionGates(GateConfig(width=4, features=2, **options))
        path.write_bytes(TrainedGates(gates, "").to_bytes())
        with pytest.raises(KvfoldError, match=f"{message}.*kvfold train-gates"):
            fold(model, prompt(60), DBTrimKV(tokens=9, gates=str(path)))


def test_no_gates():
    with pytest.raises(KvfoldError, match="kvfold train-gates"):
        fold(tiny_model("llama"), prompt(60), DBTrimKV(gates="missing.safetensors"))


def test_gates_of_the_package():
    files = sorted(SHIPPED.glob("*.safetensors"))
    assert [file.stem for file in files] == [DBTrimKV().gates]
    for file in files:
        assert file.stat().st_size <= 6e6
        trained = load_gates(file.stem)
        assert trained.fingerprint and trained.facts["texts"] and trained.facts["train"]["seed"] == 0
        assert trained.gates.config.tie == "all"


def test_gates_of_the_package_and_another_model():
    with pytest.raises(KvfoldError, match=r"another model.*kvfold train-gates"):
        fold(tiny_model("llama"), prompt(60), DBTrimKV(keep=0.5))


def test_a_cache_that_watches_no_model(gates_file):
    model = tiny_model("llama")
    cache = FoldedCache(DBTrimKV(gates=gates_file(model)))
    with pytest.raises(KvfoldError, match=r"cache\.watch"):
        model(prompt(5), **{CACHE_KEYWORD: cache})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(total=5), "must be kept"),
        (dict(tokens=8, sinks=5, recent=4), "must be kept"),
        (dict(tokens=8, least=9), "must be kept"),
        (dict(keep=0.001), "budget pays"),
        (dict(memory=10), "budget pays"),
    ],
)
def test_budgets_that_are_too_small(options, message, gates_file):
    model = tiny_model("llama")
    with pytest.raises(BudgetError, match=message):
        fold(model, prompt(100), DBTrimKV(gates=gates_file(model), **options))


@pytest.mark.parametrize(
    "options",
    [
        dict(tokens=0), dict(total=-1), dict(keep=1.5), dict(memory=0), dict(threshold=1.0), dict(lookahead=0),
        dict(sinks=-1), dict(least=-1), dict(buffer=-1), dict(scope="layer"), dict(tokens=3, keep=0.1),
    ],
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(ValueError):
        DBTrimKV(**options)


def test_one_prefill_for_several_gates(gates_file):
    """As `kvfold eval` folds: each method sees its own gates, and one without gates none."""
    from kvfold import SnapKV
    from kvfold.evaluate.prefill import Prefill

    model, ids = tiny_model("llama"), prompt(60)
    methods = [DBTrimKV(tokens=10, gates=gates_file(model, tie=tie)) for tie in ("all", "none")]
    prefill = Prefill(model, ids, [SnapKV(keep=0.5), *methods])
    for method in methods:
        assert kept_by(prefill.fold(method), 0) == kept_by(fold(model, ids, method), 0)
    assert kept_by(prefill.fold(methods[0]), 0) != kept_by(prefill.fold(methods[1]), 0)
    cache = prefill.fold(methods[1])
    steps(model, cache, prompt(40, seed=1), None)
    assert cache.folded_layers[0].tail == 8
    assert prefill.fold(SnapKV(keep=0.5)).folded_layers[0].gates is None
