"""Decoding attention over graded tokens by a small C loop.

Plain torch runs some fifty small operations a layer on the sections of a graded store; graded_cpu.c runs one loop over
the packed codes, and over the exact tokens after them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfold.codecs.codebook import common_levels
from kvfold.kernels.native import Native
from kvfold.kernels.position_bias import Turns
from kvfold.kernels.reference import Part

MAX_DIM, MAX_QUERIES = 256, 16
"""Largest head dimension and number of queries of a KV head that the loop takes."""

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INTEGERS = "heads queries key_dim value_dim grades widths threads visible position_bytes tail"
_INTEGERS += " frame_kind scale_kind exact_kind states_kind"
_POINTERS = "query width counts key_counts value_bits order key_turned key_mean key_deviation value_mean"
_POINTERS += (
    " value_magnitude positions key_codes value_codes magnitudes fine_keys fine_values fine_scales exact_keys"
)
_POINTERS += " exact_values tail_keys tail_values partner coarse_cos coarse_sin fine rotation before before_lse output lse"


class _Arguments(ctypes.Structure):
    """As graded_cpu.c's `arguments`."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTEGERS.split()]
        + [(name, ctypes.c_double) for name in ("scaling", "softcap", "turn_scale")]
        + [(name, ctypes.c_void_p) for name in _POINTERS.split()]
    )


def _declare(library: ctypes.CDLL) -> None:
    levels = torch.cat([common_levels(bits) for bits in range(1, 9)])
    steps = torch.exp2((torch.arange(256) - 128) / 16)
    library.kvfold_graded_tables.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.kvfold_graded_tables.restype = None
    library.kvfold_graded_tables(levels.data_ptr(), steps.data_ptr())
    library.kvfold_graded_attend.argtypes = [ctypes.c_void_p]
    library.kvfold_graded_attend.restype = ctypes.c_int


NATIVE = Native("graded_cpu.c", _declare)
problem = NATIVE.problem
"""None if the loop can be used, else the reason why not"""


class RowLoop:
    """The loop over one row's graded tokens.

    Parameters
    ----------
    widths : sequence of int
        Key widths, widest first.
    counts : (kv_heads, grades + 2) int32
    frame, buffers : mapping of str to Tensor
        The row's own. They must not change: the loop reads their memory.
    rotation : (value_dim, value_dim) float32
        What turns coded values back.
    """

    def __init__(
        self,
        widths: Sequence[int],
        counts: Tensor,
        frame: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        rotation: Tensor,
    ):
        width = (ctypes.c_int64 * len(widths))(*widths)
        tensors = {**frame, **buffers, "counts": counts, "rotation": rotation}
        self.heads, self.key_dim = frame["key_mean"].shape
        self.value_dim = len(rotation)
        kinds = [_KINDS.get(tensors[name].dtype) for name in ("key_mean", "fine_scales", "exact_keys")]
        frames = {tensor.dtype for name, tensor in frame.items() if name.startswith("key_mean")}
        frames |= {
            frame[name].dtype for name in ("key_turned", "key_deviation", "value_mean") if name in frame
        }
        fits = max(self.key_dim, self.value_dim) <= MAX_DIM and None not in kinds and len(frames) == 1
        self.usable = fits and all(t.is_contiguous() and t.device.type == "cpu" for t in tensors.values())
        """Whether the loop can serve this row at all"""
        if not self.usable:
            return
        self._kept = tensors, width
        self._arguments = _Arguments(
            heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim, widths=len(widths),
            grades=frame["value_bits"].shape[-1], position_bytes=buffers["positions"].element_size(),
            frame_kind=kinds[0], scale_kind=kinds[1], exact_kind=kinds[2], width=ctypes.addressof(width),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        turns: Turns | None,
        visible: int,
        scaling: float,
        softcap: float | None,
        tail: tuple[Tensor, Tensor] | None = None,
        before: Part | None = None,
    ) -> Part | None:
        """Attention of few queries over the row, and over exact tokens after it.

        Parameters
        ----------
        query : (heads, n, key_dim) float32, float16 or bfloat16
        turns : Turns or None
            Of the row's positions; needed where the frame has `key_turned`.
        visible : int
            Tokens of the row at or after this position are hidden.
        scaling : float
        softcap : float or None
        tail : (keys, values), each (kv_heads, tokens, dim) of the query's dtype, optional
            Every query sees all of them.
        before : (output (heads, n, value_dim), log-sum-exp (heads, n)), optional
            Attention over yet other tokens, to be merged.

        Returns
        -------
        (output (heads, n, value_dim), log-sum-exp (heads, n)), float32, or None where the loop cannot serve.
        """
        heads, count, _ = query.shape
        queries, kind = heads // self.heads * count, _KINDS.get(query.dtype)
        if (
            not self.usable
            or queries > MAX_QUERIES
            or kind is None
            or query.device.type != "cpu"
            or problem()
        ):
            return None
        tensors = {"query": query.contiguous()}
        if turns is not None:
            tensors |= {
                name: getattr(turns, name) for name in ("partner", "coarse_cos", "coarse_sin", "fine")
            }
        if tail is not None:
            if tail[0].dtype != query.dtype or tail[1].dtype != query.dtype:
                return None
            tensors |= {"tail_keys": tail[0].contiguous(), "tail_values": tail[1].contiguous()}
        if before is not None:
            tensors |= {"before": before[0].contiguous(), "before_lse": before[1].contiguous()}
        output = query.new_empty(heads, count, self.value_dim, dtype=torch.float32)
        lse = query.new_empty(heads, count, dtype=torch.float32)
        arguments = _Arguments.from_buffer_copy(self._arguments)
        arguments.queries, arguments.threads, arguments.visible = queries, torch.get_num_threads(), visible
        arguments.states_kind, arguments.tail = kind, 0 if tail is None else tail[0].shape[1]
        arguments.scaling, arguments.softcap = scaling, softcap or 0.0
        arguments.turn_scale = 1.0 if turns is None else turns.scale
        arguments.output, arguments.lse = output.data_ptr(), lse.data_ptr()
        for name, tensor in tensors.items():
            setattr(arguments, name, tensor.data_ptr())
        if NATIVE.library.kvfold_graded_attend(ctypes.byref(arguments)):
            raise MemoryError("attention over a folded cache ran out of memory")
        return output, lse
