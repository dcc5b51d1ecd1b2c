"""What kernels derive from a store and keep: all of it told, and in the ledger as "kernel tables"."""

from __future__ import annotations

import gc
from copy import deepcopy

import pytest
import torch

import kvfold
from kvfold.kernels import record_plan
from kvfold.kernels.around_records import problem
from kvfold.kernels.position_bias import FINE
from kvfold.ledger import KERNEL_TABLES, storage_bytes
from kvfold.methods import XKV
from kvfold.stores.base import AttendContext
from kvfold.stores.graded import RecordedGradedStore
from kvfold.stores.lowrank import LowRankStore, decode
from kvfold.stores.reading import ReadsRecords
from kvfold.stores.recorded import RecordedStore
from tests.methods.baselines.views import view
from tests.stores import test_graded_recorded, test_recorded
from tests.stores.checks import SharingTurn, assert_accounts
from tests.tiny import prompt, tiny_model

H200 = 132, 227 * 1024
TURN = SharingTurn(still=8)
MISSING = problem(torch.device("cuda"), 64, 1)


def by_records(store, query, context):
    """`ReadsRecords._attend` with every table that its kernels read, by their plain twin."""
    records, group = store._records, query.shape[1] * query.shape[2] // store.kv_heads
    for planes in (0, 16):
        records._plans[group, planes] = record_plan.make_plan(records, group, planes, *H200)
    if records.positions is not None:
        records.begins(-(-store.layout.tokens // FINE))
    return store.attend_records(query, context)


def by_tables(store, query, context):
    """As `lowrank.decode.attend`, its launches left out."""
    decode._kept(store, "exact", lambda: decode._exact(store))
    rows = tuple(range(store.rows))
    for some in (rows, rows[:1]):
        for whole in (True, False):
            decode._together(store, some, whole)


def recorded(padding):
    store = test_recorded.rotated("groups", padding=padding, sinks=4, norm_bits=8)
    return RecordedStore.of(store)


def graded(cropped):
    store = RecordedGradedStore.of(test_graded_recorded.graded())
    return store.crop(200) if cropped else store


def one_graded():
    return graded(False).select(torch.tensor([1]))


def lowrank(pads):
    return XKV(keep=0.4, split=False).fold([view(pads=pads, seed=seed) for seed in range(2)])[0]


STORES = {
    "records": (lambda: recorded(False), by_records),
    "records of short rows": (lambda: recorded(True), by_records),
    "grades": (lambda: graded(False), by_records),
    "cropped grades": (lambda: graded(True), by_records),
    "grades of one row": (one_graded, by_records),
    "factors": (lambda: lowrank((9, 0)), by_tables),
    "factors of one row": (lambda: lowrank((0,)), by_tables),
}


@pytest.mark.parametrize("name", STORES)
def test_no_table_is_left_out(name):
    make, attend = STORES[name]
    store = make()
    query = torch.randn(store.rows, 2 * store.kv_heads, 1, store.key_dim)
    state, meta = {key: x.clone() for key, x in store.tensors().items()}, store.meta()
    assert not store.derived, "before the first attention there is nothing"
    assert_accounts(store, lambda one: attend(one, query, AttendContext(0.1, rotary=TURN)))
    assert bool(store.derived) == (name != "factors of one row")
    assert store.meta() == meta and store.tensors().keys() == state.keys()
    assert all(torch.equal(x, state[key]) for key, x in store.tensors().items())


def live():
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}


METHODS = [
    kvfold.RDKV(keep=0.3, window=8, tile=16),
    kvfold.BlockGTQ(),
    kvfold.XKV(keep=0.4),
]


def serve_a_cpu(monkeypatch):
    """Kernels are told to, with their plain twins in their place."""
    for kind in (RecordedStore, RecordedGradedStore):
        monkeypatch.setattr(kind, "problem", staticmethod(lambda store: None))
    monkeypatch.setattr("kvfold.kernels.around_records.problem", lambda *_: None)
    monkeypatch.setattr(ReadsRecords, "attend_with_tail", lambda *_: None)
    monkeypatch.setattr(ReadsRecords, "_attend", lambda store, q, context, **_: by_records(store, q, context))
    plain = LowRankStore.attend

    def attend(store, query, rows, context):
        by_tables(store, query, context)
        return plain(store, query, rows, context)

    monkeypatch.setattr(LowRankStore, "attend", attend)


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_ledger_counts_tables(method, device, monkeypatch, tmp_path):
    """Every byte that appears with a cache that kernels read is in its ledger."""
    model = tiny_model("llama", head_dim=64, num_attention_heads=4, hidden_size=256)
    if device == "cpu":
        serve_a_cpu(monkeypatch)
    else:
        model = deepcopy(model).to(device, torch.float16)
    ids = prompt(440, 2).to(device)
    question = torch.cat([ids, ids[:, :1]], 1)

    def run():
        cache = kvfold.fold(model, ids, method)
        cache.save(tmp_path / "before.kvf")
        fresh = cache.ledger()
        kvfold.generate(model, question, cache, max_new_tokens=3, do_sample=False)
        return fresh, cache

    run()  # what is made once for the process
    before = live()
    fresh, cache = run()
    ledger, after = cache.ledger(), live()
    assert sum(count for place, count in after.items() if place not in before) == ledger.total
    stores = [layer.segments[0].store for layer in cache.folded_layers]
    derived = storage_bytes(tensor for store in stores for tensor in store.derived)
    assert ledger.by_purpose[KERNEL_TABLES] == derived > 0 and KERNEL_TABLES not in fresh.by_purpose
    assert (ledger.folded_bytes, ledger.folded_ratio) == (fresh.folded_bytes, fresh.folded_ratio)
    cache.crop(cache.get_seq_length() - 440)
    cache.save(tmp_path / "after.kvf")
    assert KERNEL_TABLES not in kvfold.artifact.load_stores(tmp_path / "after.kvf")[0]["ledger"]["by_purpose"]
