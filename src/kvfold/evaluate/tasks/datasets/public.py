"""What tasks on public data sets share: rows are loaded and checked once, before any work."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvfold.evaluate.tasks.base import Task
from kvfold.evaluate.tasks.datasets.rows import Row


@dataclass(frozen=True, kw_only=True)
class PublicTask(Task):
    """A task whose samples are rows of a data set, in its order.

    Parameters
    ----------
    path : str
        A local copy (.jsonl, .json or .parquet, or the folder that holds it under its published name), or the hub id
        of a mirror with the same fields ("": the hub).
    """

    path: str = ""

    @abstractmethod
    def load(self) -> Sequence[Row]:
        """The rows, checked.

        Raises
        ------
        KvfoldError
            As `rows.load`.
        """

    def rows(self) -> Sequence[Row]:
        """The rows of `load`, which is called once."""
        return _rows(self)

    def check(self) -> None:
        self.rows()


@lru_cache(maxsize=4)
def _rows(task: PublicTask) -> Sequence[Row]:
    return task.load()
