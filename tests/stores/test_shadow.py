"""Low-rank keys read a few chunks at a time."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods import ShadowKV
from kvfold.stores import store_from_state
from kvfold.stores.base import AttendContext
from tests.methods.baselines.views import view
from tests.stores.checks import Turn, assert_behaves, assert_same

SMALL = dict(rank=20, chunk=4, outlier_chunks=3, local_chunks=2)


@pytest.mark.parametrize("pads", [(9, 0, 30), (0, 59, 52)])
def test_reads_everything_when_it_may(pads):
    (store,) = ShadowKV(sparse_budget=1000, **SMALL).fold([view(pads=pads)])
    assert_behaves(store, Turn())


def choice(store, one, row, query, kv_head, group):
    """Tokens that one query reads, chunk by chunk from the exact keys: ShadowKV, algorithm 2."""
    first = store.layout.firsts[row]
    keys, at = one.keys[row, kv_head, first:].double(), first
    inside = (len(keys) // 4 - 2) * 4
    chunks = [keys[start : start + 4] for start in range(0, inside, 4)]
    marks = [chunk.mean(0) for chunk in chunks]
    worst = [
        min(float(torch.cosine_similarity(key, mark, dim=0)) for key in chunk)
        for chunk, mark in zip(chunks, marks, strict=True)
    ]
    outliers = sorted(range(len(chunks)), key=lambda index: worst[index])[:3]
    others = [index for index in range(len(chunks)) if index not in outliers]
    shares = []
    for member in range(group):
        logits = torch.stack(
            [query[kv_head * group + member].double() @ marks[i] * one.scaling for i in others]
        )
        shares.append(logits.softmax(0))
    best = torch.stack(shares).amax(0).topk(store.layout.selected).indices.tolist()
    chunks_read = [*outliers, *(others[index] for index in best)]
    tokens = {4 * chunk + inner for chunk in chunks_read for inner in range(4)} | set(
        range(inside, len(keys))
    )
    return sorted(token + at for token in tokens)


def test_each_query_reads_its_own_choice():
    one = view(pads=(9, 0))
    (store,) = ShadowKV(sparse_budget=12, **SMALL).fold([one])
    query = torch.randn(2, 4, 6, 16) * 1.5
    output, lse = store.attend(query, None, AttendContext(one.scaling, rotary=Turn()))
    for row in range(2):
        for step in range(6):
            for head in range(4):
                kept = store.kept(row, head // 2, Turn())
                tokens = choice(store, one, row, query[row, :, step], head // 2, 2)
                read = torch.tensor([token - store.layout.firsts[row] for token in tokens])
                assert len(read) < len(kept.positions)
                scores = query[row, head, step].double() @ kept.keys[read].double().T * one.scaling
                expected = scores.softmax(-1) @ kept.values[read].double()
                assert torch.allclose(output[row, head, step].double(), expected, atol=1e-3)
                assert torch.allclose(lse[row, head, step].double(), scores.logsumexp(-1), atol=1e-3)


def test_keys_are_the_best_of_their_rank():
    """Before RoPE and of all heads together, by NumPy's singular values; outliers and the newest are exact."""
    import numpy as np

    one = view(tokens=64)
    (store,) = ShadowKV(sparse_budget=1000, **SMALL).fold([one])
    plain = Turn().unrotate(one.keys[0, :, :56], one.positions[0, :56])
    flat = plain.transpose(0, 1).reshape(56, -1).double().numpy()
    u, s, v = np.linalg.svd(flat, full_matrices=False)
    best = torch.tensor((u[:, :20] * s[:20]) @ v[:20]).float().view(56, 2, 16)
    turned = Turn().rotate(best.transpose(0, 1), one.positions[0, :56])
    for head in range(2):
        kept = store.kept(0, head, Turn())
        outliers = store._tokens_of(store.buffers["outlier_chunks.0"][head])
        others = [token for token in range(56) if token not in outliers.tolist()]
        assert torch.allclose(kept.keys[others], turned[head, others], atol=2e-2)
        exact = [*outliers.tolist(), *range(56, 64)]
        assert torch.allclose(kept.keys[exact], one.keys[0, head, exact], atol=3e-3)
    assert not torch.allclose(turned, one.keys[0, :, :56], atol=0.3)


def test_without_rope():
    (store,) = ShadowKV(sparse_budget=1000, **SMALL).fold([view(pads=(3,), rotary=False)])
    assert_behaves(store)


def test_bytes_are_counted():
    one = view(pads=(0,), tokens=64)
    (store,) = ShadowKV(sparse_budget=16, **SMALL).fold([one])
    chunks, marks = 14, 11
    expected = {
        "token factors": 2 * 56 * 20,
        "bases": 2 * 20 * 32,
        "landmarks": 2 * 2 * marks * 16,
        "positions": 2 * 2 * chunks,
        "fp16 rows": 2 * 2 * 16 * (3 * 4 + 8),
        "offloadable values": 2 * 2 * 64 * 24,
    }
    assert store.ledger() == expected


def test_repeated_rows_are_copies():
    (store,) = ShadowKV(sparse_budget=16, **SMALL).fold([view(pads=(9, 0))])
    twice = store.select(torch.tensor([1, 1]))
    assert_same(twice, store, Turn(), rows=[1, 1])
    assert twice.buffers["values.0"].data_ptr() != twice.buffers["values.1"].data_ptr()


def test_damaged_state_is_refused():
    (store,) = ShadowKV(sparse_budget=16, **SMALL).fold([view()])
    for name in ("factors.0", "landmark_chunks.0", "local_keys.0", "values.0"):
        tensor = store.tensors()[name]
        cut = tensor[:-1] if name == "factors.0" else tensor[:, :-1]
        with pytest.raises(ValueError, match="row 0"):
            store_from_state("shadow", {**store.tensors(), name: cut}, store.meta())
