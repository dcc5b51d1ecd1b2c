"""Measure a grid: one exact prefill for all methods of a cell, results appended row by row, resumable at any moment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import KvfoldError
from kvfold.evaluate import results
from kvfold.evaluate.grid import Grid, open_task
from kvfold.evaluate.measure import sample_of
from kvfold.evaluate.plan import Plan
from kvfold.evaluate.protocol import script_of
from kvfold.evaluate.results import Appender, Row, Run
from kvfold.evaluate.workers import launch, need_accelerate, share
from kvfold.prompt import context_length, has_chat

Progress = Callable[[int, int], None]
"""Called with (cells done, cells to do)."""


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes
    ----------
    run : str
        `Run.id`.
    measured, skipped : int
        Cells measured now, and those that the folder had already.
    errors : list of Row
        Those of the grid's cells that have no figures.
    rows : list of Row
        Of the grid's cells, measured now or before.
    notes : list of str
        For the user.
    dead : int
        Workers that ended before their share was done.
    """

    run: str
    measured: int
    skipped: int
    errors: list[Row]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    dead: int = 0


def run(
    grid: Grid,
    folder: str | Path,
    *,
    workers: int = 1,
    retry: bool = False,
    command: str | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Measure a grid into a folder; cells that the folder has already are not measured again.

    A process killed at any moment loses the cell it was measuring, no more: call again with the same folder. Within
    `accelerate launch` each process measures its share.

    Parameters
    ----------
    grid : Grid
    folder : path
        Made if it is not there.
    workers : int
        Processes, over CPU cores or GPUs; each loads the model once. More than one needs `accelerate`.
    retry : bool
        Measure cells again that ended in an error.
    command : str, optional
        Command line that repeats this, for the record.
    progress : callable, optional
        Called with (cells done, cells to do).

    Raises
    ------
    KvfoldError
        Before any model is loaded: an unknown model, a length beyond a model's context or too short for a task, a
        folder of another version. A method that fails is no error here but an error row.
    """
    folder = Path(folder).expanduser()
    if workers < 1:
        raise KvfoldError(f"workers must be at least 1, not {workers}")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1 and ranks > 1:
        raise KvfoldError("this is a process of `accelerate launch` already: leave out --workers")
    if max(workers, ranks) > 1:
        need_accelerate()
    results.check_schema(folder)
    outlines = {model: _outline(model) for model in dict.fromkeys(grid.models)}
    notes = _check(grid, outlines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvfoldError(f"{folder} cannot be made a results folder: {error.strerror or error}") from error
    plan = Plan(grid, folder, retry, {model: has_chat(each.tokenizer) for model, each in outlines.items()})
    every = [
        group.cell(variant, when) for group in plan.groups for variant in plan.variants for when in plan.whens
    ]
    todo = [cell for cell in every if cell not in plan.done]
    this = _run(grid, outlines, command)
    died: list[str] = []
    if todo:
        with Appender(folder / results.RUNS) as file:
            file.write(this)

        def tick(done: int) -> None:
            if progress is not None:
                progress(done, len(todo))

        tick(0)
        if workers > 1:
            died = launch(plan, this.id, min(workers, len(plan.groups)), tick)
        elif ranks > 1:
            share(plan, this.id, tick)
        else:
            plan.measure(this.id, 0, 1, grid.device, tick)
    wanted = set(every)
    rows = [row for row in results.read(folder).rows if row.cell in wanted]
    return Summary(
        run=this.id,
        measured=len({row.cell for row in rows} & set(todo)),
        skipped=len(every) - len(todo),
        errors=[row for row in rows if row.error is not None],
        rows=rows,
        notes=[*plan.notes, *notes, *died],
        dead=len(died),
    )


# ---- before any work ----


@dataclass(frozen=True)
class _Outline:
    """What is known of a model without its weights."""

    config: Any
    tokenizer: Any


def _outline(spec: str) -> _Outline:
    from kvfold.cli.models import load_outline

    return _Outline(*load_outline(spec, quiet=True))


def _check(grid: Grid, outlines: Mapping[str, _Outline]) -> list[str]:
    """Make the first sample of everything: it must fit the model with its answers.

    Returns
    -------
    list of str
        Notes on tasks that have fewer samples than asked for.
    """
    for label in grid.tasks:
        open_task(label).check()
    fewer: dict[str, str] = {}
    for model, outline in outlines.items():
        chat = has_chat(outline.tokenizer)
        if "chat" in grid.formats and not chat:
            raise KvfoldError(f"model {model} has no chat template: use --format plain or auto")
        limit = context_length(outline.config)
        # The question in view or not, a sample is the same tokens.
        for group in dict.fromkeys(
            replace(group, view="unseen") for group in grid.groups_of(model, 0, chat=chat)
        ):
            if limit is not None and group.tokens > limit:
                raise KvfoldError(f"--tokens {group.tokens}: {model} reads at most {limit}")
            task = open_task(group.task)
            try:
                sample = sample_of(outline.tokenizer, task, group)
                script = script_of(outline.tokenizer, sample, group.view, group.format)
            except KvfoldError as error:
                raise KvfoldError(f"task {group.task} at {group.tokens} tokens: {error}") from error
            except IndexError as error:
                raise KvfoldError(f"task {group.task} has no samples: {error}") from error
            if limit is not None and script.tokens > limit:
                most = group.tokens + limit - script.tokens
                raise KvfoldError(
                    f"task {group.task} at {group.tokens} tokens takes {script.tokens} positions with its answers,"
                    f" and {model} reads at most {limit}: "
                    + (f"at most --tokens {most}" if most > 0 else "ask for less of them")
                )
            if grid.samples > 1 and group.task not in fewer:
                fewer[group.task] = ""
                try:
                    sample_of(outline.tokenizer, task, replace(group, sample=grid.samples - 1))
                except IndexError as error:
                    fewer[group.task] = f"task {group.task} has fewer than {grid.samples} samples ({error})"
                except KvfoldError:
                    pass  # what a later sample cannot is told by its rows
    return [note for note in fewer.values() if note]


def _run(grid: Grid, outlines: Mapping[str, _Outline], command: str | None) -> Run:
    now = datetime.now(timezone.utc)
    dtypes = {
        str(getattr(outline.config, "dtype", None) or "float32").removeprefix("torch.")
        for outline in outlines.values()
    }
    return Run(
        id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        started=now.isoformat(timespec="seconds"),
        command=command or f"kvfold.evaluate.run({grid!r}, ...)",
        hardware=hardware(grid.device),
        versions=versions(),
        seed=grid.seed,
        dtype=grid.dtype if grid.dtype != "auto" else ", ".join(sorted(dtypes)),
    )


def hardware(device: str = "auto") -> str:
    """GPUs, or processor and threads."""
    if device != "cpu" and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of what figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "kvfold", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
