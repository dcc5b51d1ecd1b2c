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

COMMON_UNIT = 1 / 32
"""Unit of `common_levels`: within 2 % of the best step of 8-bit codes, and by chance close to many Lloyd-Max levels."""


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


def integers(bits: int, dim: int | None = None) -> Tensor:
    """Levels of `integer_levels` without their unit.

    Parameters
    ----------
    bits : int
        1 to 4, or 8.
    dim : int, optional
        As for `integer_levels`.

    Returns
    -------
    Tensor (2 ** bits,) float32
        Whole numbers from -63 to 63; for 8 bits the code less 127.5.

    Raises
    ------
    ValueError
        For other widths, whose levels lie too densely for whole numbers of 8 bits.
    """
    if bits == 8:
        return torch.arange(256) - 127.5
    if bits not in range(1, 5):
        raise ValueError(f"codes of 1 to 4 and of 8 bits have integer levels, not of {bits!r}")
    levels = _density(bits, dim)
    return torch.tensor(np.round(levels / levels[-1] * 63), dtype=torch.float32)


def integer_levels(bits: int, dim: int | None = None) -> Tensor:
    """Levels that are whole multiples of a unit where that costs nothing, so that a GPU multiplies them in 8 bits.

    Up to 4 bits the Lloyd-Max levels, rounded to 63rds of the largest: the squared error grows by 2 % at most. For 8 bits
    uniform steps: up to twice the error, which is half a bit, where there is least use for it. Between, Lloyd-Max levels
    as they are.

    Parameters
    ----------
    bits : int
        Width of a code, 1 to 8.
    dim : int, optional
        Dimensions of the unit vector that a coordinate is of, at least 2; N(0, 1) if not given.

    Returns
    -------
    Tensor (2 ** bits,) float32
        Ascending and symmetric, on the CPU.

    Raises
    ------
    ValueError
        As `gaussian_levels` and `sphere_levels`.
    """
    exact = gaussian_levels(bits) if dim is None else sphere_levels(bits, dim)
    if bits in (5, 6, 7):
        return exact
    whole = integers(bits, dim)
    return whole * (_uniform_step(bits, dim) if bits == 8 else exact[-1] / 63)


def common_levels(bits: int) -> Tensor:
    """Levels for N(0, 1) that are whole multiples of one unit, `COMMON_UNIT`, at every width that a GPU multiplies in 8 bits.

    So a channel may have one width here and another there, and still one scale. Up to 4 bits the Lloyd-Max levels, rounded: the
    squared error grows by 0.3 % at most. For 8 bits the code less 127.5: twice the error, which is half a bit, where there
    is least use for it. Between, Lloyd-Max levels as they are.

    Parameters
    ----------
    bits : int
        Width of a code, 1 to 8.

    Returns
    -------
    Tensor (2 ** bits,) float32
        Ascending and symmetric, on the CPU.

    Raises
    ------
    ValueError
        If ``bits`` is not 1 to 8.
    """
    if bits == 8:
        return integers(8) * COMMON_UNIT
    levels = gaussian_levels(bits)
    return levels if bits > 4 else (levels / COMMON_UNIT).round() * COMMON_UNIT


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


def _density(bits: int, dim: int | None) -> _Array:
    """The Lloyd-Max levels of a coordinate."""
    return _gaussian(bits) if dim is None else _sphere(bits, dim)


@cache
def _gaussian(bits: int) -> _Array:
    u, x, density = _gaussian_grid()
    return _lloyd_max(bits, u, x, density, lambda x: x)


@cache
def _sphere(bits: int, dim: int) -> _Array:
    return _lloyd_max(bits, *_sphere_grid(dim), np.arcsin)


def _gaussian_grid() -> tuple[_Array, _Array, _Array]:
    """Right half of a density on a grid: u, x(u), density per unit of u."""
    # Beyond 12 standard deviations the mass is below float64's resolution of 1.
    u = np.linspace(0.0, 12.0, _GRID)
    return u, u, np.exp(-u * u / 2)


def _sphere_grid(dim: int) -> tuple[_Array, _Array, _Array]:
    # With x = sin(u) the density is cos(u)^(dim - 2): smooth even for dim 2, whose density in x is infinite
    # at 1.
    u = np.linspace(0.0, min(np.pi / 2, 12.0 / np.sqrt(dim)), _GRID)
    return u, np.sin(u), np.cos(u) ** (dim - 2)


@cache
def _uniform_step(bits: int, dim: int | None) -> float:
    """Step between levels (code - half) of the least squared error."""
    _, x, density = _gaussian_grid() if dim is None else _sphere_grid(dim)
    x, density = x[::32], density[::32]
    cells, largest = 1 << (bits - 1), float(_density(bits, dim)[-1])

    def error(step: float) -> float:
        level = (np.minimum(np.floor(x / step), cells - 1) + 0.5) * step
        return float((density * (x - level) ** 2).sum())

    steps = np.linspace(0.5, 1.1, 121) * largest / (cells - 0.5)
    return float(min(steps, key=error))


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
