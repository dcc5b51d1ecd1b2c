"""Rows of a published data set, from the hub or from a local copy, checked before anything is done with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import KvfoldError

Row = Mapping[str, Any]

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Source:
    """Where a data set is published, and what a local copy is called.

    Attributes
    ----------
    hub : str
        Repository on the Hugging Face hub.
    stem : str
        Name of a local copy without its suffix (.json, .jsonl or .parquet); also the configuration of a mirror.
    split : str
    file : str
        A JSON file in the repository to be read as it is, or `archive.zip::member`; "": what `load_dataset` finds.
    """

    hub: str
    stem: str
    split: str = "train"
    file: str = ""

    @property
    def url(self) -> str:
        """The file's address."""
        archive, inside, member = self.file.partition("::")
        return (
            f"zip://{member}::hf://datasets/{self.hub}/{archive}"
            if inside
            else f"hf://datasets/{self.hub}/{archive}"
        )


@dataclass(frozen=True)
class Kind:
    """What a field must be: a test, and words for the message."""

    words: str
    fits: Callable[[Any], bool]


TEXT = Kind("a text", lambda value: isinstance(value, str))
NONEMPTY = Kind("a text that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
TEXTS = Kind(
    "a list of texts, at least one",
    lambda value: (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, str) for item in value)
    ),
)


def one_of(choices: Iterable[str]) -> Kind:
    """A text out of a few."""
    choices = tuple(choices)
    return Kind("one of " + ", ".join(choices), lambda value: value in choices)


@dataclass(frozen=True)
class Table:
    """Rows, and where they come from."""

    origin: str
    rows: Sequence[Row]

    def wrong(self, index: int, field: str, why: str) -> KvfoldError:
        """The error of a row (from 0) whose field will not do."""
        return KvfoldError(f"{self.origin}, row {index}: field {field!r} {why}")


def load(source: Source, path: str, fields: Mapping[str, Kind]) -> Table:
    """The rows of a data set, each with the fields that a task needs.

    Parameters
    ----------
    source : Source
    path : str
        "": the hub. Else a file, a folder that holds the data set's file under its published name (at any depth), or
        the hub id of a mirror with the same fields.
    fields : mapping
        What each field must be.

    Raises
    ------
    KvfoldError
        The package datasets is not installed; there is no such file, it cannot be read or has no rows; or a field is
        missing or of another kind: the message names file, row (from 0) and field.
    """
    try:
        import datasets
    except ImportError:
        raise KvfoldError(
            "public data sets are read with the package datasets: pip install 'kvfold[datasets]'"
        ) from None
    origin, arguments = _locate(source, path)
    try:
        table = Table(origin, datasets.load_dataset(**arguments))
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, StopIteration) or "corresponds to no data" in str(cause):
            raise KvfoldError(f"{origin} has no rows") from error
        hint = "" if arguments["path"] in ("json", "parquet") and path else ", or give path= of a local copy"
        raise KvfoldError(
            f"cannot read {origin} ({type(cause).__name__}: {cause}): check it{hint}"
        ) from error
    if not len(table.rows):
        raise KvfoldError(f"{origin} has no rows")
    for index in range(len(table.rows)):
        try:
            row = table.rows[index]
        except UnicodeDecodeError as error:
            raise KvfoldError(
                f"{origin}, row {index} is not UTF-8 ({error.reason}): save the file as UTF-8"
            ) from error
        for name, kind in fields.items():
            if row.get(name) is None:
                has = ", ".join(sorted(key for key, value in row.items() if value is not None))
                raise table.wrong(index, name, f"is missing (it has {has})")
            if not kind.fits(row[name]):
                raise table.wrong(index, name, f"must be {kind.words}, not {_brief(row[name])}")
    return table


def _locate(source: Source, path: str) -> tuple[str, dict[str, Any]]:
    """A name for messages, and what to ask `load_dataset` for."""
    if not path:
        if source.file:
            return source.url, {"path": "json", "data_files": source.url, "split": "train"}
        return source.hub, {"path": source.hub, "split": source.split}
    local = Path(path).expanduser()
    if local.is_file():
        files = [local]
    elif local.is_dir():
        named = [local / f"{source.stem}{suffix}" for suffix in _BUILDERS]
        files = [file for file in named if file.is_file()][:1] or sorted(
            file
            for file in local.rglob("*")
            if file.suffix in _BUILDERS and (file.stem == source.stem or file.parent.name == source.stem)
        )
        if not files:
            raise KvfoldError(
                f"{path} holds no {source.stem}.jsonl, .json or .parquet: give the file itself, or the folder that holds it"
            )
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not local.suffix:
        return path, {"path": path, "name": source.stem, "split": source.split}
    else:
        raise KvfoldError(f"there is no file or folder {path}")
    if files[0].suffix not in _BUILDERS:
        raise KvfoldError(f"{files[0]} must be .jsonl, .json or .parquet")
    builder = _BUILDERS[files[0].suffix]
    same = [
        str(file) for file in files if _BUILDERS[file.suffix] == builder and file.parent == files[0].parent
    ]
    return str(files[0]), {"path": builder, "data_files": same, "split": "train"}


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
