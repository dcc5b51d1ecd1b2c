"""Rivals that choose tokens, each against its paper's formula written out in loops, and the budget they share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvfold.errors import BudgetError
from kvfold.methods import METHODS, LayerView, make_method
from kvfold.methods.baselines import (
    RKV,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    PyramidKV,
    Random,
    SnapKV,
    StreamingLLM,
)
from kvfold.methods.baselines.select import Selection

PADS = (0, 13)
TOKENS, HEADS, KV_HEADS, DIM = 48, 4, 2, 8
SCALING = 0.9
SELECTIONS = [AdaKV, ExpectedAttention, KeyDiff, Knorm, PyramidKV, Random, RKV, SnapKV, StreamingLLM, TOVA]


class HalfRotary:
    """RoPE that turns channel i with channel i + d/2, and stretches by a factor as YaRN does."""

    def __init__(self, dim=DIM, scale=1.0):
        self.frequencies, self.scale = 100.0 ** -(torch.arange(dim // 2) / (dim // 2)), scale

    def turn(self, x, positions, sign):
        angle = positions[:, None].float() * self.frequencies
        a, b = x.float().chunk(2, -1)
        cos, sin = angle.cos(), sign * angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1) * self.scale**sign

    def rotate(self, x, positions):
        return self.turn(x, positions, 1)

    def unrotate(self, x, positions):
        return self.turn(x, positions, -1)


def make_view(seed=0, pads=PADS, tokens=TOKENS, dtype=torch.float32, **options):
    """A left-padded layer whose queries and keys have something to say to each other."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(pads)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    index = torch.arange(tokens)
    first = torch.tensor(pads)[:, None]
    real = index >= first
    queries = draw(batch, HEADS, tokens, DIM)
    return LayerView(
        keys=draw(batch, KV_HEADS, tokens, DIM) * 1.5 + 0.3,
        values=draw(batch, KV_HEADS, tokens, DIM),
        valid=real[:, None].expand(-1, KV_HEADS, -1),
        real_tokens=tuple(tokens - pad for pad in pads),
        positions=(index - first).clamp_min(0),
        scaling=SCALING,
        queries=queries[:, :, -32:],
        sampled=queries,
        sampled_index=index,
        rotary=HalfRotary(),
        **options,
    )


def kept(store, row, head):
    return sorted(store.kept(row, head).positions.tolist())


def best(scores, count):
    """Indices of the largest of {token: score}, the newest of equal ones first."""
    return sorted(sorted(scores, key=lambda token: (scores[token], token), reverse=True)[:count])


def attention(view, row, head, place, keys_to=None):
    """Weights of the query of `head` at logical index `place` over tokens {token: weight}, causal, in float64."""
    group = HEADS // KV_HEADS
    query = view.sampled[row, head, place].double()
    tokens = [t for t in range(PADS[row], (keys_to or place) + 1) if t <= place]
    logits = [float(query @ view.keys[row, head // group, t].double()) * SCALING for t in tokens]
    total = math.fsum(math.exp(logit) for logit in logits)
    return {token: math.exp(logit) / total for token, logit in zip(tokens, logits)}


def window_scores(view, row, kv_head, window, pool, pooling, heads):
    """SnapKV: the window's attention to what precedes it, joined over query heads, pooled over neighbours."""
    group = HEADS // KV_HEADS
    start = TOKENS - window
    by_head = []
    for head in range(kv_head * group, (kv_head + 1) * group):
        rows = [attention(view, row, head, place) for place in range(start, TOKENS)]
        by_head.append({t: math.fsum(r[t] for r in rows) for t in range(PADS[row], start)})
    join = {"mean": lambda x: sum(x) / len(x), "max": max}[heads]
    joined = {t: join([scores[t] for scores in by_head]) for t in by_head[0]}
    half = pool // 2
    pooled = {}
    for t in joined:
        near = [joined.get(t + d, 0.0) for d in range(-half, half + 1)]
        pooled[t] = max(near) if pooling == "max" else sum(near) / pool
    return pooled


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize(("pool", "pooling"), [(5, "avg"), (7, "max"), (1, "avg")])
def test_snapkv(heads, pool, pooling):
    view = make_view()
    # The window attends to itself, and must not lend its mass to the neighbours that pooling sees.
    view.keys[:, :, -6:] = view.queries[:, ::2, -6:]
    method = SnapKV(tokens=15, window=6, pool=pool, pooling=pooling, heads=heads)
    (store,) = method.fold([view])
    for row in range(2):
        for head in range(KV_HEADS):
            scores = window_scores(view, row, head, 6, pool, pooling, heads)
            assert kept(store, row, head) == best(scores, 9) + list(range(TOKENS - 6, TOKENS))


@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_adakv(floor):
    view = make_view(1)
    # Make one head hungrier than the other.
    view.keys[:, 0] *= 3
    (store,) = AdaKV(tokens=16, window=4, floor=floor).fold([view])
    for row in range(2):
        scores = [window_scores(view, row, head, 4, 7, "max", "mean") for head in range(KV_HEADS)]

        def counts(base, scores=scores):
            pooled = sorted(
                ((score, head) for head in range(KV_HEADS) for score in scores[head].values()), reverse=True
            )
            won = [sum(owner == head for _, owner in pooled[: KV_HEADS * base]) for head in range(KV_HEADS)]
            return [round((1 - floor) * n + floor * base) for n in won]

        # The largest base that the 32 tokens of the layer pay for, windows included.
        base = max(b for b in range(30) if sum(counts(b)) + 2 * 4 <= 32)
        assert base >= 12
        if floor < 1:
            assert counts(base)[0] != counts(base)[1], "nothing to adapt"
        for head in range(KV_HEADS):
            expected = best(scores[head], counts(base)[head]) + list(range(TOKENS - 4, TOKENS))
            assert kept(store, row, head) == expected


def test_pyramidkv():
    layers, capacity, window, beta = 5, 20, 4, 8
    account = {}
    views = [make_view(seed, folding_layers=layers, account=account) for seed in range(layers)]
    method = PyramidKV(tokens=capacity, window=window, beta=beta)
    stores = [method.fold([view])[0] for view in views]
    for row in range(2):
        real = TOKENS - PADS[row]
        last = (capacity - window) / beta
        first = 2 * (capacity - window) - last
        if first > real - window:
            first = real - window
            last = 2 * (capacity - window) - first
        for layer, store in enumerate(stores):
            count = math.floor(window + first - layer * (first - last) / (layers - 1) + 1e-9)
            for head in range(KV_HEADS):
                scores = window_scores(views[layer], row, head, window, 5, "avg", "mean")
                expected = best(scores, count - window) + list(range(TOKENS - window, TOKENS))
                assert kept(store, row, head) == expected


@pytest.mark.parametrize(("bits", "keep"), [(16, 0.6), (4, 0.4)])
def test_pyramidkv_costs_what_equal_layers_would(bits, keep):
    account = {}
    views = [make_view(seed, pads=(0,), folding_layers=6, account=account) for seed in range(6)]
    method = PyramidKV(keep=keep, window=4, bits=bits, group=8)
    stores = [method.fold([view])[0] for view in views]
    sizes = [store.nbytes for store in stores]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    total, full = sum(sizes), sum(store.full_bytes for store in stores)
    assert 0.95 * keep < total / full <= keep


def test_tova():
    view = make_view(2)
    (store,) = TOVA(tokens=10).fold([view])
    for row in range(2):
        by_head = [attention(view, row, head, TOKENS - 1) for head in range(HEADS)]
        scores = {t: math.fsum(weights[t] for weights in by_head) / HEADS for t in by_head[0]}
        for head in range(KV_HEADS):
            assert kept(store, row, head) == best(scores, 10)


def test_streaming_keeps_sinks_and_the_newest():
    view = make_view(3)
    (store,) = StreamingLLM(tokens=12).fold([view])
    for row in range(2):
        expected = [*range(PADS[row], PADS[row] + 4), *range(TOKENS - 8, TOKENS)]
        assert all(kept(store, row, head) == expected for head in range(KV_HEADS))
    view.previous = (store, None)
    (later,) = StreamingLLM(tokens=12).fold([view])
    assert kept(later, 0, 0) == list(range(TOKENS - 12, TOKENS)), "a later turn has no sinks of its own"


def test_knorm():
    view = make_view(4)
    (store,) = Knorm(tokens=10).fold([view])
    for row in range(2):
        for head in range(KV_HEADS):
            norms = {
                t: -math.sqrt(sum(float(x) ** 2 for x in view.keys[row, head, t]))
                for t in range(PADS[row], TOKENS)
            }
            assert kept(store, row, head) == best(norms, 10)


def test_keydiff():
    view = make_view(5)
    (store,) = KeyDiff(tokens=10).fold([view])
    for row in range(2):
        for head in range(KV_HEADS):
            keys = {t: view.keys[row, head, t].double() for t in range(PADS[row], TOKENS)}
            anchor = sum(key / key.norm() for key in keys.values()) / len(keys)
            similar = {t: -float(key @ anchor / (key.norm() * anchor.norm())) for t, key in keys.items()}
            assert kept(store, row, head) == best(similar, 10)


def rotation(position, rotary):
    """RoPE at a position as a matrix, float64."""
    matrix = np.zeros((DIM, DIM))
    for i, frequency in enumerate(rotary.frequencies.double().tolist()):
        j, angle = i + DIM // 2, position * frequency
        matrix[i, i] = matrix[j, j] = math.cos(angle) * rotary.scale
        matrix[i, j], matrix[j, i] = -math.sin(angle) * rotary.scale, math.sin(angle) * rotary.scale
    return matrix


def expected_scores(view, row, kv_head, horizon, covariance, value_norm, epsilon):
    """Expected Attention, section 3: Gaussian queries turned by the mean rotation after the prompt."""
    first, real = PADS[row], TOKENS - PADS[row]
    start = first + 4
    turn = np.mean([rotation(real + step, view.rotary) for step in range(horizon)], 0)
    group = HEADS // KV_HEADS
    result = dict.fromkeys(range(start, TOKENS), 0.0)
    for head in range(kv_head * group, (kv_head + 1) * group):
        plain = np.stack(
            [
                np.linalg.solve(rotation(t - first, view.rotary), view.sampled[row, head, t].double().numpy())
                for t in range(start, TOKENS)
            ]
        )
        mean = turn @ plain.mean(0)
        spread = turn @ np.cov(plain.T, bias=True) @ turn.T
        logits = {}
        for t in result:
            key = view.keys[row, kv_head, t].double().numpy() * SCALING
            logits[t] = mean @ key + (key @ spread @ key / 2 if covariance else 0)
        total = math.fsum(math.exp(x) for x in logits.values())
        for t in result:
            weight = math.exp(logits[t]) / total
            if value_norm:
                weight = (weight + epsilon) * float(view.values[row, kv_head, t].double().norm())
            result[t] += weight / group
    return result


@pytest.mark.parametrize(
    ("covariance", "value_norm", "epsilon", "scale"),
    [(True, True, 0.0, 1.0), (True, True, 0.02, 1.3), (False, False, 0.0, 1.0)],
)
def test_expected_attention(covariance, value_norm, epsilon, scale):
    view = make_view(6)
    view.rotary = HalfRotary(scale=scale)
    view.keys.mul_(0.4)
    # Queries with a direction, or their mean says nothing.
    view.sampled += 0.8
    method = ExpectedAttention(
        tokens=14, horizon=150, covariance=covariance, value_norm=value_norm, epsilon=epsilon
    )
    found = method.scores(view)
    (store,) = method.fold([view])
    for row in range(2):
        sinks = list(range(PADS[row], PADS[row] + 4))
        for head in range(KV_HEADS):
            scores = expected_scores(view, row, head, 150, covariance, value_norm, epsilon)
            tensor = torch.tensor(list(scores.values()))
            assert torch.allclose(found[row, head, PADS[row] + 4 :], tensor, rtol=1e-3, atol=1e-7)
            assert kept(store, row, head) == sinks + best(scores, 10)


def test_expected_attention_with_competing_heads():
    view = make_view(7)
    view.keys[:, 0] *= 2
    (equal,) = ExpectedAttention(tokens=14).fold([view])
    (store,) = ExpectedAttention(tokens=14, floor=0.2).fold([view])
    counts = [len(kept(store, 0, head)) for head in range(KV_HEADS)]
    assert [len(kept(equal, 0, head)) for head in range(KV_HEADS)] == [14, 14]
    assert counts[0] != counts[1] and sum(counts) in (27, 28)


def redundancy(keys, tokens, similar):
    """R-KV, section 3.3: mean cosine to the others, each token exempting its newest likeness, then softmax."""
    unit = {t: keys[t].double() / keys[t].double().norm() for t in tokens}
    received = dict.fromkeys(tokens, 0.0)
    for i in tokens:
        cosine = {j: 0.0 if i == j else float(unit[i] @ unit[j]) for j in tokens}
        alike = [j for j in tokens if cosine[j] > similar]
        if alike:
            cosine[max(alike)] = 0.0
        for j in tokens:
            received[j] += cosine[j] / len(tokens)
    total = math.fsum(math.exp(x) for x in received.values())
    return {t: math.exp(x) / total for t, x in received.items()}


def max_pool(scores, half):
    return {t: max(scores.get(t + d, 0.0) for d in range(-half, half + 1)) for t in scores}


@pytest.mark.parametrize("weight", [0.1, 0.9])
def test_rkv_on_a_prompt(weight):
    view = make_view(8)
    window = 5
    (store,) = RKV(tokens=16, window=window, weight=weight).fold([view])
    for row in range(2):
        tokens = range(PADS[row], TOKENS)
        before = range(PADS[row], TOKENS - window)
        for kv_head in range(KV_HEADS):
            importance = dict.fromkeys(before, 0.0)
            for place in range(TOKENS - window, TOKENS):
                heads = range(kv_head * 2, kv_head * 2 + 2)
                queries = [view.sampled[row, head, place].double() for head in heads]
                logits = {
                    t: max(float(q @ view.keys[row, kv_head, t].double()) * SCALING for q in queries)
                    for t in before
                }
                total = math.fsum(math.exp(x) for x in logits.values())
                for t in before:
                    importance[t] += math.exp(logits[t]) / total / window
            importance = max_pool(importance, 3)
            repeated = redundancy(view.keys[row, kv_head], tokens, 0.5)
            scores = {t: weight * importance[t] - (1 - weight) * repeated[t] for t in before}
            assert kept(store, row, kv_head) == best(scores, 11) + list(range(TOKENS - window, TOKENS))


def test_rkv_on_generated_tokens():
    view = make_view(9, pads=(0, 0), generated=True)
    view.queries, view.mass = None, torch.rand(2, KV_HEADS, TOKENS) * 5
    (store,) = RKV(tokens=16).fold([view])
    for row in range(2):
        for head in range(KV_HEADS):
            mass = view.mass[row, head].tolist()
            importance = max_pool({t: x / sum(mass) for t, x in enumerate(mass)}, 3)
            repeated = redundancy(view.keys[row, head], range(TOKENS), 0.5)
            scores = {t: 0.1 * importance[t] - 0.9 * repeated[t] for t in range(TOKENS)}
            assert kept(store, row, head) == best(scores, 16), "no token of a block is kept by rule"


def test_rkv_takes_rows_of_similarity_in_pieces(monkeypatch):
    view = make_view(10)
    whole = RKV(tokens=16).redundancy(view)
    monkeypatch.setattr("kvfold.methods.baselines.rkv.ROWS", 7)
    assert torch.allclose(RKV(tokens=16).redundancy(view), whole, atol=1e-7)


def test_random_is_told_by_its_seed_alone():
    view = make_view(11)
    (store,) = Random(tokens=10, seed=3).fold([view])
    (again,) = Random(tokens=10, seed=3).fold([make_view(12)])
    (other,) = Random(tokens=10, seed=4).fold([view])
    alone = make_view(11, pads=PADS[1:], tokens=TOKENS)
    alone.keys, alone.values = view.keys[1:, :, 13:], view.values[1:, :, 13:]
    alone.valid, alone.positions = view.valid[1:, :, 13:], view.positions[1:, 13:]
    (single,) = Random(tokens=10, seed=3).fold([alone])
    sets = []
    for head in range(KV_HEADS):
        assert kept(store, 0, head) == kept(again, 0, head) != kept(other, 0, head)
        assert kept(store, 1, head) == [t + 13 for t in kept(single, 0, head)]
        sets.append(kept(store, 0, head))
    assert sets[0] != sets[1], "heads draw apart"
    (layer,) = Random(tokens=10, seed=3).fold([make_view(11, layer_idx=1)])
    assert kept(layer, 0, 0) != sets[0], "layers draw apart"


def test_random_is_even():
    counts = torch.zeros(TOKENS)
    for seed in range(200):
        (store,) = Random(tokens=12, seed=seed).fold([make_view(pads=(0,))])
        for head in range(KV_HEADS):
            counts[kept(store, 0, head)] += 1
    # 400 draws at 1/4: a standard deviation of 8.7.
    assert counts.sum() == 400 * 12 and counts.min() > 65 and counts.max() < 135


# ---- what they share ----


def bytes_of(store, bits, group):
    """Counted from shapes alone: codes, scales, minima, positions, channel order and counts."""
    total = 0
    for row in range(store.rows):
        for head in range(KV_HEADS):
            count = len(store.kept(row, head).positions)
            total += DIM + 4 * (2 if bits == 16 else 4)
            total += 2 * count
            if bits == 16:
                total += count * 2 * DIM * 2
                continue
            coded = math.ceil(DIM * bits / 8)
            total += 2 * count * coded
            total += 4 * count * math.ceil(DIM / group)
            if count:
                total += 4 * DIM * math.ceil(count / min(count, group))
    return total


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_budgets_are_bytes_and_spent(selection, bits):
    view = make_view(13, tokens=200, pads=(0,), dtype=torch.float16)
    view.mass = torch.rand(1, KV_HEADS, 200)
    for budget in ({"keep": 0.5}, {"keep": 0.29}, {"bits_per_element": 5.3}):
        method = selection(**budget, bits=bits, group=16)
        view.account = {}
        (store,) = method.fold([view])
        allowed = round(budget.get("keep", budget.get("bits_per_element", 0) / 16) * store.full_bytes, 6)
        assert store.nbytes == bytes_of(store, bits, 16)
        assert store.nbytes <= allowed
        # Two more tokens in each head would not fit.
        longest = max(len(kept(store, 0, head)) for head in range(KV_HEADS))
        group = 4 * DIM * (bits < 16)
        more = KV_HEADS * (2 * (2 + 4 * DIM * bits / 16 + 4 * (bits < 16)) + group)
        assert longest == 200 or store.nbytes + more > allowed


@pytest.mark.parametrize("selection", SELECTIONS)
def test_coding_keeps_the_same_kind_of_tokens(selection):
    """Selection does not look at `bits`: at a payload of so many tokens, four times as many are kept at 4 bits."""
    view = make_view(14, tokens=128, pads=(0,))
    (plain,) = selection(tokens=40).fold([view])
    (coded,) = selection(tokens=10, bits=4, group=16).fold([view])
    for head in range(KV_HEADS):
        left, right = plain.kept(0, head), coded.kept(0, head)
        assert sorted(left.positions.tolist()) == sorted(right.positions.tolist())
        exact = view.keys[0, head, right.positions]
        spread = exact.amax() - exact.amin()
        assert float((right.keys - exact).abs().max()) <= float(spread) / 15
        assert not torch.equal(right.keys, exact)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_equal_scores_keep_the_newest(selection):
    view = make_view(15)
    same = {name: torch.ones_like(getattr(view, name)) for name in ("keys", "values", "queries", "sampled")}
    for name, value in same.items():
        setattr(view, name, value)
    stores = [selection(tokens=17).fold([view])[0] for _ in range(2)]
    for row in range(2):
        for head in range(KV_HEADS):
            assert kept(stores[0], row, head) == kept(stores[1], row, head)
    if selection in (Knorm, KeyDiff):
        assert kept(stores[0], 1, 0) == list(range(TOKENS - 17, TOKENS))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_short_rows_are_kept_whole(selection):
    view = make_view(16, pads=(0, TOKENS - 5))
    (store,) = selection(tokens=8, bits=4).fold([view])
    assert kept(store, 1, 0) == list(range(TOKENS - 5, TOKENS))
    assert torch.equal(store.kept(1, 0).keys, view.keys[1, 0, -5:].half().float())
    assert len(kept(store, 0, 0)) < TOKENS


@pytest.mark.parametrize("selection", SELECTIONS)
def test_evicted_tokens_do_not_come_back(selection):
    """A prompt that goes on after it was folded: what is gone is invalid, and counts towards the budget only."""
    view = make_view(17, pads=(0, 0))
    valid = torch.rand(TOKENS, generator=torch.Generator().manual_seed(0)) > 0.4
    view.valid = valid.expand(2, KV_HEADS, -1).clone()
    view.valid[..., -8:] = True
    (store,) = selection(keep=0.99).fold([view])
    assert kept(store, 0, 0) == view.valid[0, 0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_options_out_of_range(selection):
    for options, word in (
        ({}, "exactly one"),
        ({"keep": 0.5, "bits": 1}, "bits"),
        ({"keep": 0.5, "bits": 4, "group": 0}, "group"),
        ({"keep": 0.5, "window": 0}, "window"),
        ({"keep": 0.5, "pool": 4}, "pool"),
        ({"keep": 0.5, "floor": 1.5}, "floor"),
        ({"keep": 0.5, "beta": 0.5}, "beta"),
        ({"keep": 0.5, "weight": 2.0}, "weight"),
        ({"keep": 0.5, "horizon": 0}, "horizon"),
        ({"keep": 0.5, "sinks": -1}, "sinks"),
        ({"keep": 0.5, "epsilon": math.nan}, "epsilon"),
        ({"keep": 0.5, "similar": math.nan}, "similar"),
        ({"keep": 0.5, "block_tokens": -1}, "block_tokens"),
    ):
        fields = selection.__dataclass_fields__
        if all(name in fields for name in options):
            with pytest.raises(ValueError, match=word):
                selection(**options)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_budget_below_one_token_names_the_smallest(selection, bits):
    method = selection(keep=0.001, bits=bits)
    with pytest.raises(BudgetError, match="at least keep=") as error:
        method.check(100, KV_HEADS, DIM, DIM)
    least = float(str(error.value).split("keep=")[1].split()[0])
    selection(keep=least, bits=bits).check(100, KV_HEADS, DIM, DIM)
    with pytest.raises(BudgetError):
        selection(keep=least - 2e-4, bits=bits).check(100, KV_HEADS, DIM, DIM)


def test_every_selection_is_a_method_by_name():
    for cls in SELECTIONS:
        assert issubclass(cls, Selection) and METHODS[cls.name] is cls
        method = make_method(cls.name, keep=0.25, bits=4)
        assert method.to_dict()["bits"] == 4 and (cls.paper == "control" or "arXiv" in cls.paper)
