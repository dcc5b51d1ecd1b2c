"""MiniCache and ShadowKV: what they merge, factor and refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold import fold
from kvfold.errors import UnsupportedModelError
from kvfold.ledger import storage_bytes
from kvfold.methods import MiniCache, ShadowKV
from kvfold.methods.baselines.minicache import slerp
from kvfold.stores import DenseStore
from kvfold.stores.merged import MergedStore
from tests.methods.baselines.views import view
from tests.tiny import prompt, tiny_model


def between(a, b, t):
    """Equation 3 of the paper for one pair of vectors."""
    angle = np.arccos(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))
    first = np.sin((1 - t) * angle) / np.sin(angle) * a / np.linalg.norm(a)
    return first + np.sin(t * angle) / np.sin(angle) * b / np.linalg.norm(b), angle


def test_minicache_pair_by_hand():
    lower, upper = view(pads=(9, 0), seed=0), view(pads=(9, 0), seed=1)
    stores = MiniCache(start=0, gamma=0.2, t=0.6).fold([lower, upper])
    kept_exact = 0
    for row, pad in ((0, 9), (1, 0)):
        for head in range(2):
            for name in ("keys", "values"):
                a, b = (getattr(one, name)[row, head, pad:].double().numpy() for one in (lower, upper))
                merged = [between(x, y, 0.6) for x, y in zip(a, b, strict=True)]
                angles = np.array([angle for _, angle in merged])
                apart = angles > angles.max() - 0.2 * (angles.max() - angles.min())
                kept_exact += apart.sum()
                for states, store in zip((a, b), stores, strict=True):
                    found = getattr(store.kept(row, head), name).numpy()
                    for index, (direction, _) in enumerate(merged):
                        expected = (
                            states[index] if apart[index] else direction * np.linalg.norm(states[index])
                        )
                        assert np.allclose(found[index], expected, atol=1e-2)
    assert 0 < kept_exact < 0.4 * 8 * 60


def test_slerp_of_parallel_opposite_and_zero_vectors():
    a = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    b = torch.tensor([[5.0, 0.0], [-2.0, 0.0], [0.0, 2.0]])
    mix, angle = slerp(a, b, 0.6)
    assert torch.allclose(mix[0], torch.tensor([1.0, 0.0])) and angle[0] == 0
    assert bool(torch.isfinite(mix).all())


def test_minicache_folds_the_upper_half_in_pairs():
    views = [view(seed=seed) for seed in range(7)]
    stores = MiniCache().fold(views)
    assert [type(store) for store in stores] == [DenseStore] * 3 + [MergedStore] * 4
    assert stores[3].buffers["key_directions"] is stores[4].buffers["key_directions"]
    assert stores[4].buffers["key_directions"] is not stores[5].buffers["key_directions"]
    odd = MiniCache().fold(views[:5])
    assert [type(store) for store in odd] == [DenseStore] * 2 + [MergedStore] * 2 + [DenseStore]
    different = MiniCache(start=0).fold([views[0], view(key_dim=24)])
    assert [type(store) for store in different] == [DenseStore] * 2


def test_shared_bytes_count_once_and_survive_a_file(tmp_path):
    import kvfold

    model = tiny_model("llama", num_hidden_layers=4)
    cache = fold(model, prompt(90), MiniCache(start=0))
    assert cache.ledger().folded_ratio < 0.75
    cache.save(tmp_path / "merged.kvf")
    loaded = kvfold.load(tmp_path / "merged.kvf", model)
    for one in (cache, loaded):
        live = [t for layer in one.folded_layers for t in layer.tail_tensors()]
        live += [t for layer in one.folded_layers for s in layer.segments for t in s.store.tensors().values()]
        assert one.ledger().total == storage_bytes([*live, *one.rotary_tables()])
    assert loaded.ledger() == cache.ledger()
    both = fold(model, prompt(90, 2), MiniCache(start=0))
    before = both.ledger().total
    both.batch_select_indices(torch.tensor([1]))
    assert both.ledger().by_purpose["shared directions"] * 2 <= before
    assert both.ledger().folded_ratio < 0.75


def test_shadowkv_refuses_latents_by_name():
    with pytest.raises(UnsupportedModelError, match="shadowkv"):
        fold(tiny_model("deepseek_v3"), prompt(90), ShadowKV())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (MiniCache, {"t": 1.5}),
        (MiniCache, {"gamma": -1}),
        (ShadowKV, {"rank": 0}),
        (ShadowKV, {"sparse_budget": 4}),
    ],
)
def test_bad_options(method, options):
    with pytest.raises(ValueError):
        method(**options)
