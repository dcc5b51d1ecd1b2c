"""One method's tokens in another's code."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cli.options import build_method, changed_options
from kvfold.errors import KvfoldError
from kvfold.methods import KIVI, RDKV, BlockGTQ, Chain, KVSculpt, SelectFit, SnapKV, TurboQuant, make_method
from kvfold.stores import CodedStore
from tests.tiny import prompt, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


FIRST = [
    SnapKV(keep=0.4, window=8),
    SelectFit(keep=0.4, window=8, sinks=2),
    KVSculpt(keep=0.4, window=8, sinks=2, steps=2),  # as many tokens as each head needs
]


@pytest.mark.parametrize("first", FIRST, ids=lambda method: method.name)
@pytest.mark.parametrize("then", [BlockGTQ(bits=4), TurboQuant(bits=4)])
def test_keeps_what_the_first_keeps_in_the_code_of_the_second(model, first, then):
    ids = prompt(90)
    alone, chained = (kvfold.fold(model, ids, method) for method in (first, first >> then))
    for plain, coded in zip(alone.layers, chained.layers, strict=True):
        plain, coded = plain.segments[0].store, coded.segments[0].store
        assert isinstance(coded, CodedStore)
        for head in range(plain.kv_heads):
            a, b = plain.kept(0, head), coded.kept(0, head, None)
            assert torch.equal(a.positions, b.positions)
            for one, other in ((a.keys, b.keys), (a.values, b.values)):
                assert 0 < (one - other).norm() < 0.2 * one.norm()
            assert (a.bias is None) == (b.bias is None)
    # 4 bits, a norm and a position of each token, against 32 channels in 16 bits; constants weigh most on few tokens.
    assert chained.ledger().folded_bytes < 0.6 * alone.ledger().folded_bytes


def test_is_saved_and_loaded(model, tmp_path):
    ids = prompt(90)
    cache = kvfold.fold(model, ids, SnapKV(keep=0.4, window=8) >> BlockGTQ(bits=4, widths=(2, 3, 4, 8)))
    cache.save(tmp_path / "c.kvf")
    loaded = kvfold.load(tmp_path / "c.kvf", model)
    assert loaded.method == cache.method
    new = torch.cat([ids, prompt(3)], 1)
    outputs = [
        model.generate(new, past_key_values=one, max_new_tokens=5, do_sample=False) for one in (cache, loaded)
    ]
    assert torch.equal(*outputs)


def test_plain_data_and_back():
    chain = SnapKV(keep=0.4) >> BlockGTQ(bits=4)
    data = chain.to_dict()
    assert data["first"]["method"] == "snapkv" and data["then"]["bits"] == 4
    assert changed_options(data) == {"first": "snapkv:keep=0.4", "then": "blockgtq:bits=4"}
    name = data.pop("method")
    assert make_method(name, **data) == chain and data["first"]["method"] == "snapkv"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SnapKV(keep=0.4) >> KIVI(), "kivi cannot code what another method keeps"),
        (lambda: SnapKV(keep=0.4) >> RDKV(keep=0.1), "rdkv cannot code"),
        (lambda: SnapKV(keep=0.4) >> BlockGTQ(keep=0.1), "give it bits, and the budget to snapkv"),
        (lambda: SnapKV(keep=0.4, bits=4) >> BlockGTQ(bits=4), "snapkv codes its tokens already"),
        (lambda: SnapKV(keep=0.4) >> BlockGTQ(bits=4) >> TurboQuant(), "chain leaves no tokens"),
        (lambda: Chain(first=RDKV(keep=0.4), then=BlockGTQ(bits=4)), "rdkv leaves no tokens"),
        (lambda: KIVI() >> BlockGTQ(bits=4), "kivi leaves no tokens"),
    ],
)
def test_what_cannot_be_chained_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("label", ["blockgtq:bits=4 >> snapkv", "snapkv >> kivi", "snapkv:window=8 >> rdkv"])
def test_the_wrong_order_is_told_before_budgets(label):
    for given in ({}, {"keep": 0.2}):
        with pytest.raises(KvfoldError, match=r"cannot code.*blockgtq or turboquant"):
            build_method(label, given, ())
