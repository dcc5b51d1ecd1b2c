"""Local paths and fsspec URLs alike: read in order, write in one step."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from kvfold.errors import ArtifactError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(://|::)")


def is_url(path: str) -> bool:
    """Whether fsspec is to open it (a Windows drive letter is no scheme)."""
    return _URL.match(path) is not None


def filesystem(url: str) -> tuple[Any, str]:
    """File system of a path or URL, and the path in it (ArtifactError where there is none)."""
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
    except ImportError as error:
        raise ArtifactError(f"{url}: {error}; install that package to use such addresses") from error
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{url} cannot be used: {error}") from error
    return fs, path


@contextmanager
def opened_for_reading(path: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """Open a file to be read from its start, with its size where that is known.

    Raises
    ------
    ArtifactError
        It does not exist, is a folder, or cannot be read.
    """
    try:
        if is_url(path):
            fs, inside = filesystem(path)
            handle = fs.open(inside, "rb")
        else:
            handle = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path} does not exist: check the path, or save a folded cache there first"
        ) from error
    except IsADirectoryError as error:
        raise ArtifactError(f"{path} is a folder: give the path of a saved cache in it") from error
    except ArtifactError:
        raise
    except Exception as error:  # File systems of other packages raise anything.
        raise ArtifactError(f"{path} cannot be opened: {error}") from error
    with handle:
        try:
            size: int | None = handle.seek(0, os.SEEK_END)
            handle.seek(0)
        except (OSError, ValueError, TypeError):
            size = None
        try:
            yield handle, size
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error}") from error


@contextmanager
def written_in_one_step(path: str, size: int) -> Iterator[IO[bytes]]:
    """A handle whose content appears at `path` when the block ends well, and nowhere when it does not.

    Parameters
    ----------
    path : str
    size : int
        Bytes to come, for the error message.

    Raises
    ------
    ArtifactError
        Any failure to write; the file that was at `path` before is untouched, and no temporary one is left.
    """
    try:
        with _remote(path) if is_url(path) else _local(path) as handle:
            yield handle
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path} cannot be written: its folder does not exist; create it first"
        ) from error
    except ArtifactError:
        raise
    except Exception as error:
        if not (is_url(path) or isinstance(error, OSError)):
            raise
        raise ArtifactError(
            f"{path} cannot be written ({size:,} bytes): {error}; nothing was changed there."
            " Free some space or choose another place, and save again"
        ) from error


@contextmanager
def _local(path: str) -> Iterator[IO[bytes]]:
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise ArtifactError(f"{path} is a folder: give the name of a file in it")
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, _temporary_name())
    try:
        with open(temporary, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
    _sync_folder(folder)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raise ArtifactError unless a local folder takes a new file, which is tried: permissions do not tell of all that may stop it."""
    temporary = os.path.join(folder, _temporary_name())
    try:
        with open(temporary, "xb"):
            pass
        os.remove(temporary)
    except OSError as error:
        raise ArtifactError(
            f"{os.fspath(folder)} cannot be written: {error.strerror}; choose another place"
        ) from error


def _sync_folder(folder: str) -> None:
    """Make the new name itself survive a crash, where folders can be synchronised."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _remote(url: str) -> Iterator[IO[bytes]]:
    from fsspec.implementations.local import LocalFileSystem

    fs, target = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        with _local(target) as handle:
            yield handle
        return
    if fs.isdir(target):
        raise ArtifactError(f"{url} is a folder: give the name of a file in it")
    folder, _, _ = target.rpartition("/")
    temporary = f"{folder}/{_temporary_name()}" if folder or target.startswith("/") else _temporary_name()
    try:
        with fs.open(temporary, "wb") as handle:
            yield handle
        fs.mv(temporary, target)
    except BaseException:
        with suppress(Exception):
            fs.rm(temporary)
        raise


def _temporary_name() -> str:
    return f".kvfold-{secrets.token_hex(6)}.tmp"
