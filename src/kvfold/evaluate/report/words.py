"""Figures as people read them."""

from __future__ import annotations

import math

from kvfold.evaluate.report.statistics import Estimate

MINUS, NONE = "−", "–"


def share(value: float | None) -> str:
    """Part of a whole, such as "12.5 %"."""
    if value is None or not math.isfinite(value):
        return NONE
    percent = 100 * value
    digits = 0 if percent >= 99.95 else 1 if percent >= 1 else 2
    written = f"{percent:.{digits}f}"
    return f"{written.rstrip('0').rstrip('.') if '.' in written else written} %"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    if abs(value) < 1e-4 or abs(value) >= 1e5:
        return f"{value:.1e}".replace("-", MINUS).replace("e" + MINUS + "0", "e" + MINUS).replace("e+0", "e")
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}".replace("-", MINUS)


def tick(value: float) -> str:
    """A round figure on an axis."""
    return f"{value:g}".replace("e-0", "e-").replace("-", MINUS)


def score(value: float | None) -> str:
    """Two decimals, as tables of scores have them; more digits where the score is no share (perplexity)."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.2f}".replace("-", MINUS) if abs(value) <= 1 else number(value)


def signed(value: float) -> str:
    """With its sign, also when positive; a difference that rounds to nothing has none."""
    written = score(value)
    if float(written.replace(MINUS, "-").replace("∞", "inf")) == 0:
        return score(0.0)
    return written if value < 0 else f"+{written}"


def interval(estimate: Estimate | None, write: object = number) -> str:
    """The interval alone, "" where there is none."""
    assert callable(write)
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"[{write(estimate.low)}, {write(estimate.high)}]"


def seconds(value: float | None) -> str:
    """Seconds or milliseconds."""
    if value is None:
        return NONE
    return f"{number(value)} s" if value >= 1 else f"{number(1000 * value)} ms"


def reason(error: str) -> str:
    """What an error is, without what was particular to it."""
    return " ".join(error.split()).partition(":")[0][:80]
