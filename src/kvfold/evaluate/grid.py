"""What to measure: models x methods x budgets x tasks x lengths x protocols x samples, checked whole before any work."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, get_args

from kvfold.cli.models import DEVICES, DTYPES
from kvfold.errors import KvfoldError
from kvfold.evaluate.results import Cell, Format, View, When
from kvfold.evaluate.tasks.base import Task
from kvfold.methods import METHODS, Full
from kvfold.methods.base import Method

AUTO = "auto"

CHOICES: dict[str, tuple[str, ...]] = {
    "views": get_args(View),
    "when": get_args(When),
    "formats": (AUTO, *get_args(Format)),
}


@dataclass(frozen=True)
class Variant:
    """A method at a budget.

    Attributes
    ----------
    label : str
        Name and options that differ from the defaults.
    budget : str
        Such as `keep=0.1`, or "".
    method : Method
    """

    label: str
    budget: str
    method: Method


FULL = Variant(Full.name, "", Full())


@dataclass(frozen=True)
class Group:
    """Cells that share one exact prefill."""

    model: str
    task: str
    tokens: int
    view: View
    format: Format
    sample: int
    seed: int

    def cell(self, variant: Variant, when: When) -> Cell:
        """One of its cells."""
        return Cell(
            model=self.model,
            method=variant.label,
            budget=variant.budget,
            task=self.task,
            tokens=self.tokens,
            view=self.view,
            when=when,
            format=self.format,
            sample=self.sample,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to measure; every combination is one cell, and the full cache runs beside each.

    Parameters
    ----------
    models : sequence of str
        Folders, hub ids, or `demo`.
    tasks : sequence of str
        Labels: a name, or `name:option=value,option=value`; the name of a group, such as `ruler`, stands for its tasks.
    methods : sequence of str
        Labels likewise. A budget among the options is that method's own.
    budgets : sequence of str
        Such as `keep=0.1`, `bits_per_element=2` or `tokens=256`.
    tokens : sequence of int
        Prompt lengths.
    samples : int
        Of each task and length.
    views : "unseen", "in view"
    when : "prefill", "generating"
    formats : "auto", "chat", "plain"
        auto: the chat template of models that have one.
    seed : int
        Another seed makes other samples, and other cells.
    dtype, device : str
        As for `kvfold fold`.

    Raises
    ------
    KvfoldError
        Anything in it is unknown or impossible.
    """

    models: Sequence[str]
    tasks: Sequence[str]
    methods: Sequence[str] = ("rdkv",)
    budgets: Sequence[str] = ("keep=0.25", "keep=0.1")
    tokens: Sequence[int] = (4096,)
    samples: int = 5
    views: Sequence[str] = ("unseen",)
    when: Sequence[str] = ("prefill",)
    formats: Sequence[str] = (AUTO,)
    seed: int = 0
    dtype: str = AUTO
    device: str = AUTO

    def __post_init__(self) -> None:
        for name in ("models", "tasks", "methods", "budgets", "tokens", "views", "when", "formats"):
            object.__setattr__(self, name, _sequence(name, getattr(self, name)))
            if not getattr(self, name) and name != "budgets":
                raise KvfoldError(f"{name}: give at least one")
        for name, choices in CHOICES.items():
            for value in getattr(self, name):
                _known(name, value, choices)
        for value in self.tokens:
            _whole("tokens", value, 1)
        for name, choices in (("dtype", DTYPES), ("device", DEVICES)):
            _known(name, getattr(self, name), choices)
        _whole("samples", self.samples, 1)
        _whole("seed", self.seed, 0)
        labels = [label for given in self.tasks for label in _expand(given)]
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(labels)))
        names = [model_name(model) for model in self.models]
        for name in names:
            if names.count(name) > 1 and len(set(self.models)) > 1:
                raise KvfoldError(f"models: two are called {name!r}; give one of the folders another name")
        self.variants()

    @staticmethod
    def from_dict(data: Any) -> Grid:
        """A grid from plain data, such as YAML; `keep: [0.25, 0.1]` is short for budgets.

        Raises
        ------
        KvfoldError
            Also for unknown keys (near names are listed) and values of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise KvfoldError("a grid is a mapping with models, tasks, methods, ...")
        data = dict(data)
        known = [field.name for field in fields(Grid)]
        for key in data:
            if key not in (*known, "keep", "bits_per_element"):
                raise KvfoldError(_unknown("key", key, [*known, "keep", "bits_per_element"]))
        short = {key: data.pop(key) for key in ("keep", "bits_per_element") if key in data}
        if short:
            budgets = list(_sequence("budgets", data.get("budgets", ())))
            budgets += [f"{key}={value}" for key, values in short.items() for value in _sequence(key, values)]
            data["budgets"] = budgets
        for key in ("models", "tasks"):
            if key not in data:
                raise KvfoldError(f"{key}: give at least one")
        return Grid(**data)

    def variants(self) -> list[Variant]:
        """The full cache, then every method at every budget it takes."""
        found = {(FULL.label, FULL.budget): FULL}
        for label in self.methods:
            for variant in _variants(label, self.budgets):
                found.setdefault((variant.label, variant.budget), variant)
        return list(found.values())

    def groups(self, chats: Mapping[str, bool]) -> list[Group]:
        """Every shared prefill, in the order of measuring: all tasks' first samples first.

        Parameters
        ----------
        chats : mapping of str to bool
            Which models have a chat template.
        """
        return [
            group
            for model in dict.fromkeys(self.models)
            for sample in range(self.samples)
            for group in self.groups_of(model, sample, chat=chats[model])
        ]

    def groups_of(self, model: str, sample: int, *, chat: bool) -> list[Group]:
        """Those of one model and sample."""
        found: dict[Group, None] = {}
        for task, tokens, form, view in product(self.tasks, self.tokens, self.formats, self.views):
            if form == AUTO:
                form = "chat" if chat else "plain"
            if not open_task(task).asks:
                view = "unseen"  # nothing is asked
            group = Group(model_name(model), task, tokens, view, form, sample, self.seed)  # type: ignore[arg-type]
            found[group] = None
        return list(found)


def open_task(label: str) -> Task:
    """A task from its label.

    Raises
    ------
    KvfoldError
        No such task or option.
    """
    from kvfold.evaluate import tasks

    try:
        return tasks.make_task(label)
    except KvfoldError:
        raise
    except (ValueError, TypeError) as error:
        raise KvfoldError(f"task {label}: {error}") from error


def _expand(label: str) -> list[str]:
    from kvfold.evaluate import tasks

    labels = tasks.expand(label)
    for each in labels:
        open_task(each)
    return labels


def model_name(spec: str) -> str:
    """What results call a model: a folder's own name, or the hub id."""
    path = Path(os.path.expanduser(spec))
    return path.resolve().name if path.is_dir() else spec


def _variants(label: str, budgets: Sequence[str]) -> Iterable[Variant]:
    from kvfold.cli.options import split_label

    first, chained, then = label.partition(">>")
    if chained:
        (code,) = _variants(then, ("",))
        told = code.label + (":,"[":" in code.label] + code.budget if code.budget else "")
        for variant in _variants(first, budgets):
            try:
                yield Variant(f"{variant.label} >> {told}", variant.budget, variant.method >> code.method)
            except ValueError as error:
                raise KvfoldError(f"method {label}: {error}") from error
        return
    name, options = split_label(label)
    if name not in METHODS:
        raise KvfoldError(_unknown("method", name, METHODS))
    known = [field.name for field in fields(METHODS[name])]
    terms = [term for term in METHODS[name].budgets if term in known]
    own = {term: options.pop(term) for term in terms if term in options}
    if own:
        wanted = [",".join(f"{term}={value}" for term, value in own.items())]
    elif terms:
        wanted = list(budgets)
        if not wanted:
            raise KvfoldError(f"method {name} needs a budget: such as --keep 0.1")
    else:
        wanted = [""]
    for budget in wanted:
        term, _, value = budget.partition("=")
        if budget and term not in terms:
            raise KvfoldError(f"budget {budget}: {_unknown('term', term, terms)} (method {name})")
        method = _make(label, name, {**options, **({term: value} if budget else {})})
        shown = [
            f"{key}={_shown(method, key, options[key])}" for key in known if _changed(method, key, options)
        ]
        yield Variant(
            f"{name}:{','.join(shown)}" if shown else name,
            f"{term}={_shown(method, term, value)}" if budget else "",
            method,
        )


def _make(label: str, name: str, options: Mapping[str, str]) -> Method:
    from kvfold.cli.options import build_method

    known = [field.name for field in fields(METHODS[name])]
    for key in options:
        if key not in known:
            raise KvfoldError(f"method {label}: {_unknown('option', key, known)}")
    try:
        method: Method = build_method(name, {}, [f"{key}={value}" for key, value in options.items()])
    except KvfoldError as error:
        raise KvfoldError(f"method {label}: {str(error).removeprefix('--option ')}") from error
    return method


def _changed(method: Method, key: str, options: Mapping[str, str]) -> bool:
    from kvfold.cli.options import default_of

    field = next(field for field in fields(method) if field.name == key)
    return key in options and getattr(method, key) != default_of(field)


def _shown(method: Method, key: str, text: str) -> str:
    """A value as labels have it: the same text for the same value."""
    value = getattr(method, key)
    if text.startswith("@"):
        return text
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown(kind: str, name: Any, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, 3, 0.5)
    return f"unknown {kind} {str(name)!r}: " + (
        f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(known) or 'none'}"
    )


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    kind = int if name == "tokens" else (int, float) if name in ("keep", "bits_per_element") else str
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    for item in values:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise KvfoldError(f"{name}: {item!r} is no {'text' if kind is str else 'number'}")
    return values


def _known(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise KvfoldError(f"{name}: {_unknown('choice', value, choices)}")


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise KvfoldError(f"{name}: {value!r} is not a whole number of at least {least}")
