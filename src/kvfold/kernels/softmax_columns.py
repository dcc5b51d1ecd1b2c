"""Column sums of softmax weights by a C loop: torch's steps each read and write the whole block of logits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvfold.kernels.native import Native


def _declare(library: ctypes.CDLL) -> None:
    counts = [ctypes.c_int64] * 6
    library.kvfold_softmax_columns.argtypes = [ctypes.c_void_p, *counts, ctypes.c_void_p]
    library.kvfold_softmax_columns.restype = ctypes.c_int


NATIVE = Native("softmax_columns.c", _declare)


def add_columns(logits: Tensor, sums: Tensor, squared: bool) -> None:
    """Add each row's softmax weights, or their squares, to the sums of its columns.

    Parameters
    ----------
    logits : (heads, rows, tokens) float32 or bfloat16, on the CPU
        None of them infinite.
    sums : (heads, tokens) float32, contiguous
        Changed in place.
    squared : bool
    """
    logits = logits.contiguous()
    half, threads = logits.dtype == torch.bfloat16, torch.get_num_threads()
    if NATIVE.library.kvfold_softmax_columns(
        logits.data_ptr(), half, *logits.shape, squared, threads, sums.data_ptr()
    ):
        raise MemoryError("weighing a prompt's tokens ran out of memory")


def low_precision_pays() -> bool:
    """Whether bfloat16 products are several times faster here than float32 ones."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported is not None and supported())
