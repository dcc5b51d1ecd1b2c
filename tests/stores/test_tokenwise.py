"""Affine and rotated codes of every token."""

from __future__ import annotations

import pytest
import torch

from kvfold.codecs.packing import packed_bytes
from kvfold.codecs.rotated import RotatedCode
from kvfold.stores import AffineStore, RotatedStore, store_from_state
from kvfold.stores.affine import AffineLayout
from kvfold.stores.rotated import RotatedLayout
from tests.stores.checks import Turn, assert_attends, assert_behaves, assert_same

ROWS, HEADS, TOKENS, KEY, VALUE = 3, 2, 90, 32, 48


def states(dtype=torch.float32, seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(ROWS, HEADS, tokens, KEY, generator=generator) + 2
    values = torch.randn(ROWS, HEADS, tokens, VALUE, generator=generator)
    return keys.to(dtype), values.to(dtype)


def padded(pads=(11, 0, 40)):
    valid = torch.arange(TOKENS) >= torch.tensor(pads)[:, None]
    return valid, tuple(TOKENS - pad for pad in pads)


def affine(bits=4, group=16, dtype=torch.float32, padding=True, seed=0, tokens=TOKENS):
    keys, values = states(dtype, seed, tokens)
    valid, real = padded() if padding else (None, (tokens,) * ROWS)
    layout = AffineLayout(tokens, real, (0, 0, 0), HEADS, KEY, VALUE, bits, group)
    return AffineStore.encode(keys, values, layout, {"valid": valid} if padding else {}), keys, values


CODES = {
    "uniform": (RotatedCode(((3, KEY),)),) * 2,
    "haar": (RotatedCode(((2, KEY),), rotation="haar", keep_norm=False),) * 2,
    "prod": (RotatedCode(((3, KEY),), sketch=True),) * 2,
    "groups": (
        RotatedCode(((6, 4), (3, 12), (1, 16)), norms="group"),
        RotatedCode(((5, 8), (2, 24)), norms="group"),
    ),
    "one norm": (RotatedCode(((6, 4), (3, 12), (1, 16))),) * 2,
}


def rotated(name, seed=0, tokens=TOKENS, padding=True, mean=True, sinks=0, norm_bits=16, size=1.0):
    keys, values = (x * size for x in states(seed=seed, tokens=tokens))
    valid, real = padded() if padding else (None, (tokens,) * ROWS)
    value = RotatedCode(((4, VALUE),))
    layout = RotatedLayout(
        tokens, real, (5, 0, -9), HEADS, KEY, VALUE, CODES[name], (value,) * 2, True, sinks, norm_bits
    )
    extra = {"valid": valid} if padding else {}
    if mean:
        extra["key_mean"] = torch.full((ROWS, HEADS, KEY), 2.0, dtype=torch.float16)
    if len(CODES[name][0].groups) > 1:
        generator = torch.Generator().manual_seed(1)
        order = torch.rand(ROWS, HEADS, KEY, generator=generator).argsort(-1)
        extra["key_order"] = order.to(torch.uint8)
    if name == "one norm":
        extra["key_shares"] = torch.tensor([0.3, 0.6, 0.74]).expand(ROWS, HEADS, -1).half().contiguous()
    return RotatedStore.encode(keys, values, layout, extra, Turn()), keys, values


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("group", [None, 16, 20])
def test_affine(bits, group):
    store, *_ = affine(bits, group)
    assert_behaves(store)
    groups = {dim: 1 if group is None else -(-dim // group) for dim in (KEY, VALUE)}
    per_head = sum(packed_bytes(dim, bits) + 4 * groups[dim] for dim in (KEY, VALUE))
    assert store.nbytes == ROWS * TOKENS * (HEADS * per_head + 1)


@pytest.fixture(params=["C loop", "plain torch"])
def reader(request, monkeypatch):
    """What reads rotated codes on a CPU."""
    monkeypatch.setenv("KVFOLD_CPU_KERNEL", str(int(request.param == "C loop")))


@pytest.mark.parametrize("name", CODES)
def test_rotated(name, reader):
    store, *_ = rotated(name)
    assert_behaves(store, Turn())


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("norm_bits", [8, 16])
def test_sinks_are_exact(name, norm_bits, monkeypatch, reader):
    store, keys, values = rotated(name, sinks=4, norm_bits=norm_bits)
    monkeypatch.setattr(RotatedStore, "block", 14)
    assert_behaves(store, Turn())
    plain = rotated(name, norm_bits=norm_bits)[0]
    for row, count in enumerate(store.real_tokens):
        first, count = TOKENS - count, min(count, 4)
        kept, coded = store.kept(row, 1, Turn()), plain.kept(row, 1, Turn())
        own = slice(first, first + count)
        assert torch.allclose(kept.keys[:count], keys[row, 1, own], rtol=1e-3, atol=1e-3)
        assert torch.allclose(kept.values[:count], values[row, 1, own], rtol=1e-3, atol=1e-3)
        assert torch.equal(kept.keys[count:], coded.keys[count:])
        assert not torch.allclose(kept.keys[:count], coded.keys[:count], rtol=1e-3, atol=1e-3)
    short = store.crop(TOKENS - store.real_tokens[0] + 2)
    assert_attends(short, Turn())
    extra = ROWS * HEADS * 4 * (KEY + VALUE) * 2
    assert store.nbytes == plain.nbytes + extra


def test_norms_as_logarithms():
    """Half the bytes, within a 32nd of an octave, whatever their size."""
    full, half = rotated("groups", mean=False)[0], rotated("groups", mean=False, norm_bits=8)[0]
    for name in ("key", "value"):
        norms, codes = full.buffers[f"{name}_norms"], half.buffers[f"{name}_norms"]
        assert codes.dtype == torch.uint8 and codes.shape == norms.shape
        told = torch.exp2((codes.double() - 128) / 16) * half.buffers[f"{name}_units"][:, None]
        assert float((told / norms).log2().abs().max()) < 1 / 32 + 1e-3
    big = rotated("groups", mean=False, norm_bits=8, size=1e12)[0].kept(0, 0)
    assert torch.allclose(big.keys / 1e12, half.kept(0, 0).keys, rtol=1e-3, atol=1e-4)
    zero = rotated("groups", mean=False, norm_bits=8, size=0.0)[0].kept(0, 0)
    assert bool((zero.keys == 0).all() & (zero.values == 0).all())


def test_blocks_of_tokens_and_of_queries(monkeypatch):
    for store, rotary in ((affine()[0], None), (rotated("prod")[0], Turn())):
        monkeypatch.setattr(store, "block", 13)
        assert_attends(store, rotary, queries=5)


def test_a_row_of_padding_only_holds_nothing():
    keys, values = states()
    valid, real = padded((0, TOKENS, 3))
    layout = AffineLayout(TOKENS, real, (0, 0, 0), HEADS, KEY, VALUE, 4, 16)
    assert_attends(AffineStore.encode(keys, values, layout, {"valid": valid}))


@pytest.mark.parametrize("make", [lambda **o: affine(**o)[0], lambda **o: rotated("uniform", **o)[0]])
def test_blocks_join(make):
    first, second = make(), make(seed=1, tokens=30, padding=False)
    joined = first.join(second)
    assert (
        joined.tokens == TOKENS + 30
        and joined.nbytes >= first.nbytes + second.nbytes - second.rows * HEADS * KEY * 2
    )
    for row in range(ROWS):
        for head in range(HEADS):
            kept = joined.kept(row, head, Turn())
            old, new = first.kept(row, head, Turn()), second.kept(row, head, Turn())
            assert torch.equal(kept.positions, torch.cat([old.positions, new.positions + TOKENS]))
            assert torch.equal(kept.values, torch.cat([old.values, new.values]))
            assert torch.equal(kept.keys[: len(old.keys)], old.keys)
    assert_attends(joined, Turn())
    assert first.join(affine(bits=5)[0]) is None
    assert first.join(rotated("haar")[0]) is None


def test_a_missing_rotary_embedding_is_said():
    with pytest.raises(ValueError, match="rotary"):
        rotated("uniform")[0].kept(0, 0)


def test_different_means_do_not_join():
    first, second = rotated("uniform")[0], rotated("uniform", mean=False)[0]
    assert first.join(second) is None and second.join(first) is None
    second.buffers["key_mean"] = first.buffers["key_mean"] + 1
    assert first.join(second) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states(dtype):
    store, keys, _ = affine(8, 16, dtype, padding=False)
    for head in range(HEADS):
        assert torch.allclose(store.kept(0, head).keys, keys[0, head].float(), atol=0.03)


def test_beyond_float16():
    keys, values = states()
    layout = AffineLayout(TOKENS, (TOKENS,) * ROWS, (0, 0, 0), HEADS, KEY, VALUE, 8, 16)
    store = AffineStore.encode((keys * 1e5).bfloat16(), values.bfloat16(), layout, {})
    assert torch.allclose(store.kept(1, 1).keys, keys[1, 1] * 1e5, rtol=0.05, atol=1e4)
    code = RotatedCode(((8, KEY),))
    codes, scales = code.encode(keys * 1e6)
    assert scales.dtype == torch.bfloat16
    assert torch.allclose(code.restore(code.decode(codes, scales)), keys * 1e6, rtol=0.05, atol=2e5)


@pytest.mark.parametrize("store", [affine()[0], rotated("groups")[0]], ids=["affine", "rotated"])
def test_damaged_state_is_refused(store):
    tensors = store.tensors()
    for name in store.per_token:
        with pytest.raises(ValueError, match=name):
            store_from_state(store.kind, {**tensors, name: tensors[name][:, :-1]}, store.meta())
        with pytest.raises(ValueError, match=name):
            store_from_state(store.kind, {**tensors, name: tensors[name][:-1]}, store.meta())


def test_select_shares_nothing_that_is_dropped():
    store, *_ = rotated("groups")
    assert_same(store.select(torch.tensor([1])), store, Turn(), rows=[1])
    assert store.select(torch.tensor([1])).nbytes * 3 == store.nbytes
