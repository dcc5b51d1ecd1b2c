"""Tasks: one file each, made from a seed or read from a data set; and how a label such as `needle:depths=9,needles=3` names one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks.base import Count, Sample, Task, Turn
from kvfold.evaluate.tasks.code_completion import CodeCompletion
from kvfold.evaluate.tasks.datasets import DATASETS
from kvfold.evaluate.tasks.fidelity import Fidelity
from kvfold.evaluate.tasks.kv_retrieval import KVRetrieval
from kvfold.evaluate.tasks.needle import Needle
from kvfold.evaluate.tasks.perplexity import Perplexity
from kvfold.evaluate.tasks.ruler import RULER

TASKS: dict[str, type[Task]] = {
    cls.name: cls for cls in (Needle, *RULER, KVRetrieval, CodeCompletion, Perplexity, Fidelity)
} | DATASETS
"""Every task by its name on the command line."""

GROUPS: dict[str, tuple[str, ...]] = {"ruler": tuple(cls.name for cls in RULER)}
"""Names that stand for several tasks."""


def make_task(label: str) -> Task:
    """The task of a label: `name`, or `name:option=value,option=value`.

    Raises
    ------
    KvfoldError
        Unknown task (the message lists near names) or option (it lists those the task has), or a value that does not
        fit.
    """
    name, options = _split(label)
    if name in GROUPS:
        raise KvfoldError(f"{name} is a group of tasks, {', '.join(GROUPS[name])}: name one, or use expand")
    cls = _named(name)
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    values = {}
    for option, value in options.items():
        if option not in known:
            near = _near(option, known)
            raise KvfoldError(
                f"task {name} has no option {option!r}{near}: it has {', '.join(known) or 'none'}"
            )
        values[option] = _parse(value, hints[option], f"{name}:{option}")
    return cls(**values)


def expand(label: str) -> list[str]:
    """The labels that a label stands for: a group's tasks, each with the options that it has, or the label itself.

    Raises
    ------
    KvfoldError
        As `make_task`; for a group, an option that none of its tasks has.
    """
    name, options = _split(label)
    if name not in GROUPS:
        make_task(label)
        return [label]
    members = {member: [field.name for field in fields(TASKS[member])] for member in GROUPS[name]}
    every = sorted({option for known in members.values() for option in known})
    for option in options:
        if option not in every:
            raise KvfoldError(
                f"no task of {name} has an option {option!r}{_near(option, every)}: they have {', '.join(every)}"
            )
    labels = []
    for member, known in members.items():
        own = [f"{option}={value}" for option, value in options.items() if option in known]
        labels.append(f"{member}:{','.join(own)}" if own else member)
        make_task(labels[-1])
    return labels


def _split(label: str) -> tuple[str, dict[str, str]]:
    name, _, rest = label.strip().partition(":")
    items: list[str] = []
    for item in rest.split(",") if rest else ():
        if "=" in item or not items:
            items.append(item)
        else:  # a comma within a value
            items[-1] += f",{item}"
    options = {}
    for item in items:
        option, equals, value = item.partition("=")
        if not equals or not option.strip():
            raise KvfoldError(f"task {label!r}: write options as name:option=value,option=value")
        options[option.strip().replace("-", "_")] = value.strip()
    return name.strip(), options


def _named(name: str) -> type[Task]:
    if name in TASKS:
        return TASKS[name]
    every = [*TASKS, *GROUPS]
    near = _near(name, every)
    raise KvfoldError(f"unknown task {name!r}{near}" + ("" if near else f": choose from {', '.join(every)}"))


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _parse(value: str, kind: Any, option: str) -> Any:
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for one in kinds:
        if get_origin(one) is Literal and value in get_args(one):
            return value
        if one is bool and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if one is str:
            return value
        if one in (int, float):
            try:
                return one(value)
            except ValueError:
                continue
    wanted = [
        "|".join(map(str, get_args(one)))
        if get_origin(one) is Literal
        else getattr(one, "__name__", str(one))
        for one in kinds
    ]
    raise KvfoldError(f"{option}={value}: expected {' or '.join(wanted)}")


__all__ = ["GROUPS", "TASKS", "Count", "Sample", "Task", "Turn", "expand", "make_task"]
