"""The largest eigenvalues of a Gram matrix and their vectors: by products, Cholesky factors and one small eigendecomposition."""

from __future__ import annotations

import torch
from torch import Tensor


def leading(gram: Tensor, count: int, rounds: int = 2, spare: int = 16) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a positive semi-definite matrix, by randomised subspace iteration.

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
    Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), algorithms 4.4 and 5.3.
    """
    n = len(gram)
    generator = torch.Generator(gram.device).manual_seed(0)
    basis = torch.randn(n, min(count + spare, n), generator=generator, dtype=gram.dtype, device=gram.device)
    for _ in range(rounds):
        basis = orthonormal(gram @ basis, passes=1)
    basis = orthonormal(gram @ basis)
    inner = basis.t() @ gram @ basis
    # Half of the time finds vectors in float32; they are made orthonormal again, and what they hold is measured.
    turned = orthonormal(torch.linalg.eigh(inner.float())[1].to(gram), passes=1)
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
