"""Products in two bfloat16 parts against float64: how they are put together everywhere, the GPU's own products on one."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels import split_products
from kvfold.kernels.split_products import Moments, product

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(params=["plain", "parts"])
def way(request, monkeypatch):
    monkeypatch.setattr(split_products, "serves", lambda device: request.param == "parts")
    monkeypatch.setattr(split_products, "PANEL", 20)
    if request.param == "parts" and not CUDA:
        # What the GPU does: products of bfloat16 numbers, exact, summed in float32.
        monkeypatch.setattr(split_products, "multiply", lambda x, y: x.float() @ y.float())
    return request.param


def drawn(*shape):
    """Of columns whose sizes differ by up to a thousand."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))
    return (x * 10 ** torch.linspace(0, -3, shape[-1])).to(DEVICE)


def test_products(way):
    x, y = drawn(70, 90), drawn(90, 31)
    exact = x.double() @ y.double()
    bound = x.double().abs() @ y.double().abs()
    found = product(x, y)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() < 2**-16 * bound).all()


def test_moments_of_pieces(way):
    x = drawn(500, 50)
    x[:, 7] += 3
    moments = Moments(50, DEVICE)
    for piece in x.split(123):
        moments.add(piece)
    exact = x.double().t() @ x.double()
    size = exact.diagonal().sqrt()
    assert torch.equal(moments.total(), moments.total().t())
    # Relative to the channels' own sizes, small ones too.
    assert ((moments.total() - exact) / (size[:, None] * size)).abs().max() < 1e-5
