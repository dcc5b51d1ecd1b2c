"""Kept tokens with values and biases of any origin."""

from __future__ import annotations

import pytest
import torch

from kvfold.stores import WeightedStore, store_from_state
from kvfold.stores.base import AttendContext, Kept
from kvfold.stores.weighted import WeightedLayout
from tests.stores.checks import assert_attends, assert_behaves


def random_store(counts=((20, 31), (5, 0), (64, 1)), tokens=64, bias=True, dtype=torch.float32, key_dim=16):
    generator = torch.Generator().manual_seed(0)

    def head(count):
        return Kept(
            torch.randperm(tokens, generator=generator)[:count],
            torch.randn(count, key_dim, generator=generator),
            torch.randn(count, 24, generator=generator) * 3,
            torch.randn(count, generator=generator) if bias else None,
        )

    rows = [[head(count) for count in row] for row in counts]
    layout = WeightedLayout(tokens, (tokens,) * len(counts))
    return WeightedStore.build(layout, rows, dtype), rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_behaves(bias, dtype):
    store, rows = random_store(bias=bias, dtype=dtype)
    assert_behaves(store)
    half = torch.float16 if dtype == torch.float32 else dtype
    for row, heads in enumerate(rows):
        for head, expected in enumerate(heads):
            kept = store.kept(row, head)
            assert torch.equal(kept.positions, expected.positions)
            assert torch.equal(kept.keys, expected.keys.to(half).float())
            assert torch.equal(kept.values, expected.values.to(half).float())
            assert (kept.bias is None) if not bias else torch.equal(kept.bias, expected.bias.to(half).float())
    each = WeightedStore.token_bytes(16, 24, 64, bias)
    assert store.nbytes == 4 * 6 + each * sum(len(kept.positions) for row in rows for kept in row)


def test_a_bias_is_a_count():
    """A token with bias log(3) is the token three times."""
    once = Kept(torch.arange(2), torch.randn(2, 4), torch.randn(2, 4), torch.tensor([3.0, 1.0]).log())
    often = Kept(torch.arange(4), once.keys[[0, 0, 0, 1]], once.values[[0, 0, 0, 1]], torch.zeros(4))
    stores = [WeightedStore.build(WeightedLayout(4, (4,)), [[kept]], torch.float32) for kept in (once, often)]
    query = torch.randn(1, 1, 5, 4)
    (one, one_lse), (many, many_lse) = (store.attend(query, None, AttendContext(0.5)) for store in stores)
    assert torch.allclose(one, many, atol=1e-3) and torch.allclose(one_lse, many_lse, atol=1e-3)


def test_long_heads_in_blocks(monkeypatch):
    store, _ = random_store()
    monkeypatch.setattr(WeightedStore, "block", 7)
    assert_attends(store)


def test_damaged_state_is_refused():
    store, _ = random_store()
    for name in ("positions", "keys", "values", "bias"):
        with pytest.raises(ValueError, match=name):
            store_from_state("weighted", {**store.tensors(), name: store.tensors()[name][:-1]}, store.meta())
    with pytest.raises(ValueError, match="rows"):
        store_from_state(
            "weighted", {**store.tensors(), "counts": store.buffers["counts"][:-1]}, store.meta()
        )
