"""TriZone: attention over packed codes equals attention over what they decode to, in float64."""

from __future__ import annotations

import pytest
import torch

from kvfold.stores import TriZoneStore, store_from_state
from kvfold.stores.base import AttendContext
from kvfold.stores.trizone import Layout


def random_store(
    rows=2, heads=3, tokens=70, key_dim=64, value_dim=64, seed=0, dtype=torch.float32, **options
):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, heads, tokens, key_dim, generator=generator).to(dtype)
    values = (torch.randn(rows, heads, tokens, value_dim, generator=generator) + 3).to(dtype)
    value_widths = options.pop("value_widths", (2, 4, 8, 16))
    key_widths = options.pop("key_widths", (2, 4, 8, 16))

    def draw(widths, *shape):
        choice = torch.randint(0, len(widths) + 1, shape, generator=generator)
        return torch.tensor([0, *widths], dtype=torch.uint8)[choice]

    layout = Layout(
        value_widths=value_widths,
        key_widths=key_widths,
        value_group=options.pop("value_group", None),
        key_group=options.pop("key_group", None),
        tokens=tokens,
        real_tokens=(tokens,) * rows,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    value_bits = draw(value_widths, rows, heads, tokens)
    if options.pop("empty_head", False):
        value_bits[0, 0] = 0
    key_bits = draw(key_widths, rows, heads, key_dim)
    return TriZoneStore.encode(keys, values, value_bits, key_bits, layout), value_bits, key_bits, keys, values


def exact(store, query, rows, scaling):
    """float64 attention over the decoded content."""
    batch, heads = query.shape[:2]
    group = heads // store.kv_heads
    output = torch.zeros(*query.shape[:3], store.value_dim, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kept = store.kept(b if rows is None else int(rows[b]), h // group)
            if not len(kept.positions):
                continue
            scores = query[b, h].double() @ kept.keys.double().T * scaling
            output[b, h] = scores.softmax(-1) @ kept.values.double()
            lse[b, h] = scores.logsumexp(-1)
    return output, lse


SHAPES = [
    dict(),
    dict(key_group=32, value_group=32),
    dict(key_group=16, value_group=16, value_dim=80, key_dim=96),
    dict(value_widths=(3, 5), key_widths=(3, 6, 7), tokens=33, heads=1),
    dict(value_widths=(16,), key_widths=(16,), key_dim=128, value_dim=256),
    dict(empty_head=True),
    dict(tokens=1),
    dict(dtype=torch.bfloat16),
    dict(dtype=torch.float16, key_group=32),
]


@pytest.mark.parametrize("block", [8, 32, 4096])
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_attend_equals_decoded_attention(options, block, monkeypatch):
    if options.get("key_group") and block % options["key_group"]:
        block = options["key_group"]
    monkeypatch.setattr(TriZoneStore, "block", block)
    store, *_ = random_store(**options)
    generator = torch.Generator().manual_seed(1)
    for rows in (None, torch.tensor([1, 1, 0])):
        batch = store.rows if rows is None else 3
        query = torch.randn(batch, store.kv_heads * 4, 3, store.key_dim, generator=generator)
        output, lse = store.attend(query, rows, AttendContext(0.125))
        expected, expected_lse = exact(store, query, rows, 0.125)
        assert torch.allclose(output.double(), expected, atol=2e-5, rtol=2e-4)
        finite = expected_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, finite)
        assert torch.allclose(lse.double()[finite], expected_lse[finite], atol=1e-4)


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_content_is_what_was_asked_for(options):
    store, value_bits, key_bits, keys, values = random_store(**options)
    for row in range(store.rows):
        for head in range(store.kv_heads):
            kept = store.kept(row, head)
            bits = value_bits[row, head]
            assert kept.positions.sort().values.tolist() == bits.nonzero().flatten().tolist()
            for position, key, value in zip(kept.positions.tolist(), kept.keys, kept.values, strict=True):
                spread = values[row, head, position].float()
                step = (spread.max() - spread.min()) / (2 ** int(bits[position]) - 1)
                assert (value - spread).abs().max() <= 0.51 * step + 0.01 * spread.abs().max()
                pruned = key_bits[row, head] == 0
                assert bool((key[pruned] == 0).all())
                exact16 = key_bits[row, head] == 16
                assert torch.allclose(
                    key[exact16], keys[row, head, position, exact16].float(), rtol=1e-2, atol=1e-3
                )


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_bytes_are_those_of_the_layout(options):
    store, value_bits, key_bits, *_ = random_store(**options)
    expected = store.rows * store.layout.fixed_bytes(store.kv_heads)
    for row in range(store.rows):
        for head in range(store.kv_heads):
            bits = value_bits[row, head].tolist()
            kept = sum(width > 0 for width in bits)
            expected += sum(store.layout.value_bytes(width) for width in bits)
            for width in store.layout.key_widths:
                channels = int((key_bits[row, head] == width).sum())
                expected += store.layout.key_bytes(width, channels, kept)
    assert store.nbytes == expected
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in store.tensors().values()
    }
    assert sum(storages.values()) == expected


def test_select_and_crop():
    store, *_ = random_store(rows=3, key_group=32, value_group=32)
    chosen = store.select(torch.tensor([2, 0]))
    assert chosen.rows == 2
    for new, old in enumerate([2, 0]):
        for head in range(store.kv_heads):
            left, right = chosen.kept(new, head), store.kept(old, head)
            for name in ("positions", "keys", "values"):
                assert torch.equal(getattr(left, name), getattr(right, name))
    shorter = store.crop(40)
    assert shorter.tokens == 40 and shorter.kept(0, 0).positions.max() < 40
    query = torch.randn(3, 6, 2, 64)
    output, lse = shorter.attend(query, None, AttendContext(0.1))
    expected, expected_lse = exact(shorter, query, None, 0.1)
    assert torch.allclose(output.double(), expected, atol=2e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-4)
    again = store_from_state("trizone", shorter.tensors(), shorter.meta())
    assert torch.equal(again.attend(query, None, AttendContext(0.1))[0], output)


def test_damaged_state_is_refused():
    store, *_ = random_store()
    tensors = store.tensors()
    for name, tensor in tensors.items():
        if name in ("order", "value_counts", "key_counts"):
            continue
        with pytest.raises(ValueError):
            store_from_state("trizone", {**tensors, name: tensor[:-1]}, store.meta())
