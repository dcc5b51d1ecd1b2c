"""Benches on tiny shapes: what they measure is right before how fast it is matters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

import kvfold
from kvfold.bench import Candidate, Setup, attention, decode, fold, memory, throughput
from kvfold.bench import attention as attention_bench
from kvfold.bench.decode import _chooses
from kvfold.bench.fill import filled
from kvfold.bench.page import to_html
from kvfold.bench.peak import peak
from kvfold.bench.record import Record
from kvfold.bench.shapes import SHAPES, config_of, full_bytes
from kvfold.bench.timing import Times
from kvfold.errors import ArtifactError, KvfoldError, UnsupportedModelError
from kvfold.kernels import reference
from kvfold.ledger import storage_bytes
from kvfold.stores.dense import DenseStore
from tests.tiny import BASE, tiny_model

CPU = torch.device("cpu")
FOUR = Candidate("four", kvfold.BlockGTQ(bits=4))
KEEP = Candidate("keep", kvfold.RDKV(keep=0.25))


@pytest.fixture
def setup(monkeypatch) -> Setup:
    monkeypatch.setattr("kvfold.bench.timing.by_clock", lambda calls, seconds=0: (calls[0](), 1.0)[1])
    monkeypatch.setattr("kvfold.bench.reading.by_clock", lambda calls, seconds=0: 1.0)
    model = tiny_model("llama")
    return Setup(model.config, (FOUR, KEEP), (96,), (2,), torch.float32, CPU, model)


def test_shapes_have_the_published_numbers_of_parameters():
    from kvfold.bench.setup import _weights

    billions = {name: round(_weights(config_of(name)) / 1e9, 2) for name in SHAPES}
    assert billions == {
        "llama-3.1-8b": 8.03,
        "llama-3.2-3b": 3.21,
        "qwen2.5-3b": 3.09,
        "qwen2.5-7b": 7.62,
        "smollm2-135m": 0.13,
    }
    # Llama-3.1-8B: 32 layers x 8 heads x 128 channels x keys and values x 2 bytes = 128 KiB a token.
    assert full_bytes(config_of("llama-3.1-8b"), 1, torch.float16) == 131072
    assert config_of("llama-3.1-8b", 2).num_hidden_layers == 2


def test_filled_caches_hold_the_same_bytes_as_a_real_fold(setup):
    ids = torch.randint(3, 128, (2, 96))
    for candidate in (FOUR, KEEP):
        made = filled(setup, candidate.method, 96, 2)
        folded = kvfold.fold(setup.model, ids, candidate.method)
        tensors = [t for layer in made.folded_layers for t in layer.segments[0].store.tensors().values()]
        assert storage_bytes(tensors) == sum(t.nbytes for t in tensors)  # no two layers share memory
        assert made.ledger().tokens == 96
        assert made.ledger().folded_bytes == pytest.approx(folded.ledger().folded_bytes, rel=0.15)


def test_layers_folded_together_share_in_a_filled_cache(setup):
    method = kvfold.methods.XKV(keep=0.5, layers=2, split=False)
    made = filled(setup, method, 96, 2)
    stores = [layer.segments[0].store for layer in made.folded_layers]
    factors = [store.buffers["key_factors.1"] for store in stores]
    assert [a is b for a, b in zip(factors, factors[1:])] == [n % 2 == 0 for n in range(len(factors) - 1)]
    assert made.ledger().folded_ratio <= 0.5


def test_attention_tells_bytes_and_ratios(setup):
    rows = list(attention(setup))
    baselines = [row for row in rows if row["kind"] == "baseline"]
    assert {row["label"] for row in baselines} >= {"sdpa flash", "sdpa math"}
    assert any("problem" in row for row in baselines)  # cuDNN has no CPU
    named = {row["label"]: row for row in rows if row["kind"] == "method"}
    assert list(named) == ["full", "four", "keep"]
    assert (
        named["full"]["bytes"] == 2 * 2 * 2 * 96 * 16 * 4
    )  # keys and values, rows, heads, tokens, channels, bytes
    assert named["four"]["bytes"] < 0.25 * named["full"]["bytes"]
    for row in named.values():
        assert row["error"] < 1e-4
        assert row["speedup"] == row["times_floor"] == 1  # every call takes a millisecond here


def test_a_wrong_result_is_not_timed(setup, monkeypatch):
    right = DenseStore.attend

    def wrong(self, query, rows, context):
        output, lse = right(self, query, rows, context)
        return output * 1.01, lse

    monkeypatch.setattr(DenseStore, "attend", wrong)
    row = next(row for row in attention(setup) if row["label"] == "full")
    assert "ms" not in row and row["problem"].startswith("wrong by 1.0e-02")


def test_the_reference_is_attention_in_float64():
    query, keys, values = torch.randn(4, 1, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    found = attention_bench_module()._exact(query, keys, values, 0.3)
    expected, _ = reference.attend(query[None].double(), keys[None].double(), values[None].double(), 0.3)
    assert torch.allclose(found, expected[0].double(), atol=1e-6)


def attention_bench_module():
    import sys

    return sys.modules[attention_bench.__module__]


def test_decode_has_a_floor_of_weights_and_cache(setup):
    rows = {row["label"]: row for row in decode(replace(setup, batches=(1,)))}
    assert list(rows) == ["full", "four", "keep", "stock"]
    model = setup.model
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    speed = 2 * (1 << 24) * 4 / 1e-3  # the copy takes a millisecond here
    for label in ("full", "four", "keep"):
        row = rows[label]
        assert row["weight_bytes"] == weights
        assert row["floor_ms"] == pytest.approx(1e3 * (weights + row["bytes"]) / speed)
        assert row["reason"] == "cpu has no CUDA graphs"
    assert rows["stock"]["bytes"] == full_bytes(model.config, 96, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replays_stay_within_the_room_of_the_graph():
    """A replay is a step: past the room that was asked for it writes out of bounds."""
    model = tiny_model.__wrapped__("llama", dtype=torch.bfloat16).to("cuda")
    setup = Setup(model.config, (FOUR,), (256,), (1,), torch.bfloat16, model.device, model)
    rows = list(decode(setup, stock=False))
    assert [row["reason"] for row in rows] == [None, None] and all(row["step_ms"] > 0 for row in rows)
    torch.cuda.synchronize()


def test_decode_refuses_other_tokens(setup, monkeypatch):
    from kvfold.engine.choose import Chooser

    right = Chooser.choose
    monkeypatch.setattr(Chooser, "choose", lambda self, logits: right(self, -logits))
    with pytest.raises(RuntimeError, match="other tokens"):
        list(decode(replace(setup, candidates=()), stock=False))


def test_what_chooses_is_known(setup):
    """Its graphs are compared with their own steps: others round otherwise, and then read other chunks."""
    method = kvfold.XKV(keep=0.6, sparse_budget=16, chunk=4, recent=4, outlier_chunks=1)
    assert _chooses(filled(setup, method, 96, 2))
    assert not any(_chooses(filled(setup, other.method, 96, 2)) for other in (FOUR, KEEP))


def test_memory_counts_what_is_alive(setup):
    rows = {row["label"]: row for row in memory(setup)}
    full = full_bytes(setup.config, 2 * 96, torch.float32)
    assert rows["full"]["ledger_bytes"] == rows["full"]["live_bytes"] == full
    for row in rows.values():
        assert row["live_bytes"] == pytest.approx(row["ledger_bytes"], rel=0.02, abs=4096)
        assert row["peak_bytes"] > row["live_bytes"]
        assert row["confirmed"] is None
    assert rows["four"]["longest"] > 4 * rows["full"]["longest"]


def test_peak_counts_tensors_that_came_and_went():
    before = torch.ones(1000)
    with peak(CPU) as found:
        kept = before * 2
        torch.cat([kept, kept]).sum()
        view = before[:10]
        before.add_(1)
    assert found.left == 4000 + 0 * view.numel()
    assert 12000 <= found.most <= 12100


def test_throughput_takes_the_largest_batch_of_the_budget(setup):
    one = full_bytes(setup.config, 96, torch.float32)
    rows = list(throughput(replace(setup, batches=(1,)), 3 * one + 5))
    full = [row for row in rows if row["label"] == "full"]
    assert [row["batch"] for row in full] == [1, 3]
    four = [row for row in rows if row["label"] == "four"][-1]
    assert four["batch"] == (3 * one + 5) // four["bytes"] > 12
    assert four["tokens_per_second"] == pytest.approx(1e3 * four["batch"] / four["ms"])
    with pytest.raises(KvfoldError, match="--budget of 73,727 bytes: one request of 96 tokens takes 73,728"):
        list(throughput(setup, one - 1))


def test_fold_compares_with_the_prefill(setup):
    rows = {row["label"]: row for row in fold(setup, rounds=1)}
    assert list(rows) == ["four", "keep"]
    for row in rows.values():
        assert row["fold_seconds"] == pytest.approx(row["seconds"] - row["prefill_seconds"])
        assert row["layer_bytes"] == full_bytes(setup.config, 2 * 96, torch.float32) // 3
        assert row["scratch_bytes"] > 0
        assert row["above_layers"] == pytest.approx(1 + row["scratch_bytes"] / row["layer_bytes"])
    with pytest.raises(KvfoldError, match="--method full: it folds nothing"):
        list(fold(replace(setup, candidates=(Candidate("full", kvfold.Full()),))))


def test_bad_input_is_refused_before_any_work(setup, monkeypatch):
    with pytest.raises(KvfoldError, match="--context 1: at least 2"):
        replace(setup, contexts=(1,))
    with pytest.raises(KvfoldError, match="--batch 0: at least 1"):
        replace(setup, batches=(0,))
    with pytest.raises(KvfoldError, match="reads at most 511"):
        replace(setup, contexts=(512,))
    with pytest.raises(UnsupportedModelError, match="this one has others"):
        replace(setup, config=tiny_model("gemma3_text").config)
    with pytest.raises(KvfoldError, match="is needed"):
        replace(setup, candidates=(Candidate("small", kvfold.RDKV(keep=1e-4)),))
    monkeypatch.setattr("kvfold.bench.setup.free_bytes", lambda device: 10**6)
    with pytest.raises(KvfoldError, match="GB are free: --batch 12 fits"):
        list(decode(replace(setup, batches=(999,))))
    random = Setup(LlamaConfig(**BASE), (), (96,), (1,), torch.float32, CPU)
    monkeypatch.setattr("kvfold.bench.setup.free_bytes", lambda device: 1000)
    with pytest.raises(KvfoldError, match="the weights take"):
        random.model  # noqa: B018


def test_times_prefer_the_graph():
    assert Times(2.0, 1.0).best == 1.0
    assert Times(2.0).best == 2.0


def test_a_record_is_written_whole_and_drawn(tmp_path):
    rows = [
        {"label": label, "context": context, "batch": 1, "ms": ms * context, "kind": "method"}
        for label, ms in (("full", 2.0), ("<four>", 1.0))
        for context in (1024, 4096)
    ]
    record = Record("attention", "tiny", "float32", "cpu", "kvfold bench attention", {}, rows)
    record.write(str(tmp_path / "a.json"))
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["rows"] == rows and told["versions"]["torch"]
    page = to_html(record)
    assert page.count("<polyline") == 2 and "&lt;four&gt;" in page and "<four>" not in page
    assert "4,096" in page
    with pytest.raises(ArtifactError, match="does not exist"):
        record.write(str(tmp_path / "none" / "a.json"))
