"""What the options of a method may be: their annotations, in words and checked."""

from __future__ import annotations

import types
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from kvfold.methods.base import Method


def check_options(method: Method) -> None:
    """Raise ValueError, naming the option, if one is not what its annotation says."""
    hints = get_type_hints(type(method))
    for field in fields(method):
        value, kind = getattr(method, field.name), hints[field.name]
        if not _fits(value, kind):
            raise ValueError(f"{field.name} must be {describe(kind)}, got {value!r}")


def describe(kind: Any) -> str:
    """An annotation as words for help and errors."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(kind))
    if kind is type(None):
        return "none"
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) in (tuple, list):
        parts = [describe(part) for part in get_args(kind) if part is not Ellipsis]
        return f"{','.join(parts)},..."
    return getattr(kind, "__name__", str(kind))


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        of = parts[:1] * len(value) if parts[1:] == (...,) and isinstance(value, tuple) else parts
        return isinstance(value, tuple) and len(value) == len(of) and all(map(_fits, value, of))
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return kind is Any or isinstance(value, get_origin(kind) or kind)
