"""Products of a matrix with one or a few vectors, at the speed at which a GPU reads the matrix.

A library's matrix product splits small ones and adds the parts in a launch of its own; here one launch does it all.
`torch.nn.functional.linear` is the plain twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

MAX_ROWS = 4
"""More vectors than that are better left to tensor cores."""
TOGETHER = 16
"""Rows that a program takes at most."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True)
class Cut:
    """How a launch is cut: rows of the matrix and columns at a time, warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


def cut_for(outputs: int, inputs: int) -> Cut:
    """What was fastest on an H200 (benchmarks/engine.py); small matrices need few rows a program to fill the GPU."""
    columns = min(512, max(16, 1 << (inputs - 1).bit_length()))
    return Cut(4, 1024, 8, 3) if outputs <= 2048 and inputs >= 1024 else Cut(8, columns, 4, 3)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel serves: few vectors, a matrix in 16 or 32 bits whose rows lie one after the other."""
    return (
        x.numel() <= MAX_ROWS * x.shape[-1]
        and x.dtype == weight.dtype
        and weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and weight.is_contiguous()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, cut: Cut | None = None) -> Tensor:
    """weight x + bias.

    Parameters
    ----------
    x : (..., inputs), at most `MAX_ROWS` vectors
    weight : (outputs, inputs)
    bias : (outputs,), optional
    cut : Cut, optional

    Returns
    -------
    (..., outputs) of x's dtype, summed in float32
    """
    return _launch(x, [weight], None, bias, "silu", cut)


def together(x: Tensor, weights: Sequence[Tensor], cut: Cut | None = None) -> list[Tensor]:
    """Products of two or three matrices with the same vectors, in one launch.

    Parameters
    ----------
    x : (..., inputs), at most `MAX_ROWS` vectors
    weights : sequence of (outputs, inputs)
        All but the last have a multiple of `TOGETHER` rows.
    cut : Cut, optional

    Returns
    -------
    list of (..., outputs), views of one tensor
    """
    return list(
        _launch(x, list(weights), None, None, "silu", cut).split([len(weight) for weight in weights], -1)
    )


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    cut: Cut | None = None,
) -> Tensor:
    """activation(gate x) * (up x), both products in one launch.

    Parameters
    ----------
    x : (..., inputs), at most `MAX_ROWS` vectors
    gate, up : (outputs, inputs)
    activation : "silu" or "gelu_tanh"
    cut : Cut, optional

    Returns
    -------
    (..., outputs) of x's dtype; nothing is rounded in between
    """
    return _launch(x, [gate], up, None, activation, cut)


def _launch(
    x: Tensor, weights: list[Tensor], up: Tensor | None, bias: Tensor | None, activation: str, cut: Cut | None
) -> Tensor:
    inputs = x.shape[-1]
    first, second, third = (*weights, *[weights[-1]] * 2)[:3]
    ends = [sum(len(weight) for weight in weights[:count]) for count in (1, 2, 3)]
    outputs = ends[-1]
    cut = cut or cut_for(outputs, inputs)
    flat = x.reshape(-1, inputs).contiguous()
    count = flat.shape[0]
    output = x.new_empty(count, outputs)
    _kernels().matvec[(math.ceil(outputs / cut.rows),)](
        flat, first, second, third, first if up is None else up, first if bias is None else bias, output, *ends, inputs,
        COUNT=count, COUNT_UP=1 << (count - 1).bit_length(), ROWS=cut.rows, COLUMNS=cut.columns, STAGES=cut.stages,
        GATED=up is not None, ACTIVATION=ACTIVATIONS[activation], BIAS=bias is not None, num_warps=cut.warps,
    )  # fmt: skip
    return output.view(*x.shape[:-1], outputs)


@cache
def _kernels() -> Any:
    from kvfold.kernels import matvec_triton

    return matvec_triton
