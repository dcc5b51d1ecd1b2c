"""Every option of every method is held to its annotation, whoever makes the method."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from kvfold import make_method
from kvfold.methods import METHODS, BlockGTQ, SnapKV
from kvfold.methods.base import Method
from kvfold.methods.chain import Chain

WRONG = {int: (2.5, "3", True, None), float: ("0.5", True), str: (3,), bool: (1, "yes")}


def wrong(kind):
    """Values that an annotation does not allow."""
    if get_origin(kind) is Literal:
        return ("no such choice",)
    if get_origin(kind) is tuple:
        return (3, [*get_args(kind)[:1]], ("x",))
    parts = get_args(kind)
    if parts:
        common = set.intersection(*(set(map(repr, wrong(part))) for part in parts if part is not type(None)))
        return tuple(
            value for part in parts for value in wrong(part) if repr(value) in common and value is not None
        )
    return WRONG.get(kind, ())


CASES = [
    (name, field.name, value)
    for name, cls in METHODS.items()
    for field in fields(cls)
    for value in wrong(get_type_hints(cls)[field.name])
]


@pytest.mark.parametrize(("name", "option", "value"), CASES, ids=lambda x: str(x))
def test_an_option_of_another_kind_is_named(name, option, value):
    with pytest.raises(ValueError, match=rf"^{option} must be"):
        make_method(name, **{option: value})


def test_there_are_cases_of_every_kind():
    assert len(CASES) > 200
    assert {type(value) for _, _, value in CASES} >= {str, float, int, bool, tuple}


NUMBERS = [
    (name, field.name)
    for name, cls in METHODS.items()
    for field in fields(cls)
    if float in (kind := get_type_hints(cls)[field.name], *get_args(kind))
]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_not_a_number_is_refused(name, option):
    for needed in ({}, {"keep": 0.5}, {"bits": 4}):
        with contextlib.suppress(ValueError):
            make_method(name, **needed)
            break
    else:
        pytest.fail(f"{name} needs more than these options")
    with pytest.raises(ValueError, match=option):
        make_method(name, **(needed | {option: float("nan")}))


def test_right_values_pass():
    assert BlockGTQ(bits=3).bits == BlockGTQ(bits=3.0).bits
    assert BlockGTQ(widths=(2, 4), bits=2.5, most_widths=None).widths == (2, 4)
    assert isinstance(SnapKV(keep=1) >> BlockGTQ(), Chain)


def test_a_chain_holds_methods():
    with pytest.raises(ValueError, match=r"^then must be Method"):
        Chain(first=SnapKV(keep=0.5), then="blockgtq")
    assert all(issubclass(cls, Method) for cls in METHODS.values())
