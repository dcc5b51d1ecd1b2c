"""Finished parts of a fold that takes long, in a folder, so that one that was stopped goes on from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvfold import __version__
from kvfold.artifact import files
from kvfold.artifact.store import ArtifactStore
from kvfold.errors import ArtifactError
from kvfold.methods.base import Method
from kvfold.methods.work import Work

logger = logging.getLogger(__name__)

_PART = ".part"


class SavedWork(Work):
    """Keeps finished parts in a local folder.

    They are found again by the same fold only: the same model, tokens, options and version of kvfold. Parts of another
    are written over. A part is there whole or not at all. The folder is made when there is a first part to keep.

    Parameters
    ----------
    folder : str or path
    model : transformers causal language model
    input_ids : (batch, tokens) int64
    method : Method
    attention_mask : (batch, tokens), optional
    told : callable, optional
        As for `Work`.

    Examples
    --------
    >>> work = SavedWork("contract.part", model, document, method)
    >>> cache = kvfold.fold(model, document, method, work=work)  # stopped and called again: goes on
    >>> cache.save("contract.kvf")
    >>> work.remove()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        input_ids: torch.Tensor,
        method: Method,
        attention_mask: torch.Tensor | None = None,
        told: Callable[[int, int], None] | None = None,
    ):
        super().__init__(told)
        self._failed = False
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self._key = f"{__version__} {ArtifactStore.key(model, input_ids, method, attention_mask)}"

    def kept(self, name: str) -> dict[str, torch.Tensor] | None:
        """What an earlier run kept under a name, or None where it did not, or not for this fold."""
        try:
            with safe_open(self._path(name), "pt") as part:
                if (part.metadata() or {}).get("key") != self._key:
                    return None
                return {key: part.get_tensor(key) for key in part.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError):
            return None

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a part; where that fails the fold goes on without it, and the log says so."""
        data = save({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, {"key": self._key})
        try:
            os.makedirs(self.folder, exist_ok=True)
            with files.written_in_one_step(self._path(name), len(data)) as handle:
                handle.write(data)
        except (ArtifactError, OSError) as error:
            if not self._failed:  # once: the next parts fail alike
                logger.warning("%s; if this fold is stopped, it begins anew", str(error))
            self._failed = True

    @property
    def parts(self) -> list[str]:
        """Names of the parts that are there, of this fold or another."""
        with suppress(OSError):
            return sorted(
                name.removesuffix(_PART) for name in os.listdir(self.folder) if name.endswith(_PART)
            )
        return []

    def remove(self) -> None:
        """Let go of all parts, and of the folder if there is nothing else in it."""
        with suppress(OSError):
            for name in self.parts:
                os.remove(self._path(name))
            os.rmdir(self.folder)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name + _PART)
