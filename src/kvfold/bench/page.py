"""Charts of a record on one self-contained page: a figure against context or batch, one line a method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from kvfold.bench.record import Record
from kvfold.evaluate.report.pareto import Look, looks, marker
from kvfold.evaluate.report.svg import Scale, padded, tag, text
from kvfold.evaluate.report.words import number, tick


@dataclass(frozen=True)
class Axes:
    """What a chart shows.

    Attributes
    ----------
    across, up : str
        Keys of a row.
    title, across_title : str
    apart : str
        Key by which rows go to charts of their own.
    """

    across: str
    up: str
    title: str
    across_title: str
    apart: str


CHARTS = {
    "attention": Axes("context", "ms", "Milliseconds of one layer", "tokens", "batch"),
    "decode": Axes("context", "ms", "Milliseconds a token", "tokens", "batch"),
    "memory": Axes("context", "ledger_bytes", "Bytes of the cache", "tokens", "batch"),
    "throughput": Axes("batch", "tokens_per_second", "Tokens a second", "requests in a step", "context"),
    "fold": Axes("context", "share", "Folding, as a share of the prefill", "tokens", "batch"),
}


def to_html(record: Record) -> str:
    """The page.

    Raises
    ------
    ValueError
        Of a bench that has no chart.
    """
    if record.bench not in CHARTS:
        raise ValueError(f"there is no chart of {record.bench}")
    axes = CHARTS[record.bench]
    labels = list(dict.fromkeys(row["label"] for row in record.rows))
    own = {row["label"] for row in record.rows if row["label"] not in ("full", "stock") and not _foreign(row)}
    styles = looks(labels, own)
    body = []
    for value in sorted({row[axes.apart] for row in record.rows}):
        rows = [row for row in record.rows if row[axes.apart] == value]
        drawn = chart(rows, axes, styles)
        if drawn:
            heading = f"{axes.title}, {axes.apart} {value:,}"
            body += [tag("h3", escape(heading)), tag("figure", drawn)]
    legend = [
        tag(
            "li",
            tag(
                "span",
                tag("svg", marker(styles[label].shape, 7.0, 7.0, 4.4), width=14, height=14),
                escape(label),
            ),
            class_=styles[label].css,
        )
        for label in labels
    ]
    told = record.to_dict()
    about = (
        f"{record.model}, {record.dtype}, {told['hardware']}; "
        + ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    )  # fmt: skip
    style = files("kvfold.evaluate.report").joinpath("page.css").read_text("utf-8")
    title = f"kvfold bench {record.bench}"
    return Markup("").join(
        [
            Markup('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", escape(title)),
            tag("style", Markup(style)),
            Markup("</head><body><main>"),
            tag("h1", escape(title)),
            tag("p", escape(about), class_="soft"),
            *body,
            tag("ul", *legend, class_="legend"),
            tag("pre", escape(record.command)),
            Markup("</main></body></html>\n"),
        ]
    )


def _foreign(row: dict[str, Any]) -> bool:
    return row.get("kind") == "baseline"


def chart(
    rows: Sequence[dict[str, Any]],
    axes: Axes,
    styles: dict[str, Look],
    *,
    width: int = 760,
    height: int = 380,
) -> Markup:
    """An `<svg>` with logarithmic axes, or "" where no row has a positive figure."""
    points = [row for row in rows if (row.get(axes.up) or 0) > 0 and row[axes.across] > 0]
    if not points:
        return Markup("")
    left, right, top, bottom = 56, width - 16, 12, height - 42
    low, high = padded([row[axes.across] for row in points], log=True, least=2)
    across = Scale(low, high, left, right, log=True)
    low, high = padded([row[axes.up] for row in points], log=True, least=4)
    up = Scale(low, high, bottom, top, log=True)
    parts = []
    for value in sorted({row[axes.across] for row in points}):
        x = across(value)
        parts += [tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid")]
        parts += [text(x, bottom + 15, f"{value:,}", text_anchor="middle")]
    for value in up.ticks(8):
        y = up(value)
        parts += [tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid")]
        parts += [text(left - 6, y + 4, tick(value), text_anchor="end")]
    parts.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(text((left + right) / 2, bottom + 34, axes.across_title, text_anchor="middle"))
    for label in dict.fromkeys(row["label"] for row in points):
        line = sorted((row for row in points if row["label"] == label), key=lambda row: row[axes.across])
        places = [(across(row[axes.across]), up(row[axes.up]), row) for row in line]
        own = [tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places))]
        for x, y, row in places:
            tip = tag("title", escape(f"{label}: {number(row[axes.up])}"))
            own.append(tag("g", tip, marker(styles[label].shape, x, y), class_="dot"))
        parts.append(tag("g", *own, class_=f"line {styles[label].css}"))
    return tag(
        "svg",
        *parts,
        role="img",
        aria_label=f"{axes.title} against {axes.across_title}",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
    )
