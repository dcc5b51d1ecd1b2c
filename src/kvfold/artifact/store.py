"""Folded documents kept by what they were made of, so that one folded before is found instead of folded again.

A folder, or any fsspec URL, of saved caches named by their key. Beside each lies a mark with the time of its last use,
which decides what goes when room is short: file systems that fsspec knows cannot all tell or set such a time themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvfold.artifact import container, files
from kvfold.artifact.state import load, save
from kvfold.errors import ArtifactError, KvfoldError
from kvfold.methods.base import Method

if TYPE_CHECKING:
    from kvfold.hf.cache import FoldedCache

logger = logging.getLogger(__name__)

_ENTRY, _MARK, _PARTS = ".kvf", ".used", ".parts"
_KEY = re.compile(r"[0-9a-f]{64}")
_FILES = frozenset({"calibration", "gates"})
"""Method options that name a file: what is in it counts, not where it is."""
_ABANDONED = 24 * 3600.0
"""Seconds after which what a killed process left half done is nobody's."""


@dataclass(frozen=True)
class Entry:
    """One folded document of a store.

    Attributes
    ----------
    key : str
    nbytes : int
        Of its file.
    used : float
        When it was last written or wanted, in seconds since 1970; 0 where its mark is missing.
    """

    key: str
    nbytes: int
    used: float


@dataclass(frozen=True)
class ArtifactStore:
    """Folded documents by content hash, under a local folder or any fsspec URL.

    Several processes may use one store at a time: an entry appears whole or not at all, and of two that write the same
    one the last stays, which is as good as the first.

    Parameters
    ----------
    url : str
    limit : int, optional
        Bytes; what was least recently used goes when an entry is added that makes all of them larger than this. The
        entry added stays, whatever its size.

    Examples
    --------
    >>> store = ArtifactStore("~/folded", limit=10 * 10**9)
    >>> cache = store.fold(model, input_ids, kvfold.RDKV(keep=0.1))  # folds it, or finds it
    """

    url: str
    limit: int | None = None

    def __post_init__(self) -> None:
        if not self.url:
            raise KvfoldError("a store needs a folder or an fsspec URL")
        if self.limit is not None and self.limit < 0:
            raise KvfoldError(f"the limit of a store must be at least 0 bytes, got {self.limit}")
        plain = self.url if files.is_url(self.url) else os.path.abspath(os.path.expanduser(self.url))
        object.__setattr__(self, "url", plain.rstrip("/") or "/")

    # ---- what an entry is called ----

    @staticmethod
    def key(
        model: Any, input_ids: torch.Tensor, method: Method, attention_mask: torch.Tensor | None = None
    ) -> str:
        """SHA-256 of all that a folded prompt depends on.

        That is the model (weights, dtype, RoPE: `kvfold.hf.fingerprint`), the tokens and their padding, the method with
        every option and the content of its files, and the format of saved caches.

        Parameters
        ----------
        model : transformers causal language model
        input_ids : (batch, tokens) int64
        method : Method
        attention_mask : (batch, tokens), optional

        Returns
        -------
        str
            64 hexadecimal digits.
        """
        from kvfold.api import token_hash
        from kvfold.hf.fingerprint import fingerprint

        padded = attention_mask is not None and not bool(attention_mask.all())
        parts = [
            container.VERSION,
            fingerprint(model),
            str(model.dtype),
            list(input_ids.shape),
            token_hash(input_ids),
            token_hash(attention_mask) if attention_mask is not None and padded else None,
            _with_contents(method.to_dict()),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def path(self, key: str) -> str:
        """Where an entry is, or would be: a path or URL for `kvfold.load`."""
        return self._inside(key + _ENTRY)

    def parts(self, key: str) -> str:
        """A folder for finished parts of an entry that is being made; `collect` removes it once it is a day old."""
        return self._inside(key + _PARTS)

    def resolve(self, start: str) -> str:
        """The key that begins with these digits.

        Raises
        ------
        ArtifactError
            None does, or several do.
        """
        keys = [entry.key for entry in self.entries() if entry.key.startswith(start.lower())]
        if start and len(keys) == 1:
            return keys[0]
        told = "kvfold store list shows what it holds"
        if not start or not keys:
            raise ArtifactError(f"the store {self.url} has no entry {start!r}: {told}")
        raise ArtifactError(
            f"{len(keys)} entries of the store {self.url} begin with {start!r}: give more digits"
        )

    # ---- use ----

    def fold(
        self,
        model: Any,
        input_ids: torch.Tensor,
        method: Method,
        attention_mask: torch.Tensor | None = None,
        *,
        extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> FoldedCache:
        """`kvfold.fold`, unless the store has the result already; else it is put there.

        An entry that turns out to be damaged is told of in the log and replaced.
        """
        from kvfold.api import fold

        key = self.key(model, input_ids, method, attention_mask)
        try:
            if self.find(key) is not None:
                return load(self.path(key), model)
        except ArtifactError as error:
            logger.warning("%s; folding it again", str(error))  # not the error, which holds frames
        self.prepare()
        cache = fold(model, input_ids, method, attention_mask, **options)
        self.put(key, cache, extra)
        return cache

    def find(self, key: str) -> dict[str, Any] | None:
        """Manifest of an entry, checked to its last byte and marked as used now; None where there is none.

        Raises
        ------
        ArtifactError
            It is damaged.
        """
        if not self._exists(key):
            return None
        try:
            manifest = container.read_manifest(self.path(key))
        except ArtifactError:
            if not self._exists(key):  # gone while it was looked for
                return None
            raise
        self.touch(key)
        return manifest

    def prepare(self) -> None:
        """Make the store's folder, so that one that cannot be written is known before any work (ArtifactError)."""
        fs, root = self._opened()
        try:
            fs.makedirs(root, exist_ok=True)
        except Exception as error:  # File systems of other packages raise anything.
            raise ArtifactError(
                f"the store {self.url} cannot be made: {error}; choose another place"
            ) from error
        if not files.is_url(self.url):
            files.check_folder(self.url)

    def put(self, key: str, cache: FoldedCache, extra: dict[str, Any] | None = None) -> str:
        """Save a cache under its key, then let go of what is beyond the limit; returns its path.

        Raises
        ------
        ArtifactError
            It cannot be written; the store is as it was.
        """
        self.prepare()
        save(cache, self.path(key), extra)
        self.touch(key)
        if self.limit is not None:
            self.collect(self.limit, spare=key)
        return self.path(key)

    def touch(self, key: str) -> None:
        """Mark an entry as used now, where the store can be written."""
        now = f"{time.time():.6f}".encode()
        with (
            suppress(ArtifactError),
            files.written_in_one_step(self._inside(key + _MARK), len(now)) as handle,
        ):
            handle.write(now)

    # ---- upkeep ----

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        fs, root = self._opened()
        found = []
        for name, info in self._listed(fs, root):
            key = name.removesuffix(_ENTRY)
            if name.endswith(_ENTRY) and _KEY.fullmatch(key):
                found.append(Entry(key, int(info.get("size") or 0), _mark(fs, f"{root}/{key}{_MARK}")))
        return sorted(found, key=lambda entry: (-entry.used, entry.key))

    def describe(self, key: str) -> dict[str, Any]:
        """Manifest of an entry by its header alone: its tensors are neither read nor checked (ArtifactError)."""
        path = self.path(key)
        with files.opened_for_reading(path) as (handle, size):
            return container.read_header(handle, size, path)[1]

    def remove(self, key: str) -> None:
        """Let go of an entry; one that is gone already is no error.

        Raises
        ------
        ArtifactError
            It cannot be removed.
        """
        fs, root = self._opened()
        for name in (key + _ENTRY, key + _MARK):
            try:
                fs.rm_file(f"{root}/{name}")
            except FileNotFoundError:
                continue
            except Exception as error:  # File systems of other packages raise anything.
                raise ArtifactError(f"{self._inside(name)} cannot be removed: {error}") from error

    def collect(self, limit: int, spare: str | None = None) -> list[Entry]:
        """Remove the least recently used entries until the rest are within a limit.

        What processes that were killed left half written goes too, once it is a day old.

        Parameters
        ----------
        limit : int
            Bytes.
        spare : str, optional
            A key that stays in any case.

        Returns
        -------
        list of Entry
            Those removed.
        """
        self._sweep()
        entries = self.entries()
        total = sum(entry.nbytes for entry in entries)
        removed = []
        for entry in reversed(entries):
            if total <= limit:
                break
            if entry.key != spare:
                self.remove(entry.key)
                removed.append(entry)
                total -= entry.nbytes
        return removed

    def _sweep(self) -> None:
        fs, root = self._opened()
        listed = [name for name, _ in self._listed(fs, root)]
        for name in listed:
            orphan = name.endswith(_MARK) and name.removesuffix(_MARK) + _ENTRY not in listed
            half = (name.startswith(".kvfold-") and name.endswith(".tmp")) or name.endswith(_PARTS)
            if orphan or half:
                with suppress(Exception):  # not every file system knows ages
                    if time.time() - fs.modified(f"{root}/{name}").timestamp() > _ABANDONED:
                        fs.rm(f"{root}/{name}", recursive=name.endswith(_PARTS))

    def _exists(self, key: str) -> bool:
        fs, root = self._opened()
        try:
            return bool(fs.exists(f"{root}/{key}{_ENTRY}"))
        except Exception as error:  # File systems of other packages raise anything.
            raise ArtifactError(f"the store {self.url} cannot be read: {error}") from error

    def _listed(self, fs: Any, root: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        try:
            listed = fs.ls(root, detail=True)
        except FileNotFoundError:
            return
        except Exception as error:  # File systems of other packages raise anything.
            raise ArtifactError(f"the store {self.url} cannot be read: {error}") from error
        for info in listed:
            yield str(info["name"]).rpartition("/")[2], info

    def _inside(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _opened(self) -> tuple[Any, str]:
        fs, root = files.filesystem(self.url)
        fs.invalidate_cache()  # others write here too
        return fs, str(root).rstrip("/")


def _mark(fs: Any, path: str) -> float:
    try:
        return float(fs.cat_file(path))
    except Exception:  # none, or not one of ours
        return 0.0


def _with_contents(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _with_contents(entry, key) for key, entry in value.items()}
    if name in _FILES and isinstance(value, str):
        path = Path(value).expanduser()
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return value
