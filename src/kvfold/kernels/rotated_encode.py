"""Rotated codes of many heads in one pass: a C loop on the CPU, a Triton kernel on a GPU.

`RotatedCode.encode` is what they compute, one head's code after the other, in plain torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.kernels.channel_sums import less, spans
from kvfold.kernels.native import Native
from kvfold.kernels.position_bias import turns
from kvfold.kernels.rotated_groups import KINDS, MAX_DIM, groups_of
from kvfold.kernels.triton_rotated_table import alike, serves

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode
    from kvfold.stores.base import Rotary

_INTEGERS = (
    "rows heads tokens dim kind threads row_stride head_stride token_stride by_group keep_norm most_groups"
)
_INTEGERS += " code_bytes scales"
_POINTERS = "count code_start scale_start groups x order shares codes norms"


class _Arguments(ctypes.Structure):
    """As rotated_encode.c's `arguments`."""

    _fields_ = [(name, ctypes.c_int64) for name in _INTEGERS.split()] + [
        (name, ctypes.c_void_p) for name in _POINTERS.split()
    ]


def _declare(library: ctypes.CDLL) -> None:
    library.kvfold_rotated_encode.argtypes = [ctypes.c_void_p]
    library.kvfold_rotated_encode.restype = ctypes.c_int


NATIVE = Native("rotated_encode.c", _declare)


def encode_heads(
    x: Tensor,
    codes: tuple[RotatedCode, ...],
    shares: Tensor | None = None,
    order: Tensor | None = None,
    constant: Tensor | None = None,
    rotary: Rotary | None = None,
    shifts: Sequence[int] = (),
) -> tuple[Tensor, Tensor] | None:
    """Code vectors of several heads.

    Parameters
    ----------
    x : (rows, heads, tokens, dim) float32, float16 or bfloat16
    codes : tuple of RotatedCode
        One for each head.
    shares : (rows, heads, groups), optional
        As `RotatedCode.encode` takes them; heads of fewer groups leave the last ones.
    order : (rows, heads, dim) uint8, optional
        The channels of x in the order in which the codes group them.
    constant : (rows, heads, dim), optional
        Taken from x beforehand, turned by RoPE to each token's position if `rotary` is given.
    rotary : Rotary, optional
    shifts : sequence of int
        RoPE position of each row's index 0.

    Returns
    -------
    (codes (rows, tokens, bytes of all heads) uint8, norms (rows, tokens, norms of all heads) float32), or None where only
    plain torch can serve.

    Raises
    ------
    ValueError
        x holds NaN or infinity. On a GPU nothing waits to find out: the norms of such vectors are then not finite.
    """
    if not alike(codes) or x.dtype not in KINDS or x.numel() == 0:
        return None
    if serves(x.device, codes):
        from kvfold.kernels import triton_rotated_encode

        turn = [turns(rotary, x.shape[-1], x.shape[2], shift, x.device) for shift in shifts] if rotary else []
        return triton_rotated_encode.encode(x, codes, shares, order, constant, turn)
    if x.device.type == "cpu" and x.shape[-1] <= MAX_DIM and not NATIVE.problem():
        if constant is None:
            return _loop(x, codes, shares, order)
        return in_spans(lambda part: _loop(part, codes, shares, order), x, constant, rotary, shifts)
    return None


def in_spans(
    encode: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    constant: Tensor | None,
    rotary: Rotary | None,
    shifts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """What `encode` makes of x less the constant (see `encode_heads`), some tokens at a time: (rows, tokens, ...) each."""
    whole: list[Tensor] = []
    for span in spans(x.shape[2]):
        part = x[:, :, span]
        if constant is not None:
            taken = [less(x[row], span, constant[row], rotary, shift) for row, shift in enumerate(shifts)]
            part = torch.stack(taken)
        for at, done in enumerate(encode(part)):
            if len(whole) == at:
                whole.append(done.new_empty(x.shape[0], x.shape[2], *done.shape[2:]))
            whole[at][:, span] = done
    codes, norms = whole
    return codes, norms


def _loop(
    x: Tensor, codes: tuple[RotatedCode, ...], shares: Tensor | None, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, heads, tokens, dim = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    tables = groups_of(codes)
    packed = torch.empty(rows, tokens, sum(code.nbytes for code in codes), dtype=torch.uint8)
    norms = torch.empty(rows, tokens, sum(code.scales for code in codes))
    given = {
        "order": None if order is None else order.contiguous(),
        "shares": None if shares is None else shares.float().contiguous(),
    }
    arguments = _Arguments(
        rows=rows, heads=heads, tokens=tokens, dim=dim, kind=KINDS[x.dtype], threads=torch.get_num_threads(),
        row_stride=x.stride(0), head_stride=x.stride(1), token_stride=x.stride(2),
        by_group=codes[0].norms == "group", keep_norm=codes[0].keep_norm,
        most_groups=0 if shares is None else shares.shape[-1],
        code_bytes=packed.shape[-1], scales=norms.shape[-1],
        x=x.data_ptr(), codes=packed.data_ptr(), norms=norms.data_ptr(), **tables.fields(),
        **{name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None},
    )  # fmt: skip
    if NATIVE.library.kvfold_rotated_encode(ctypes.byref(arguments)):
        raise ValueError("x holds NaN or infinity; remove padding or masked positions before coding")
    return packed, norms
