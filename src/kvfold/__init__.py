"""kvfold: fold the key-value cache of a long prompt to a few percent of its size."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "fold": "kvfold.api",
    "attach": "kvfold.api",
    "load": "kvfold.api",
    "FoldedCache": "kvfold.hf.cache",
    "Ledger": "kvfold.ledger",
    "Method": "kvfold.methods.base",
    "METHODS": "kvfold.methods",
    "make_method": "kvfold.methods",
    "Full": "kvfold.methods",
    "RDKV": "kvfold.methods",
    "PublishedRDKV": "kvfold.methods",
    "SnapKV": "kvfold.methods",
    "KIVI": "kvfold.methods",
}

__all__ = sorted([*_EXPORTS, "__version__"])

if TYPE_CHECKING:
    from kvfold.api import attach, fold, load
    from kvfold.hf.cache import FoldedCache
    from kvfold.ledger import Ledger
    from kvfold.methods import KIVI, METHODS, RDKV, Full, PublishedRDKV, SnapKV, make_method
    from kvfold.methods.base import Method


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
