"""What the kernels over graded tokens (`triton_graded_errors.py`, `triton_graded_pack.py`) need to know, and where they work."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.kernels import dense_decode

MAX_DIM, MAX_GRADES = 256, 16


class Books(NamedTuple):
    """Codebooks by width; those of 0 bits and of widths that are not used may hold anything.

    Attributes
    ----------
    levels : (9, 256) float32
        Ascending, symmetric about 0.
    nearest : (9, cells) float32
        The level nearest to each cell of [-reach, reach].
    reach : float
    """

    levels: Tensor
    nearest: Tensor
    reach: float


def serves(device: torch.device, key_dim: int, value_dim: int, grades: int) -> bool:
    """Whether the kernels can work there, on such tokens."""
    fits = max(key_dim, value_dim) <= MAX_DIM and grades <= MAX_GRADES
    return fits and dense_decode.problem(device) is None
