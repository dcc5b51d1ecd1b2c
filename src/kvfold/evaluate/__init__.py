"""Measuring what a fold loses: tasks, shared prefills, the runner of grids and its results."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Grid": "kvfold.evaluate.grid",
    "Summary": "kvfold.evaluate.runner",
    "read": "kvfold.evaluate.results",
    "run": "kvfold.evaluate.runner",
}

__all__ = ["Grid", "Summary", "read", "run"]

if TYPE_CHECKING:
    from kvfold.evaluate.grid import Grid
    from kvfold.evaluate.results import read
    from kvfold.evaluate.runner import Summary, run


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvfold.evaluate' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
