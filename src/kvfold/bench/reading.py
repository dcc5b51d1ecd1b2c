"""The floor of whatever must read some bytes: a kernel that only reads them, and the machine's bandwidth."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kvfold.bench.timing import by_clock, by_events


def floor(device: torch.device) -> Callable[[Tensor], None]:
    """A call that reads a tensor's bytes: on a GPU with nvcc a kernel that does nothing else, else torch's sum."""
    if device.type == "cuda":
        try:
            return reader()
        except (OSError, RuntimeError):  # no nvcc
            pass
    return _sum


def floor_name(device: torch.device) -> str:
    """What the floor was measured with."""
    return "torch.sum" if floor(device) is _sum else "read-only kernel"


def _sum(data: Tensor) -> None:
    flat = data.reshape(-1).view(torch.uint8)
    # Of 32-bit numbers torch sums as fast as memory gives them.
    flat[: flat.numel() // 4 * 4].view(torch.float32).sum()


@cache
def reader() -> Callable[[Tensor], None]:
    """The read-only kernel, built by nvcc on the first call; takes contiguous tensors of whole 16 bytes.

    Raises
    ------
    OSError, RuntimeError
        There is no compiler.
    """
    from torch.utils import cpp_extension

    folder = Path(cpp_extension.get_default_build_root()) / "kvfold_read_only"
    folder.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "kvfold_read_only",
        [str(Path(__file__).with_name("read_only.cu"))],
        extra_cuda_cflags=["-O3"],
        build_directory=str(folder),
        is_python_module=False,
    )
    library = ctypes.CDLL(str(folder / "kvfold_read_only.so"))
    library.kvfold_read_only.argtypes = [ctypes.c_void_p, ctypes.c_longlong, ctypes.c_void_p, ctypes.c_void_p]
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(data: Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        problem = library.kvfold_read_only(data.data_ptr(), data.nbytes, sink.data_ptr(), stream)
        if problem:
            raise RuntimeError(f"the read-only kernel failed: CUDA error {problem}")

    return read


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.ones((1 << 28 if device.type == "cuda" else 1 << 24), device=device)
    target = torch.empty_like(source)
    by = by_events if device.type == "cuda" else by_clock
    return 2 * source.nbytes / (1e-3 * by([lambda: target.copy_(source)]))
