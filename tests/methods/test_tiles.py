"""Folds are made of tiles of sixteen channels where a GPU would decode them from records, and of finer ones elsewhere."""

from dataclasses import replace

import pytest
import torch

import kvfold
from kvfold.methods import blockgtq, rdkv
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
    def decodes(keys, values):
        return keys.shape[-1] % 16 == 0

    monkeypatch.setattr(blockgtq, "reads_records", decodes)
    monkeypatch.setattr(rdkv, "reads_records", decodes)


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
    assert all(isinstance(store, GradedStore) for store in folded(method))
    method = kvfold.BlockGTQ(bits=5, widths=(5, 6))
    assert all(isinstance(store, RotatedStore) for store in folded(method))
    for store in folded(kvfold.BlockGTQ(bits=2.7), head_dim=24):
        assert RecordedStore.of(store) is None


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_generated_blocks_follow_their_prompt(method, as_on_a_gpu):
    model = tiny_model("llama", head_dim=32)
    cache = kvfold.fold(model, prompt(300), method)
    ids = torch.cat([prompt(300), prompt(300)[:, -1:]], 1)
    model.generate(ids, past_key_values=cache, max_new_tokens=200, do_sample=False, eos_token_id=None)
    assert all(layer.folded_tokens > 300 for layer in cache.folded_layers)
