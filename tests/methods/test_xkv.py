"""xKV: windows, ranks, budgets, what errors cost, and later turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfold import fold
from kvfold.allocate.transform import Components, fill
from kvfold.errors import BudgetError, UnsupportedModelError
from kvfold.kernels import split_products
from kvfold.ledger import storage_bytes
from kvfold.methods import XKV, exact_rows, factorise
from kvfold.methods.subspace import leading, orthonormal
from kvfold.stores.base import AttendContext
from tests.methods.baselines.views import view
from tests.stores.checks import Turn
from tests.tiny import left_pad, prompt, tiny_model

KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
PUBLISHED = dict(widths=(16,), basis_bits=16, metric="plain", centre=False, sinks=0, recent=0)


def alike(layers=3, tokens=200, rank=6, noise=0.05, seed=0, mixed=False):
    """Views whose layers are linear maps of the same few token features, or (mixed) of features of their own."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(tokens, rank, generator=generator)
    views = []
    for layer in range(layers):
        own = torch.randn(tokens, rank, generator=generator) if mixed else features
        one = view(tokens=tokens, seed=100 * seed + layer)
        keys = own @ torch.randn(rank, 32, generator=generator)
        values = own @ torch.randn(rank, 48, generator=generator)
        keys = keys.view(tokens, 2, 16).transpose(0, 1) + noise * torch.randn(
            2, tokens, 16, generator=generator
        )
        values = values.view(tokens, 2, 24).transpose(0, 1)
        values = values + noise * torch.randn(2, tokens, 24, generator=generator)
        views.append(replace(one, keys=Turn().rotate(keys, one.positions[0])[None], values=values[None]))
    return views


def relative_error(views, stores):
    lost = total = 0.0
    for one, store in zip(views, stores, strict=True):
        for head in range(2):
            kept = store.kept(0, head, Turn())
            for found, exact in ((kept.keys, one.keys[0, head]), (kept.values, one.values[0, head])):
                lost += float((found - exact).square().sum())
                total += float(exact.square().sum())
    return lost / total


def nbytes(stores):
    return storage_bytes(tensor for store in stores for tensor in store.tensors().values())


def test_published_form_is_the_truncated_svd():
    """Of pre-RoPE keys, and of values, of all layers side by side: by NumPy's singular values."""
    views = [view(seed=seed) for seed in range(3)]
    stores = XKV(key_rank=20, value_rank=30, **PUBLISHED).fold(views)
    for part, rank in (("keys", 20), ("values", 30)):
        states = [getattr(one, part)[0] for one in views]
        if part == "keys":
            states = [Turn().unrotate(x, one.positions[0]) for x, one in zip(states, views, strict=True)]
        flat = torch.cat([x.transpose(0, 1).flatten(1) for x in states], 1).double().numpy()
        u, s, v = np.linalg.svd(flat, full_matrices=False)
        best = torch.tensor((u[:, :rank] * s[:rank]) @ v[:rank]).float().view(60, 3, 2, -1)
        for layer, store in enumerate(stores):
            for head in range(2):
                expected = best[:, layer, head]
                if part == "keys":
                    expected = Turn().rotate(expected, views[layer].positions[0])
                found = getattr(store.kept(0, head, Turn()), part)
                assert torch.allclose(found, expected, atol=2e-2)
    # One row of factors for three layers; each its basis.
    expected = 2 * 60 * (20 + 30) + 3 * 2 * 2 * (20 * 16 + 30 * 24)
    assert nbytes(stores) == expected


@pytest.mark.parametrize("keep", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("basis_bits", [8, 16])
def test_budgets_count_everything(keep, basis_bits):
    views = alike()
    stores = XKV(keep=keep, basis_bits=basis_bits).fold(views)
    assert 0.75 * keep < nbytes(stores) / sum(store.full_bytes for store in stores) <= keep


def test_shared_layers_lose_less_at_equal_bytes():
    views = alike()
    shared = XKV(keep=0.15, layers=3, split=False).fold(views)
    alone = [store for one in views for store in XKV(keep=0.15).fold([one])]
    assert nbytes(shared) <= nbytes(alone) * 1.05
    assert relative_error(views, shared) < 0.5 * relative_error(views, alone)


def test_layers_unlike_each_other_are_split():
    views = alike(mixed=True)
    split = XKV(keep=0.2).fold(views)
    whole = XKV(keep=0.2, split=False).fold(views)
    assert max(row.layers for store in split for row in store.layout.rows) < 3
    assert {row.layers for store in whole for row in store.layout.rows} == {3}
    assert relative_error(views, split) < relative_error(views, whole)
    assert {row.layers for store in XKV(keep=0.2).fold(alike()) for row in store.layout.rows} == {3}


def logit_error(views, stores):
    """Of the prompt's own queries, mean square."""
    total = 0.0
    for one, store in zip(views, stores, strict=True):
        for head in range(2):
            kept = store.kept(0, head, Turn())
            query = one.sampled[0, 2 * head : 2 * head + 2].flatten(0, 1)
            total += float((query @ (kept.keys - one.keys[0, head]).t()).square().mean())
    return total


def test_the_metric_is_what_queries_meet():
    """Queries in few directions: components that no query meets get nothing."""
    views = [view(tokens=200, seed=seed) for seed in range(2)]
    for one in views:
        # Turned by slow planes only, so that a query meets the same directions from every position.
        one.sampled[..., :8] *= 0.02
    options = dict(keep=0.3, layers=2, flatten=0.0)
    aware, plain = (XKV(metric=metric, **options).fold(views) for metric in ("queries", "plain"))
    assert logit_error(views, aware) < 0.3 * logit_error(views, plain)


def test_tokens_that_queries_want_lose_less():
    views = [view(tokens=200, seed=seed) for seed in range(2)]
    wanted = torch.zeros(200, dtype=torch.bool)
    wanted[60:70] = True
    for one in views:
        # Every query, turned to where it will ask, looks for these tokens' keys.
        target = Turn().unrotate(one.keys[0, :, 60:61], one.positions[0, 60:61]).repeat_interleave(2, 0)
        one.keys[0, :, wanted] = Turn().rotate(
            target[::2].expand(-1, 10, -1) + 0.1 * torch.randn(2, 10, 16), one.positions[0, wanted]
        )
        one.sampled = Turn().rotate(
            target.expand(-1, len(one.sampled_index), -1), one.positions[0, one.sampled_index]
        )[None]

    def share(stores):
        lost = torch.zeros(200)
        for one, store in zip(views, stores, strict=True):
            for head in range(2):
                lost += (store.kept(0, head, Turn()).values - one.values[0, head]).square().sum(-1)
        return float(lost[wanted].mean() / lost[4:-32].mean())

    assert share(XKV(keep=0.2, flatten=1.0).fold(views)) < 0.6 * share(XKV(keep=0.2, flatten=0.0).fold(views))


def test_what_all_tokens_have_is_taken_out():
    """Keys and values with a large constant, as a projection's bias makes, lose no more than without it."""

    def moved(views, by):
        generator = torch.Generator().manual_seed(7)
        result = []
        for one in views:
            keys = Turn().unrotate(one.keys[0], one.positions[0]) + by * torch.randn(
                2, 1, 16, generator=generator
            )
            values = one.values + by * torch.randn(2, 1, 24, generator=generator)
            result.append(replace(one, keys=Turn().rotate(keys, one.positions[0])[None], values=values))
        return result

    def lost(views, **options):
        stores = XKV(keep=0.3, metric="plain", **options).fold(views)
        assert nbytes(stores) <= 0.3 * sum(store.full_bytes for store in stores)
        error = 0.0
        for one, store in zip(views, stores, strict=True):
            for head in range(2):
                kept = store.kept(0, head, Turn())
                error += float((kept.keys - one.keys[0, head]).square().sum())
                error += float((kept.values - one.values[0, head]).square().sum())
        return error

    near, far = moved(alike(), 0.0), moved(alike(), 30.0)
    assert lost(far) < 1.5 * lost(near)
    assert lost(far, centre=False) > 20 * lost(far)


def test_the_mean_is_that_of_the_tokens_in_factors():
    views = alike(layers=1)
    (store,) = XKV(keep=0.3, metric="plain").fold(views)
    start, count = store.coded(0)
    inside = slice(start, start + count)
    keys = Turn().unrotate(views[0].keys[0], views[0].positions[0])[:, inside]
    assert torch.allclose(store.buffers["key_mean.0"].float(), keys.mean(1), atol=2e-3)
    assert torch.allclose(
        store.buffers["value_mean.0"].float(), views[0].values[0, :, inside].mean(1), atol=2e-3
    )
    assert store.ledger()["means"] == 2 * 2 * (16 + 24)


def in_halves(views):
    """Two turns of 120 tokens of what `alike(tokens=240)` made."""
    return [
        [replace(one, keys=one.keys[:, :, part], values=one.values[:, :, part], valid=one.valid[:, :, part],
                 positions=one.positions[:, part], real_tokens=(120,),
                 sampled=one.sampled[:, :, one.sampled_index < 120],
                 sampled_index=one.sampled_index[one.sampled_index < 120]) for one in views]
        for part in (slice(0, 120), slice(120, 240))
    ]  # fmt: skip


def test_a_later_turn_with_another_mean_is_put_on_the_basis_there_is():
    views = alike(tokens=240)
    for one in views:
        one.values[:, :, 120:] += 0.05
    halves = in_halves(views)
    method = XKV(keep=0.2)
    first = method.fold(halves[0])
    second = method.fold([replace(one, previous=(s, None)) for one, s in zip(halves[1], first, strict=True)])
    assert first[0].buffers["value_mean.0"] is second[0].buffers["value_mean.0"]
    assert relative_error(halves[1], second) < 2 * relative_error(halves[0], first)


@pytest.mark.parametrize("solver", ["eigh", "subspace"])
def test_ranks_with_a_budget_are_the_most_it_may_buy(solver):
    views = alike(rank=40)
    free = XKV(keep=0.3, split=False, solver=solver).fold(views)
    few = XKV(keep=0.3, split=False, solver=solver, key_rank=12).fold(views)
    assert free[0].layout.rows[0].key.rank > 12 == few[0].layout.rows[0].key.rank
    assert few[0].layout.rows[0].value.rank > 12
    assert nbytes(few) <= 0.3 * sum(store.full_bytes for store in few)
    # What the cap leaves out counts as lost.
    assert few[0].layout.rows[0].key.lost > free[0].layout.rows[0].key.lost


def test_subspace_iteration_finds_the_leading_eigenvectors():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 80, generator=generator, dtype=torch.float64) * 0.9 ** torch.arange(80)
    gram = x.t() @ x
    values, vectors = leading(gram, 20)
    assert torch.allclose(vectors.t() @ vectors, torch.eye(20, dtype=torch.float64), atol=1e-8)
    assert torch.allclose((vectors * (gram @ vectors)).sum(0), values) and (values.diff() <= 0).all()
    expected = torch.tensor(np.linalg.eigvalsh(gram.numpy())[::-1][:20].copy())
    assert torch.allclose(values, expected, rtol=1e-2)
    assert torch.allclose(values.sum(), expected.sum(), rtol=1e-3)
    # At so many bits that all have some, the error goes with the geometric mean; coded, with a few bits, by what is bought.
    assert values.log().mean() < expected.log().mean() + 0.01
    rest = float(gram.trace())
    for bits in (3.0, 5.0):
        found, best = (
            one.lost(fill([one], 1000, int(bits * 20 * 1000 / 8), (2, 3, 4, 5, 6, 8), tile=2)[0])
            for one in (Components(e.float(), 16, rest - float(e.sum())) for e in (values, expected))
        )
        assert found < 1.02 * best
    views = alike()
    exact, fast = (relative_error(views, XKV(keep=0.2, solver=s).fold(views)) for s in ("eigh", "subspace"))
    assert fast < 1.2 * exact


def test_subspace_iteration_serves_fewer_tokens_than_channels():
    views = alike(layers=6, tokens=170, rank=40)
    options = dict(keep=0.3, split=False, key_rank=12, value_rank=30)
    exact, fast = (XKV(solver=solver, **options).fold(views) for solver in ("eigh", "subspace"))
    assert relative_error(views, fast) < 1.02 * relative_error(views, exact)
    assert fast[0].layout.rows[0].value.lost < 1.02 * exact[0].layout.rows[0].value.lost


def test_the_metric_is_a_root_that_leaves_no_direction_out():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 9, 16, generator=generator) * 3.0 ** -torch.arange(16.0)
    moments = queries.transpose(1, 2) @ queries  # of rank 9
    moments = torch.cat([moments, torch.zeros(1, 16, 16)])
    found = factorise.root(moments).double()
    assert torch.equal(found, found.tril())
    largest = np.linalg.eigvalsh(moments.double().numpy())[:, -1:]
    least = np.linalg.eigvalsh((found @ found.mT).numpy())
    assert (least > 0).all() and (least[:3, 0] > 2.7e-5 * largest[:3, 0]).all()
    # Errors count as the queries' logits do, but for what is added to every direction.
    x = torch.randn(5, 16, generator=generator).double()
    exact = torch.einsum("td,hde,te->ht", x, moments.double(), x)
    added = (x @ found).square().sum(-1) - exact
    bound = 1.2e-4 * torch.tensor(largest) * x.square().sum(-1)
    assert (added[:3] > -1e-6 * exact[:3]).all() and (added[:3] < bound[:3]).all()


@pytest.mark.parametrize("options", [dict(keep=0.5), dict(key_rank=12, value_rank=16, widths=(16,))])
def test_tokens_are_folded_some_at_a_time(monkeypatch, options):
    views = in_halves(alike(tokens=400))
    method = XKV(sparse_budget=32, outlier_chunks=2, choice="layer", **options)

    def folded():
        first = method.fold(views[0])
        later = [replace(one, previous=(s, None)) for one, s in zip(views[1], first, strict=True)]
        return first + method.fold(later)

    whole = folded()
    # No piece ends where a panel, a chunk or the tokens do.
    monkeypatch.setattr(factorise, "TOKENS", 43)
    monkeypatch.setattr(exact_rows, "TOKENS", 43)
    monkeypatch.setattr(split_products, "PANEL", 20)
    for one, two in zip(whole, folded(), strict=True):
        assert one.layout.rows[0].key.groups == two.layout.rows[0].key.groups
        assert torch.equal(one.buffers["outliers.0"], two.buffers["outliers.0"])
        for head in range(one.kv_heads):
            mine, its = (store.kept(0, head, Turn()) for store in (one, two))
            for x, y in ((mine.keys, its.keys), (mine.values, its.values)):
                # A rounding may put a number on the other side of a code's border.
                assert (x - y).norm() < 0.02 * y.norm()


def test_products_in_parts_as_on_a_gpu_lose_no_more(monkeypatch):
    views = alike(tokens=300)
    method = XKV(keep=0.3, split=False)
    whole = method.fold(views)
    monkeypatch.setattr(split_products, "serves", lambda device: True)
    monkeypatch.setattr(split_products, "multiply", lambda x, y: x.float() @ y.float())
    parts = method.fold(views)
    assert not torch.equal(whole[0].buffers["key_norms.0"], parts[0].buffers["key_norms.0"])
    assert relative_error(views, parts) < 1.01 * relative_error(views, whole)


@pytest.mark.parametrize("n, rank", [(60, 60), (60, 9)])
def test_columns_are_made_orthonormal_however_dependent(n, rank):
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(n, rank, generator=generator).double()
        @ torch.randn(rank, 30, generator=generator).double()
    )
    found = orthonormal(x)
    assert torch.allclose(found.t() @ found, torch.eye(30, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(found @ (found.t() @ x), x, atol=1e-8)


def test_a_later_turn_is_put_on_the_basis_there_is():
    views = alike(tokens=240)
    halves = in_halves(views)
    method = XKV(keep=0.2)
    first = method.fold(halves[0])
    second = method.fold([replace(one, previous=(s, None)) for one, s in zip(halves[1], first, strict=True)])
    for one, two in zip(first, second, strict=True):
        assert one.buffers["key_basis.0"] is two.buffers["key_basis.0"]
        assert one.buffers["key_factors.0"] is not two.buffers["key_factors.0"]
    assert nbytes(second) / sum(store.full_bytes for store in second) <= 0.2
    assert relative_error(halves[1], second) < 2 * relative_error(halves[0], first)


def test_a_later_turn_unlike_the_first_gets_a_basis_of_its_own():
    method = XKV(keep=0.2)
    first = method.fold(alike())
    fresh = alike(seed=5)
    second = method.fold([replace(one, previous=(s, None)) for one, s in zip(fresh, first, strict=True)])
    assert first[0].buffers["key_basis.0"] is not second[0].buffers["key_basis.0"]
    assert relative_error(fresh, second) < 0.2


def test_a_later_turn_too_short_to_pay_stays_exact():
    first = XKV(keep=0.5).fold(alike())
    short, method = alike(tokens=40, seed=5), XKV(keep=0.05)
    second = method.fold([replace(one, previous=(s, None)) for one, s in zip(short, first, strict=True)])
    assert relative_error(short, second) == 0
    with pytest.raises(BudgetError, match="raise keep"):
        method.fold(short)


@pytest.mark.parametrize("solver", ["eigh", "subspace"])
@pytest.mark.parametrize("keep", [0.02, 0.1])
def test_a_later_turn_whose_outliers_alone_cost_too_much_stays_exact(solver, keep):
    sparse = dict(sparse_budget=32, outlier_chunks=16, solver=solver)
    first, short = XKV(keep=0.6, **sparse).fold(alike()), alike(tokens=120, seed=5)
    later = [replace(one, previous=(s, None)) for one, s in zip(short, first, strict=True)]
    assert relative_error(short, XKV(keep=keep, **sparse).fold(later)) == 0


@pytest.mark.parametrize("solver", ["eigh", "subspace"])
def test_rows_of_very_different_lengths(solver):
    """Beside one in factors: a row too short for them, and one of one token more."""
    model, (ids, mask) = tiny_model("llama"), left_pad(prompt(200, 3), [0, 190, 167])
    cache = fold(model, ids, XKV(keep=0.35, solver=solver), attention_mask=mask)
    rows = cache.folded_layers[0].segments[0].store.layout.rows
    assert [row.sinks + row.newest for row in rows][1] == 10
    assert [200 - row.first - row.sinks - row.newest for row in rows][1:] == [0, 33 - 2]


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.2])
@pytest.mark.parametrize("options", [{}, dict(sparse_budget=32), dict(sparse_budget=48, chunk=7)])
@pytest.mark.parametrize("tokens", [60, 301])
def test_the_least_budget_that_is_told_is_enough(keep, options, tokens):
    with pytest.raises(BudgetError, match="at least keep=") as told:
        XKV(keep=keep / 4, **options).check(tokens, 2, 16, 16)
    enough = float(str(told.value).split("keep=")[1].split()[0])
    XKV(keep=enough, **options).check(tokens, 2, 16, 16)
    with pytest.raises(BudgetError):
        XKV(keep=enough * 0.97, **options).check(tokens, 2, 16, 16)


@pytest.mark.parametrize("tokens", [33, 40, 90])
@pytest.mark.parametrize("chunk", [8, 29, 32, 64, 100])
@pytest.mark.parametrize("keep", [0.3, 0.6, 1.0])
def test_chunks_as_long_as_the_prompt_are_within_the_budget_or_refused(tokens, chunk, keep):
    method = XKV(keep=keep, chunk=chunk, sparse_budget=chunk)
    views = [view(seed=seed, tokens=tokens, pads=(0, tokens - 20)) for seed in range(2)]
    whole = sum(method.exact_tokens(tokens)) == tokens
    try:
        stores = method.fold(views)
    except BudgetError as error:
        assert ("no whole chunk" in str(error)) == whole
        with pytest.raises(BudgetError, match="no whole chunk" if whole else None):
            method.check(tokens, 2, 16, 24)
    else:
        assert not whole
        alone = method.fold([view(seed=seed, tokens=tokens) for seed in range(2)])
        assert nbytes(alone) <= keep * sum(store.full_bytes for store in alone)
        assert stores[0].tokens == tokens


def test_a_prompt_of_no_whole_chunk_where_that_is_no_fault():
    """Ranks alone leave such tokens as they are, and so does a later turn."""
    sparse = dict(chunk=64, sparse_budget=64)
    short = alike(tokens=40, seed=5)
    halves = [replace(one, keys=one.keys.half(), values=one.values.half()) for one in short]
    assert {store.kind for store in XKV(key_rank=4, value_rank=4, **PUBLISHED, **sparse).fold(halves)} == {
        "dense"
    }
    first = XKV(keep=0.6, **sparse).fold(alike(tokens=300))
    later = [replace(one, previous=(s, None)) for one, s in zip(short, first, strict=True)]
    assert relative_error(short, XKV(keep=0.6, **sparse).fold(later)) == 0


def test_windows_of_a_model():
    model = tiny_model("llama", num_hidden_layers=5)
    cache = fold(model, prompt(120), XKV(keep=0.4, layers=2, split=False))
    factors = [layer.segments[0].store.buffers["key_factors.0"] for layer in cache.folded_layers]
    assert factors[0] is factors[1] and factors[2] is factors[3]
    assert len({id(one) for one in factors}) == 3
    assert cache.ledger().folded_ratio <= 0.4
    cache = fold(model, prompt(120), XKV(keep=0.4, borders=(1, 4), split=False))
    factors = [layer.segments[0].store.buffers["key_factors.0"] for layer in cache.folded_layers]
    assert len({id(one) for one in factors}) == 3 and factors[1] is factors[2] is factors[3]


def test_a_window_is_all_that_is_held():
    """When a window is folded, the layers after it have not run and those before it are small."""

    class Spy(XKV):
        def fold(self, views):
            seen.append([one.layer_idx for one in views])
            return super().fold(views)

    seen: list[list[int]] = []
    fold(tiny_model("llama", num_hidden_layers=5), prompt(80), Spy(keep=0.4, layers=2))
    assert seen == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("layers", [1, 99])
def test_windows_of_one_layer_and_of_more_than_there_are(layers):
    cache = fold(
        tiny_model("llama", num_hidden_layers=3), prompt(120), XKV(keep=0.5, layers=layers, split=False)
    )
    rows = [layer.segments[0].store.layout.rows[0] for layer in cache.folded_layers]
    assert [row.layers for row in rows] == [min(layers, 3)] * 3
    assert cache.ledger().folded_ratio <= 0.5


def test_ranks_that_do_not_pay_leave_tokens_exact(caplog):
    """Bases of a short prompt, and as many components as there are tokens."""
    views = [replace(one, keys=one.keys.half(), values=one.values.half()) for one in alike(tokens=40)]
    stores = XKV(key_rank=40, value_rank=40, **PUBLISHED).fold(views)
    assert {store.kind for store in stores} == {"dense"} and "stay exact" in caplog.text
    assert relative_error(views, stores) == 0
    caplog.clear()
    assert {s.kind for s in XKV(key_rank=4, value_rank=4, **PUBLISHED).fold(views)} == {"lowrank"}
    assert not caplog.text


def test_ranks_above_the_channels_are_refused_before_any_work():
    with pytest.raises(BudgetError, match=r"key_rank=65 is more than the 64 channels .* window of 2 layers"):
        XKV(key_rank=65, value_rank=8, layers=2, widths=(16,)).check(4096, 2, 16, 16)
    with pytest.raises(BudgetError, match="value_rank=200"):
        fold(tiny_model("llama"), prompt(60), XKV(keep=0.5, value_rank=200))


def test_a_window_on_two_devices_is_split(monkeypatch, caplog):
    def fold_window(self, views):
        runs.append([one.layer_idx for one in views])
        return [None for _ in views]

    runs: list[list[int]] = []
    views = [replace(view(seed=number), layer_idx=number) for number in range(3)]
    views[2] = replace(views[2], keys=views[2].keys.to("meta"), values=views[2].values.to("meta"))
    monkeypatch.setattr(XKV, "_fold_window", fold_window)
    assert len(XKV(keep=0.5).fold(views)) == 3
    assert runs == [[0, 1], [2]] and "cpu, meta" in caplog.text


def test_windows_form_around_sliding_layers():
    model = tiny_model.__wrapped__("gemma3_text", num_hidden_layers=4, layer_types=KINDS)
    cache = fold(model, prompt(120), XKV(keep=0.5, layers=2, split=False))
    assert [layer.layer_idx for layer in cache.folded_layers] == [0, 3]
    first, second = (layer.segments[0].store.buffers["key_factors.0"] for layer in cache.folded_layers)
    assert first is second


def test_a_selection_as_large_as_the_context_reads_all():
    views = [view(seed=seed, tokens=90) for seed in range(2)]
    options = dict(keep=0.6, chunk=4, outlier_chunks=2, split=False)
    (store, _), (less, _) = (XKV(**options, sparse_budget=n).fold(views) for n in (1000, 12))
    query = torch.randn(1, 4, 3, 16)
    for head in range(2):
        kept = store.kept(0, head, Turn())
        scores = query[0, 2 * head].double() @ kept.keys.double().T * views[0].scaling
        expected = scores.softmax(-1) @ kept.values.double()
        context = AttendContext(views[0].scaling, rotary=Turn())
        output = store.attend(query, None, context)[0][0, 2 * head].double()
        assert torch.allclose(output, expected, atol=1e-4)
    assert not torch.allclose(less.attend(query, None, context)[0][0, 2 * head].double(), expected, atol=1e-2)


def test_layers_of_other_shapes_do_not_share():
    views = [view(seed=0), view(seed=1, value_dim=32), view(seed=2, value_dim=32)]
    stores = XKV(keep=0.5, split=False).fold(views)
    assert [store.layout.rows[0].layers for store in stores] == [1, 2, 2]


def test_latent_attention_has_no_keys_to_choose_by():
    with pytest.raises(UnsupportedModelError, match="sparse_budget"):
        XKV(keep=0.5, sparse_budget=64).fold(
            [view(kv_heads=1, expand=lambda rotary, latent: (rotary, latent))]
        )


def test_singular_states_and_few_tokens():
    one = view(tokens=40)
    flat = replace(one, keys=torch.zeros_like(one.keys), values=torch.ones_like(one.values))
    (store,) = XKV(keep=0.5).fold([flat])
    kept = store.kept(0, 0, Turn())
    assert torch.allclose(kept.keys, flat.keys[0, 0], atol=1e-3)
    assert torch.allclose(kept.values, flat.values[0, 0], atol=5e-2)
    with pytest.raises(BudgetError, match="at least keep="):
        fold(tiny_model("llama"), prompt(60), XKV(keep=0.02))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give keep"),
        (dict(keep=0.1, bits_per_element=2), "exactly one"),
        (dict(key_rank=8, widths=(16,)), "both"),
        (dict(keep=0.1, key_rank=1), "at least 2"),
        (dict(key_rank=8, value_rank=8), "one width"),
        (dict(key_rank=1, value_rank=8, widths=(16,)), "at least 2"),
        (dict(keep=0.1, widths=(4, 16)), "16 alone"),
        (dict(keep=0.1, layers=0), "layers"),
        (dict(keep=0.1, borders=(4, 2)), "borders"),
        (dict(keep=0.1, sparse_budget=7), "at least one chunk"),
        (dict(keep=0.1, recent=-1), "negative"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        XKV(**options)
