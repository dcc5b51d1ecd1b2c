"""CUDA C++ of this folder as libraries, compiled by the machine's nvcc when first used."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def no_compiler() -> str | None:
    """Why nothing can be compiled, or None."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return "no nvcc: install the CUDA toolkit of torch's version, or set CUDA_HOME"
    if not cpp_extension.is_ninja_available():
        return "no ninja: pip install ninja"
    return None


def built(source: str, macros: Mapping[str, int]) -> ctypes.CDLL:
    """A library of this folder's CUDA source compiled with the macros, from torch's folder of extensions or built there."""
    from torch.utils import cpp_extension

    name = "_".join(["kvfold", source.removesuffix(".cu"), *map(str, macros.values())])
    folder = Path(cpp_extension.get_default_build_root()) / name
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name,
        [str(Path(__file__).with_name(source))],
        extra_cuda_cflags=["-O3", *(f"-D{macro}={value}" for macro, value in macros.items())],
        build_directory=str(folder),
        is_python_module=False,
    )
    return ctypes.CDLL(str(folder / f"{name}.so"))
