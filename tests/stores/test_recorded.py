"""Rotated codes as records: the same content, and attention by records as over the plain codes."""

from __future__ import annotations

import pytest
import torch

from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.records import problem
from kvfold.kernels.reference import attend, merge
from kvfold.stores import RotatedStore, store_from_state
from kvfold.stores.base import AttendContext
from kvfold.stores.recorded import RecordedStore
from kvfold.stores.rotated import RotatedLayout
from tests.stores.checks import SharingTurn, Turn, assert_behaves, assert_same

ROWS, HEADS, TOKENS, DIM = 3, 2, 150, 64
CODES = {
    "uniform": ((RotatedCode(((3, DIM),)),) * 2, 3),
    "4 bits": ((RotatedCode(((4, DIM),), rotation="haar"),) * 2, 4),
    "groups": (
        (
            RotatedCode(((8, 16), (3, 16), (1, 32)), norms="group"),
            RotatedCode(((4, 32), (2, 32)), norms="group"),
        ),
        2,
    ),
    "one norm": ((RotatedCode(((4, 16), (2, 48))),) * 2, 8),
}


def rotated(name, padding=True, mean=True, sinks=0, norm_bits=16, tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, HEADS, tokens, DIM, generator=generator) for _ in range(2))
    valid = torch.arange(tokens) >= torch.tensor((11, 0, tokens - 2))[:, None]
    real = tuple(valid.sum(1).tolist()) if padding else (tokens,) * ROWS
    codes, bits = CODES[name]
    value = RotatedCode(((bits, DIM),))
    layout = RotatedLayout(
        tokens, real, (5, 0, -9), HEADS, DIM, DIM, codes, (value,) * 2, mean, sinks, norm_bits
    )
    extra = {"valid": valid} if padding else {}
    if mean:
        extra["key_mean"] = torch.randn(ROWS, HEADS, DIM, generator=generator).half()
    if len(codes[0].groups) > 1:
        extra["key_order"] = torch.rand(ROWS, HEADS, DIM, generator=generator).argsort(-1).to(torch.uint8)
    if name == "one norm":
        extra["key_shares"] = torch.tensor([0.6, 0.8]).expand(ROWS, HEADS, -1).half().contiguous()
    return RotatedStore.encode(keys, values, layout, extra, Turn())


@pytest.mark.parametrize("norm_bits", [8, 16])
@pytest.mark.parametrize("name", CODES)
def test_there_and_back(name, norm_bits):
    """Byte for byte; bytes are those of the plain form, what records round up and the constants."""
    store = rotated(name, norm_bits=norm_bits, sinks=4)
    there = RecordedStore.of(store)
    back = there.plain()
    assert back.layout == store.layout and back.buffers.keys() == store.buffers.keys()
    for key, one in store.buffers.items():
        assert torch.equal(one, back.buffers[key]) and one.dtype == back.buffers[key].dtype
    coded = sum(store.buffers[key].nbytes for key in RotatedStore.per_token)
    assert there.buffers["records"].nbytes == coded * 192 // TOKENS
    new = sum(there.buffers[key].nbytes for key in ("books", "key_scale", "value_scale"))
    assert there.nbytes == store.nbytes - coded + coded * 192 // TOKENS + new
    assert_same(there, store, Turn())


@pytest.mark.parametrize("name, sinks, norm_bits", [("groups", 4, 8)])
def test_behaves(name, sinks, norm_bits, monkeypatch):
    monkeypatch.setattr(RecordedStore, "block", 70)
    assert_behaves(RecordedStore.of(rotated(name, sinks=sinks, norm_bits=norm_bits, tokens=80)), Turn())


OPTIONS = [  # padding, mean, sinks, bits of norms
    (True, True, 4, 8),
    (True, False, 0, 16),
    (False, True, 0, 8),
    (False, False, 4, 16),
    (False, False, 0, 8),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CODES)
def test_attends_by_records(name, options):
    """Whole levels with scales folded into query and output, against codes decoded one by one."""
    store = rotated(name, *options)
    query, context = torch.randn(ROWS, 4 * HEADS, 2, DIM), AttendContext(0.1, rotary=Turn())
    found, expected = (
        RecordedStore.of(store).attend_records(query, context),
        store.attend(query, None, context),
    )
    error = (found[0] - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
    assert float(error.max()) < 1e-4
    assert float((found[1] - expected[1]).abs().max()) < 1e-4


@pytest.mark.skipif(problem(torch.device("cuda")) is not None, reason=str(problem(torch.device("cuda"))))
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CODES)
def test_attends_by_the_kernel(name, options):
    store = rotated(name, *options)
    there = store.to("cuda").for_decoding()
    assert type(there) is RecordedStore and type(there.to("cpu")) is RotatedStore
    context, generator = AttendContext(0.1, rotary=SharingTurn()), torch.Generator().manual_seed(1)
    query = torch.randn(ROWS, 4 * HEADS, 2, DIM, generator=generator)
    keys, values = (torch.randn(ROWS, HEADS, 9, DIM, generator=generator) for _ in range(2))
    expected = store.attend(query, None, context)
    found = there.attend(query.cuda(), None, context)
    assert_close(found, expected)
    one, length = query[:, :, :1].contiguous(), torch.tensor([7], device="cuda")
    tail = attend(one, keys[:, :, :7], values[:, :, :7], 0.1)
    expected = merge([tuple(part[:, :, :1] for part in expected), tail])
    found = there.attend_with_tail(one.cuda(), keys.cuda(), values.cuda(), context, None, length)
    assert_close(found, expected)


def assert_close(found, expected):
    error = (found[0].cpu() - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
    assert float(error.max()) < 2e-3
    assert float((found[1].cpu() - expected[1]).abs().max()) < 2e-3


def test_joins_and_is_saved():
    first, second = (rotated("groups", padding=False, mean=False, seed=seed) for seed in (0, 1))
    second.buffers["key_order"] = first.buffers["key_order"]
    joined = RecordedStore.of(first).join(RecordedStore.of(second))
    assert isinstance(joined, RecordedStore)
    assert_same(joined, first.join(second))
    again = store_from_state("recorded", joined.tensors(), joined.meta())
    assert_same(again, joined)
    with pytest.raises(ValueError, match="records are"):
        store_from_state(
            "recorded", {**joined.tensors(), "records": joined.buffers["records"][:, 16:]}, joined.meta()
        )


@pytest.mark.parametrize("name", CODES)
def test_is_plain_off_the_gpu(name):
    store = rotated(name, norm_bits=8, sinks=4)
    moved = RecordedStore.of(store).to("cpu")
    assert type(moved) is RotatedStore and moved.layout == store.layout
    assert moved.buffers.keys() == store.buffers.keys()
    assert all(torch.equal(tensor, moved.buffers[key]) for key, tensor in store.buffers.items())


def test_what_records_cannot_hold_stays_plain():
    for codes in (
        (RotatedCode(((5, DIM),)),) * 2,
        (RotatedCode(((4, 8), (2, 56)), norms="group"),) * 2,
        (RotatedCode(((3, DIM),), sketch=True),) * 2,
    ):
        layout = RotatedLayout(5, (5,), (0,), 2, DIM, DIM, codes, (RotatedCode(((4, DIM),)),) * 2)
        states = torch.randn(1, 2, 5, DIM)
        assert RecordedStore.of(RotatedStore.encode(states, states, layout, {})) is None
