"""Graded tokens as records: the same content, and attention by records as over the plain codes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.records import problem
from kvfold.kernels.reference import attend, merge
from kvfold.stores import GradedStore, store_from_state
from kvfold.stores.base import AttendContext
from kvfold.stores.graded import Frame, GradedLayout, RecordedGradedStore
from tests import interpreted
from tests.stores.checks import SharingTurn as Turn
from tests.stores.checks import assert_behaves, assert_same, exact
from tests.tiny import prompt, tiny_model

ROWS, HEADS, TOKENS, GRADES = 3, 2, 300, 3
CUDA = problem(torch.device("cuda")) is None
DEVICE = "cuda" if CUDA else "cpu"


def graded(dim=64, tokens=TOKENS, turned=True, widths=(8, 4, 2), only=None, seed=0, shift=0, frame=None):
    """Random tokens at random grades, none fine; head 1 of row 0 keeps none, head 0 of row 2 no exact ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tiles = torch.rand(ROWS, HEADS, GRADES, dim // 16, generator=generator).mul(len(widths) + 1).int()
    counts = torch.stack([(tiles == index).sum(-1) * 16 for index in range(len(widths))], -1)
    frame = frame or Frame(
        key_turned=normal(ROWS, HEADS, dim).half() if turned else None,
        key_mean=normal(ROWS, HEADS, dim).half(),
        key_deviation=(torch.rand(ROWS, HEADS, dim, generator=generator) + 0.5).half(),
        value_mean=normal(ROWS, HEADS, dim).half(),
        value_magnitude=torch.rand(ROWS, HEADS, generator=generator) + 1,
        order=torch.rand(ROWS, HEADS, dim, generator=generator).argsort(-1).to(torch.uint8),
        key_counts=counts.to(torch.int16),
        value_bits=torch.tensor(widths, dtype=torch.uint8)[
            torch.randint(0, len(widths), (ROWS, HEADS, GRADES), generator=generator)
        ],
    )
    shifts = tuple(first + shift for first in (5, 0, -9))
    layout = GradedLayout(tuple(widths), tokens, (tokens,) * ROWS, shifts, dim, dim)
    grades = torch.randint(0, GRADES + 2, (ROWS, HEADS, tokens), generator=generator).to(torch.uint8)
    grades[grades == GRADES + 1] = GRADES + 2
    if only is not None:
        grades[:] = only
    grades[0, 1] = 0
    grades[2, 0] = grades[2, 0].clamp_max(GRADES)
    keys, values = normal(ROWS, HEADS, tokens, dim) + 1, normal(ROWS, HEADS, tokens, dim) + 3
    return GradedStore.encode(keys, values, grades, layout, frame, Turn() if turned else None)


CASES = [
    dict(),
    dict(turned=False),
    dict(dim=128, widths=(8, 4, 3, 2, 1)),
    dict(dim=96, widths=(3, 1), tokens=65),
    dict(only=0),
    dict(only=1),
    dict(only=GRADES + 2),
    dict(tokens=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_there_and_back(case):
    """Byte for byte; more bytes are those of what records round up, of wider positions and of constants."""
    store = graded(**case)
    there = RecordedGradedStore.of(store)
    assert_same(there, store, Turn())
    assert there.widths() == store.widths()
    back = there.plain()
    assert type(back) is GradedStore and back.layout == store.layout and back.frame is store.frame
    assert back.buffers.keys() == store.buffers.keys()
    for key, one in store.buffers.items():
        assert torch.equal(one, back.buffers[key]) and one.dtype == back.buffers[key].dtype
    expected = slots = 0
    for row, head_counts in enumerate(store.buffers["counts"].tolist()):
        for head, counts in enumerate(head_counts):
            for grade, count in enumerate(counts[:-2]):
                widths = store.frame.key_counts[row, head, grade].tolist()
                token = store.layout.token_bytes(widths, int(store.frame.value_bits[row, head, grade]))
                slots += -(-count // 64) * 64
                expected += -(-count // 64) * 64 * (token - 2)
    assert there.buffers["records"].nbytes == expected and there.buffers["positions"].nbytes == 4 * slots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attends_by_records(case):
    """Whole levels, one scale a channel for all grades, against decoded tokens in float64."""
    store = graded(**case)
    there = RecordedGradedStore.of(store)
    query, context = torch.randn(ROWS, 4 * HEADS, 2, store.key_dim), AttendContext(0.1, rotary=Turn())
    for own in (there, there.crop(store.tokens // 2)):
        output, lse = own.attend_records(query, context)
        expected, expected_lse = exact(own, query, None, 0.1, Turn())
        assert torch.allclose(output.double(), expected, atol=1e-4, rtol=1e-4)
        assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


@pytest.mark.parametrize("turned", [True, False])
def test_behaves(turned):
    assert_behaves(RecordedGradedStore.of(graded(tokens=80, turned=turned)), Turn())


@pytest.mark.parametrize("plain", [True, False], ids=["plain block", "recorded block"])
def test_joins_a_block(plain):
    first = graded(tokens=128)
    block = graded(tokens=40, seed=1, shift=128, frame=first.frame)
    following = block if plain else RecordedGradedStore.of(block)
    assert_same(first.join(following), first.join(block), Turn())
    joined = RecordedGradedStore.of(first).join(following)
    assert isinstance(joined, RecordedGradedStore) and joined.tokens == 168
    assert_same(joined, first.join(block), Turn())
    query, context = torch.randn(ROWS, HEADS, 1, 64), AttendContext(0.1, rotary=Turn())
    expected = merge([store.attend(query, None, context) for store in (first, block)])
    found = joined.attend(query, None, context)
    assert torch.allclose(found[0], expected[0], atol=1e-4) and torch.allclose(
        found[1], expected[1], atol=1e-4
    )
    other = graded(tokens=40, seed=1, shift=128)
    assert RecordedGradedStore.of(first).join(other) is None, "another frame"


def check():
    """A decode step by kernels, interpreted where there is no GPU: the store, what was hidden of it, a tail, another part."""
    for case in (
        dict(),
        dict(turned=False),
        dict(dim=80, widths=(4, 1)),
        dict(only=2),
        dict(only=GRADES + 2),
    ):
        for crop in (0, 100):
            store = RecordedGradedStore.of(graded(**case)).crop(TOKENS - crop)
            query, key, value = (
                torch.randn(ROWS, heads, count, store.key_dim).half()
                for heads, count in ((3 * HEADS, 1), (HEADS, 9), (HEADS, 9))
            )
            before = torch.randn(ROWS, 3 * HEADS, 1, store.key_dim), torch.randn(ROWS, 3 * HEADS, 1)
            expected = merge(
                [
                    exact(store, query, None, 0.1, Turn()),
                    attend(query.double(), key[:, :, :7], value[:, :, :7], 0.1),
                    before,
                ]
            )
            length = torch.tensor([7], device=DEVICE)
            inputs = [x.to(DEVICE) for x in (query, key, value)]
            one = RecordedGradedStore.from_state(
                {name: x.to(DEVICE) for name, x in store.tensors().items()}, store.meta()
            )
            context = AttendContext(0.1, rotary=Turn())
            found = one._attend(
                inputs[0],
                context,
                tail=Exact(*inputs[1:], length),
                before=tuple(x.to(DEVICE) for x in before),
            )
            error = (found[0].cpu() - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
            assert float(error.max()) < 2e-3, (case, crop, float(error.max()))
            assert torch.allclose(found[1].cpu().double(), expected[1].double(), atol=2e-3), (case, crop)


def test_a_decode_step_by_kernels():
    interpreted.run(check)


def folded(device, dtype):
    model = tiny_model("llama", head_dim=64, num_attention_heads=4, hidden_size=256)
    model = deepcopy(model).to(device, dtype)
    method = kvfold.RDKV(keep=0.3, window=8, tile=16, block_tokens=0)
    return model, kvfold.fold(model, prompt(440).to(device), method)


def stores_of(cache):
    return [layer.segments[0].store for layer in cache.folded_layers]


def test_a_saved_fold_is_plain_where_there_is_no_gpu(tmp_path):
    model, cache = folded("cpu", torch.float32)
    before = stores_of(cache)
    for layer, store in zip(cache.folded_layers, before, strict=True):
        layer.segments[0] = replace(layer.segments[0], store=RecordedGradedStore.of(store))
    cache.save(tmp_path / "x.kvf")
    again = kvfold.load(tmp_path / "x.kvf", model)
    for layer, store, one in zip(again.folded_layers, before, stores_of(again), strict=True):
        assert type(one) is GradedStore
        assert_same(one, store, again.rotary(layer.module(), torch.device("cpu")))


@pytest.mark.skipif(not CUDA, reason=str(problem(torch.device("cuda"))))
def test_a_fold_is_read_by_kernels(tmp_path):
    """By itself, in CUDA graphs too; the same tokens as from the plain form on the CPU."""
    model, cache = folded("cuda", torch.float16)
    assert all(isinstance(store, RecordedGradedStore) for store in stores_of(cache))
    assert cache.ledger().folded_ratio <= 0.3
    cache.save(tmp_path / "x.kvf")
    question = torch.cat([prompt(440), prompt(5)], 1)
    found = kvfold.generate(model, question.cuda(), cache, max_new_tokens=40, do_sample=False)
    model = model.cpu()
    again = kvfold.load(tmp_path / "x.kvf", model)
    expected = kvfold.generate(model, question, again, max_new_tokens=40, do_sample=False)
    assert (found.cpu() == expected)[:, -40:].float().mean() > 0.9


@pytest.mark.parametrize("name", ["records", "positions", "exact_positions", "exact_keys", "exact_values"])
def test_damaged_state_is_refused(name):
    store = RecordedGradedStore.of(graded())
    tensors = {**store.tensors(), name: store.buffers[name][:-1]}
    with pytest.raises(ValueError, match=f"{name} has"):
        store_from_state(store.kind, tensors, store.meta())


def test_is_plain_off_the_gpu():
    store = graded().crop(250)
    moved = RecordedGradedStore.of(store).to("cpu")
    assert type(moved) is GradedStore and moved.tokens == 250
    assert_same(moved, store, Turn())


def test_what_records_cannot_hold_stays_plain():
    assert RecordedGradedStore.of(graded(widths=(8, 5, 2))) is None
    assert RecordedGradedStore.of(graded(only=GRADES + 1)) is None, "fine"
    frame = graded().frame
    parts = torch.tensor([17, 0, 0], dtype=torch.int16).expand_as(frame.key_counts).contiguous()
    assert RecordedGradedStore.of(graded(only=1, frame=replace(frame, key_counts=parts))) is None


@pytest.mark.parametrize("keep", [0.1, 0.4])
def test_rdkv_by_tiles_is_recorded(keep):
    """No token fine, no value without a width, whole tiles: every layer of a fold becomes records, within the budget."""
    model = tiny_model("llama", head_dim=32)
    cache = kvfold.fold(model, prompt(450), kvfold.RDKV(keep=keep, window=8, tile=16))
    assert cache.ledger().folded_ratio <= keep
    stores = [layer.segments[0].store for layer in cache.folded_layers]
    as_records = sum(RecordedGradedStore.of(store).nbytes for store in stores)
    assert 0.8 * keep < as_records / sum(store.full_bytes for store in stores) <= keep
    for layer in cache.folded_layers:
        store, rotary = layer.segments[0].store, cache.rotary(layer.module(), torch.device("cpu"))
        assert not store.buffers["counts"][..., -2].any() and store.buffers["counts"].any()
        assert not (store.frame.key_counts % 16).any() and store.frame.value_bits.min() >= 2
        there = RecordedGradedStore.of(store)
        assert_same(there, store, rotary)
        query = torch.randn(1, 4, 1, 32)
        context = AttendContext(0.2, rotary=rotary)
        expected, expected_lse = store.attend(query, None, context)
        output, lse = there.attend(query, None, context)
        assert torch.allclose(output, expected, atol=1e-4) and torch.allclose(lse, expected_lse, atol=1e-4)


def test_tiles_need_whole_heads_and_their_widths():
    with pytest.raises(ValueError, match="widths must be chosen"):
        kvfold.RDKV(keep=0.1, tile=16, widths=(2, 6))
    with pytest.raises(ValueError, match="grades must ascend"):
        kvfold.RDKV(keep=0.1, tile=16, grades=(32.0, 8.0))
    with pytest.raises(ValueError, match=r"tile must be 1\|16"):
        kvfold.RDKV(keep=0.1, tile=8)
    with pytest.raises(KvfoldError, match="does not divide the 24 channels"):
        kvfold.fold(tiny_model("llama", head_dim=24), prompt(100), kvfold.RDKV(keep=0.3, tile=16))
