"""What every command shares: the two consoles, byte counts for humans, and errors as one line."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kvfold.errors import KvfoldError

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit codes: wrong usage or input; anything else that went wrong; Ctrl-C."""

_INPUT_ERRORS = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    UnicodeDecodeError,
)


class Failure(Exception):
    """Something went wrong that is not the input's fault; the message is for the user."""


def out() -> Console:
    """Console for results."""
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """Console for progress, notes and errors: the standard error of this moment, even if redirected later."""
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False)


def print_json(data: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def note(message: str) -> None:
    """A remark that is not a result."""
    err().print(Text(message, style="yellow"), soft_wrap=True)


@contextmanager
def working(message: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner while something slow runs."""
    console = err()
    if quiet or not console.is_terminal:
        yield
    else:
        with console.status(Text(message)):
            yield


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with the time so far, for steps whose number nobody knows; called with what was done last."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = err()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done: bar.update(task, description=f"{title}: {done} done")


def megabytes(count: int) -> str:
    """Bytes for humans, in units of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def ledger_table(ledger: Mapping[str, Any], title: str | None = None) -> Table:
    """Bytes by purpose, with total, ratio and the bytes of the same prompt's 16-bit cache.

    Parameters
    ----------
    ledger : mapping
        `Ledger.to_dict()`.
    title : str, optional
    """
    table = Table(title=title, title_justify="left")
    table.add_column("bytes for")
    table.add_column("bytes", justify="right")
    table.add_column("of full", justify="right")
    full = ledger["full_bytes"] or 1
    for purpose, count in sorted(ledger["by_purpose"].items(), key=lambda item: -item[1]):
        table.add_row(purpose, f"{count:,}", f"{count / full:.2%}")
    table.add_section()
    table.add_row("total", f"{ledger['total']:,}", f"{ledger['total'] / full:.2%}", style="bold")
    table.add_row("full 16-bit cache", f"{ledger['full_bytes']:,}", "100.00%")
    return table


def explain(error: BaseException) -> tuple[str, int]:
    """One line for the user and the exit code of an error."""
    if isinstance(error, KvfoldError):
        return str(error), BAD_INPUT
    if isinstance(error, Failure):
        return str(error), FAILURE
    if isinstance(error, UnicodeDecodeError):
        return f"the text is not UTF-8 ({error.reason} at byte {error.start})", BAD_INPUT
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return where + error.strerror, BAD_INPUT if isinstance(error, _INPUT_ERRORS) else FAILURE
    if isinstance(error, _INPUT_ERRORS):
        return str(error), BAD_INPUT
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: {error} (a shorter document, or --chunk-size, needs less)", FAILURE
    return f"{type(error).__name__}: {error} (kvfold --debug ... shows where)", FAILURE


class Commands(TyperGroup):
    """A command group whose errors end in one red line and an exit code instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            err().print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if _handled_by_typer(error) or (ctx.obj or {}).get("debug"):
                raise
            message, code = explain(error)
            line = " ".join(message.split())
            err().print(Text.assemble(("error: ", "bold red"), (line, "red")), soft_wrap=True)
            raise typer.Exit(code) from None


def _handled_by_typer(error: Exception) -> bool:
    """Usage errors, exits and broken pipes, which typer reports itself."""
    if isinstance(error, typer.Exit | typer.Abort | typer.BadParameter | EOFError):
        return True
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return True
    return hasattr(error, "exit_code")
