"""Quality against bytes: one line a method, its intervals, and the frontier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvfold.evaluate.report import words
from kvfold.evaluate.report.samples import FULL
from kvfold.evaluate.report.settings import Entry, Setting
from kvfold.evaluate.report.statistics import Estimate
from kvfold.evaluate.report.svg import FONT, Scale, padded, tag, text, width_of

NAME_HEIGHT = 13
SHAPES = ("circle", "square", "triangle", "diamond", "down", "cross", "plus")
HUES = 7


@dataclass(frozen=True)
class Look:
    """How a method is drawn on the whole page.

    Attributes
    ----------
    css : str
        Class of its hue.
    shape : str
        Of its markers.
    key : str
        Joins what belongs to it.
    """

    css: str
    shape: str
    key: str


def looks(methods: Sequence[str], ours: frozenset[str] | set[str]) -> dict[str, Look]:
    """A hue and a shape for each method: no two alike among the first 49, ours in the page's own colour."""
    result: dict[str, Look] = {}
    rivals = own = 0
    for index, method in enumerate(methods):
        if method in ours:
            result[method] = Look("ours", SHAPES[own % len(SHAPES)], f"m{index}")
            own += 1
        else:
            # Neighbours differ in both hue and shape.
            shape = SHAPES[(rivals + rivals // HUES + 1) % len(SHAPES)]
            result[method] = Look(f"hue{rivals % HUES}", shape, f"m{index}")
            rivals += 1
    return result


def marker(shape: str, x: float, y: float, size: float = 4) -> Markup:
    """A small mark around a point."""
    if shape == "circle":
        return tag("circle", cx=x, cy=y, r=size)
    if shape == "square":
        return tag("rect", x=x - size * 0.9, y=y - size * 0.9, width=size * 1.8, height=size * 1.8)
    if shape in ("cross", "plus"):
        turn = f"rotate(45 {x:.1f} {y:.1f})" if shape == "cross" else None
        arm, half = size * 1.25, size * 0.42
        path = (
            f"M{x - half:.1f} {y - arm:.1f}h{2 * half:.1f}v{arm - half:.1f}h{arm - half:.1f}v{2 * half:.1f}"
            f"h{half - arm:.1f}v{arm - half:.1f}h{-2 * half:.1f}v{half - arm:.1f}h{half - arm:.1f}v{-2 * half:.1f}"
            f"h{arm - half:.1f}z"
        )
        return tag("path", d=path, transform=turn)
    corners = {
        "triangle": ((0, -1.25), (1.15, 0.85), (-1.15, 0.85)),
        "down": ((0, 1.25), (1.15, -0.85), (-1.15, -0.85)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    }[shape]
    return tag("polygon", points=" ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners))


@dataclass(frozen=True)
class _Dot:
    entry: Entry
    estimate: Estimate
    x: float
    y: float


def drawable(setting: Setting, figure: str) -> list[Entry]:
    """Entries with bytes and a finite figure, without the full cache."""
    return [
        entry
        for entry in setting.entries
        if entry.method != FULL
        and entry.ratio
        and (found := getattr(entry, figure)) is not None
        and math.isfinite(found.mean)
    ]


def chart(setting: Setting, figure: str, styles: dict[str, Look], *, width: int, height: int) -> Markup:
    """Score or KL divergence of every method against its bytes.

    Parameters
    ----------
    setting : Setting
    figure : "score" or "kl"
    styles : dict of str to Look
        See `looks`.
    width, height : int
        Pixels.

    Returns
    -------
    Markup
        An `<svg>`, or "" if there is nothing to draw.
    """
    entries = drawable(setting, figure)
    if not entries:
        return Markup("")
    higher = figure == "score" and setting.higher_is_better
    full = setting.full.score.mean if figure == "score" and setting.full and setting.full.score else None
    column = _column(entries, width, height)
    left, right, top, bottom = 46, width - 14 - column, 14, height - 40
    across = _across(entries, left, right)
    up = _up(entries, figure, setting, full, bottom, top)

    dots: dict[str, list[_Dot]] = {}
    for entry in sorted(entries, key=lambda e: (e.ratio or 0, e.budget)):
        estimate: Estimate = getattr(entry, figure)
        dots.setdefault(entry.method, []).append(
            _Dot(entry, estimate, across(entry.ratio or 0), up(estimate.mean))
        )
    zero = up.log and any(getattr(entry, figure).mean <= 0 for entry in entries)
    parts = [_axes(across, up, left, right, top, bottom, zero)]
    taken: list[_Box] = []
    if full is not None:
        y = up(full)
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="full"))
        note, box = _note(words.score(full), y, [d for line in dots.values() for d in line], left, right, top)
        parts.append(note)
        taken.append(box)
    on = [d for line in dots.values() for d in line if getattr(d.entry, f"on_{figure}_frontier")]
    parts.append(_staircase(sorted(on, key=lambda d: d.x), right, top if not higher else bottom))
    # Ours last, on top.
    order = sorted(dots, key=lambda method: styles[method].css == "ours")
    parts += [_line(method, dots[method], styles[method], up, figure) for method in order]
    room = (left, right, top, bottom)
    lines = {method: line for method, line in dots.items() if len(line) > 1} if column else {}
    parts += _beside(lines, styles, room)
    rest = {method: line for method, line in dots.items() if method not in lines}
    parts += _within(rest, dots, styles, figure, room, taken)
    return tag(
        "svg",
        *parts,
        role="img",
        aria_label=_spoken(setting, figure, on),
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        class_="pareto",
    )


def _note(
    score: str, y: float, dots: Sequence[_Dot], left: float, right: float, top: float
) -> tuple[Markup, _Box]:
    """The full cache's score at its line, where the fewest dots are in the way."""
    written = f"full cache {score}"
    long = width_of(written)

    def box(share: float, baseline: float) -> _Box:
        x = left + 4 + share * (right - left - long - 8)
        return x, x + long, baseline - FONT, baseline + 3

    def hidden(place: _Box) -> int:
        return sum(place[0] - 5 < d.x < place[1] + 5 and place[2] - 5 < d.y < place[3] + 5 for d in dots)

    heights = [y - 5, y + FONT + 3] if y > top + 4 else [y + FONT + 3]
    chosen = min((box(share, at) for at in heights for share in (0, 1, 0.25, 0.5, 0.75)), key=hidden)
    return text(chosen[0], chosen[3] - 3, written, class_="note"), chosen


def _across(entries: Sequence[Entry], left: float, right: float) -> Scale:
    low, high = padded([entry.ratio or 0 for entry in entries], log=True, least=4)
    return Scale(low, high, left, right, log=True)


def _up(
    entries: Sequence[Entry], figure: str, setting: Setting, full: float | None, bottom: float, top: float
) -> Scale:
    values = [getattr(entry, figure).mean for entry in entries]
    if figure == "score" and setting.higher_is_better:
        values += [] if full is None else [full]
        low, high = padded(values, log=False, least=0.2)
        if max(values) <= 1 and min(values) >= 0:
            low, high = max(low, -0.02), min(high, 1.02)
        return Scale(low, high, bottom, top)
    values += [] if full is None or full <= 0 else [full]
    positive = [value for value in values if value > 0] or [1e-6]
    low, high = padded(positive, log=True, least=4)
    # Figures of exactly 0 sit on the axis, below everything else, and a tick says 0 there.
    return Scale(low / 2 if min(values) <= 0 else low, high, bottom, top, log=True)


def _axes(
    across: Scale,
    up: Scale,
    left: float,
    right: float,
    top: float,
    bottom: float,
    zero: bool,
) -> Markup:
    parts = []
    for value in across.ticks(max(3, int((right - left) / 52))):
        x = across(value)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        parts.append(text(x, bottom + 15, words.share(value), text_anchor="middle"))
    ticks = [(up(value), words.tick(value)) for value in up.ticks(max(3, int((bottom - top) / 34)))]
    if zero:
        ticks = [(bottom, "0"), *((y, written) for y, written in ticks if y < bottom - FONT)]
    for y, written in ticks:
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(text(left - 6, y + 4, written, text_anchor="end"))
    parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(
        text((left + right) / 2, bottom + 33, "bytes, of the full 16-bit cache", text_anchor="middle")
    )
    return tag("g", *parts, class_="axes")


def _staircase(on: Sequence[_Dot], right: float, worst: float) -> Markup:
    if not on:
        return Markup("")
    path = f"M{on[0].x:.1f} {worst:.1f}V{on[0].y:.1f}"
    for dot in on[1:]:
        path += f"H{dot.x:.1f}V{dot.y:.1f}"
    return tag("path", d=f"{path}H{right:.1f}", class_="frontier")


def _line(method: str, dots: Sequence[_Dot], look: Look, up: Scale, figure: str) -> Markup:
    parts = []
    for dot in dots:
        if dot.estimate.low is not None and dot.estimate.high is not None:
            ends = up(dot.estimate.low), up(dot.estimate.high)
            parts.append(tag("line", x1=dot.x, x2=dot.x, y1=ends[0], y2=ends[1], class_="whisker"))
    whole = [dot for dot in dots if dot.entry.complete]
    if len(whole) > 1:
        points = " ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in whole)
        parts.append(tag("polyline", points=points))
    for dot in dots:
        css = "dot" if dot.entry.complete else "dot part"
        size = 4.6 if look.css == "ours" else 3.8
        parts.append(
            tag("g", marker(look.shape, dot.x, dot.y, size), class_=css, data_tip=_tip(dot.entry, figure))
        )
    return tag("g", *parts, class_=f"line {look.css}", data_m=look.key)


def _tip(entry: Entry, figure: str) -> str:
    lines = [entry.label, f"{words.share(entry.ratio)} of the bytes"]
    if entry.score:
        lines.append(f"score {words.score(entry.score.mean)} {words.interval(entry.score, words.score)}")
    if entry.kl:
        lines.append(f"KL {words.number(entry.kl.mean)} {words.interval(entry.kl)}")
    samples = f"{entry.n} of {entry.expected} samples" if entry.n < entry.expected else f"{entry.n} samples"
    lines.append(samples if entry.complete else f"{samples}: not compared")
    return "\n".join(line.strip() for line in lines)


_Box = tuple[float, float, float, float]


def _column(entries: Sequence[Entry], width: float, height: float) -> float:
    """Pixels at the right for the names of lines: 0 where they would not fit, and a legend must do."""
    counted = Counter(entry.method for entry in entries)
    lines = [method for method, count in counted.items() if count > 1]
    if width < 480 or not lines or len(lines) * NAME_HEIGHT > height - 40:
        return 0.0
    return min(max(width_of(_cut(method)) for method in lines) + 16, 0.3 * width)


def _cut(name: str, most: int = 20) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _beside(lines: dict[str, list[_Dot]], styles: dict[str, Look], room: _Box) -> list[Markup]:
    """Names right of the chart, each as near as may be to the end of its line, and joined to it."""
    _, right, _, bottom = room
    order = sorted(lines, key=lambda method: lines[method][-1].y)
    ys = [lines[method][-1].y for method in order]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + NAME_HEIGHT)
    floor = bottom + 6
    for i in reversed(range(len(ys))):
        ys[i] = min(ys[i], floor)
        floor = ys[i] - NAME_HEIGHT
    parts = []
    for method, y in zip(order, ys, strict=True):
        dot, look = lines[method][-1], styles[method]
        join = f"M{dot.x + 6:.1f} {dot.y:.1f}L{right + 4:.1f} {y:.1f}h4"
        parts.append(
            tag(
                "g",
                tag("path", d=join, class_="join"),
                text(right + 11, y + 4, _cut(method)),
                class_=f"name {look.css}",
                data_m=look.key,
            )
        )
    return parts


def _within(
    wanted: dict[str, list[_Dot]],
    dots: dict[str, list[_Dot]],
    styles: dict[str, Look],
    figure: str,
    room: _Box,
    taken: list[_Box],
) -> list[Markup]:
    """Names in the chart, ours and those on the frontier first, as far as there is room without overlap."""
    taken += [(dot.x - 5, dot.x + 5, dot.y - 5, dot.y + 5) for line in dots.values() for dot in line]

    def rank(method: str) -> tuple[bool, bool, str]:
        frontier = any(getattr(dot.entry, f"on_{figure}_frontier") for dot in dots[method])
        return styles[method].css != "ours", not frontier, method

    parts = []
    roomy = len(dots) <= 6 or room[1] - room[0] > 360
    for method in sorted(wanted, key=rank):
        foreign, dominated, _ = rank(method)
        if foreign and dominated and not roomy:
            continue
        long = width_of(_cut(method)) + 4
        box = next((box for dot in wanted[method] if (box := _free(dot, long, taken, room))), None)
        if box is not None:
            taken.append(box)
            parts.append(
                tag(
                    "g",
                    text(box[0] + 2, box[3] - 4, _cut(method)),
                    class_=f"name {styles[method].css}",
                    data_m=styles[method].key,
                )
            )
    return parts


def _free(dot: _Dot, long: float, taken: Sequence[_Box], room: _Box) -> _Box | None:
    high = FONT + 4
    left, right, top, bottom = room
    for x, y in (
        (dot.x - long / 2, dot.y - high - 5),
        (dot.x - long / 2, dot.y + 5),
        (dot.x + 7, dot.y - high / 2),
        (dot.x - long - 7, dot.y - high / 2),
        (dot.x + 5, dot.y - high - 3),
        (dot.x - long - 5, dot.y + 3),
    ):
        # Near an end of the chart the text moves inwards.
        x = min(max(x, left + 2), right - long)
        box = (x, x + long, y, y + high)
        inside = top - 12 <= y and box[3] <= bottom
        if inside and not any(
            box[0] < b[1] and b[0] < box[1] and box[2] < b[3] and b[2] < box[3] for b in taken
        ):
            return box
    return None


def _spoken(setting: Setting, figure: str, on: Sequence[_Dot]) -> str:
    what = f"Score ({setting.metric})" if figure == "score" else "KL divergence from the full cache"
    about = f"{setting.task}, {setting.tokens:,} tokens" if setting.tokens else "mean over tasks"
    best = "; ".join(
        f"{dot.entry.label}: {words.number(dot.estimate.mean)} at {words.share(dot.entry.ratio)}"
        for dot in sorted(on, key=lambda d: d.x)
    )
    return (
        f"{what} against bytes, {setting.model}, {setting.protocol}, {about}. Best by size: {best or 'none'}."
    )
