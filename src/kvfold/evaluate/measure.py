"""One measured cell after another: an exact prefill for all methods of a group, and what each makes of it."""

from __future__ import annotations

import gc
import math
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import KvfoldError
from kvfold.evaluate.grid import FULL, Group, Variant, open_task
from kvfold.evaluate.metrics import fidelity
from kvfold.evaluate.prefill import Prefill
from kvfold.evaluate.protocol import Reader, room, script_of
from kvfold.evaluate.results import Fidelity, Row, When
from kvfold.evaluate.tasks.base import Sample, Task
from kvfold.hf import bridge
from kvfold.hf.refuse import check_lengths
from kvfold.hf.support import check_supported

_FIGURES: dict[str, Callable[[Fidelity], float]] = {
    "perplexity": lambda found: math.exp(min(found.nll, 700.0)),
    "KL": lambda found: found.kl,
}
"""Scores of tasks that ask nothing, by their metric."""


def sample_of(tokenizer: Any, task: Task, group: Group) -> Sample:
    """A group's sample: the same for the same seed, task and index."""
    rng = random.Random(f"{group.seed}/{group.task}/{group.sample}")
    left, count = room(tokenizer, group.tokens, group.format)
    return task.sample(group.sample, left, count, rng)


class Bench:
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
            made: Any = why(error)
        else:
            made = self._attempt(lambda: Shared(self, group, task, sample))
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
            message = why(error)
        bridge.forget()
        free()
        return message


def why(error: Exception) -> str:
    """An error in one line, for a row."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {' '.join(str(error).split())}"
    if isinstance(error, KvfoldError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def free() -> None:
    """Return memory that nothing holds any more to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Shared:
    """What the methods of a group share: the exact prefill, and the full cache's answers and logits."""

    def __init__(self, bench: Bench, group: Group, task: Task, sample: Sample):
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
        check_lengths(method, self.bench.model.config, [len(self.script.folded)])
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
