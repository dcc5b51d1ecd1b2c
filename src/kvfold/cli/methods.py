"""kvfold methods: the ways to fold and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from kvfold.cli import console
from kvfold.errors import KvfoldError


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[METHOD]...", help="Only these; all by default.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the methods, the papers they come from and their options."""
    from rich.table import Table

    from kvfold.cli.options import describe_methods

    known = describe_methods()
    missing = sorted(set(names or ()) - {method["name"] for method in known})
    if missing:
        raise KvfoldError(
            f"unknown method {missing[0]!r}: choose from {', '.join(method['name'] for method in known)}"
        )
    if names:
        known = [method for method in known if method["name"] in names]
    if json_:
        console.print_json(known)
        return
    table = Table(show_lines=True)
    for title in ("method", "paper", "options (--option name=value), with defaults"):
        table.add_column(title, overflow="fold")
    for method in known:
        lines = [
            f"{option['name']}"
            + ("" if option["required"] else f"={option['default']}")
            + f"  ({option['type']})"
            for option in method["options"]
        ]
        table.add_row(method["name"], f"{method['paper']}\n{method['about']}", "\n".join(lines))
    console.out().print(table)
