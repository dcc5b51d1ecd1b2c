"""The largest eigenvalues of a Gram matrix and their vectors, nearly: products and Cholesky factors, which a GPU does fast."""

from __future__ import annotations

import torch
from torch import Tensor


def leading(gram: Tensor, count: int, rounds: int = 2, spare: int = 16) -> tuple[Tensor, Tensor]:
    """Nearly the largest eigenvalues of a positive semi-definite matrix, by randomised subspace iteration.

    Within the subspace iteration goes on, on a small matrix, instead of an eigendecomposition: vectors of nearly equal
    eigenvalues stay mixed, and the values are what the vectors hold. As an orthonormal transform that is as good: components
    of nearly equal energy, mixed, are coded with nearly the same error.

    Parameters
    ----------
    gram : (n, n) float64
    count : int
    rounds : int
        Multiplications beyond the first.
    spare : int
        Directions tried beyond `count`.

    Returns
    -------
    (values (count,), largest first, vectors (n, count) orthonormal)

    References
    ----------
    Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), algorithm 4.4; Golub and Van Loan, "Matrix
    Computations", section 8.2.4 (orthogonal iteration).
    """
    n = len(gram)
    generator = torch.Generator(gram.device).manual_seed(0)
    basis = torch.randn(n, min(count + spare, n), generator=generator, dtype=gram.dtype, device=gram.device)
    for _ in range(rounds):
        basis = orthonormal(gram @ basis, passes=1)
    basis = orthonormal(gram @ basis)
    inner = basis.t() @ gram @ basis
    # Columns are in order by now, so that their products with the square are of very different sizes, but far from dependent.
    turned = orthonormal(inner @ inner, passes=1)
    turned = orthonormal(inner @ (inner @ turned))
    values = (turned * (inner @ turned)).sum(0)
    order = values.argsort(descending=True)[:count]
    return values[order], basis @ turned[:, order]


def orthonormal(x: Tensor, passes: int = 2) -> Tensor:
    """An orthonormal basis (n, k) of the columns of x (n, k), float64: by Cholesky factors, which a GPU finds far faster than QR.

    Parameters
    ----------
    x : (n, k)
        Where columns are too nearly dependent for Cholesky factors, QR is used.
    passes : int
        1 suffices where only their span matters.

    References
    ----------
    Fukaya and others, "CholeskyQR2" (2014).
    """
    found = x
    for _ in range(passes):
        factor, failed = torch.linalg.cholesky_ex(found.t() @ found)
        if bool(failed):
            return torch.linalg.qr(x)[0]
        found = torch.linalg.solve_triangular(factor, found.t(), upper=False).t()
    return found
