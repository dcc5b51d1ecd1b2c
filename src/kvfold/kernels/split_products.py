"""Products of float32 matrices on a GPU's tensor cores: in two bfloat16 parts of eight bits each, summed in float32.

What is left out, the product of the small parts, is 2^-18 of the whole. Elsewhere plain products serve.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PANEL = 512
"""Rows of a symmetric product at a time, which then leaves out what lies below the diagonal."""


@cache
def serves(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices into float32 ones (torch 2.8, compute capability 8.0)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return hasattr(torch.ops.aten.mm, "dtype") and torch.cuda.get_device_capability(device)[0] >= 8


def product(x: Tensor, y: Tensor) -> Tensor:
    """x (n, k) @ y (k, m), float32."""
    if not serves(x.device):
        return x @ y
    (high, low), (its_high, its_low) = halves(x), halves(y)
    found = multiply(high, its_high)
    found += multiply(high, its_low)
    found += multiply(low, its_high)
    return found


class Moments:
    """The sum of x^T x over pieces x (n, channels) float32, in float64.

    Parameters
    ----------
    channels : int
    device : torch.device
    """

    def __init__(self, channels: int, device: torch.device):
        self._sum = torch.zeros(channels, channels, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add a piece's."""
        if serves(x.device):
            high, low = halves(x)
            # Twice high^T low is not symmetric, but its symmetric part is what is wanted.
            self._sum += multiply(high.t(), high)
            self._sum.add_(multiply(high.t(), low), alpha=2)
            return
        x = x.double()
        for start in range(0, len(self._sum), PANEL):
            rows, after = slice(start, start + PANEL), slice(start + PANEL, None)
            self._sum[rows, rows].addmm_(x[:, rows].t(), x[:, rows])
            self._sum[rows, after].addmm_(x[:, rows].t(), x[:, after], alpha=2)

    def total(self) -> Tensor:
        """(channels, channels) symmetric."""
        return (self._sum + self._sum.t()) / 2


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 matrices whose sum is x to 2^-17 of each number."""
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of bfloat16 matrices in float32."""
    return torch.mm(x, y, out_dtype=torch.float32)
