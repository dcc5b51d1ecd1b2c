"""The most memory that a stretch of work holds at once, beyond what was there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Peak:
    """Bytes, once the stretch has ended.

    Attributes
    ----------
    most : int
        Of all that was held at once, beyond what was there before.
    left : int
        Of what it left behind.
    """

    most: int = 0
    left: int = 0


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Measure a stretch: on a GPU by torch's allocator, on a CPU by the storages of all tensors that operations return.

    What a CPU operation allocates within itself is not seen.
    """
    gc.collect()
    found = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize()
        found.most = torch.cuda.max_memory_allocated(device) - before
        gc.collect()
        found.left = torch.cuda.memory_allocated(device) - before
        return
    with _Storages() as storages:
        yield found
    gc.collect()
    found.most, found.left = storages.most, storages.live


class _Storages(TorchDispatchMode):
    """Sums the storages that operations make, until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place in given or place in self._known or not storage.nbytes():
                continue
            self._known.add(place)
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._gone, place, storage.nbytes())
        return result

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


def _tensors(state: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
