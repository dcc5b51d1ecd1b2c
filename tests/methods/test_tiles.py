"""Folds are made of tiles of sixteen channels where a GPU would decode them from records, and of finer ones elsewhere."""

from dataclasses import replace

import pytest
import torch

import kvfold
from kvfold.kernels import around_records
from kvfold.stores.graded import GradedStore
from kvfold.stores.graded.recorded import RecordedGradedStore
from kvfold.stores.recorded import RecordedStore
from kvfold.stores.rotated import RotatedStore
from tests.tiny import prompt, tiny_model

RECORDS = {RotatedStore: RecordedStore, GradedStore: RecordedGradedStore}


def folded(method, head_dim=32):
    model = tiny_model("llama", head_dim=head_dim)
    cache = kvfold.fold(model, prompt(300), method)
    return [layer.segments[0].store for layer in cache.folded_layers]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(around_records, "problem", lambda device, dim, group: None)
    for store in (RotatedStore, GradedStore):  # there is no kernel here after all
        monkeypatch.setattr(store, "for_decoding", lambda store: store)


METHODS = [kvfold.BlockGTQ(bits=2.7), kvfold.BlockGTQ(keep=0.3), kvfold.RDKV(keep=0.3, window=8)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_where_a_gpu_decodes_records(method, as_on_a_gpu):
    for store in folded(method):
        assert RECORDS[type(store)].of(store) is not None


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_elsewhere(method):
    stores = folded(method)
    assert not all(RECORDS[type(store)].of(store) for store in stores)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_tile_that_was_chosen_stays(method, as_on_a_gpu):
    chosen = replace(method, tile=2 if isinstance(method, kvfold.BlockGTQ) else 1)
    assert not all(RECORDS[type(store)].of(store) for store in folded(chosen))


def test_what_tiles_cannot_have(as_on_a_gpu):
    """Widths that no record has, or a budget that tiles are too coarse for: as elsewhere."""
    method = kvfold.RDKV(keep=0.3, window=8, widths=(2, 6))
    assert not any(RecordedGradedStore.of(store) for store in folded(method))
    method = kvfold.BlockGTQ(bits=5, widths=(5, 6))
    assert not any(RecordedStore.of(store) for store in folded(method))
    for store in folded(kvfold.BlockGTQ(bits=2.7), head_dim=24):
        assert RecordedStore.of(store) is None


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_generated_blocks_follow_their_prompt(method, as_on_a_gpu):
    model = tiny_model("llama", head_dim=32)
    cache = kvfold.fold(model, prompt(300), method)
    ids = torch.cat([prompt(300), prompt(300)[:, -1:]], 1)
    model.generate(ids, past_key_values=cache, max_new_tokens=200, do_sample=False, eos_token_id=None)
    assert all(layer.folded_tokens > 300 for layer in cache.folded_layers)


@pytest.mark.parametrize("options", [dict(bits=5), dict(bits=6.5), dict(keep=0.4)], ids=str)
def test_keys_are_as_fine_as_elsewhere_where_values_have_no_record(options, as_on_a_gpu, monkeypatch):
    found = folded(kvfold.BlockGTQ(**options))
    monkeypatch.undo()
    for store, other in zip(found, folded(kvfold.BlockGTQ(**options)), strict=True):
        assert RecordedStore.of(store) is not None or store.layout == other.layout


def test_capped_logits_have_no_records(as_on_a_gpu):
    model = tiny_model("gemma2", head_dim=32)
    for method in METHODS:
        cache = kvfold.fold(model, prompt(300), method)
        stores = [layer.segments[0].store for layer in cache.folded_layers if layer.segments]
        assert stores and not all(RECORDS[type(store)].of(store) for store in stores)


def test_a_budget_for_every_row_and_turn(as_on_a_gpu):
    """What single channels can have, tiles must not refuse: short rows of a batch, short second turns."""
    model, method = tiny_model("llama", head_dim=128), kvfold.RDKV(keep=0.05, window=8)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, :230] = 0
    kvfold.fold(model, prompt(300, 2), method, mask)
    cache = kvfold.fold(model, prompt(300), method)
    for tokens in (60, 50):
        seen = cache.get_seq_length()
        cache.expect(seen + tokens)
        with torch.no_grad():
            model(prompt(tokens), past_key_values=cache)
