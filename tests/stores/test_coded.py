"""Kept tokens of each head in rotated codes."""

from __future__ import annotations

import pytest
import torch

from kvfold.codecs.rotated import RotatedCode
from kvfold.stores import CodedStore, store_from_state
from kvfold.stores.base import Kept
from kvfold.stores.coded import CodedLayout
from tests.stores.checks import Turn, assert_attends, assert_behaves

KEYS = (RotatedCode(((4, 4), (3, 12)), norms="group"), RotatedCode(((8, 2), (2, 14)), norms="token"))
VALUES = (RotatedCode(((3, 24),)), RotatedCode(((4, 24),)))


def random_store(counts=((20, 31), (5, 0), (64, 1)), tokens=64, bias=True, mean=None, order=True, codes=KEYS):
    generator = torch.Generator().manual_seed(0)

    def head(count):
        return Kept(
            torch.randperm(tokens, generator=generator)[:count],
            torch.randn(count, 16, generator=generator),
            torch.randn(count, 24, generator=generator) * 3,
            torch.randn(count, generator=generator) if bias else None,
        )

    rows = [[head(count) for count in row] for row in counts]
    layout = CodedLayout(
        tokens, (tokens,) * len(counts), tuple(range(len(counts))), codes, VALUES, turned=mean == "turned"
    )
    constants = {}
    if mean:
        constants["key_mean"] = torch.randn(len(counts), 2, 16, generator=generator).half() * 5
    if order:
        constants["key_order"] = (
            torch.stack([torch.randperm(16, generator=generator) for _ in range(2 * len(counts))])
            .view(-1, 2, 16)
            .to(torch.uint8)
        )
    return CodedStore.encode(rows, layout, constants, Turn()), rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mean", [None, "turned", "same"])
@pytest.mark.parametrize("order", [True, False])
def test_behaves(bias, mean, order):
    store, rows = random_store(bias=bias, mean=mean, order=order)
    assert_behaves(store, Turn())
    for row, heads in enumerate(rows):
        for head, expected in enumerate(heads):
            kept = store.kept(row, head, Turn())
            assert torch.equal(kept.positions, expected.positions)
            if bias:
                assert torch.equal(kept.bias, expected.bias.half().float())
            else:
                assert kept.bias is None


def test_content_is_as_exact_as_its_codes():
    """8 bits come back within a few percent whatever the constant taken out, 2 bits do not."""
    worst = {}
    for width in (8, 2):
        code = RotatedCode(((width, 16),), norms="group")
        for mean in (None, "turned", "same"):
            store, rows = random_store(mean=mean, codes=(code, code))
            lost = [
                (store.kept(row, head, Turn()).keys - kept.keys).norm() / kept.keys.norm()
                for row, heads in enumerate(rows)
                for head, kept in enumerate(heads)
                if len(kept.positions) > 1
            ]
            worst[width] = max(worst.get(width, 0), float(max(lost)))
            if mean is None:
                plain = float(max(lost))
        assert worst[width] >= plain
    # A constant five times as large as the keys is coded too where it is not theirs: only the plain form is this exact.
    assert plain > 0.2 and worst[8] < 0.15


def test_bytes_are_those_of_codes_norms_positions_and_constants():
    store, rows = random_store()
    kept = [[len(kept.positions) for kept in heads] for heads in rows]
    first, second = (sum(row[head] for row in kept) for head in range(2))
    key = first * (2 + 5 + 2) + second * (2 + 4 + 1)
    value = first * (9 + 1) + second * (12 + 1)
    constants = 3 * (4 * (3 + 2) + 2 * 16) + 4 * 6
    assert store.nbytes == key + value + (2 + 2) * (first + second) + constants
    assert store.widths() == [
        {"values": {3: first}, "keys": {4: 12, 3: 36}},
        {"values": {4: second}, "keys": {8: 6, 2: 42}},
    ]


def test_long_heads_in_blocks(monkeypatch):
    store, _ = random_store(mean="turned")
    monkeypatch.setattr(CodedStore, "block", 7)
    assert_attends(store, Turn())


def test_rope_must_be_there():
    store, _ = random_store(mean="turned")
    with pytest.raises(ValueError, match="cannot be found"):
        assert_attends(store)


@pytest.mark.parametrize(
    "name", ["positions", "key_codes", "value_codes", "key_norms", "value_norms", "bias"]
)
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_damaged_state_is_refused(name, change):
    store, _ = random_store()
    tensor = store.tensors()[name]
    damaged = tensor[:-1] if change == "shorter" else torch.cat([tensor, tensor[:1]])
    with pytest.raises(ValueError, match=f"buffer {name} is {change}"):
        store_from_state("coded", {**store.tensors(), name: damaged}, store.meta())
    with pytest.raises(ValueError, match="counts"):
        store_from_state("coded", {**store.tensors(), "counts": store.buffers["counts"][:-1]}, store.meta())
