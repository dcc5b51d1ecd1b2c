"""Decoding attention over rotated codes by a small C loop.

Plain torch unpacks every code into float32 and multiplies matrices; rotated_cpu.c runs one loop over the packed codes, and
over the exact tokens beside them. `stores.tokenwise` is its plain twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.codecs import logarithm
from kvfold.kernels.native import Native
from kvfold.kernels.position_bias import Turns
from kvfold.kernels.reference import Part
from kvfold.kernels.rotated_groups import KINDS, MAX_DIM, groups_of
from kvfold.kernels.triton_rotated_table import alike

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode

MAX_QUERIES, MOST_QUERIES = 16, 128
"""Queries of a KV head that the loop takes at a time, and in all: where there are more, what plain torch unpacks is shared."""

_LOGARITHMS = 3
_SIDE_INTEGERS = "dim by_group most_groups norm_kind share_kind code_bytes scales"
_SIDE_POINTERS = "count code_start scale_start groups codes norms units shares sinks tail"
_INTEGERS = "heads queries tokens threads first stop tail"
_INTEGERS += " order_bytes query_kind sink_kind mean_kind most_sinks"
_POINTERS = (
    "query order valid mean partner coarse_cos coarse_sin fine magnitudes before before_lse output lse"
)


class _Side(ctypes.Structure):
    """As rotated_cpu.c's `side`."""

    _fields_ = [(name, ctypes.c_int64) for name in _SIDE_INTEGERS.split()] + [
        (name, ctypes.c_void_p) for name in _SIDE_POINTERS.split()
    ]


class _Arguments(ctypes.Structure):
    """As rotated_cpu.c's `arguments`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _INTEGERS.split()),
        *((name, ctypes.c_double) for name in ("scaling", "softcap", "turn_scale")),
        *((name, _Side) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
    ]


def _declare(library: ctypes.CDLL) -> None:
    library.kvfold_rotated_attend.argtypes = [ctypes.c_void_p]
    library.kvfold_rotated_attend.restype = ctypes.c_int


NATIVE = Native("rotated_cpu.c", _declare)


class StoreLoop:
    """The loop over one store's rotated codes.

    Parameters
    ----------
    keys, values : tuple of RotatedCode
        One for each KV head.
    buffers : mapping of str to Tensor
        The store's own (`stores.rotated.RotatedStore`). They must not change: the loop reads their memory.
    """

    def __init__(
        self,
        keys: tuple[RotatedCode, ...],
        values: tuple[RotatedCode, ...],
        buffers: Mapping[str, Tensor],
    ):
        self.derived: list[Tensor] = []
        """What the loop made of the buffers and keeps"""
        self._unserved = _unserved(keys, values, buffers)
        if self._unserved is not None:
            return
        kept = {name: tensor.contiguous() for name, tensor in buffers.items()}
        self._buffers, self._sides = kept, {"key": keys, "value": values}
        self._groups = {name: groups_of(codes) for name, codes in self._sides.items()}
        self.derived += [tensor for name, tensor in kept.items() if tensor is not buffers[name]]
        self._rows: dict[int, _Arguments] = {}

    def problem(self) -> str | None:
        """None if the loop reads this store, else the reason why plain torch does."""
        return self._unserved or NATIVE.problem()

    def _row(self, row: int) -> _Arguments:
        """What does not change from call to call."""
        if row not in self._rows:
            buffers, keys = self._buffers, self._sides["key"]
            own = {name: tensor[row].data_ptr() for name, tensor in buffers.items()}
            order, sinks, mean = (buffers.get(f"key_{name}") for name in ("order", "sinks", "mean"))
            self._rows[row] = _Arguments(
                heads=len(keys), tokens=buffers["key_codes"].shape[1],
                keys=self._side("key", own), values=self._side("value", own),
                order=own.get("key_order"), order_bytes=0 if order is None else order.element_size(),
                valid=own.get("valid"), magnitudes=_magnitudes().data_ptr(),
                mean=own.get("key_mean"), mean_kind=0 if mean is None else KINDS[mean.dtype],
                sink_kind=0 if sinks is None else KINDS[sinks.dtype],
                most_sinks=0 if sinks is None else sinks.shape[2],
            )  # fmt: skip
        return self._rows[row]

    def _side(self, name: str, own: Mapping[str, int]) -> _Side:
        codes, norms, shares = (
            self._sides[name],
            self._buffers[f"{name}_norms"],
            self._buffers.get(f"{name}_shares"),
        )
        return _Side(
            dim=codes[0].dim, by_group=codes[0].norms == "group",
            most_groups=0 if shares is None else shares.shape[-1],
            norm_kind=_LOGARITHMS if f"{name}_units" in own else KINDS[norms.dtype],
            share_kind=0 if shares is None else KINDS[shares.dtype],
            code_bytes=sum(code.nbytes for code in codes), scales=norms.shape[-1],
            **self._groups[name].fields(),
            **{part: own.get(f"{name}_{part}") for part in ("codes", "norms", "units", "shares", "sinks")},
        )  # fmt: skip

    def serves(self, query: Tensor) -> bool:
        """Whether the loop takes queries (heads, n, key_dim) to this store."""
        if self.problem() or query.dtype not in KINDS or query.device.type != "cpu":
            return False
        group = query.shape[0] // len(self._sides["key"])
        return group <= MAX_QUERIES and group * query.shape[1] <= MOST_QUERIES

    def attend(
        self,
        row: int,
        query: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks: tuple[int, int] = (0, 0),
        turns: Turns | None = None,
        tail: tuple[Tensor, Tensor] | None = None,
        before: Part | None = None,
    ) -> Part:
        """Attention of few queries over one row, and over exact tokens after it.

        Parameters
        ----------
        row : int
        query : (heads, n, key_dim) float32, float16 or bfloat16
        scaling : float
        softcap : float or None
        sinks : (first, stop)
            Tokens that are read from the first of "key_sinks" and "value_sinks" on, not from codes.
        turns : Turns, optional
            Of the row's tokens, if "key_mean" is turned.
        tail : (keys, values), each (kv_heads, tokens, dim) of the query's dtype, optional
            Every query sees all of them.
        before : (output (heads, n, value_dim), log-sum-exp (heads, n)), optional
            Attention over yet other tokens, to be merged.

        Returns
        -------
        (output (heads, n, value_dim), log-sum-exp (heads, n)), float32. Where `serves` says so.
        """
        heads, count, _ = query.shape
        kv_heads, value_dim = len(self._sides["key"]), self._sides["value"][0].dim
        at_once = MAX_QUERIES // (heads // kv_heads)
        if count > at_once:
            parts = []
            for start in range(0, count, at_once):
                some = slice(start, start + at_once)
                own = None if before is None else (before[0][:, some], before[1][:, some])
                parts.append(self.attend(row, query[:, some], scaling, softcap, sinks, turns, tail, own))
            outputs, lses = zip(*parts, strict=True)
            return torch.cat(outputs, 1), torch.cat(lses, 1)
        arguments = _Arguments.from_buffer_copy(self._row(row))
        given = {"query": query.contiguous()}
        if turns is not None:
            given |= {name: getattr(turns, name) for name in ("partner", "coarse_cos", "coarse_sin", "fine")}
        if tail is not None:
            key, value = (part.contiguous() for part in tail)
            arguments.tail = key.shape[1]
            arguments.keys.tail, arguments.values.tail = key.data_ptr(), value.data_ptr()
        if before is not None:
            given |= {"before": before[0].float().contiguous(), "before_lse": before[1].float().contiguous()}
        output = query.new_empty(heads, count, value_dim, dtype=torch.float32)
        lse = query.new_empty(heads, count, dtype=torch.float32)
        given |= {"output": output, "lse": lse}
        arguments.queries, arguments.threads = heads // kv_heads * count, torch.get_num_threads()
        arguments.query_kind = KINDS[query.dtype]
        arguments.first, arguments.stop = sinks
        arguments.turn_scale = 1.0 if turns is None else turns.scale
        arguments.scaling, arguments.softcap = scaling, softcap or 0.0
        for name, tensor in given.items():
            setattr(arguments, name, tensor.data_ptr())
        if NATIVE.library.kvfold_rotated_attend(ctypes.byref(arguments)):
            raise MemoryError("attention over a folded cache ran out of memory")
        return output, lse


@cache
def _magnitudes() -> Tensor:
    """What the codes of logarithms stand for, in units (256,)."""
    return logarithm.decode(torch.arange(256), torch.ones(()))


def _unserved(
    keys: tuple[RotatedCode, ...], values: tuple[RotatedCode, ...], buffers: Mapping[str, Tensor]
) -> str | None:
    """Why the loop cannot read such a store anywhere; None if it can."""
    if any(tensor.device.type != "cpu" for tensor in buffers.values()):
        return "the store is not on a CPU"
    if "key_codes" not in buffers:
        return "the codes lie in records"
    if not (alike(keys) and alike(values)):
        return "codes have a sketch, or heads differ in their kinds of norms"
    if max(keys[0].dim, values[0].dim) > MAX_DIM:
        return f"heads have more than {MAX_DIM} channels"
    return None
