"""The groups of a grid, which of their cells a folder has already, and how a process measures its share of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

from kvfold.evaluate import results
from kvfold.evaluate.grid import Grid, model_name
from kvfold.evaluate.measure import Bench, free
from kvfold.evaluate.results import Appender, Cell, When

Tick = Callable[[int], None]
"""Called with the cells a process has measured."""


class Plan:
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

    def measure(self, run_id: str, index: int, count: int, device: str, tick: Tick) -> None:
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
                        bench = Bench(model, tokenizer, self.variants)
                        del model
                    for row in bench.rows(group, wanted, run_id):
                        file.write(row)
                        done += 1
                        tick(done)
                del bench
                free()
