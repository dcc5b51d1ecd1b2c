"""Measure a grid: one exact prefill for all methods of a cell, results appended row by row, resumable at any moment."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import platform
import random
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import KvfoldError
from kvfold.evaluate import results
from kvfold.evaluate.grid import FULL, Grid, Group, Variant, model_name, open_task
from kvfold.evaluate.metrics import fidelity
from kvfold.evaluate.prefill import Prefill
from kvfold.evaluate.protocol import Reader, room, script_of
from kvfold.evaluate.results import Appender, Cell, Fidelity, Row, Run, When
from kvfold.evaluate.tasks.base import Sample, Task
from kvfold.hf import bridge
from kvfold.hf.support import cache_shape, check_supported
from kvfold.prompt import context_length, has_chat

Progress = Callable[[int, int], None]
"""Called with (cells done, cells to do)."""

_Tick = Callable[[int], None]

_FIGURES: dict[str, Callable[[Fidelity], float]] = {
    "perplexity": lambda found: math.exp(min(found.nll, 700.0)),
    "KL": lambda found: found.kl,
}
"""Scores of tasks that ask nothing, by their metric."""


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
        _need_accelerate()
    results.check_schema(folder)
    outlines = {model: _outline(model) for model in dict.fromkeys(grid.models)}
    notes = _check(grid, outlines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvfoldError(f"{folder} cannot be made a results folder: {error.strerror or error}") from error
    plan = _Plan(grid, folder, retry, {model: has_chat(each.tokenizer) for model, each in outlines.items()})
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
            died = _launch(plan, this.id, workers, tick)
        elif ranks > 1:
            _share(plan, this.id, tick)
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


def sample_of(tokenizer: Any, task: Task, group: Group) -> Sample:
    """A group's sample: the same for the same seed, task and index."""
    rng = random.Random(f"{group.seed}/{group.task}/{group.sample}")
    left, count = room(tokenizer, group.tokens, group.format)
    return task.sample(group.sample, left, count, rng)


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


# ---- work ----


class _Plan:
    """The groups of a grid, and which cells a folder has already."""

    def __init__(self, grid: Grid, folder: Path, retry: bool, chats: Mapping[str, bool]):
        self.grid, self.folder, self.retry, self.chats = grid, folder, retry, chats
        self.groups = grid.groups(chats)
        self.variants = grid.variants()
        self.whens: list[When] = list(dict.fromkeys(grid.when))  # type: ignore[arg-type]
        self.notes: list[str] = []
        self.done: set[Cell] = set()
        if (folder / results.RUNS).is_file():
            found = results.read(folder)
            self.notes = found.notes
            self.done = {row.cell for row in found.rows if row.error is None or not retry}

    def measure(self, run_id: str, index: int, count: int, device: str, tick: _Tick) -> None:
        """Measure every `count`-th group from `index` on that is not done."""
        from kvfold.cli.models import load_model

        specs = {model_name(spec): spec for spec in self.grid.models}
        done = 0
        # A share is counted over all groups, so that workers agree on it whatever each finds done.
        share = self.groups[index::count]
        with Appender(self.folder / f"rows-{index}.jsonl") as file:
            for name, groups in groupby(share, key=lambda group: group.model):
                bench = None
                for group in groups:
                    wanted = [
                        (variant, [when for when in self.whens if group.cell(variant, when) not in self.done])
                        for variant in self.variants
                    ]
                    wanted = [(variant, missing) for variant, missing in wanted if missing]
                    if not wanted:
                        continue
                    if bench is None:
                        model, tokenizer = load_model(
                            specs[name], dtype=self.grid.dtype, device=device, quiet=True
                        )
                        bench = _Bench(model, tokenizer, self.variants)
                        del model
                    for row in bench.rows(group, wanted, run_id):
                        file.write(row)
                        done += 1
                        tick(done)
                del bench
                _free()


class _Bench:
    """A loaded model, on which groups are measured."""

    def __init__(self, model: Any, tokenizer: Any, variants: Sequence[Variant]):
        check_supported(model)
        self.model, self.tokenizer = model, tokenizer
        self.methods = [variant.method for variant in variants]

    def rows(
        self, group: Group, wanted: Sequence[tuple[Variant, Sequence[When]]], run_id: str
    ) -> Iterator[Row]:
        """A row for each wanted cell, each as soon as it is measured."""
        task = open_task(group.task)
        try:
            sample = sample_of(self.tokenizer, task, group)
        except IndexError:
            return  # a data set with fewer samples than asked for
        except Exception as error:
            made: Any = _why(error)
        else:
            made = self._attempt(lambda: _Shared(self, group, task, sample))
        for variant, whens in wanted:
            figures: dict[bool, Row] = {}
            for when in whens:
                cell = group.cell(variant, when)
                # Without blocks nothing is folded while generating, so that both are the same measurement.
                exact = when == "prefill" or not variant.method.block
                if isinstance(made, str):
                    yield Row(cell, run_id, error=made)
                    continue
                if exact not in figures:
                    measured = self._attempt(partial(made.measure, variant, exact))
                    figures[exact] = (
                        Row(cell, run_id, error=measured) if isinstance(measured, str) else measured
                    )
                yield replace(figures[exact], cell=cell, run=run_id)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """The result of some work, or why there is none; then nothing of it is left in memory."""
        try:
            return work()
        except Exception as error:
            message = _why(error)
        bridge.forget()
        _free()
        return message


def _why(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {' '.join(str(error).split())}"
    if isinstance(error, KvfoldError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Shared:
    """What the methods of a group share: the exact prefill, and the full cache's answers and logits."""

    def __init__(self, bench: _Bench, group: Group, task: Task, sample: Sample):
        self.bench, self.group, self.task, self.sample = bench, group, task, sample
        self.script = script = script_of(bench.tokenizer, sample, group.view, group.format)
        model = bench.model
        start = self._now()
        # All methods of the grid, not only those still missing: what one is shown must not depend on the others.
        self.prefill = Prefill(model, torch.tensor([script.folded], device=model.device), bench.methods)
        self.prefill_seconds = self._now() - start
        self.reader = reader = Reader(model, bench.tokenizer, exact=True)
        full = self.prefill.fold(FULL.method)
        self.answers: list[list[int]] = []
        self.chunks: list[tuple[list[int], list[int]]] = []
        if script.continuation:
            self.chunks.append((script.asked[0], script.continuation))
        else:
            cache = full.fork()
            for asked, limit in zip(script.asked, script.limits, strict=True):
                if self.answers:
                    asked = reader.unread(self.answers[-1]) + asked
                self.answers.append(reader.answer(cache, asked, limit, script.stop))
                self.chunks.append((asked, self.answers[-1]))
        self.logits = reader.forced(full.fork(), self.chunks)
        self.targets = torch.tensor(
            [token for _, answer in self.chunks for token in answer], device=self.logits.device
        )

    def _now(self) -> float:
        if self.bench.model.device.type == "cuda":
            torch.cuda.synchronize(self.bench.model.device)
        return time.perf_counter()

    def measure(self, variant: Variant, exact: bool) -> Row:
        """A row, but for its cell and run.

        Raises
        ------
        BudgetError, OutOfMemoryError, Exception
            Whatever the method fails with.
        """
        method = variant.method
        start = self._now()
        count = len(self.script.folded)
        if count > method.shortest:
            shape = cache_shape(self.bench.model.config)
            method.check(count, shape.kv_heads, shape.key_dim, shape.value_dim)
        cache = self.prefill.fold(method)
        fold_seconds = self._now() - start
        ledger = cache.ledger()
        widths = cache.widths() if not self.group.sample else None
        if variant == FULL:
            reader, logits, answers = self.reader, self.logits, self.answers
        else:
            reader = Reader(self.bench.model, self.bench.tokenizer, exact)
            logits = reader.forced(cache.fork(), self.chunks)
            answers = []
            if self.answers:
                answers = reader.follow(cache, self.chunks, logits.argmax(-1).tolist(), self.script)
        found = fidelity(self.logits, logits, self.targets)
        texts = [reader.text(answer, self.script.stop) for answer in answers]
        if texts:
            turns = self.sample.turns
            score = sum(map(self.task.score, texts, turns)) / len(turns)
        else:
            score = _FIGURES[self.task.metric](found)
        return Row(
            cell=self.group.cell(variant, "prefill"),
            run="",
            score=score,
            metric=self.task.metric,
            higher_is_better=self.task.higher_is_better,
            fidelity=found,
            answers=texts,
            references=[list(turn.references) for turn in self.sample.turns] if texts else [],
            prompt_tokens=len(self.script.folded),
            folded_bytes=ledger.folded_bytes + ledger.by_purpose.get("tail", 0),
            full_bytes=ledger.full_bytes,
            widths=widths,
            prefill_seconds=self.prefill_seconds,
            fold_seconds=fold_seconds,
            decode_seconds=reader.seconds / reader.steps if reader.steps else None,
            about=self.sample.about,
            ledger=ledger.by_purpose,
            note="; ".join(entry["why"] for entry in cache.report if not entry["folded"]),
        )


# ---- several processes ----


def _need_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise KvfoldError("several workers need accelerate: pip install 'kvfold[eval]'")


def _share(plan: _Plan, run_id: str, tick: _Tick) -> None:
    """Measure the share of one process among those that accelerate started."""
    from accelerate import PartialState

    cpu = plan.grid.device == "cpu" or not torch.cuda.is_available()
    # Nothing is ever exchanged, so that a process that dies takes no other with it.
    state = PartialState(cpu=cpu, backend="gloo", timeout=timedelta(minutes=2))
    try:
        plan.measure(run_id, state.process_index, state.num_processes, str(state.device), tick)
    finally:
        state.destroy_process_group()


def _worker(grid: Grid, folder: Path, retry: bool, chats: Mapping[str, bool], run_id: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _share(_Plan(grid, folder, retry, chats), run_id, lambda done: None)
    except Exception as error:
        rank = os.environ.get("RANK", "?")
        sys.stderr.write(f"worker {rank}: {_why(error)}\n")
        sys.exit(1)


def _end_with_parent() -> None:
    """A worker whose parent was killed would measure on, unseen, beside the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started here leave Ctrl-C to their parent, which ends them without a traceback from each."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _launch(plan: _Plan, run_id: str, workers: int, tick: _Tick) -> list[str]:
    """Measure in processes of their own; notes on those that failed."""
    from accelerate.utils import patch_environment

    context = multiprocessing.get_context("spawn")
    processes = []
    shared = {
        "world_size": workers,
        "local_world_size": workers,
        "master_addr": "127.0.0.1",
        "master_port": _free_port(),
        "omp_num_threads": max(1, torch.get_num_threads() // workers),
    }
    before = _rows(plan.folder)
    try:
        for rank in range(workers):
            process = context.Process(
                target=_worker,
                args=(plan.grid, plan.folder, plan.retry, plan.chats, run_id),
                name=f"kvfold-eval-{rank}",
            )
            with patch_environment(**shared, **_placed(rank)), _deaf_to_interrupts():
                process.start()
            processes.append(process)
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            tick(_rows(plan.folder) - before)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
    failed = [(rank, process.exitcode) for rank, process in enumerate(processes) if process.exitcode]
    return [
        f"worker {rank} ended with exit code {code}: run again to measure what it left"
        for rank, code in failed
    ]


def _placed(rank: int) -> dict[str, str | int]:
    """A worker's place: every worker sees one GPU, which several may share, since much of folding is no GPU work."""
    place: dict[str, str | int] = {"rank": rank, "local_rank": 0 if torch.cuda.is_available() else rank}
    if torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
        place["cuda_visible_devices"] = devices[rank % len(devices)]
    return place


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _rows(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("rows-*.jsonl"))
