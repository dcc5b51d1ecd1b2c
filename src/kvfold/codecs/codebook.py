"""Lloyd-Max codebooks for one coordinate of a randomly rotated vector.

A rotated vector's coordinates are close to Gaussian when it is long (TurboQuant), but those of a short unit
vector are not: Block-GTQ's small RoPE groups have 2 to 8 dimensions, where levels made for the exact density
(that of one coordinate of a point on the sphere) are worth up to half of the error.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Array = NDArray[np.float64]
_GRID = 1 << 17


def gaussian_levels(bits: int) -> Tensor:
    """Optimal scalar quantiser levels for N(0, 1).

    Parameters
    ----------
    bits : int
        Width of a code, 1 to 8.

    Returns
    -------
    Tensor (2 ** bits,) float32
        Ascending and symmetric, on the CPU. Divide by ``sqrt(dim)`` for a unit vector of many dimensions.

    Raises
    ------
    ValueError
        If ``bits`` is not 1 to 8.

    References
    ----------
    Lloyd (1982), Max (1960); TurboQuant (2504.19874), MSE variant.
    """
    _check_bits(bits)
    return torch.tensor(_gaussian(bits), dtype=torch.float32)


def sphere_levels(bits: int, dim: int) -> Tensor:
    """Optimal levels for one coordinate of a uniformly random unit vector in ``dim`` dimensions.

    Its density is proportional to ``(1 - x^2)^((dim - 3) / 2)`` on [-1, 1].

    Parameters
    ----------
    bits : int
        Width of a code, 1 to 8.
    dim : int
        Dimensions of the vector, at least 2.

    Returns
    -------
    Tensor (2 ** bits,) float32
        Ascending, symmetric and within [-1, 1], on the CPU.

    Raises
    ------
    ValueError
        If ``bits`` is not 1 to 8 or ``dim`` is below 2.

    References
    ----------
    Block-GTQ notes, 4.3: the released code uses Gaussian levels for groups of every size.
    """
    _check_bits(bits)
    if dim < 2:
        raise ValueError(f"dim must be at least 2, got {dim}; a unit vector of one dimension is just a sign.")
    return torch.tensor(_sphere(bits, dim), dtype=torch.float32)


def encode(x: Tensor, levels: Tensor) -> Tensor:
    """Index of the nearest level of each element.

    Parameters
    ----------
    x : Tensor (...)
        Floating, in the units of ``levels``; compared in float32.
    levels : Tensor (2 ** bits,) float32
        Ascending, on the device of ``x``.

    Returns
    -------
    Tensor (...) uint8
        A value halfway between two levels gets the lower one. NaN gets the last level: check for it
        beforehand.
    """
    boundaries = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(x.float().contiguous(), boundaries, out_int32=True).to(torch.uint8)


def decode(codes: Tensor, levels: Tensor) -> Tensor:
    """Levels of the codes.

    Parameters
    ----------
    codes : Tensor (...) uint8
    levels : Tensor (2 ** bits,)

    Returns
    -------
    Tensor (...)
        In the dtype of ``levels``.
    """
    # A uint8 index would be taken for a mask.
    return levels[codes.int()]


def _check_bits(bits: int) -> None:
    if bits not in range(1, 9):
        raise ValueError(f"bits must be an integer from 1 to 8, got {bits!r}.")


@cache
def _gaussian(bits: int) -> _Array:
    # Beyond 12 standard deviations the mass is below float64's resolution of 1.
    u = np.linspace(0.0, 12.0, _GRID)
    return _lloyd_max(bits, u, u, np.exp(-u * u / 2), lambda x: x)


@cache
def _sphere(bits: int, dim: int) -> _Array:
    # With x = sin(u) the density is cos(u)^(dim - 2): smooth even for dim 2, whose density in x is infinite
    # at 1.
    u = np.linspace(0.0, min(np.pi / 2, 12.0 / np.sqrt(dim)), _GRID)
    return _lloyd_max(bits, u, np.sin(u), np.cos(u) ** (dim - 2), np.arcsin)


def _lloyd_max(
    bits: int, u: _Array, x: _Array, density: _Array, u_of_x: Callable[[_Array], _Array]
) -> _Array:
    """Levels for a symmetric density given on a grid of its right half: x(u), ``density`` per unit of u."""
    cells = 1 << (bits - 1)
    step = u[1] - u[0]

    def tail(values: _Array) -> _Array:
        """Integral from each grid point to the last one, summed from its smallest terms on."""
        trapezoids = (values[1:] + values[:-1]) * (step / 2)
        return np.append(trapezoids[::-1].cumsum()[::-1], 0.0)

    mass, moment = tail(density), tail(density * x)
    # Start where many fine cells would lie (Panter and Dite): equal shares of the density's cube root.
    slope = np.gradient(x, step)
    share = tail(np.cbrt(density * np.maximum(slope, 1e-12) ** 2))
    levels = np.interp(-share[0] * (1 - (np.arange(cells) + 0.5) / cells), -share, x)
    for _ in range(100):
        inner = (levels[1:] + levels[:-1]) / 2
        edges = np.concatenate([[u[0]], u_of_x(inner), [u[-1]]])
        cell_mass = -np.diff(np.interp(edges, u, mass))
        centres = -np.diff(np.interp(edges, u, moment)) / cell_mass
        moved = np.abs(centres - levels).max() / levels[-1]
        if moved < 1e-9:
            levels = centres
            break
        # Newton's step: a level follows its two boundaries, and each of them half of the levels beside it. (Lloyd's own,
        # levels = centres, takes thousands of rounds at 8 bits.)
        half = np.interp(edges[1:-1], u, density / slope) / 2
        down, up = (
            half * (centres[1:] - inner) / cell_mass[1:],
            half * (inner - centres[:-1]) / cell_mass[:-1],
        )
        follow = np.diag(np.append(up, 0.0) + np.insert(down, 0, 0.0)) + np.diag(up, 1) + np.diag(down, -1)
        levels = levels + np.linalg.solve(np.eye(cells) - follow, centres - levels)
    return np.concatenate([-levels[::-1], levels])
