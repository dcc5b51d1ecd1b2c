"""What folding a long prompt holds beside what it was given and what it makes."""

from __future__ import annotations

import pytest
import torch

from kvfold import RDKV, BlockGTQ
from kvfold.bench.peak import peak
from kvfold.kernels import channel_sums
from kvfold.ledger import storage_bytes
from kvfold.methods.base import LayerView
from tests.stores.test_graded import ROTARY

TOKENS, HEADS, DIM = 8192, 4, 64


def made():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator).bfloat16()
    index = torch.arange(0, TOKENS, 256)
    return LayerView(
        keys=keys + 1,
        values=values,
        valid=torch.ones(1, 1, TOKENS, dtype=torch.bool).expand(-1, HEADS, -1),
        real_tokens=(TOKENS,),
        positions=torch.arange(TOKENS)[None],
        scaling=0.1,
        queries=keys[:, :, -32:],
        sampled=keys[:, :, index],
        sampled_index=index,
        rotary=ROTARY,
    )


@pytest.mark.parametrize(
    ("method", "most"),
    [(BlockGTQ(bits=3), 0.25), (RDKV(keep=0.1), 0.7), (RDKV(keep=0.1, tile=16, queries="window"), 0.7)],
    ids=["blockgtq", "rdkv", "rdkv by tiles"],
)
def test_no_copy_of_a_layer(method, most, monkeypatch):
    """In layers, of 16-bit keys and values together: a float32 copy of the keys alone would be one."""
    monkeypatch.setattr(channel_sums, "AT_A_TIME", 256)
    view = made()
    with peak(torch.device("cpu")) as found:
        stores = method.fold([view])
    new = storage_bytes([tensor for store in stores for tensor in store.tensors().values()])
    layer = view.keys.nbytes + view.values.nbytes
    assert 0 < found.most - new <= most * layer, (found.most - new) / layer
