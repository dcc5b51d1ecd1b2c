"""The matrix-vector kernel against float64, interpreted where there is no GPU."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

from kvfold.kernels import matvec
from kvfold.kernels.matvec import Cut
from tests import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def check():
    generator = torch.Generator().manual_seed(0)
    low = torch.bfloat16 if CUDA else torch.float16
    cases = [(1, 20, 70, torch.float32), (3, 37, 600, low)]
    for count, outputs, inputs, dtype in cases:
        tolerance = 1e-6 if dtype == torch.float32 else 4e-3

        def draw(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

        def near(found, expected, dtype=dtype, tolerance=tolerance):
            assert found.dtype == dtype and found.shape == expected.shape
            assert (found.double() - expected).norm() / expected.norm() < tolerance

        x, weight, up, bias = (
            draw(1, count, inputs),
            draw(outputs, inputs),
            draw(outputs, inputs),
            draw(outputs),
        )
        product, other = (x.double() @ matrix.double().T for matrix in (weight, up))
        near(matvec.linear(x, weight), product)
        matrices = [draw(rows, inputs) for rows in (32, 16, 21)]
        for number in (2, 3):
            for found, matrix in zip(matvec.together(x, matrices[:number]), matrices):
                near(found, x.double() @ matrix.double().T)
        near(matvec.linear(x, weight, bias, Cut(8, 32, 4, 2)), product + bias.double())
        near(matvec.gated(x, weight, up, "silu"), silu(product) * other)
        near(matvec.gated(x, weight, up, "gelu_tanh"), gelu(product, approximate="tanh") * other)


def test_against_float64():
    interpreted.run(check)


def test_what_fits():
    weight = torch.zeros(8, 16)
    assert matvec.fits(torch.zeros(2, 2, 16), weight)
    assert not matvec.fits(torch.zeros(1, 5, 16), weight), "more vectors than the kernel is made for"
    assert not matvec.fits(torch.zeros(1, 16).half(), weight)
    assert not matvec.fits(torch.zeros(1, 8), weight.T)
