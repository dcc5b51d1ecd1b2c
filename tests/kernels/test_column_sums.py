"""Column sums against the whole matrix in float64: the twin in torch, and the kernel, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels import column_sums
from tests import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CASES = {
    # batch, heads, kv_heads, queries, tokens, dim, causal, left padding, softcap, other tokens, squared
    "all see all": (1, 4, 2, 70, 150, 64, False, (0,), None, False, True),
    "causal, ragged": (2, 6, 2, 150, 150, 32, True, (0, 37), None, False, False),
    "a later chunk beside others": (1, 2, 2, 40, 140, 48, True, (0,), None, True, True),
    "capped, padded": (2, 4, 1, 33, 90, 16, True, (50, 3), 4.0, False, False),
    "few queries, parts of the tokens": (1, 4, 2, 5, 1300, 16, True, (700,), None, True, True),
    "wide": (1, 2, 1, 66, 66, 160, True, (5,), None, False, True),
}


def drawn(batch, heads, kv_heads, queries, tokens, dim, causal, padding, softcap, beside, squared):
    generator = torch.Generator().manual_seed(0)
    # As the projections of a model leave them: heads next to each other.
    query = torch.randn(batch, queries, heads, dim, generator=generator).half().transpose(1, 2)
    key = torch.randn(batch, tokens, kv_heads, dim, generator=generator).half().transpose(1, 2)
    index = torch.arange(tokens)
    valid = (index >= torch.tensor(padding)[:, None])[:, None]
    position = index[-queries:].expand(batch, -1)
    last = torch.where(position >= torch.tensor(padding)[:, None], position, -1) if causal else None
    other = torch.randn(batch, heads, queries, generator=generator) + 3 if beside else None
    return query, key, 0.3, valid, last, softcap, other, squared


def whole(query, key, scaling, valid, last, softcap, other, squared):
    batch, heads, queries, _ = query.shape
    kv_heads, tokens = key.shape[1:3]
    logits = query.double() @ key.double().repeat_interleave(heads // kv_heads, 1).transpose(2, 3) * scaling
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    visible = valid[:, :, None].expand(-1, -1, queries, -1)
    if last is not None:
        visible = visible & (torch.arange(tokens) <= last[..., None])[:, None]
    weights = logits.exp() * visible
    total = weights.sum(-1, keepdim=True) + (0 if other is None else other.double().exp()[..., None])
    weights = weights / total.clamp_min(1e-30)
    return (weights.square() if squared else weights).view(batch, kv_heads, -1, tokens).sum(2)


def near(found, expected):
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert bool((found.cpu()[expected == 0] == 0).all())
    assert (found.cpu() - expected).abs().max() / expected.max() < 1e-5


def check():
    from kvfold.kernels import triton_column_sums

    for case in CASES.values():
        given = drawn(*case)
        on = [x.to(DEVICE) if torch.is_tensor(x) else x for x in given]
        on[5] = on[5] or 0.0
        near(triton_column_sums.column_sums(*on), whole(*given))
    on = [x.to("meta") if torch.is_tensor(x) else x for x in on]
    assert triton_column_sums.column_sums(*on).shape == (1, 1, 66)


@pytest.mark.parametrize("rows", [1024, 19])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twin(case, rows, monkeypatch):
    monkeypatch.setattr(column_sums, "ROWS_AT_A_TIME", rows)
    given = drawn(*case)
    near(column_sums.plain(*given), whole(*given))


def test_kernel():
    interpreted.run(check)


def test_refusals():
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="disagree"):
        column_sums.column_sums(query, key[..., :4], 1.0)
    with pytest.raises(ValueError, match="last"):
        column_sums.column_sums(query, key, 1.0, last=torch.zeros(1, 5))
    with pytest.raises(ValueError, match="valid"):
        column_sums.column_sums(query, key, 1.0, valid=torch.ones(1, 3, 5, dtype=torch.bool))
    assert "CUDA" in column_sums.problem(torch.device("cpu"), torch.float16, 64)
    assert "float32" in column_sums.problem(torch.device("cuda"), torch.float32, 64)
    assert "576" in column_sums.problem(torch.device("cuda"), torch.float16, 576)
