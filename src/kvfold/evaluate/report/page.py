"""One self-contained HTML page: style, script and charts inside it, nothing fetched when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvfold.evaluate.report import words
from kvfold.evaluate.report.aggregate import Report
from kvfold.evaluate.report.bits import BitMap
from kvfold.evaluate.report.levels import levels, retained, smallest_good
from kvfold.evaluate.report.maps import bit_map, bit_summary, needle_map
from kvfold.evaluate.report.needles import NeedleMap
from kvfold.evaluate.report.pareto import chart, drawable, looks, marker
from kvfold.evaluate.report.samples import FULL
from kvfold.evaluate.report.settings import Entry, Setting, protocol_name
from kvfold.evaluate.report.statistics import RESAMPLES


@dataclass(frozen=True)
class Place:
    """One model under one protocol.

    Attributes
    ----------
    id, title, headline : str
    overview : Setting
        The mean over tasks, or the only setting there is.
    settings : list of Setting
        Each task and length, unless there is only one.
    needles : list of (str, list of NeedleMap)
        By budget.
    needle_tasks : int
    bits : list of BitMap
    top_bits : int
        Of the colour scale.
    """

    id: str
    title: str
    headline: str
    overview: Setting
    settings: list[Setting]
    needles: list[tuple[str, list[NeedleMap]]]
    needle_tasks: int
    bits: list[BitMap]
    top_bits: int


@dataclass(frozen=True)
class Model:
    """One model and the protocols it was measured under."""

    id: str
    name: str
    places: list[Place]


def to_html(report: Report, title: str = "kvfold: quality by bytes") -> str:
    """The page.

    Parameters
    ----------
    report : Report
    title : str
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from kvfold import __version__

    room = files("kvfold.evaluate.report")
    environment = Environment(
        loader=PackageLoader("kvfold.evaluate", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.globals.update(
        chart=chart,
        marker=marker,
        needle_map=needle_map,
        bit_map=bit_map,
        bit_summary=bit_summary,
        levels=levels,
        retained=retained,
        smallest_good=smallest_good,
        interval=words.interval,
        share=words.share,
        share_whole=share_whole,
        number=words.number,
        score=words.score,
        signed=words.signed,
        seconds=words.seconds,
        sizes=sizes,
        columns=columns,
        best_of=best_of,
        remark=remark,
        scope=scope,
        name=name,
        gist=gist,
        methods_of=methods_of,
        bits_of=bits_of,
        undrawn=undrawn,
    )
    methods = {entry.method: entry.ours for setting in report.settings for entry in setting.entries}
    order = sorted(methods, key=lambda method: (not methods[method], method))
    return environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle(report),
        models=models(report),
        runs=report.runs,
        notes=report.notes,
        rows=report.rows,
        looks=looks([m for m in order if m != FULL], {m for m in order if methods[m]}),
        resamples=RESAMPLES,
        version=__version__,
        css=Markup(room.joinpath("page.css").read_text(encoding="utf-8")),
        js=Markup(room.joinpath("page.js").read_text(encoding="utf-8")),
    )


def models(report: Report) -> list[Model]:
    """Settings, maps and headlines by model and protocol."""
    places: dict[tuple[str, str, str, str], list[Setting]] = {}
    for setting in report.settings:
        places.setdefault(_place(setting), []).append(setting)
    found: dict[str, list[Place]] = {}
    for number, (place, settings) in enumerate(places.items()):
        bits = [one for one in report.bits if _place(one) == place]
        needles = [one for one in report.needles if _place(one) == place]
        most = max(
            (v for one in bits for grid in (one.keys, one.values) for row in grid for v in row), default=0
        )
        found.setdefault(place[0], []).append(
            Place(
                id=f"protocol-{number}",
                title=_capital(protocol_name(*place[1:])),
                headline=headline(settings[0]),
                overview=settings[0],
                settings=settings[1:],
                needles=_by_budget(needles),
                needle_tasks=len({one.task for one in needles}),
                bits=bits,
                top_bits=next(top for top in (2, 4, 8, 16, 32, 64) if most <= top),
            )
        )
    return [Model(f"model-{i}", model, found[model]) for i, model in enumerate(found)]


def _place(one: Any) -> tuple[str, str, str, str]:
    return one.model, one.view, one.when, one.format


def _by_budget(needles: Sequence[NeedleMap]) -> list[tuple[str, list[NeedleMap]]]:
    groups: dict[str, list[NeedleMap]] = {}
    for needle in needles:
        title = "" if needle.method == FULL or not needle.budget else needle.budget
        groups.setdefault(title, []).append(needle)
    for maps in groups.values():
        maps.sort(key=lambda one: (one.method != FULL, not one.ours, one.method, one.task))
    # What has no budget first: the full cache is what all others are to be held against.
    return sorted(groups.items(), key=lambda item: (item[0] != "", -max(one.ratio or 0.0 for one in item[1])))


FIXED = "Size fixed by the method"


def sizes(setting: Setting) -> list[tuple[str, list[Entry]]]:
    """Entries by budget, the largest first: the full cache, each budget, what has none, and what has no bytes at all."""
    groups: dict[str, list[Entry]] = {}
    for entry in setting.entries:
        groups.setdefault("" if entry.method == FULL else entry.budget or FIXED, []).append(entry)

    def size(item: tuple[str, list[Entry]]) -> tuple[bool, bool, float, str]:
        title, entries = item
        known = [entry.ratio for entry in entries if entry.ratio is not None]
        return title != "", title == FIXED, -max(known, default=0.0), title

    def rank(entry: Entry) -> tuple[bool, float, float, str]:
        sign = -1 if setting.higher_is_better else 1
        score = sign * entry.score.mean if entry.score else float("inf")
        return entry.n == 0, score, entry.kl.mean if entry.kl else float("inf"), entry.method

    ordered = sorted(groups.items(), key=size)
    return [
        (
            title,
            sorted(entries, key=lambda e: (-(e.ratio or 0.0), e.method))
            if title == FIXED
            else sorted(entries, key=rank),
        )
        for title, entries in ordered
    ]


@dataclass(frozen=True)
class Columns:
    """Which figures a table has anything to say about."""

    score: bool
    kl: bool
    speed: bool

    @property
    def count(self) -> int:
        """Columns in all."""
        return 3 + 2 * self.score + 4 * self.kl + 2 * self.speed


def columns(setting: Setting) -> Columns:
    """The columns that at least one entry fills; a task whose score is the KL shows it once."""
    return Columns(
        score=setting.metric != "KL" and any(entry.score for entry in setting.entries),
        kl=any(entry.kl for entry in setting.entries),
        speed=any(entry.fold_seconds or entry.decode_seconds for entry in setting.entries),
    )


def best_of(entries: Sequence[Entry], figure: str, setting: Setting) -> Entry | None:
    """The complete entry with the best mean, where there are several to choose from."""
    able = [e for e in entries if e.complete and e.method != FULL and getattr(e, figure) is not None]
    if len(able) < 2:
        return None
    sign = -1 if figure == "score" and setting.higher_is_better else 1
    return min(able, key=lambda e: sign * getattr(e, figure).mean)


def errors(entry: Entry) -> str:
    """Reasons and how often."""
    counted: dict[str, int] = {}
    for error, count in entry.errors.items():
        counted[words.reason(error)] = counted.get(words.reason(error), 0) + count
    return ", ".join(f"{reason} ({count} of {entry.expected})" for reason, count in counted.items())


def remark(entry: Entry) -> str:
    """What keeps a reader from comparing this entry, "" if nothing does."""
    told = [errors(entry)] if entry.errors else [] if entry.complete else ["too few samples to compare"]
    if entry.unfolded:
        told.append(f"nothing folded ({entry.unfolded} of {entry.n})")
    return ", ".join(told)


def undrawn(setting: Setting) -> list[str]:
    """What charts leave out, and why."""
    drawn = {id(e) for figure in ("score", "kl") for e in drawable(setting, figure)}
    budgets: dict[tuple[str, str], list[str]] = {}
    for entry in setting.entries:
        if entry.method != FULL and id(entry) not in drawn:
            why = errors(entry) or "no finite figures"
            budgets.setdefault((entry.method, why), []).append(entry.budget)
    return [f"{method} {', '.join(asked)}".strip() + f": {why}" for (method, why), asked in budgets.items()]


def methods_of(setting: Setting) -> list[str]:
    """Methods drawn in either chart, ours first."""
    ours = {e.method: e.ours for figure in ("score", "kl") for e in drawable(setting, figure)}
    return sorted(ours, key=lambda method: (not ours[method], method))


def bits_of(bits: Sequence[BitMap]) -> str:
    """The prompts that bit maps are of."""
    return "; ".join(sorted({f"{one.task}, {one.tokens:,} tokens" for one in bits}))


def share_whole(value: float) -> str:
    """Percent without decimals, which never rounds a loss away."""
    return f"{int(100 * value + 1e-9)} %" if value < 1 else f"{100 * value:.0f} %"


def scope(setting: Setting) -> str:
    """What a setting is about, in words."""
    if setting.tokens is not None:
        return f"{setting.task}, {setting.tokens:,} tokens"
    return (
        f"mean over {setting.tasks} task{'s' * (setting.tasks != 1)} and lengths"
        if setting.tasks
        else "all tasks"
    )


def name(setting: Setting) -> str:
    """A setting with its model and protocol."""
    return f"{setting.model}, {setting.protocol}, {scope(setting)}"


def gist(setting: Setting) -> str:
    """One line for a setting that is folded away."""
    full = setting.full
    told = [f"full cache {words.score(full.score.mean)}"] if full and full.score else []
    found = smallest_good(setting)
    if found and found.score:
        told.append(
            f"{found.method} keeps {words.score(found.score.mean)} at {words.share(found.ratio)} of the bytes"
        )
    return "; ".join(told)


def headline(setting: Setting) -> Any:
    """The one sentence to remember, as markup."""
    from markupsafe import Markup

    full, found = setting.full, smallest_good(setting)
    if found is None or full is None or full.score is None or found.score is None:
        if full is not None and full.score is not None and full.score.mean == 0:
            return "The full cache itself scores 0: these tasks are beyond the model, and only KL tells methods apart."
        if full is None or full.score is None:
            return "No score of the full cache to compare with."
        return "No method keeps 95 % of the full cache's score at any size measured."
    kept = retained(found.score.mean, full.score.mean, setting.higher_is_better)
    css = "" if found.ours else ' class="rival"'
    facts = [f"{found.score.n} sample{'s' * (found.score.n > 1)}"]
    if found.kl:
        facts.insert(0, f"KL {words.number(found.kl.mean)}")
    if found.difference:
        range_ = words.interval(found.difference, words.signed)
        facts.insert(0, f"{words.signed(found.difference.mean)} {range_}".strip() + " against the full cache")
    return Markup(
        "<b{0}>{1} of the bytes</b> keep <b{0}>{2} of the score</b> with {3} <small>{4}</small>"
    ).format(Markup(css), words.share(found.ratio), share_whole(kept), found.method, ", ".join(facts))


def subtitle(report: Report) -> str:
    """How much was measured, when and on what."""
    tasks = {setting.task for setting in report.settings if setting.task}
    methods = {entry.method for setting in report.settings for entry in setting.entries}
    dates = sorted({run.started[:10] for run in report.runs})
    hardware = sorted({run.hardware for run in report.runs})
    told = [
        f"{report.rows:,} measurements",
        f"{len(methods)} method{'s' * (len(methods) > 1)}",
        f"{len(tasks)} task{'s' * (len(tasks) > 1)}",
    ]
    if dates:
        told.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
    return " · ".join([*told, *hardware])


def _capital(words_: str) -> str:
    return words_[:1].upper() + words_[1:]
