"""Graded tokens: attention over packed codes equals attention over what they decode to, in float64."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels.reference import merge
from kvfold.stores import store_from_state
from kvfold.stores.base import AttendContext
from kvfold.stores.graded import Frame, GradedLayout, GradedStore

GRADES = 3


class HalfSplitRotary:
    """RoPE on halves, as Llama has it."""

    scale = 1.0

    def _turn(self, x, angle):
        half = x.shape[-1] // 2
        angle = angle[:, None] * 100.0 ** (-torch.arange(half) / half)
        first, second = x.float().split(half, -1)
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
        )

    def rotate(self, x, positions):
        return self._turn(x, positions.float())

    def unrotate(self, x, positions):
        return self._turn(x, -positions.float())

    def shared(self, name, make):
        return make()


ROTARY = HalfSplitRotary()


def random_store(
    rows=2,
    heads=3,
    tokens=70,
    key_dim=64,
    value_dim=64,
    widths=(8, 4, 2),
    turned=True,
    only=None,
    empty_head=False,
    dtype=torch.float32,
):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    keys = (normal(rows, heads, tokens, key_dim) + 1).to(dtype)
    values = (normal(rows, heads, tokens, value_dim) + 3).to(dtype)
    half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    cuts = torch.rand(rows, heads, GRADES, len(widths) + 1, generator=generator)
    counts = (cuts / cuts.sum(-1, keepdim=True) * key_dim).int()[..., :-1]
    choice = torch.tensor([0, *widths], dtype=torch.uint8)
    frame = Frame(
        key_turned=normal(rows, heads, key_dim).to(half) if turned else None,
        key_mean=normal(rows, heads, key_dim).to(half),
        key_deviation=(torch.rand(rows, heads, key_dim, generator=generator) + 0.5).to(half),
        value_mean=normal(rows, heads, value_dim).to(half),
        value_magnitude=torch.rand(rows, heads, generator=generator) + 1,
        order=torch.rand(rows, heads, key_dim, generator=generator).argsort(-1).to(torch.uint8),
        key_counts=counts.to(torch.int16),
        value_bits=choice[torch.randint(0, len(choice), (rows, heads, GRADES), generator=generator)],
    )
    layout = GradedLayout(tuple(widths), tokens, (tokens,) * rows, tuple(range(rows)), key_dim, value_dim)
    grades = torch.randint(0, GRADES + 3, (rows, heads, tokens), generator=generator).to(torch.uint8)
    if only is not None:
        grades[:] = only
    if empty_head:
        grades[0, 0] = 0
    store = GradedStore.encode(keys, values, grades, layout, frame, ROTARY if turned else None)
    return store, grades, keys, values


def exact(store, query, rows, scaling, softcap=None, rotary=ROTARY):
    """float64 attention over the decoded content."""
    group = query.shape[1] // store.kv_heads
    output = torch.zeros(*query.shape[:3], store.value_dim, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            kept = store.kept(b if rows is None else int(rows[b]), h // group, rotary)
            if not len(kept.positions):
                continue
            scores = query[b, h].double() @ kept.keys.double().T * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            output[b, h] = scores.softmax(-1) @ kept.values.double()
            lse[b, h] = scores.logsumexp(-1)
    return output, lse


class ScaledRotary(HalfSplitRotary):
    """As YaRN has it."""

    scale = 1.3

    def rotate(self, x, positions):
        return super().rotate(x, positions) * self.scale

    def unrotate(self, x, positions):
        return super().unrotate(x, positions) / self.scale


def check(store, rows=None, queries=2, softcap=None, rotary=ROTARY):
    batch = store.rows if rows is None else len(rows)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, 2 * store.kv_heads, queries, store.key_dim, generator=generator)
    output, lse = store.attend(query, rows, AttendContext(0.1, softcap, None, rotary))
    expected, expected_lse = exact(store, query, rows, 0.1, softcap, rotary)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(output.double(), expected, atol=2e-4, rtol=1e-4)


CASES = [
    dict(),
    dict(turned=False),
    dict(empty_head=True),
    dict(only=0),
    dict(only=1),
    dict(only=GRADES + 1),
    dict(only=GRADES + 2),
    dict(tokens=1),
    dict(tokens=300),
    dict(rows=1, heads=1),
    dict(key_dim=80, value_dim=96),
    dict(key_dim=96, value_dim=80),
    dict(key_dim=128, value_dim=128, dtype=torch.bfloat16),
    dict(key_dim=256, value_dim=256, dtype=torch.float16),
    dict(widths=(7, 5, 3, 1)),
    dict(widths=(8, 6, 1), key_dim=80),
    dict(widths=(1,), value_dim=96),
]


@pytest.mark.parametrize("block", [1, 200, 1 << 16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_equals_decoded_attention(case, block, monkeypatch):
    monkeypatch.setattr(GradedStore, "block", block)
    store, *_ = random_store(**case)
    check(store)
    check(store, torch.tensor([0] if store.rows == 1 else [1, 1, 0]), queries=1)


@pytest.mark.parametrize("queries", [1, 200])
def test_few_and_many_queries_and_softcap(queries):
    store, *_ = random_store(tokens=300)
    check(store, queries=queries)
    check(store, queries=queries, softcap=2.0)


@pytest.mark.parametrize("queries", [1, 200])
def test_rotary_with_a_factor_of_its_own(queries):
    store, *_ = random_store(tokens=300)
    check(store, queries=queries, rotary=ScaledRotary())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_content_is_what_the_grades_say(case):
    store, grades, keys, values = random_store(**case)
    for row in range(store.rows):
        for head in range(store.kv_heads):
            kept = store.kept(row, head, ROTARY)
            grade = grades[row, head]
            assert sorted(kept.positions.tolist()) == grade.nonzero().flatten().tolist()
            assert torch.equal(grade[kept.positions], grade[kept.positions].sort().values)
            wholly = grade[kept.positions] == GRADES + 2
            half = torch.bfloat16 if keys.dtype == torch.bfloat16 else torch.float16
            where = kept.positions[wholly]
            assert torch.equal(kept.keys[wholly], keys[row, head, where].to(half).float())
            assert torch.equal(kept.values[wholly], values[row, head, where].to(half).float())
            fine = grade[kept.positions] == GRADES + 1
            where = kept.positions[fine]
            torch.testing.assert_close(kept.keys[fine], keys[row, head, where].float(), atol=0.06, rtol=0.01)
            torch.testing.assert_close(
                kept.values[fine], values[row, head, where].float(), atol=0.06, rtol=0.01
            )


def test_eight_bits_decode_to_what_went_in():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 50, 64, generator=generator)
    ones = torch.ones(1, 2, 64, dtype=torch.float16)
    order = torch.arange(64).flip(0).to(torch.uint8).expand(1, 2, -1).contiguous()
    counts, bits = (
        torch.full((1, 2, 1, 1), 64, dtype=torch.int16),
        torch.full((1, 2, 1), 8, dtype=torch.uint8),
    )
    frame = Frame(ones, ones * 0, ones, ones * 0, torch.ones(1, 2), order, counts, bits)
    layout = GradedLayout((8,), 50, (50,), (3,), 64, 64)
    keys = keys + ROTARY.rotate(torch.ones(50, 64), torch.arange(50) + 3)
    grades = torch.ones(1, 2, 50, dtype=torch.uint8)
    store = GradedStore.encode(keys, values, grades, layout, frame, ROTARY)
    kept = store.kept(0, 1, ROTARY)
    assert (kept.keys - keys[0, 1]).square().mean() < 3e-4
    assert (kept.values - values[0, 1]).square().mean() < 3e-4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_the_layouts_own(case):
    store, grades, *_ = random_store(**case)
    layout, frame = store.layout, store.frame
    expected = store.rows * layout.frame_bytes(store.kv_heads, GRADES, frame.key_turned is not None)
    for row in range(store.rows):
        for head in range(store.kv_heads):
            for grade in range(GRADES):
                counts, bits = (
                    frame.key_counts[row, head, grade].tolist(),
                    int(frame.value_bits[row, head, grade]),
                )
                expected += int((grades[row, head] == grade + 1).sum()) * layout.token_bytes(counts, bits)
            expected += int((grades[row, head] == GRADES + 1).sum()) * layout.fine_bytes
            expected += int((grades[row, head] == GRADES + 2).sum()) * layout.exact_bytes
    assert store.nbytes == expected


@pytest.mark.parametrize("tokens", [69, 30, 1, 0])
def test_crop_hides_the_newest(tokens):
    store, *_ = random_store()
    shorter = store.crop(tokens)
    assert shorter.tokens == tokens and shorter.real_tokens == (tokens, tokens)
    for head in range(3):
        before, after = store.kept(1, head, ROTARY), shorter.kept(1, head, ROTARY)
        assert torch.equal(after.positions, before.positions[before.positions < tokens])
        assert torch.equal(after.keys, before.keys[before.positions < tokens])
    check(shorter)
    assert shorter.crop(0).real_tokens == (0, 0)


def same(one, other, rows):
    for row, source in enumerate(rows):
        for head in range(one.kv_heads):
            found, expected = one.kept(row, head, ROTARY), other.kept(source, head, ROTARY)
            for name in ("positions", "keys", "values"):
                assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    "case", [dict(), dict(empty_head=True), dict(turned=False), dict(widths=(7, 5, 3))], ids=str
)
def test_select_takes_rows_and_their_bytes(case):
    store, *_ = random_store(rows=3, **case)
    for rows in ([2, 0], [1], [0, 0, 2]):
        chosen = store.crop(60).select(torch.tensor(rows))
        assert chosen.tokens == 60 and chosen.layout.shifts == tuple(rows)
        same(chosen, store.crop(60), rows)
        check(chosen)
    parts = [store.select(torch.tensor([row])).nbytes for row in range(3)]
    assert sum(parts) == store.nbytes


@pytest.mark.parametrize("case", [dict(), dict(turned=False), dict(widths=(6, 1)), dict(only=0)], ids=str)
def test_state_comes_back(case):
    store, *_ = random_store(**case)
    for one in (store, store.crop(20)):
        meta = {
            name: list(value) if isinstance(value, tuple) else value for name, value in one.meta().items()
        }
        back = store_from_state("graded", one.tensors(), meta)
        assert back.meta() == one.meta() and back.nbytes == one.nbytes
        same(back, one, range(store.rows))
        check(back)


@pytest.mark.parametrize(
    "name",
    ["positions", "key_codes", "value_codes", "magnitudes", "fine_keys", "fine_scales", "exact_values"],
)
@pytest.mark.parametrize("change", [-1, 1])
def test_damaged_state_is_refused(name, change):
    store, *_ = random_store()
    tensors = store.tensors()
    tensor = tensors[name]
    tensors[name] = tensor[:-1] if change < 0 else torch.cat([tensor, tensor[:1]])
    with pytest.raises(ValueError, match=name):
        GradedStore.from_state(tensors, store.meta())


def test_missing_rotary_is_told():
    store, *_ = random_store()
    with pytest.raises(ValueError, match="rotary"):
        store.attend(torch.zeros(2, 3, 1, 64), None, AttendContext(1.0))


def test_widths_count_tokens_and_channels():
    store, grades, *_ = random_store(rows=2)
    for head, widths in enumerate(store.widths()):
        assert sum(widths["values"].values()) == 2 * store.tokens
        assert sum(widths["keys"].values()) == int((grades[:, head] > 0).sum()) * store.key_dim
        assert widths["values"][16] == int((grades[:, head] == GRADES + 2).sum())


@pytest.mark.parametrize("turned", [True, False])
def test_join_is_both_segments(turned):
    first, *_ = random_store(tokens=41, turned=turned)
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(2, 3, 30, 64, generator=generator) + 1
    values = torch.randn(2, 3, 30, 64, generator=generator) + 3
    grades = torch.randint(0, GRADES + 3, (2, 3, 30), generator=generator).to(torch.uint8)
    grades[0, 1] = 0
    shifts = tuple(shift + 41 for shift in first.layout.shifts)
    layout = GradedLayout(first.layout.widths, 30, (30, 30), shifts, 64, 64)
    second = GradedStore.encode(keys, values, grades, layout, first.frame, ROTARY)
    joined = first.join(second)
    assert joined.tokens == 71 and joined.frame is first.frame
    for row in range(2):
        for head in range(3):
            one, two, both = (store.kept(row, head, ROTARY) for store in (first, second, joined))
            order = both.positions.argsort()
            positions = torch.cat([one.positions, two.positions + 41])
            assert torch.equal(both.positions[order], positions.sort().values)
            expected = torch.cat([one.keys, two.keys])[positions.argsort()]
            # Fine turns are halves, and other ones for a token whose segment now begins elsewhere.
            assert torch.allclose(both.keys[order], expected, atol=2e-3 if turned else 1e-4)
            expected = torch.cat([one.values, two.values])[positions.argsort()]
            assert torch.allclose(both.values[order], expected, atol=1e-5)
    query = torch.randn(2, 6, 2, 64, generator=generator)
    context = AttendContext(0.125, rotary=ROTARY)
    expected = merge([store.attend(query, None, context) for store in (first, second)])
    found = joined.attend(query, None, context)
    assert torch.allclose(found[0], expected[0], atol=1e-3 if turned else 1e-4)
    assert torch.allclose(found[1], expected[1], atol=1e-4)
    assert first.join(first) is None, "not the positions that follow"
    assert first.join(second.crop(10)) is None
    assert first.join(second.select(torch.tensor([0, 1]))) is None, "another frame"
