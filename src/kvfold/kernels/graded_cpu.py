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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvfold.codecs.codebook import gaussian_levels

MAX_DIM, MAX_QUERIES = 256, 16
"""Largest head dimension and number of queries of a KV head that the loop takes."""

_SOURCE = Path(__file__).with_name("graded_cpu.c")
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# No -ffast-math: linking with it makes older compilers flush the whole process's subnormals to zero.
_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-fno-signed-zeros", "-fassociative-math"]
_INTEGERS = [
    "heads",
    "queries",
    "key_dim",
    "value_dim",
    "grades",
    "widths",
    "threads",
    "visible",
    "position_bytes",
    "turned_stride",
    "frame_kind",
    "scale_kind",
    "exact_kind",
]
_POINTERS = [
    "query",
    "turned",
    "width",
    "counts",
    "key_counts",
    "value_bits",
    "order",
    "key_mean",
    "key_deviation",
    "value_mean",
    "value_magnitude",
    "positions",
    "key_codes",
    "value_codes",
    "magnitudes",
    "fine_keys",
    "fine_values",
    "fine_scales",
    "exact_keys",
    "exact_values",
    "rotated",
    "plain",
    "lse",
]


class _Arguments(ctypes.Structure):
    """As graded_cpu.c's `arguments`."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in _INTEGERS]
        + [("softcap", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
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


def attend(
    query: Tensor,
    turned: Tensor | None,
    row: int,
    widths: Sequence[int],
    counts: Tensor,
    frame: dict[str, Tensor],
    buffers: dict[str, Tensor],
    visible: int,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Attention of few queries over one row's graded tokens.

    Parameters
    ----------
    query : (kv_heads, n, key_dim) float32
        Scaled.
    turned : (kv_heads, n, tokens) float32 or None
        Logits of the turned vector at every position.
    row : int
    widths : sequence of int
        Key widths, widest first.
    counts : (rows, kv_heads, grades + 2) int32
    frame : dict of str to Tensor
        Of all rows.
    buffers : dict of str to Tensor
        The row's own.
    visible : int
        Tokens at or after this position are hidden.
    softcap : float or None

    Returns
    -------
    (rotated, plain, log-sum-exp) or None
        The output is the first (kv_heads, n, value_dim), un-rotated, plus the second. None where the loop cannot
        serve.
    """
    heads, n, key_dim = query.shape
    value_dim = frame["value_mean"].shape[-1]
    if n > MAX_QUERIES or max(key_dim, value_dim) > MAX_DIM or query.device.type != "cpu" or available():
        return None
    library = _loaded().library
    means, scales, exact = frame["key_mean"], buffers["fine_scales"], buffers["exact_keys"]
    tensors = {"query": query.contiguous(), "counts": counts[row]}
    for name in (
        "key_counts",
        "value_bits",
        "order",
        "key_mean",
        "key_deviation",
        "value_mean",
        "value_magnitude",
    ):
        tensors[name] = frame[name][row]
    tensors |= {name: buffers[name] for name in _POINTERS if name in buffers}
    dtypes = {tensors[name].dtype for name in ("key_mean", "key_deviation", "value_mean")}
    kinds = [_KINDS.get(tensor.dtype) for tensor in (means, scales, exact)]
    if len(dtypes) > 1 or None in kinds or not all(tensor.is_contiguous() for tensor in tensors.values()):
        return None
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return None
    output = query.new_empty(2, heads, n, value_dim)
    lse = query.new_empty(heads, n)
    width = (ctypes.c_int64 * len(widths))(*widths)
    stride = 0
    if turned is not None:
        if turned.stride(2) != 1 or turned.stride(0) != n * turned.stride(1):
            turned = turned.contiguous()
        stride = turned.stride(1)
    tensors |= {"rotated": output[0], "plain": output[1], "lse": lse}
    arguments = _Arguments(
        heads, n, key_dim, value_dim, frame["value_bits"].shape[-1], len(widths), torch.get_num_threads(),
        visible, buffers["positions"].element_size(), stride, *kinds, softcap or 0.0,
        turned=None if turned is None else turned.data_ptr(),
        width=ctypes.addressof(width),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )  # fmt: skip
    assert library is not None
    if library.kvfold_graded_attend(ctypes.byref(arguments)):
        raise MemoryError("attention over a folded cache ran out of memory")
    return output[0], output[1], lse
