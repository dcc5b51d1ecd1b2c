"""kvfold store: folded documents that `kvfold fold --store` keeps by content."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import console
from kvfold.errors import ArtifactError, KvfoldError

if TYPE_CHECKING:
    from kvfold.artifact import ArtifactStore

DEFAULT = "default"
DIGITS = 12
"""Of a key, where people read it."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

store = typer.Typer(
    name="store", help="Folded documents kept by content: list them, remove them.", no_args_is_help=True
)

Url = Annotated[
    str, typer.Option("--store", metavar="URL", help="A folder or any fsspec URL; 'default': kvfold's own.")
]


@store.command("list", epilog="Example: kvfold store list --store s3://bucket/folded")
def list_(
    url: Url = DEFAULT,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show what a store holds, the most recently used first."""
    kept = open_store(url)
    rows = [_row(kept, entry) for entry in kept.entries()]
    total = sum(row["bytes"] for row in rows)
    if json_:
        console.print_json({"store": kept.url, "bytes": total, "entries": rows})
        return
    from rich.table import Table

    table = Table(title=f"{kept.url}: {len(rows)} folded, {console.megabytes(total)}", title_justify="left")
    table.add_column("key", no_wrap=True, min_width=DIGITS)  # to be copied
    for title in ("document", "model", "method"):
        table.add_column(title, overflow="fold")
    for title in ("tokens", "bytes", "used"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        if "problem" in row:
            table.add_row(row["key"][:DIGITS], row["problem"], "", "", "", f"{row['bytes']:,}", row["used"])
            continue
        table.add_row(
            row["key"][:DIGITS],
            row["document"] or "",
            row["model"] or "",
            row["label"],
            f"{row['tokens']:,}",
            f"{row['bytes']:,}",
            row["used"],
        )
    console.out().print(table)


@store.command("rm", epilog="Example: kvfold store rm 3f2a9c")
def rm(
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY...", help="Keys, or as many of their first digits as tell.")
    ],
    url: Url = DEFAULT,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove folded documents from a store."""
    kept = open_store(url)
    chosen = sorted({kept.resolve(key) for key in keys})
    sizes = {entry.key: entry.nbytes for entry in kept.entries()}
    for key in chosen:
        kept.remove(key)
    _tell(kept, [(key, sizes.get(key, 0)) for key in chosen], json_)


@store.command("gc", epilog="Example: kvfold store gc --limit 10GB")
def gc(
    limit: Annotated[str, typer.Option("--limit", metavar="SIZE", help="What may stay, such as 500MB.")],
    url: Url = DEFAULT,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Remove what was least recently used until the rest is within a limit."""
    kept = open_store(url)
    removed = kept.collect(size_of("--limit", limit))
    _tell(kept, [(entry.key, entry.nbytes) for entry in removed], json_)


def open_store(url: str, limit: int | None = None) -> ArtifactStore:
    """The store that --store names."""
    from kvfold.artifact import ArtifactStore
    from kvfold.cli.models import cache_folder

    return ArtifactStore(str(cache_folder() / "store") if url == DEFAULT else url, limit)


def stored_path(url: str | None, path: str) -> str:
    """Where a folded document is: `path`, or with a store the entry whose key begins so, marked as used."""
    if url is None:
        return path
    kept = open_store(url)
    key = kept.resolve(path)
    kept.touch(key)
    return kept.path(key)


def size_of(flag: str, text: str) -> int:
    """Bytes of a size such as 1000, 500MB or 1.5GB, in units of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise KvfoldError(f"{flag} {text}: give a size such as 500MB or 10GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _row(kept: ArtifactStore, entry: Any) -> dict[str, Any]:
    from kvfold.cli.options import changed_options

    used = datetime.fromtimestamp(entry.used, timezone.utc).isoformat(" ", "seconds") if entry.used else "?"
    row: dict[str, Any] = {"key": entry.key, "bytes": entry.nbytes, "used": used}
    try:
        manifest = kept.describe(entry.key)
    except ArtifactError as error:
        return {**row, "problem": str(error)}
    extra, method = manifest.get("extra") or {}, manifest["method"]
    options = ",".join(f"{name}={value}" for name, value in changed_options(method).items())
    return {
        **row,
        "document": extra.get("document"),
        "model": extra.get("model") or manifest["model"]["name"],
        "label": f"{method['method']}:{options}" if options else method["method"],
        "tokens": manifest["tokens"],
        "method": method,
    }


def _tell(kept: ArtifactStore, removed: list[tuple[str, int]], json_: bool) -> None:
    freed = sum(count for _, count in removed)
    if json_:
        console.print_json({"store": kept.url, "removed": [key for key, _ in removed], "bytes": freed})
        return
    for key, count in removed:
        console.out().print(f"removed {key[:DIGITS]} ({console.megabytes(count)})")
    console.out().print(f"{len(removed)} removed, {console.megabytes(freed)} freed", soft_wrap=True)
