"""kvfold eval: measure methods side by side, at equal physical bytes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.fold import check_choice
from kvfold.cli.models import DEVICES, DTYPES
from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from kvfold.evaluate.results import Row
    from kvfold.evaluate.runner import Progress

BOTH = {
    "views": ("unseen", "in view"),
    "when": ("prefill", "generating"),
    "formats": ("chat", "plain"),
}
TASK_HELP = (
    "needle, fidelity, perplexity, kv_retrieval, code_completion, ruler or one of its 13 (niah_single_1, ...),"
    " longbench, longbench-v2, infinitebench, aime; options are in docs/benchmarks.md; repeatable."
)
_TASKS_A_TABLE = 4


def eval_(
    grid: Annotated[
        str | None,
        typer.Argument(metavar="[GRID.yaml]", help="What to measure, in YAML; flags replace what it says."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Model folder, hub id, or 'demo'; repeatable."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME[:OPTION=VALUE,...]", help=TASK_HELP),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", metavar="NAME[:OPTION=VALUE,...]", help="See `kvfold methods`; repeatable."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep", metavar="0.25,0.1", help="Budgets: folded over 16-bit bytes (default 0.25,0.1)."
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="TERM=VALUE", help="keep, bits_per_element or tokens; repeatable."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="2048,4096", help="Prompt lengths (default 4096).")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Of each task and length (default 5).")
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            "--view", help="unseen|in view|both: is the question asked after the fold, or part of it."
        ),
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(
            "--when", help="prefill|generating|both: fold the prompt alone, or generated tokens too."
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="auto|chat|plain|both: auto is the chat template of models that have one."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Another seed, other samples.")] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Results folder; what it has is not measured again.")
    ] = "results",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes, over CPU cores or GPUs.")] = 1,
    retry: Annotated[
        bool, typer.Option("--retry", help="Measure cells again that ended in an error.")
    ] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="|".join(DTYPES))] = None,
    device: Annotated[str | None, typer.Option("--device", help="|".join(DEVICES))] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure score, fidelity to the full cache and bytes of methods, from one exact prefill for all of them."""
    check_choice("--dtype", dtype or "auto", DTYPES)
    check_choice("--device", device or "auto", DEVICES)
    data: dict[str, Any] = {} if grid is None else read_grid(grid)
    budgets = list(budget or ()) + [f"keep={value}" for value in _split(keep)]
    if budgets:
        data = {key: value for key, value in data.items() if key not in ("keep", "bits_per_element")}
    given = {
        "models": model,
        "tasks": task,
        "methods": method,
        "budgets": budgets,
        "tokens": [_whole("--tokens", value) for value in _split(tokens)],
        "samples": samples,
        "views": _protocol("views", view),
        "when": _protocol("when", when),
        "formats": _protocol("formats", format_),
        "seed": seed,
        "dtype": dtype,
        "device": device,
    }
    data |= {key: value for key, value in given.items() if value not in (None, [])}
    for key, flag in (("models", "--model"), ("tasks", "--task")):
        if grid is None and not data.get(key):
            raise KvfoldError(f"nothing to measure: give {flag}, or a grid in YAML")

    from kvfold.evaluate.grid import Grid
    from kvfold.evaluate.runner import run

    wanted = Grid.from_dict(data)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    with _progress(json_) as advance:
        summary = run(wanted, output, workers=workers, retry=retry, command=command, progress=advance)
    if int(os.environ.get("RANK", "0")):
        return  # of several processes that accelerate launched, the first tells
    found = summarise(summary.rows)
    if json_:
        console.print_json(
            {
                "folder": output,
                "run": summary.run,
                "measured": summary.measured,
                "skipped": summary.skipped,
                "errors": [{"cell": row.to_dict()["cell"], "error": row.error} for row in summary.errors],
                "notes": summary.notes,
                "summary": found,
            }
        )
    else:
        show(found)
        console.out().print(
            f"{summary.measured} cells measured, {summary.skipped} there before; rows are in {output}",
            soft_wrap=True,
        )
    for note in summary.notes:
        console.note(note)
    for (name, error), count in _counted(summary.errors).items():
        console.note(f"{name}: {error} ({count} cells)")
    if summary.dead:
        raise console.Failure("not every cell was measured: run the same command again")
    if summary.errors:
        raise console.Failure(f"{len(summary.errors)} cells have no figures; --retry measures them again")


def read_grid(path: str) -> dict[str, Any]:
    """A grid's plain data from a YAML file.

    Raises
    ------
    KvfoldError
        It is no YAML mapping, or says a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise KvfoldError(f"{path}: {twice[0]} is there twice: keep one of them")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    text = Path(path).expanduser().read_text(encoding="utf-8")
    try:
        data = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise KvfoldError(f"{path} is no YAML: {error}") from error
    if not isinstance(data, dict):
        raise KvfoldError(f"{path}: a grid is a mapping with models, tasks, methods, ...")
    return data


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()] if text else []


def _whole(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise KvfoldError(f"{flag} {text}: expected whole numbers, such as 2048,4096") from None


def _protocol(key: str, value: str | None) -> list[str] | None:
    if value is None:
        return None
    return list(BOTH[key]) if value == "both" else [value.replace("in-view", "in view")]


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    screen = console.err()
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("to go"),
    )
    with Progress(
        *columns,
        console=screen,
        transient=True,
        disable=quiet or not screen.is_terminal,
        speed_estimate_period=600,
    ) as bar:
        task = bar.add_task("", total=None)
        told = -1

        def advance(done: int, total: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total)
            if not quiet and not screen.is_terminal and 10 * done // total > told:
                told = 10 * done // total  # in a log, a line for each tenth
                console.note(f"measured {done} of {total} cells")

        yield advance


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over samples: one entry for each model, protocol, length, task, method and budget, in order of bytes.

    `kl` is in nats; `ratio` is bytes over those of the 16-bit cache.
    """
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cell = row.cell
        key = (
            cell.model,
            cell.tokens,
            cell.view,
            cell.when,
            cell.format,
            cell.task,
            cell.method,
            cell.budget,
        )
        cells.setdefault(key, []).append(row)
    names = ("model", "tokens", "view", "when", "format", "task", "method", "budget")
    found = []
    for key, group in cells.items():
        good = [row for row in group if row.error is None]
        fidelity = [row.fidelity for row in good if row.fidelity is not None]
        scores = [row.score for row in good if row.score is not None]
        ratios = [row.ratio for row in good if row.ratio is not None]
        found.append(
            {
                **dict(zip(names, key, strict=True)),
                "metric": group[0].metric or next((row.metric for row in group if row.metric), ""),
                "score": fmean(scores) if scores else None,
                "kl": fmean(each.kl for each in fidelity) if fidelity else None,
                "top1": fmean(each.top1 for each in fidelity) if fidelity else None,
                "ratio": fmean(ratios) if ratios else None,
                "samples": len(good),
                "errors": len(group) - len(good),
            }
        )
    return found


def show(found: Sequence[dict[str, Any]]) -> None:
    """Tables of `summarise`: a row a method and budget, score and KL of each task side by side."""
    from rich.table import Table

    places: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in found:
        key = tuple(entry[name] for name in ("model", "tokens", "view", "when", "format"))
        places.setdefault(key, []).append(entry)
    for (model, tokens, view, when, form), entries in places.items():
        tasks = list(dict.fromkeys(entry["task"] for entry in entries))
        for start in range(0, len(tasks), _TASKS_A_TABLE):
            shown = tasks[start : start + _TASKS_A_TABLE]
            table = Table(
                title=f"{model}, {tokens} tokens, question {view}, folded "
                f"{'after prefill' if when == 'prefill' else 'while generating'}, {form}",
                title_justify="left",
            )
            table.add_column("method")
            table.add_column("budget")
            table.add_column("bytes", justify="right")
            plain: set[str] = set()
            for name in shown:
                metric = next((entry["metric"] for entry in entries if entry["task"] == name), "")
                if metric == "KL":  # its score is what the column of KL tells
                    table.add_column(f"{name}\nKL", justify="right")
                    plain.add(name)
                else:
                    table.add_column(f"{name}\n{metric}", justify="right")
                    table.add_column("\nKL", justify="right")
            lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
            for entry in entries:
                if entry["task"] in shown:
                    lines.setdefault((entry["method"], entry["budget"]), {})[entry["task"]] = entry
            for (name, budget), by_task in sorted(lines.items(), key=_order):
                ratios = [entry["ratio"] for entry in by_task.values() if entry["ratio"] is not None]
                figures = []
                for each in shown:
                    names = ("kl",) if each in plain else ("score", "kl")
                    figures += [_figure(by_task.get(each), name) for name in names]
                table.add_row(name, budget, f"{fmean(ratios):.4f}" if ratios else "", *figures)
            console.out().print(table)


def _order(item: tuple[tuple[str, str], dict[str, dict[str, Any]]]) -> tuple[Any, ...]:
    """The full cache first, then methods by name, each from its largest budget to its smallest."""
    (name, budget), _ = item
    _, _, value = budget.partition("=")
    return name != "full", name, -float(value or 0)


def _figure(entry: dict[str, Any] | None, name: str) -> str:
    if entry is None:
        return ""
    if entry[name] is None:
        return "error"
    return f"{entry[name]:.3f}" if name == "score" else f"{entry[name]:.4f}"


def _counted(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        key = f"{row.cell.method} {row.cell.budget}".strip(), row.error or ""
        counts[key] = counts.get(key, 0) + 1
    return counts
