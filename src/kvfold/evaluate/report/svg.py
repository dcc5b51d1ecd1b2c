"""Elements, axes and text for inline SVG, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

FONT = 11
"""Pixels; charts are shown at their own size, so text in them is as large as text beside them."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element; `class_` is `class`, `_` in names is `-`, None leaves an attribute out, numbers are rounded."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(children)
    # A name and numbers of ours; text of others comes in escaped.
    return Markup(f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>")


def _attribute(value: object) -> str:
    plain = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
    return str(escape(plain)).replace("\n", "&#10;")


def text(x: float, y: float, words: str, **attributes: object) -> Markup:
    """Text at a place."""
    return tag("text", escape(words), x=x, y=y, **attributes)


def width_of(words: str, size: float = FONT) -> float:
    """About how many pixels a text takes: there are no fonts here to measure with."""
    return 0.56 * size * len(words)


@dataclass(frozen=True)
class Scale:
    """From a figure to a pixel.

    Attributes
    ----------
    low, high : float
        Ends of the axis.
    start, end : float
        Their pixels.
    log : bool
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        turn: Callable[[float], float] = math.log if self.log else float
        share = (turn(clipped) - turn(self.low)) / (turn(self.high) - turn(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Round figures within the ends."""
        return (log_ticks if self.log else linear_ticks)(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `most` of them."""
    power = 10.0 ** (math.floor(math.log10((high - low) / most)) - 1)
    steps = (m * power * 10**k for k in range(4) for m in (1, 2, 5))
    # Comparing with room for rounding, so that an end that is a multiple has its tick.
    ranges = ((step, math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)) for step in steps)
    step, first, last = next(found for found in ranges if found[2] - found[1] < most)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round figures at about equal distances of their logarithms; the fewer a decade, the longer the axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [value for k in decades for m in steps if low <= (value := float(f"{m}e{k}")) <= high]
        if len(found) <= most:
            break
    if len(found) < 2:
        return linear_ticks(low, high, most)
    return found[:: math.ceil(len(found) / most)]


def padded(values: Sequence[float], *, log: bool, least: float) -> tuple[float, float]:
    """Ends of an axis around the figures: some room beside them, and a span of at least `least` (a factor if log)."""
    low, high = min(values), max(values)
    if log:
        room = max(math.log(high / low) * 0.08, (math.log(least) - math.log(high / low)) / 2, 0.05)
        return low / math.exp(room), high * math.exp(room)
    room = max((high - low) * 0.08, (least - (high - low)) / 2)
    return low - room, high + room
