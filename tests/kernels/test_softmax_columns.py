"""Column sums of attention weights, by the C loop and without it, equal those of the whole matrix in float64."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels import softmax_columns
from kvfold.kernels.reference import column_mass


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("block", [None, 7])
def test_equals_the_whole_matrix(loop, squared, dtype, atol, block, monkeypatch):
    if not loop:
        monkeypatch.setenv("KVFOLD_CPU_KERNEL", "0")
    elif softmax_columns.NATIVE.problem():
        pytest.skip(softmax_columns.NATIVE.problem())
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 50, 64, generator=generator).to(dtype)
    key = torch.randn(2, 3, 101, 64, generator=generator).to(dtype)
    found = column_mass(query, key, 0.4, None, squared=squared, block=block)
    weights = (query.double().view(2, 3, 100, 64) @ key.double().transpose(2, 3) * 0.4).softmax(-1)
    expected = (weights.square() if squared else weights).sum(2)
    torch.testing.assert_close(found.double(), expected, atol=atol * expected.max().item(), rtol=0)


@pytest.mark.skipif(softmax_columns.NATIVE.problem() is not None, reason="no C loop")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_far_logits(threads):
    logits = torch.randn(2, 9, 33, generator=torch.Generator().manual_seed(0)) * 300
    sums, before = torch.ones(2, 33), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        softmax_columns.add_columns(logits, sums, squared=False)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(sums, 1 + logits.double().softmax(-1).sum(1).float(), atol=1e-5, rtol=1e-5)
