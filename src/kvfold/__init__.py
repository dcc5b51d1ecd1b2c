"""kvfold: fold the key-value cache of a long prompt to a few percent of its size."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "fold": "kvfold.api",
    "attach": "kvfold.api",
    "load": "kvfold.api",
    "kept_shares": "kvfold.hf.modality",
    "generate": "kvfold.engine",
    "stream": "kvfold.engine",
    "Engine": "kvfold.engine",
    "FoldedCache": "kvfold.hf.cache",
    "Ledger": "kvfold.ledger",
    "Method": "kvfold.methods.base",
    "METHODS": "kvfold.methods",
    "make_method": "kvfold.methods",
    "Full": "kvfold.methods",
    "RDKV": "kvfold.methods",
    "BlockGTQ": "kvfold.methods",
    "DBTrimKV": "kvfold.methods",
    "PublishedRDKV": "kvfold.methods",
    "XKV": "kvfold.methods",
    "SnapKV": "kvfold.methods",
    "KIVI": "kvfold.methods",
    "KVSculpt": "kvfold.methods",
}

_ROOMS = ("artifact", "evaluate")
"""Packages that `import kvfold` alone reaches."""

__all__ = [
    "KIVI",
    "METHODS",
    "RDKV",
    "XKV",
    "BlockGTQ",
    "DBTrimKV",
    "Engine",
    "FoldedCache",
    "Full",
    "KVSculpt",
    "Ledger",
    "Method",
    "PublishedRDKV",
    "SnapKV",
    "__version__",
    "artifact",
    "attach",
    "evaluate",
    "fold",
    "generate",
    "kept_shares",
    "load",
    "make_method",
    "stream",
]

if TYPE_CHECKING:
    # "as" makes each a public name for type checkers, which cannot see `__getattr__`.
    from kvfold import artifact as artifact
    from kvfold import evaluate as evaluate
    from kvfold.api import attach as attach
    from kvfold.api import fold as fold
    from kvfold.api import load as load
    from kvfold.engine import Engine as Engine
    from kvfold.engine import generate as generate
    from kvfold.engine import stream as stream
    from kvfold.hf.cache import FoldedCache as FoldedCache
    from kvfold.hf.modality import kept_shares as kept_shares
    from kvfold.ledger import Ledger as Ledger
    from kvfold.methods import KIVI as KIVI
    from kvfold.methods import METHODS as METHODS
    from kvfold.methods import RDKV as RDKV
    from kvfold.methods import XKV as XKV
    from kvfold.methods import BlockGTQ as BlockGTQ
    from kvfold.methods import DBTrimKV as DBTrimKV
    from kvfold.methods import Full as Full
    from kvfold.methods import KVSculpt as KVSculpt
    from kvfold.methods import PublishedRDKV as PublishedRDKV
    from kvfold.methods import SnapKV as SnapKV
    from kvfold.methods import make_method as make_method
    from kvfold.methods.base import Method as Method


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"kvfold.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
