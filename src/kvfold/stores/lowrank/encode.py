"""Numbers to the buffers of a low-rank store."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.kernels.wide_encode import encode
from kvfold.stores.lowrank.layout import Factor, landmark_code, vector_code
from kvfold.stores.sixteen import narrow


def factors(name: str, pieces: Iterable[Tensor], factor: Factor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Token factors (n, rank), turned as `Factor.turned` does, of some tokens after others as buffers, the same for every layer of a window.

    Parameters
    ----------
    name : "key" or "value"
    pieces : iterable of Tensor
        At least one.
    factor : Factor
    dtype : torch.dtype
        Of 16 bits, for what is not coded.
    """
    code = factor.code
    if code is None:
        return {f"{name}_factors": _joined([narrow(piece, dtype) for piece in pieces])}
    coded = [encode(piece, code) for piece in pieces]
    return {
        f"{name}_factors": torch.cat([codes for codes, _ in coded]),
        f"{name}_norms": _joined([norms for _, norms in coded]),
    }


def _joined(pieces: list[Tensor]) -> Tensor:
    """In bfloat16 where one of them is."""
    wide = any(piece.dtype == torch.bfloat16 for piece in pieces)
    return torch.cat([piece.to(torch.bfloat16) if wide else piece for piece in pieces])


def bases(name: str, basis: Tensor, factor: Factor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Bases (..., rank, dim), turned as `Factor.turned` does, as buffers."""
    if factor.basis_bits == 16:
        return {f"{name}_basis": narrow(basis, dtype)}
    code = vector_code(basis.shape[-1])
    codes, scales = encode(code.rotate(basis), code)
    return {f"{name}_basis": codes, f"{name}_scales": scales}


def landmarks(marks: Tensor) -> dict[str, Tensor]:
    """Mean keys (kv_heads, chunks, key_dim) after RoPE as buffers."""
    code = landmark_code(marks.shape[-1])
    codes, scales = encode(code.rotate(marks), code)
    return {"landmarks": codes, "landmark_scales": scales}
