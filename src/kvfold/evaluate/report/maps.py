"""Heat maps: needles by depth and length, bits by layer and head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from kvfold.evaluate.report import words
from kvfold.evaluate.report.bits import BitMap
from kvfold.evaluate.report.needles import NeedleMap
from kvfold.evaluate.report.svg import tag, text


def needle_map(needle: NeedleMap) -> Markup:
    """Depth by length; each cell says its mean score in percent, `×` where all samples failed."""
    left, top, cell, row = 40, 4, 34, 19
    width, height = left + cell * len(needle.lengths) + 2, top + row * len(needle.depths) + 30
    whole = max(needle.depths) <= 1
    parts = []
    for i, depth in enumerate(needle.depths):
        y = top + i * row
        parts.append(
            text(left - 5, y + row / 2 + 4, f"{100 * depth if whole else depth:.0f} %", text_anchor="end")
        )
        for j in range(len(needle.lengths)):
            parts.append(_cell(needle.scores[i][j], needle.errors[i][j], left + j * cell, y, cell, row))
    for j, length in enumerate(needle.lengths):
        parts.append(text(left + (j + 0.5) * cell, height - 16, short(length), text_anchor="middle"))
    parts.append(text(left + cell * len(needle.lengths) / 2, height - 3, "tokens", text_anchor="middle"))
    known = [score for line in needle.scores for score in line if score is not None]
    mean = f"mean {words.score(sum(known) / len(known))}" if known else "no figures"
    worst = f", worst {words.score(min(known))}" if known else ""
    return tag(
        "svg",
        *parts,
        role="img",
        aria_label=f"{needle.task}, {needle.method} {needle.budget}: score by depth and length, {mean}{worst}.",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        class_="map",
    )


def _cell(score: float | None, errors: int, x: float, y: float, width: float, height: float) -> Markup:
    place = {"x": x + 0.5, "y": y + 0.5, "width": width - 1.0, "height": height - 1.0}
    middle = x + width / 2, y + height / 2 + 4
    if score is None:
        mark = text(*middle, "×", text_anchor="middle") if errors else Markup("")
        return tag("g", tag("rect", **place, class_="void"), mark, class_="needle")
    part = min(max(score, 0.0), 1.0)
    css = "good" if part >= 0.5 else "bad"
    depth = abs(part - 0.5) * 2
    strong = " strong" if depth > 0.55 else ""
    failed = "*" if errors else ""
    return tag(
        "g",
        tag("rect", **place, class_=css, style=f"--x:{100 * depth:.0f}%"),
        text(*middle, f"{100 * part:.0f}{failed}", text_anchor="middle"),
        class_=f"needle{strong}",
    )


def bit_map(bits: BitMap, top_bits: float) -> Markup:
    """Layers across, KV heads down, keys above values; strength goes with the square root, so that few bits differ too."""
    layers = max(len(bits.keys), 1)
    heads = max((len(layer) for layer in bits.keys), default=0) or 1
    left, cell = 46, max(4.0, min(13.0, 296 / layers))
    row = max(3.0, min(13.0, 96 / heads))
    band = row * heads
    width, height = left + cell * layers + 2, 2 * band + 10 + 26
    parts = []
    for part, (name, grid) in enumerate((("keys", bits.keys), ("values", bits.values))):
        y0 = part * (band + 8)
        parts.append(text(left - 6, y0 + band / 2 + 4, name, text_anchor="end"))
        for i in range(layers):
            heads_here = grid[i] if i < len(grid) else []
            if not heads_here:
                parts.append(_rect(left + i * cell, y0, cell, band, css="void"))
            # A layer with fewer heads fills the same band.
            high = band / max(len(heads_here), 1)
            for j, value in enumerate(heads_here):
                strength = f"--x:{100 * math.sqrt(min(value / top_bits, 1)):.0f}%"
                tip = f"layer {i}, head {j}\n{value:.2f} bits a number ({name})"
                parts.append(
                    _rect(
                        left + i * cell, y0 + j * high, cell, high, css="bits", style=strength, data_tip=tip
                    )
                )
    for i in _marks(layers):
        parts.append(text(left + (i + 0.5) * cell, 2 * band + 22, str(i), text_anchor="middle"))
    parts.append(text(left - 6, 2 * band + 22, "layer", text_anchor="end"))
    return tag(
        "svg",
        *parts,
        role="img",
        aria_label=f"{bits.method} {bits.budget}: mean bits by layer and head. {bit_summary(bits)}.",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=round(width),
        height=round(height),
        class_="map",
    )


def bit_summary(bits: BitMap) -> str:
    """Mean, and the range over heads, of keys and values."""
    told = []
    for name, grid in (("keys", bits.keys), ("values", bits.values)):
        flat = [value for layer in grid for value in layer]
        if not flat:
            continue
        spread = f" ({min(flat):.1f} to {max(flat):.1f})" if max(flat) - min(flat) > 0.05 else ""
        told.append(f"{name} {sum(flat) / len(flat):.1f}{spread}")
    return ", ".join(told)


def _rect(x: float, y: float, width: float, height: float, *, css: str, **attributes: object) -> Markup:
    gap = 0.6 if min(width, height) > 5 else 0.3
    return tag("rect", x=x, y=y, width=width - gap, height=height - gap, class_=css, **attributes)


def _marks(count: int) -> Sequence[int]:
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50) if count / s <= 9) if count <= 450 else count // 8
    return range(0, count, step)


def short(tokens: int) -> str:
    """Such as 4K: a whole number of 1,024, or thousands."""
    if tokens >= 1024 and tokens % 1024 == 0:
        return f"{tokens // 1024}K"
    return f"{tokens / 1000:.3g}k" if tokens >= 1000 else str(tokens)
