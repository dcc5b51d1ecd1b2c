"""Factors that the layers of a window share."""

from __future__ import annotations

import pytest
import torch

from kvfold.ledger import storage_bytes
from kvfold.methods import XKV
from kvfold.stores import store_from_state
from kvfold.stores.base import AttendContext
from tests.methods.baselines.views import view
from tests.stores.checks import Turn, assert_behaves

PUBLISHED = dict(
    key_rank=12,
    value_rank=16,
    widths=(16,),
    basis_bits=16,
    metric="plain",
    centre=False,
    sinks=0,
    recent=0,
    split=False,
)
SPARSE = dict(keep=0.6, chunk=4, recent=4, outlier_chunks=2, split=False)


def window(layers=2, pads=(9, 0), options=None, **changes):
    views = [view(pads=pads, seed=seed, **(options or {})) for seed in range(layers)]
    return views, XKV(**changes).fold(views)


class SharedTurn(Turn):
    """A rotary embedding that remembers what the layers of a step share."""

    def __init__(self):
        self.known = {}

    def shared(self, name, make):
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]


@pytest.mark.parametrize(
    "changes",
    [dict(keep=0.3), PUBLISHED, dict(SPARSE, sparse_budget=1000)],
    ids=["coded", "published", "sparse"],
)
def test_behaves(changes):
    _, stores = window(**changes)
    for store in stores:
        assert_behaves(store, Turn())


def test_tiles_change_nothing(monkeypatch):
    _, (store, _) = window(keep=0.4)
    query = torch.randn(2, 4, 3, 16)
    whole = store.attend(query, None, AttendContext(0.1, rotary=Turn()))
    monkeypatch.setattr(type(store), "tile", 7)
    for one, other in zip(whole, store.attend(query, None, AttendContext(0.1, rotary=Turn()))):
        assert torch.allclose(one, other, atol=1e-5)


def test_one_token_basis_for_the_window():
    _, (lower, upper) = window(split=False, keep=0.4)
    shared = [name for name in lower.buffers if "factors" in name or "norms" in name]
    assert len(shared) == 8
    for one, two in (
        (lower, upper),
        (lower.crop(50), upper.crop(50)),
        (lower.select(torch.tensor([1])), upper.select(torch.tensor([1]))),
    ):
        names = [name for name in shared if name in one.buffers]
        assert all(one.buffers[name] is two.buffers[name] for name in names)
        assert one.buffers["key_basis.0"] is not two.buffers["key_basis.0"]
        both = [*one.tensors().values(), *two.tensors().values()]
        repeated = storage_bytes(one.buffers[name] for name in names)
        assert storage_bytes(both) == one.nbytes + two.nbytes - repeated


def chunks_read(one, store, row, query, heads, group):
    """Chunks that one query (heads * group, key_dim) reads for a choice made by `heads` together; outliers by exact keys."""
    described = store.layout.rows[row]
    start, count = store.coded(row)
    marks, banned = {}, {}
    for head in heads:
        keys = one.keys[row, head, start : start + count].double().view(-1, 4, 16)
        least = torch.cosine_similarity(keys, keys.mean(1)[:, None], dim=-1).amin(1)
        banned[head] = set(least.argsort()[:2].tolist())
    assert described.sinks + described.newest + count == store.real_tokens[row]
    share = torch.zeros(count // 4, dtype=torch.float64)
    if "landmarks.0" not in store.buffers:
        return None, banned
    for head in heads:
        marks[head] = store.landmarks(row)[head].double()
        exact = one.keys[row, head, start : start + count].double().view(-1, 4, 16).mean(1)
        assert (marks[head] - exact).norm() < 0.12 * exact.norm()  # 4 bits
        for member in range(group):
            logits = marks[head] @ query[head * group + member].double() * one.scaling
            logits[list(banned[head])] = -torch.inf
            share += logits.softmax(0)
    return set(share.topk(store.layout.selected).indices.tolist()), banned


@pytest.mark.parametrize("choice", ["head", "layer", "window"])
def test_each_query_reads_its_own_choice(choice):
    """Who chooses, and what is read, in float64."""
    views, stores = window(**SPARSE, sparse_budget=12, choice=choice, options=dict(tokens=64))
    turn = SharedTurn()
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 16) * 3
    agreed = compared = 0
    for one, store in zip(views, stores, strict=True):
        output, lse = store.attend(query, None, AttendContext(one.scaling, rotary=turn))
        assert ("landmarks.0" in store.buffers) == (choice != "window" or store is stores[0])
        for row in range(2):
            start, _ = store.coded(row)
            for step in range(5):
                for head in range(2):
                    heads = [head] if choice == "head" else [0, 1]
                    source = (views[0], stores[0]) if choice == "window" else (one, store)
                    chosen, _ = chunks_read(*source, row, query[row, :, step], heads, 2)
                    _, banned = chunks_read(one, store, row, query[row, :, step], [head], 2)
                    kept = store.kept(row, head, Turn())
                    chunk = (kept.positions - start) // 4
                    inside = (kept.positions >= start) & (kept.positions < start + store.coded(row)[1])
                    read = ~inside | torch.tensor([int(c) in chosen | banned[head] for c in chunk])
                    assert int(read.sum()) < len(kept.positions)
                    for member in (2 * head, 2 * head + 1):
                        scores = query[row, member, step].double() @ kept.keys[read].double().T * one.scaling
                        expected = scores.softmax(-1) @ kept.values[read].double()
                        compared += 1
                        agreed += bool(
                            torch.allclose(output[row, member, step].double(), expected, atol=1e-3)
                        )
                        agreed -= not torch.allclose(
                            lse[row, member, step].double(), scores.logsumexp(-1), atol=5e-2
                        )
    assert agreed == compared


def test_a_window_follows_its_first_layer_though_nothing_is_forgotten():
    """A replayed step shares what the steps before it shared."""
    (one, _), (lower, upper) = window(**SPARSE, sparse_budget=12, choice="window", options=dict(tokens=64))
    kept, queries = SharedTurn(), torch.randn(3, 2, 4, 1, 16) * 3
    outputs = []
    for query in queries:
        found = []
        for turn in (kept, SharedTurn()):
            context = AttendContext(one.scaling, rotary=turn)
            lower.attend(query, None, context)
            found.append(upper.attend(query, None, context)[0])
        assert torch.equal(*found)
        # What the layer before chose for another query is another choice.
        outputs.append(found[0])
    lower.attend(queries[0], None, AttendContext(one.scaling, rotary=kept))
    stale = upper.attend(queries[1], None, AttendContext(one.scaling, rotary=kept))[0]
    assert not torch.allclose(stale, outputs[1], atol=1e-3)


def test_latents_are_never_expanded():
    """Latent attention through an expanded basis, against expanding what the store decodes to."""
    generator = torch.Generator().manual_seed(3)
    up, out = torch.randn(4, 24, 12, generator=generator), torch.randn(4, 24, 10, generator=generator)
    seen = []

    def expand(rotary, latent):
        seen.append(latent.shape[2])
        keys = torch.cat([latent @ up, rotary.expand(-1, 4, -1, -1)], -1)
        return keys, latent @ out

    views = [view(pads=(9, 0), seed=seed, kv_heads=1, group=4, expand=expand) for seed in range(2)]
    for one in views:
        one.sampled = torch.cat([torch.randn(2, 4, one.sampled.shape[2], 12), one.sampled], -1)
    stores = XKV(keep=0.5).fold(views)
    for store in stores:
        query = torch.randn(2, 4, 3, 12 + 16)
        del seen[:]
        output, lse = store.attend(query, None, AttendContext(0.1, expand=expand, rotary=Turn()))
        assert max(seen) < 51, "tokens were expanded"
        for row in range(2):
            kept = store.kept(row, 0, Turn())
            keys, values = (x[0].double() for x in expand(kept.keys[None, None], kept.values[None, None]))
            scores = query[row].double() @ keys.transpose(1, 2) * 0.1
            assert torch.allclose(output[row].double(), scores.softmax(-1) @ values, atol=1e-4)
            assert torch.allclose(lse[row].double(), scores.logsumexp(-1), atol=1e-4)


def test_damaged_state_is_refused():
    _, (store, _) = window(keep=0.4)
    for name, cut in (
        ("key_factors.0", slice(0, -1)),
        ("value_norms.1", slice(0, -1)),
        ("key_basis.0", (slice(None), slice(0, -1))),
        ("exact_keys.1", (slice(None), slice(0, -1))),
    ):
        damaged = {**store.tensors(), name: store.tensors()[name][cut]}
        with pytest.raises(ValueError, match=f"row {name[-1]}"):
            store_from_state("lowrank", damaged, store.meta())


def test_copies_of_a_window_share_what_it_shares():
    first, second = XKV(keep=0.5, split=False).fold([view(seed=0), view(seed=1)])
    names = [name for name, tensor in first.tensors().items() if tensor is second.tensors()[name]]
    assert {"key_factors.0", "value_factors.0"} <= set(names)
    one, two = (store.to("meta") for store in (first, second))
    assert all(one.buffers[name] is two.buffers[name] for name in names)
    assert first.to("cpu").buffers["key_factors.0"] is first.buffers["key_factors.0"]

    rows = torch.tensor([0, 0, 0])
    one, two = (store.select(rows) for store in (first, second))
    copies = [name for name in one.buffers if name.rpartition(".")[0] + ".0" in names]
    assert len(copies) == 3 * len(names) and all(one.buffers[name] is two.buffers[name] for name in copies)
    assert one.buffers["key_factors.1"] is not one.buffers["key_factors.2"]
    held = storage_bytes(t for store in (one, two) for t in store.tensors().values())
    assert held == 3 * storage_bytes(t for store in (first, second) for t in store.tensors().values())
