"""Two layers that share the directions of their keys and values."""

from __future__ import annotations

import pytest
import torch

from kvfold.ledger import storage_bytes
from kvfold.methods import MiniCache
from kvfold.stores import store_from_state
from tests.methods.baselines.views import view
from tests.stores.checks import assert_behaves


def pair(pads=(9, 0, 30), gamma=0.3):
    return MiniCache(start=0, gamma=gamma).fold([view(pads=pads, seed=seed) for seed in (0, 1)])


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_behaves(gamma):
    for store in pair(gamma=gamma):
        assert_behaves(store)


def test_directions_stay_shared():
    lower, upper = pair()
    for one, two in ((lower, upper), (lower.crop(50), upper.crop(50))):
        both = [*one.tensors().values(), *two.tensors().values()]
        assert storage_bytes(both) < one.nbytes + two.nbytes
        assert one.buffers["key_directions"] is two.buffers["key_directions"]
    rows = torch.tensor([2, 0])
    one, two = lower.select(rows), upper.select(rows)
    assert one.buffers["value_directions"] is two.buffers["value_directions"]
    other = upper.select(torch.tensor([0, 2]))
    assert torch.equal(other.kept(1, 0).keys, two.kept(0, 0).keys)
    assert len(other.buffers["key_directions"]) == 2


def test_damaged_state_is_refused():
    store, _ = pair()
    for name, message in (("key_norms", "key_norms"), ("key_index", "disagree"), ("kept_values", "disagree")):
        with pytest.raises(ValueError, match=message):
            store_from_state("merged", {**store.tensors(), name: store.tensors()[name][:-1]}, store.meta())
