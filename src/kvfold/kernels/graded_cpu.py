"""Decoding attention over graded tokens by a small C loop, compiled on first use where there is a C compiler.

Plain torch runs some fifty small operations a layer on the sections of a graded store; graded_cpu.c runs one loop over
the packed codes. Without a compiler, or with KVFOLD_CPU_KERNEL=0, stores/graded.py's plain torch serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvfold.codecs.codebook import gaussian_levels
from kvfold.kernels.position_bias import Turns
from kvfold.kernels.reference import Part

MAX_DIM, MAX_QUERIES = 256, 16
"""Largest head dimension and number of queries of a KV head that the loop takes."""

_SOURCE = Path(__file__).with_name("graded_cpu.c")
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# No -ffast-math: linking with it makes older compilers flush the whole process's subnormals to zero.
_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-fno-signed-zeros", "-fassociative-math"]
_INTEGERS = "heads queries key_dim value_dim grades widths threads visible position_bytes tail"
_INTEGERS += " frame_kind scale_kind exact_kind states_kind"
_POINTERS = "query width counts key_counts value_bits order key_turned key_mean key_deviation value_mean"
_POINTERS += " value_magnitude positions key_codes value_codes magnitudes fine_keys fine_values fine_scales exact_keys"
_POINTERS += " exact_values tail_keys tail_values partner coarse_cos coarse_sin fine rotation before before_lse output lse"


class _Arguments(ctypes.Structure):
    """As graded_cpu.c's `arguments`."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTEGERS.split()]
        + [("scaling", ctypes.c_double), ("softcap", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in _POINTERS.split()]
    )


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL | None
    problem: str | None


_lock = threading.Lock()


def available() -> str | None:
    """None if the loop can be used, else the reason why not. Compiles on the first call."""
    if os.environ.get("KVFOLD_CPU_KERNEL") == "0":
        return "KVFOLD_CPU_KERNEL is 0"
    return _loaded().problem


def _loaded() -> _Loaded:
    with _lock:
        return _load()


@cache
def _load() -> _Loaded:
    try:
        library = ctypes.CDLL(str(_build()))
        levels = torch.cat([gaussian_levels(bits) for bits in range(1, 9)])
        steps = torch.exp2((torch.arange(256) - 128) / 16)
        library.kvfold_graded_tables.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.kvfold_graded_tables.restype = None
        library.kvfold_graded_tables(levels.data_ptr(), steps.data_ptr())
        library.kvfold_graded_attend.argtypes = [ctypes.c_void_p]
        library.kvfold_graded_attend.restype = ctypes.c_int
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return _Loaded(None, str(error))
    return _Loaded(library, None)


def _build() -> Path:
    """The library, from the cache folder if it is there and whole."""
    compiler = _compiler()
    source = _SOURCE.read_bytes()
    threads = _openmp()
    key = [source, *map(str.encode, [*compiler, *_FLAGS, threads or "", _processor()])]
    name = hashlib.sha256(b"\0".join(key)).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(base) / "kvfold" / "kernels" / f"{name}.so"
    if _whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made.so"
        failure = ""
        for native, openmp in ((True, threads), (True, None), (False, None)):
            failure = _compile(compiler, Path(folder), made, native, openmp)
            if not failure:
                break
        else:
            raise OSError(f"{compiler[0]} cannot compile {_SOURCE.name}: {failure}")
        # Told apart from a damaged file by its own hash; loaders do not read what follows the sections.
        # A new file: the compiled one may be loaded already, and writing to it would pull its pages away.
        content = made.read_bytes()
        whole = Path(folder) / "whole.so"
        whole.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(whole, target)
    return target


def _compile(compiler: list[str], folder: Path, target: Path, native: bool, openmp: str | None) -> str:
    """Compile and link; the first line of what went wrong, or an empty string."""
    flags = [*_FLAGS, *(["-march=native"] if native else []), *(["-fopenmp"] if openmp else [])]
    part = folder / "part.o"
    for command in (
        [*compiler, *flags, "-c", str(_SOURCE), "-o", str(part)],
        [*compiler, "-shared", str(part), "-o", str(target), *([openmp] if openmp else []), "-lm"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
    if openmp:
        try:
            ctypes.CDLL(str(target), mode=os.RTLD_NOW)
        except OSError as error:  # a compiler whose threads need another library
            return str(error)
    return ""


def _compiler() -> list[str]:
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    for words in map(shlex.split, names):
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    raise OSError("no C compiler: set CC, or install cc, gcc or clang")


def _openmp() -> str | None:
    """torch's own copy of libgomp: with a second one, threads of both would wait for work on the same cores."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return next((line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libgomp" in line), None)


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags")
    )


def _whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


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
        frames |= {frame[name].dtype for name in ("key_turned", "key_deviation", "value_mean") if name in frame}
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
        if not self.usable or queries > MAX_QUERIES or kind is None or query.device.type != "cpu" or available():
            return None
        tensors = {"query": query.contiguous()}
        if turns is not None:
            tensors |= {name: getattr(turns, name) for name in ("partner", "coarse_cos", "coarse_sin", "fine")}
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
        arguments.output, arguments.lse = output.data_ptr(), lse.data_ptr()
        for name, tensor in tensors.items():
            setattr(arguments, name, tensor.data_ptr())
        library = _loaded().library
        assert library is not None
        if library.kvfold_graded_attend(ctypes.byref(arguments)):
            raise MemoryError("attention over a folded cache ran out of memory")
        return output, lse
