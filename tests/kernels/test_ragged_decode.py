"""The ragged decode kernel against float64 attention head by head, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels import ragged_decode
from kvfold.kernels.dense_decode import Exact
from kvfold.stores import WeightedStore
from kvfold.stores.base import AttendContext, Kept
from kvfold.stores.weighted import WeightedLayout
from tests import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def store_of(counts, key_dim, value_dim, bias, dtype, generator):
    """Heads of such lengths, in order of no positions."""

    def head(count):
        return Kept(
            torch.arange(count),
            torch.randn(count, key_dim, generator=generator),
            torch.randn(count, value_dim, generator=generator),
            torch.randn(count, generator=generator) if bias else None,
        )

    tokens = max(max(row) for row in counts) + 1
    layout = WeightedLayout(tokens, (tokens,) * len(counts))
    store = WeightedStore.build(layout, [[head(count) for count in row] for row in counts], dtype)
    return store.to(DEVICE)


def reference(query, store, tail, scaling, softcap):
    """(output, log-sum-exp) in float64, one query after the other."""
    batch, heads, _, _ = query.shape
    group = heads // store.kv_heads
    outputs, lses = torch.zeros(batch, heads, 1, store.value_dim, dtype=torch.float64), []
    for row in range(batch):
        for head in range(heads):
            kept = store.kept(row, head // group)
            keys, values, bias = kept.keys.double(), kept.values.double(), kept.bias
            bias = torch.zeros(len(keys), device=keys.device) if bias is None else bias
            if tail is not None:
                keys = torch.cat([keys, tail.keys[row, head // group].double()])
                values = torch.cat([values, tail.values[row, head // group].double()])
                bias = torch.cat([bias, bias.new_zeros(tail.keys.shape[2])])
            scores = keys @ query[row, head, 0].double() * scaling
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores + bias.double()
            if len(scores):
                outputs[row, head, 0] = (scores.softmax(0) @ values).cpu()
            lses.append(scores.logsumexp(0).cpu())
    return outputs.to(query.device), torch.stack(lses).view(batch, heads, 1).to(query.device)


CASES = [
    # counts, group, key dim, value dim, tail, dtype, softcap, bias
    (((150, 20),), 4, 64, 64, 20, torch.float16, None, False),
    (((0, 33, 7), (90, 1, 0)), 7, 80, 96, 5, torch.float16, 5.0, True),
    (((70, 300),), 1, 128, 128, 0, torch.bfloat16 if CUDA else torch.float16, None, True),
    (((5,), (0,), (41,)), 16, 256, 32, 70, torch.float16, None, False),
    (((0, 0),), 2, 16, 16, 9, torch.float16, None, True),
    (((0, 0),), 2, 16, 16, 0, torch.float16, None, False),
    (((1500,),), 3, 32, 32, 0, torch.float16, None, True),
]


def check():
    generator = torch.Generator().manual_seed(0)
    for counts, group, dim, value_dim, reserved, dtype, softcap, bias in CASES:
        store = store_of(counts, dim, value_dim, bias, dtype, generator)
        batch, kv_heads = len(counts), len(counts[0])
        query = torch.randn(batch, kv_heads * group, 1, dim, generator=generator).to(DEVICE, dtype)
        tail = written = None
        if reserved:
            shape = (batch, reserved, kv_heads)  # tokens outermost: strides must be honoured
            keys = torch.randn(*shape, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
            values = torch.randn(*shape, value_dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
            keys[:, :, reserved - 3 :] = torch.nan  # what nothing has been written to yet
            values[:, :, reserved - 3 :] = torch.nan
            tail = Exact(keys, values, length=torch.tensor([reserved - 3], device=DEVICE))
            written = Exact(keys[:, :, :-3], values[:, :, :-3])
        output, lse = ragged_decode.attend(query, store.ragged, tail, dim**-0.5, softcap)
        expected, expected_lse = reference(query, store, written, dim**-0.5, softcap)
        error = (output.double() - expected).norm() / expected.norm().clamp_min(1e-9)
        assert error < 4e-3, (counts, error)
        assert torch.allclose(lse.double(), expected_lse, atol=3e-3)
        if written is not None:
            part = ragged_decode.attend(query, store.ragged, None, dim**-0.5, softcap)
            empty = store_of([[0] * kv_heads] * batch, dim, value_dim, bias, dtype, generator)
            merged, merged_lse = ragged_decode.attend(
                query, empty.ragged, written, dim**-0.5, softcap, before=part
            )
            assert (merged.double() - expected).norm() / expected.norm() < 8e-3
            assert torch.allclose(merged_lse, lse, atol=3e-3)
        # The plain twin, which a store runs where the kernel does not serve.
        plain, plain_lse = WeightedStore.attend_plain(
            store, query, None, AttendContext(dim**-0.5, softcap=softcap)
        )
        alone, alone_lse = ragged_decode.attend(query, store.ragged, None, dim**-0.5, softcap)
        assert torch.allclose(alone.float(), plain, atol=1e-2) and torch.allclose(
            alone_lse, plain_lse, atol=3e-3
        )


def check_store():
    """On a GPU the store calls the kernel, with the tail in the same launches, and without waiting for the device."""
    generator = torch.Generator().manual_seed(1)
    store = store_of(((70, 300), (9, 0)), 64, 64, True, torch.float16, generator)
    query = torch.randn(2, 8, 1, 64, generator=generator).to(DEVICE, torch.float16)
    keys, values = (torch.randn(2, 2, 20, 64, generator=generator).to(DEVICE, torch.float16) for _ in "kv")
    context, length = AttendContext(0.125), torch.tensor([12], device=DEVICE)
    first = store.attend_with_tail(query, keys, values, context, None, length)
    assert first is not None
    expected, _ = reference(query, store, Exact(keys[:, :, :12], values[:, :, :12]), 0.125, None)
    assert (first[0].double() - expected).norm() / expected.norm() < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # fails where the host waits
        again = store.attend_with_tail(query, keys, values, context, None, length)
    length.fill_(17)
    graph.replay()
    expected, _ = reference(query, store, Exact(keys[:, :, :17], values[:, :, :17]), 0.125, None)
    assert (again[0].double() - expected).norm() / expected.norm() < 4e-3


def test_against_float64():
    interpreted.run(check)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_the_store_calls_it():
    check_store()


def test_what_fits():
    generator = torch.Generator().manual_seed(0)
    store = store_of(((5, 9),), 64, 64, False, torch.float16, generator)
    query = torch.zeros(1, 4, 1, 64, dtype=store.buffers["keys"].dtype, device=DEVICE)
    assert ragged_decode.fits(query, store.ragged)
    assert not ragged_decode.fits(query.expand(-1, -1, 2, -1), store.ragged)
    assert not ragged_decode.fits(query.float(), store.ragged)
    assert not ragged_decode.fits(query[..., :32], store.ragged)
    assert not ragged_decode.fits(query.expand(2, -1, -1, -1), store.ragged)
