"""Method hyper-parameters from the command line: `--option name=value`, read by the type of the field."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvfold.errors import KvfoldError
from kvfold.methods.options import describe

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def build_method(name: str, given: dict[str, Any], options: Iterable[str]) -> Any:
    """A method from its name, options that have flags of their own, and `name=value` texts.

    The name may have options of its own (`snapkv:window=8`) and may be a chain (`snapkv >> blockgtq:bits=4`), to whose first
    method flags and options go. A table may be given as `value_error=@table.json`, from a file that `kvfold calibrate` wrote.

    Raises
    ------
    KvfoldError
        Unknown method or option, or a value of the wrong type or out of range.
    """
    from kvfold.methods import METHODS, Chain, make_method

    first, chained, then = name.rpartition(">>")
    if chained:
        second = split_label(then)[0]
        if second in METHODS and not METHODS[second].recodes:
            coders = " or ".join(sorted(name for name, cls in METHODS.items() if cls.recodes))
            raise KvfoldError(f"{second} cannot code what another method keeps: end the chain with {coders}")
        parts = build_method(first, given, options), build_method(then, {}, ())
        try:
            return Chain(first=parts[0], then=parts[1])
        except ValueError as error:
            raise KvfoldError(str(error)) from error
    name, own = split_label(name)
    options = [*(f"{key}={value}" for key, value in own.items()), *options]
    values = {key: value for key, value in given.items() if value is not None}
    types_ = get_type_hints(METHODS[name]) if name in METHODS else {}
    for option in options:
        key, equals, text = option.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise KvfoldError(f"--option {option}: write it as name=value")
        if text.startswith("@") and key in ("value_error", "key_error"):
            from kvfold.methods.rdkv_published import load_table

            values[key] = load_table(text[1:])[key]
            continue
        values[key] = parse(text.strip(), types_[key], key) if key in types_ else text
    try:
        return make_method(name, **values)
    except (ValueError, TypeError) as error:
        if "keep" in types_ and "got none" in str(error):
            raise KvfoldError(f"{name} needs a budget: --keep 0.1 for a tenth of the 16-bit bytes") from error
        raise KvfoldError(str(error)) from error


def split_label(label: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name:option=value,option=value`; a value may hold commas.

    Raises
    ------
    KvfoldError
        An option without a value.
    """
    name, _, rest = label.partition(":")
    options: dict[str, str] = {}
    key = None
    for part in rest.split(",") if rest else ():
        option, equals, value = part.partition("=")
        if equals:
            key = option.strip().replace("-", "_")
            options[key] = value.strip()
        elif key is not None:
            options[key] += "," + part
        else:
            raise KvfoldError(f"{label}: write options as {name}:option=value,option=value")
    return name.strip(), options


def parse(text: str, kind: Any, name: str) -> Any:
    """Read a value of a field's type.

    Raises
    ------
    KvfoldError
        The text is no such value; the message says what would be.
    """
    for alternative in _alternatives(kind):
        try:
            return _parse_one(text, alternative)
        except (ValueError, TypeError):
            continue
    raise KvfoldError(f"--option {name}={text}: expected {describe(kind)}")


def _alternatives(kind: Any) -> list[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        # Text fits anything, so it comes last.
        return sorted(get_args(kind), key=lambda part: part is str)
    return [kind]


def _parse_one(text: str, kind: Any) -> Any:
    if kind is type(None):
        if text.lower() in ("none", ""):
            return None
        raise ValueError
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError
        return _BOOLEANS[text.lower()]
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if text == str(choice):
                return choice
        raise ValueError
    if get_origin(kind) in (tuple, list):
        parts = [part for part in get_args(kind) if part is not Ellipsis] or [str]
        return tuple(
            _parse_one(item.strip(), parts[0]) for item in text.strip("()[]").split(",") if item.strip()
        )
    if kind in (int, float, str):
        return kind(text)
    raise TypeError


def default_of(field: Field[Any]) -> Any:
    """A field's default as plain data, or None."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None


def changed_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of a method as plain data (`Method.to_dict`, or read from JSON), the options that are not at their default."""
    from kvfold.methods import METHODS, Chain

    given = {key: value for key, value in saved.items() if key != "method"}
    if saved["method"] == Chain.name:
        return {key: _label(part) for key, part in given.items()}
    if saved["method"] not in METHODS:
        return given
    defaults = {field.name: _plain(default_of(field)) for field in fields(METHODS[saved["method"]])}
    return {
        key: value for key, value in given.items() if key not in defaults or _plain(value) != defaults[key]
    }


def _label(saved: Mapping[str, Any]) -> str:
    options = ",".join(f"{key}={value}" for key, value in changed_options(saved).items())
    return f"{saved['method']}:{options}" if options else saved["method"]


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def describe_methods() -> list[dict[str, Any]]:
    """Every method with its paper and options, as plain data."""
    from kvfold.methods import METHODS

    result = []
    for name, cls in sorted(METHODS.items()):
        hints = get_type_hints(cls)
        options = [
            {
                "name": field.name,
                "type": describe(hints[field.name]),
                "default": default_of(field),
                "required": field.default is MISSING and field.default_factory is MISSING,
            }
            for field in fields(cls)
        ]
        about = (cls.__doc__ or "").strip().split("\n\n")[0]
        result.append(
            {"name": name, "paper": cls.paper, "about": " ".join(about.split()), "options": options}
        )
    return result
