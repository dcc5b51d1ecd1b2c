"""Charts: what is drawn is where its figures say, readable, and nothing is left out in silence."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.evaluate.report.synthetic import grid, row, run

from kvfold.evaluate.report import aggregate, words
from kvfold.evaluate.report.maps import bit_map, needle_map
from kvfold.evaluate.report.page import undrawn
from kvfold.evaluate.report.pareto import chart, looks
from kvfold.evaluate.report.svg import Scale, padded, width_of


@pytest.fixture(scope="module")
def report():
    return aggregate(
        [run()],
        grid(models=("SmolLM2-135M-Instruct",), samples=3, views=("unseen",), tasks=("needle", "perplexity")),
    )


def drawn(setting, figure, width=556, height=340):
    methods = {e.method: e.ours for e in setting.entries}
    styles = looks(sorted(m for m in methods if m != "full"), {m for m in methods if methods[m]})
    return ET.fromstring(chart(setting, figure, styles, width=width, height=height))


def dots(svg):
    """First two numbers of each dot's shape are near enough its middle; the tip says what it stands for."""
    found = {}
    for group in svg.iter("g"):
        if group.get("class", "").startswith("dot"):
            shape = group[0]
            if shape.tag == "circle":
                found[group.get("data-tip").splitlines()[0]] = (
                    float(shape.get("cx")),
                    float(shape.get("cy")),
                )
    return found


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1e-6, 1e3),
    st.floats(1.5, 1e5),
    st.integers(3, 9),
    st.booleans(),
)
def test_ticks_are_few_round_and_inside(low, factor, most, log):
    scale = Scale(low, low * factor, 0, 100, log)
    ticks = scale.ticks(most)
    assert 1 <= len(ticks) <= most
    assert ticks == sorted(set(ticks))
    for tick in ticks:
        assert low * (1 - 1e-6) <= tick <= low * factor * (1 + 1e-6)
        digits = f"{tick:.6e}".split("e")[0].rstrip("0").replace(".", "")
        assert len(digits) <= 5
    pixels = [scale(tick) for tick in ticks]
    assert pixels == sorted(pixels)


def test_scale_is_logarithmic_where_it_says_so():
    assert Scale(0.01, 1, 0, 100, log=True)(0.1) == pytest.approx(50)
    assert Scale(0, 1, 100, 0)(0.25) == pytest.approx(75)
    low, high = padded([0.9, 0.91], log=False, least=0.2)
    assert high - low >= 0.2


def test_dots_sit_where_their_figures_are():
    points = {"keep=0.4": (0.4, 0.8, 0.001), "keep=0.1": (0.1, 0.6, 0.01), "keep=0.025": (0.025, 0.4, 0.1)}
    rows = [row("rdkv", budget, i, s, kl, r) for budget, (r, s, kl) in points.items() for i in range(3)]
    (setting,) = aggregate([run()], rows).settings
    score, kl = dots(drawn(setting, "score")), dots(drawn(setting, "kl"))
    (x0, y0), (x1, y1), (x2, y2) = (score[f"rdkv {b}"] for b in points)
    # Equal factors of bytes and equal steps of score are equal distances; more bytes right, better up.
    assert x0 - x1 == pytest.approx(x1 - x2, abs=0.2)
    assert y2 - y1 == pytest.approx(y1 - y0, abs=0.2)
    assert x0 > x1 > x2
    assert y0 < y1 < y2
    (_, k0), (_, k1), (_, k2) = (kl[f"rdkv {b}"] for b in points)
    assert k0 - k1 == pytest.approx(k1 - k2, abs=0.2)
    assert k0 > k1 > k2, "less divergence is lower"


@pytest.mark.parametrize("figure", ["score", "kl"])
@pytest.mark.parametrize("width", [556, 356])
def test_everything_measured_is_drawn_or_named(report, figure, width):
    for setting in report.settings:
        svg = drawn(setting, figure, width)
        tips = {g.get("data-tip").splitlines()[0] for g in svg.iter("g") if g.get("data-tip")}
        left_out = {
            f"{method} {budget}"
            for text in undrawn(setting)
            for method, _, budgets in [text.split(": ")[0].partition(" ")]
            for budget in budgets.split(", ")
        }
        wanted = {e.label for e in setting.entries if e.method != "full"}
        assert tips | left_out == wanted
        assert not tips & left_out


@pytest.mark.parametrize("figure", ["score", "kl"])
@pytest.mark.parametrize("width", [556, 356])
def test_names_stay_inside_and_off_each_other(report, figure, width):
    for setting in report.settings:
        boxes = []
        for group in drawn(setting, figure, width).iter("g"):
            if group.get("class", "").startswith("name"):
                text = next(group.iter("text"))
                x, y = float(text.get("x")), float(text.get("y"))
                boxes.append((x, x + width_of(text.text), y - 9, y + 3, text.text))
        assert any(box[4] == "rdkv" for box in boxes)
        for box in boxes:
            assert box[0] >= 0 and box[1] <= width + 1, box
            assert box[2] >= 0 and box[3] <= 340, box
        for i, a in enumerate(boxes):
            for b in boxes[i + 1 :]:
                assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)


def test_methods_never_look_alike():
    names = [f"method-{i}" for i in range(40)]
    styles = looks(names, {"method-3"})
    assert len({(look.css, look.shape) for look in styles.values()}) == 40
    assert len({look.key for look in styles.values()}) == 40
    assert styles["method-3"].css == "ours"


def test_hollow_marks_and_no_interval():
    rows = [row("full", "", i, ratio=1.0, kl=0.0) for i in range(10)]
    rows += [row("snapkv", sample=i) for i in range(10)] + [row("rdkv", sample=0)]
    (setting,) = aggregate([run()], rows).settings
    svg = drawn(setting, "score")
    classes = {g.get("data-tip").splitlines()[0]: g.get("class") for g in svg.iter("g") if g.get("data-tip")}
    assert classes == {"rdkv keep=0.1": "dot part", "snapkv keep=0.1": "dot"}
    assert not [line for line in svg.iter("line") if line.get("class") == "whisker"]


def test_exact_zero_divergence_sits_on_the_axis():
    rows = [row("rdkv", "keep=0.5", i, kl=0.0, ratio=0.5) for i in range(3)]
    rows += [row("rdkv", "keep=0.1", i, kl=0.01) for i in range(3)]
    (setting,) = aggregate([run()], rows).settings
    svg = drawn(setting, "kl")
    axis = next(line for line in svg.iter("line") if line.get("class") == "axis")
    assert dots(svg)["rdkv keep=0.5"][1] == pytest.approx(float(axis.get("y1")))
    assert "0" in [text.text for text in svg.iter("text")]


def test_infinite_divergence_is_named_not_drawn():
    rows = [row("rdkv", sample=i, kl=math.inf, score=None) for i in range(3)] + [row("snapkv", sample=0)]
    (setting,) = aggregate([run()], rows).settings
    assert undrawn(setting) == ["rdkv keep=0.1: no finite figures"]


def test_markup_in_labels_is_escaped():
    bad = '<script>alert("x")</script>'
    (setting,) = aggregate([run()], [row(bad, sample=i, model=bad, task=bad) for i in range(2)]).settings
    svg = drawn(setting, "score")
    assert not list(svg.iter("script"))


def test_needle_map_says_each_score(report):
    needle = next(m for m in report.needles if (m.method, m.budget) == ("rkv", "keep=0.1"))
    svg = ET.fromstring(needle_map(needle))
    cells = [g for g in svg.iter("g") if g.get("class", "").startswith("needle")]
    shown = [next(iter(g.iter("text"))).text for g in cells]
    flat = [score for line in needle.scores for score in line]
    assert shown == ["×" if score is None else f"{100 * score:.0f}" for score in flat]
    assert "×" in shown


def test_bit_map_has_a_cell_for_each_layer_and_head(report):
    for bits in report.bits:
        svg = ET.fromstring(bit_map(bits, 16))
        cells = [r for r in svg.iter("rect") if r.get("class") == "bits"]
        assert len(cells) == 2 * 30 * 3
        assert float(svg.get("width")) <= 350


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.1, "10 %"), (0.0998, "10 %"), (0.0512, "5.1 %"), (1.0, "100 %"), (0.00512, "0.51 %"), (None, "–")],
)
def test_shares(value, written):
    assert words.share(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0139, "0.0139"),
        (1.234, "1.23"),
        (123.4, "123"),
        (-0.5, "−0.500"),
        (math.inf, "∞"),
        (2e-7, "2.0e−7"),
        (0, "0"),
    ],
)
def test_numbers(value, written):
    assert words.number(value) == written


@pytest.mark.parametrize(
    ("value", "written"), [(-0.001, "0.00"), (0.02, "+0.02"), (-0.02, "−0.02"), (3.2, "+3.20")]
)
def test_signs(value, written):
    assert words.signed(value) == written
