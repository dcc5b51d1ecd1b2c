"""C loops for the CPU, compiled on first use where there is a C compiler; plain torch serves where there is none."""

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
from collections.abc import Callable
from pathlib import Path

# No -ffast-math: linking with it makes older compilers flush the whole process's subnormals to zero.
_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-fno-signed-zeros", "-fassociative-math"]


class Native:
    """One C file of this folder as a library.

    Parameters
    ----------
    name : str
        File name.
    declare : callable
        Given the loaded library once: sets argument types and whatever tables it needs.
    """

    def __init__(self, name: str, declare: Callable[[ctypes.CDLL], None]):
        self.source, self._declare = Path(__file__).with_name(name), declare
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Build or load anew on the next use."""
        self._library: ctypes.CDLL | None = None
        self._problem: str | None = None

    def problem(self) -> str | None:
        """None if the library can be used, else the reason why not. Compiles on the first call."""
        if os.environ.get("KVFOLD_CPU_KERNEL") == "0":
            return "KVFOLD_CPU_KERNEL is 0"
        if self._library is None and self._problem is None:
            with self._lock:
                self._load()
        return self._problem

    def _load(self) -> None:
        if self._library is not None or self._problem is not None:
            return
        try:
            library = ctypes.CDLL(str(build(self.source)))
            self._declare(library)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            self._problem = str(error)
        else:
            self._library = library

    @property
    def library(self) -> ctypes.CDLL:
        """The loaded library; only after `problem` returned None."""
        assert self._library is not None
        return self._library


def build(source: Path) -> Path:
    """The library, from the cache folder if it is there and whole."""
    compiler = _compiler()
    threads = _openmp()
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = [*texts, *map(str.encode, [*compiler, *_FLAGS, threads or "", _processor()])]
    name = hashlib.sha256(b"\0".join(key)).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(base) / "kvfold" / "kernels" / f"{name}.so"
    if intact(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made.so"
        failure = ""
        for native, openmp in ((True, threads), (True, None), (False, None)):
            failure = _compile(compiler, source, Path(folder), made, native, openmp)
            if not failure:
                break
        else:
            raise OSError(f"{compiler[0]} cannot compile {source.name}: {failure}")
        # Told apart from a damaged file by its own hash; loaders do not read what follows the sections.
        # A new file: the compiled one may be loaded already, and writing to it would pull its pages away.
        content = made.read_bytes()
        whole = Path(folder) / "whole.so"
        whole.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(whole, target)
    return target


def _compile(
    compiler: list[str], source: Path, folder: Path, target: Path, native: bool, openmp: str | None
) -> str:
    """Compile and link; the first line of what went wrong, or an empty string."""
    flags = [*_FLAGS, *(["-march=native"] if native else []), *(["-fopenmp"] if openmp else [])]
    part = folder / "part.o"
    for command in (
        [*compiler, *flags, "-c", str(source), "-o", str(part)],
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


def intact(path: Path) -> bool:
    """Whether a built library is there and ends in its own hash."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]
