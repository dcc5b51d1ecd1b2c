"""kvfold report: tables with intervals, charts and one page from a results folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli import console
from kvfold.cli.fold import check_output
from kvfold.errors import KvfoldError

SUFFIXES = (".html", ".htm", ".md", ".json")
DEFAULT = "report.html"


def report(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="RESULTS...", help="Folders that `kvfold eval` wrote; shown as one."),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help=f"Where to write, .html, .md or .json. Default: {DEFAULT} here."),
    ] = None,
    highlight: Annotated[
        list[str] | None,
        typer.Option(
            "--highlight",
            metavar="METHOD",
            help="Bring this method forward; repeatable. Default: kvfold's own.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Of the page.")] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object; write only what -o names.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown; write only what -o names.")
    ] = False,
) -> None:
    """Show what an evaluation found: quality by bytes, needles, bits, intervals, runs."""
    if json_ and markdown:
        raise KvfoldError("--json and --markdown: print one of them; -o writes another")
    path = output or (None if json_ or markdown else DEFAULT)
    if path is not None:
        if Path(path).suffix.lower() not in SUFFIXES:
            raise KvfoldError(f"-o {path}: end the name in one of {', '.join(SUFFIXES)}")
        check_output(path)

    from kvfold.evaluate.results import read

    found = [read(folder) for folder in folders]

    from kvfold.evaluate.report import aggregate, to_html, to_markdown

    with console.working("estimating intervals", quiet=json_):
        figures = aggregate(
            [run for results in found for run in results.runs],
            [row for results in found for row in results.rows],
            ours=highlight,
            notes=[note for results in found for note in results.notes],
        )
    if highlight:
        methods = {entry.method for setting in figures.settings for entry in setting.entries if entry.ours}
        known = {name.split(":")[0] for name in methods}
        if unknown := sorted(set(highlight) - known):
            measured = {e.method.split(":")[0] for s in figures.settings for e in s.entries}
            raise KvfoldError(
                f"--highlight {unknown[0]}: not among the methods measured: {', '.join(sorted(measured))}"
            )
    for note in figures.notes:
        console.note(note)
    if path is not None:
        with console.working(f"writing {path}", quiet=json_):
            suffix = Path(path).suffix.lower()
            if suffix == ".json":
                written = json.dumps(figures.to_dict(), indent=1, ensure_ascii=False) + "\n"
            elif suffix == ".md":
                written = to_markdown(figures)
            else:
                written = to_html(figures, **({"title": title} if title else {}))
            save(path, written)
    if json_:
        console.print_json(figures.to_dict())
    elif markdown:
        typer.echo(to_markdown(figures), nl=False)
    else:
        console.out().print(f"wrote {path}: {figures.rows} measurements", soft_wrap=True)


def save(path: str, content: str) -> None:
    """Write a file in one step: whole, or not at all."""
    from kvfold.artifact.files import is_url, written_in_one_step

    data = content.encode()
    with written_in_one_step(path if is_url(path) else str(Path(path).expanduser()), len(data)) as file:
        file.write(data)
