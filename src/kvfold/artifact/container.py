"""The file: safetensors whose header carries a JSON manifest and two SHA-256 sums.

``kvfold_sha256`` in the header's metadata covers every byte of the header (its own 64 digits read as zeros), the
manifest's ``data_sha256`` every byte after it. Nothing is ever unpickled: bytes become tensors by their declared
dtype and shape only, read one tensor at a time straight into its own memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import torch

from kvfold.artifact.files import opened_for_reading, written_in_one_step
from kvfold.errors import ArtifactError

VERSION = 1
"""Newest format this kvfold reads, and the one it writes."""

_MANIFEST, _CHECKSUM = "kvfold", "kvfold_sha256"
_START = b'{"__metadata__":{"kvfold"'
_LARGEST_HEADER = 100_000_000
_CHUNK = 1 << 24
_BLANK = "0" * 64

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


# ---- writing ----


def write(path: str, manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file in one step: it is complete at `path`, or what was there before still is.

    Parameters
    ----------
    path : str
        Local path or fsspec URL.
    manifest : mapping
        Plain JSON data; the data checksum is added to it.
    tensors : mapping of str to Tensor

    Raises
    ------
    ArtifactError
        Out of space, no such folder, no permission ...
    """
    # Widest elements first keeps every tensor aligned, as readers of safetensors like it.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    chunks: list[memoryview] = []
    table: dict[str, Any] = {}
    data = hashlib.sha256()
    offset = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise ArtifactError(f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot hold")
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        chunk = flat.numpy().data
        data.update(chunk)
        table[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        offset += len(chunk)
        chunks.append(chunk)
    try:
        text = json.dumps({**manifest, "data_sha256": data.hexdigest()}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"only plain JSON data can be saved: {error}") from error
    metadata = {_MANIFEST: text, _CHECKSUM: _BLANK}
    header = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _LARGEST_HEADER:
        raise ArtifactError(
            f"the manifest takes {len(header):,} bytes, more than safetensors allows; shorten extra"
        )
    blank = f'"{_CHECKSUM}":"{_BLANK}"'.encode()
    signed = f'"{_CHECKSUM}":"{hashlib.sha256(header).hexdigest()}"'.encode()
    header = header.replace(blank, signed, 1)
    head = len(header).to_bytes(8, "little") + header
    with written_in_one_step(path, len(head) + offset) as handle:
        handle.write(head)
        for chunk in chunks:
            for begin in range(0, len(chunk), _CHUNK):
                handle.write(chunk[begin : begin + _CHUNK])


# ---- reading ----


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a saved cache, without a model and without keeping its tensors.

    Parameters
    ----------
    path : str or PathLike
        Local path or fsspec URL.

    Returns
    -------
    dict
        Format version, method, model, layers, ledger, extra.

    Raises
    ------
    ArtifactError
        Missing, no kvfold file, newer format, truncated or altered.
    """
    return _read(os.fspath(path), keep=False)[0]


def read(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Manifest and tensors (on the CPU, each with memory of its own), checksums verified."""
    return _read(path, keep=True)


def _read(path: str, keep: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with opened_for_reading(path) as (handle, size):
        header, manifest, entries = read_header(handle, size, path)
        expected = 8 + len(header) + (entries[-1].stop if entries else 0)
        if size is not None and size != expected:
            raise ArtifactError(_wrong_size(path, size, expected))
        data = hashlib.sha256()
        tensors: dict[str, torch.Tensor] = {}
        for entry in entries:
            buffer = torch.empty(entry.stop - entry.start if keep else 0, dtype=torch.uint8)
            target = buffer.numpy().data
            for begin in range(0, entry.stop - entry.start, _CHUNK):
                count = min(_CHUNK, entry.stop - entry.start - begin)
                piece = target[begin : begin + count] if keep else memoryview(bytearray(count))
                filled = _fill(handle, piece)
                if filled < count:
                    found = 8 + len(header) + entry.start + begin + filled
                    raise ArtifactError(_wrong_size(path, found, expected))
                data.update(piece)
            if keep:
                tensors[entry.name] = buffer.view(entry.dtype).reshape(entry.shape)
        if handle.read(1):
            raise ArtifactError(_wrong_size(path, expected + 1, expected))
    if data.hexdigest() != manifest.get("data_sha256"):
        raise ArtifactError(
            f"{path} is damaged: its tensors do not match their checksum; copy it again, or fold the prompt again"
        )
    return manifest, tensors


def _fill(handle: IO[bytes], target: memoryview) -> int:
    """Read until `target` is full or the file ends; how many bytes came."""
    filled = 0
    while filled < len(target):
        piece = handle.read(len(target) - filled)
        if not piece:
            break
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    return filled


def _wrong_size(path: str, found: int, expected: int) -> str:
    if found < expected:
        return (
            f"{path} is truncated: {found:,} of its {expected:,} bytes are there;"
            " copy it again, or fold the prompt again"
        )
    return f"{path} is damaged: it goes on after its end at {expected:,} bytes; copy it again, or fold the prompt again"


def read_header(handle: IO[bytes], size: int | None, path: str) -> tuple[bytes, dict[str, Any], list[_Entry]]:
    """Header bytes, manifest and tensor table of an open file of `size` bytes, None if that is unknown.

    Raises
    ------
    ArtifactError
        It is not ours, or too new, or not intact: asked in this order.
    """
    first = handle.read(8)
    if not first:
        raise ArtifactError(
            f"{path} is empty: it is no saved cache (make one with kvfold fold or cache.save)"
        )
    length = int.from_bytes(first, "little")
    start = handle.read(len(_START)) if len(first) == 8 else b""
    if not start.startswith(b"{") or length > _LARGEST_HEADER or length < len(_START):
        if start == _START:
            raise ArtifactError(
                f"{path} is damaged: its first bytes are not those kvfold wrote; copy it again"
            )
        raise ArtifactError(f"{path} is no saved cache: {_what_it_is(first + start)}")
    rest = handle.read(length - len(start))
    header = start + rest
    if len(header) < length:
        if start == _START:
            raise ArtifactError(
                f"{path} is truncated: {8 + len(header):,} of its header's {8 + length:,} bytes are there; copy it again,"
                " or fold the prompt again"
            )
        raise ArtifactError(f"{path} is no saved cache: {_what_it_is(first + start)}")
    damaged = ArtifactError(
        f"{path} is damaged: its header does not match its checksum; copy it again, or fold the prompt again"
    )
    try:
        table = json.loads(header)
        metadata = table.pop("__metadata__", None) or {}
        text = metadata.get(_MANIFEST)
    except (ValueError, AttributeError, RecursionError) as error:
        raise damaged from error
    if text is None:
        if start == _START:
            raise damaged
        raise ArtifactError(
            f"{path} is a safetensors file without a kvfold manifest (a model's weights?), not a saved cache"
        )
    try:
        manifest = json.loads(text)
        version = manifest["version"]
        newer = isinstance(version, int) and version > VERSION
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged from error
    if newer:
        raise ArtifactError(
            f"{path} has format version {version}, written by kvfold {manifest.get('kvfold', '?')}; this kvfold reads"
            f" up to version {VERSION}: upgrade it (pip install -U kvfold)"
        )
    claimed = str(metadata.get(_CHECKSUM))
    unsigned = header.replace(f'"{_CHECKSUM}":"{claimed}"'.encode(), f'"{_CHECKSUM}":"{_BLANK}"'.encode(), 1)
    if hashlib.sha256(unsigned).hexdigest() != claimed or version != VERSION:
        raise damaged
    try:
        entries = [_entry(name, entry) for name, entry in table.items()]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"{path}: its tensor table is malformed ({error}); fold the prompt again"
        ) from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    offset = 0
    for entry in entries:
        if entry.start != offset:
            raise ArtifactError(
                f"{path}: tensor {entry.name} is not where it should be; fold the prompt again"
            )
        offset = entry.stop
    return header, manifest, entries


def _entry(name: str, entry: Mapping[str, Any]) -> _Entry:
    dtype = _DTYPES[entry["dtype"]]
    shape = tuple(int(length) for length in entry["shape"])
    start, stop = (int(offset) for offset in entry["data_offsets"])
    if any(length < 0 for length in shape) or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {stop - start} bytes for shape {shape}")
    return _Entry(name, dtype, shape, start, stop)


def _what_it_is(start: bytes) -> str:
    if len(start) < 8 + len(_START):
        return f"it has only {len(start)} bytes"
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return (
            "it looks like a torch.save or pickle file, which kvfold never opens, because that can run code"
        )
    if start.startswith(b"GGUF"):
        return "it is a GGUF model"
    if start[8:9] == b"{":
        return "it looks like safetensors, without a kvfold manifest or cut short"
    return "it is not in kvfold's format (a safetensors file with a kvfold manifest)"
