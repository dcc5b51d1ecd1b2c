"""Seeded random rotations that spread a vector's energy evenly over its coordinates.

Random numbers are drawn by PyTorch's CPU generator and shaped in float64, so that the float32 result of one
seed is the same on every machine; move it to a device afterwards.
"""

import torch
from torch import Tensor


def hadamard(dim: int, seed: int) -> Tensor:
    """Randomised Hadamard rotation: random signs, then a normalised Hadamard matrix (as in QuaRot).

    For ``dim = m * 2^k`` with m odd and above 1 (80, 96, 112 ...), for which a plain Hadamard matrix need not
    exist, the matrix is the Kronecker product of a Haar rotation of size m and the Hadamard matrix of size
    2^k: still every output mixes every input. An odd ``dim`` is therefore a Haar rotation.

    Parameters
    ----------
    dim : int
        Size, at least 1.
    seed : int
        The same seed gives the same matrix.

    Returns
    -------
    Tensor (dim, dim) float32
        Orthogonal, on the CPU. Rotate with ``x @ matrix.T``, rotate back with ``y @ matrix``.

    Raises
    ------
    ValueError
        If ``dim`` is below 1.
    """
    generator = _generator(dim, seed)
    signs = torch.randint(0, 2, (dim,), generator=generator).double() * 2 - 1
    odd = dim // (dim & -dim)
    matrix = _haar(odd, generator) if odd > 1 else torch.ones(1, 1, dtype=torch.float64)
    butterfly = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    while len(matrix) < dim:
        matrix = torch.kron(matrix, butterfly)
    return (matrix * signs).float()


def haar(dim: int, seed: int) -> Tensor:
    """Uniformly random orthogonal matrix (Haar measure), as in TurboQuant.

    Parameters
    ----------
    dim, seed : int
        As for `hadamard`.

    Returns
    -------
    Tensor (dim, dim) float32
        As `hadamard` returns it.

    Raises
    ------
    ValueError
        If ``dim`` is below 1.

    References
    ----------
    Mezzadri, "How to generate random matrices from the classical compact groups" (2007), section 5.
    """
    return _haar(dim, _generator(dim, seed)).float()


def _generator(dim: int, seed: int) -> torch.Generator:
    if dim < 1:
        raise ValueError(f"dim must be at least 1, got {dim}.")
    return torch.Generator("cpu").manual_seed(seed)


def _haar(dim: int, generator: torch.Generator) -> Tensor:
    gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator, device="cpu")
    q, r = torch.linalg.qr(gaussian)
    # QR leaves the signs of the columns to the library; a positive diagonal of R makes it unique, and Haar.
    rotation: Tensor = (q * r.diagonal().sign()).contiguous()
    return rotation
