"""The page: whole in one file, right for odd results, and in a real browser at phone and desktop width."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.evaluate.report.browser import browsing, chromium
from tests.evaluate.report.synthetic import grid, row, run

from kvfold.evaluate.report import aggregate, to_html, to_markdown, words

VOID = {"meta", "link", "br", "rect", "circle", "line", "polyline", "polygon", "path"}


class Nesting(HTMLParser):
    """Whether every element is closed, ids are unique, and every link within the page has its target."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        about = dict(attributes)
        self.ids += [about["id"]] if "id" in about else []
        if about.get("href", "").startswith("#"):
            self.targets.append(about["href"][1:])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + " "


def parsed(page: str) -> Nesting:
    parser = Nesting()
    parser.feed(page)
    assert not parser.open
    assert len(parser.ids) == len(set(parser.ids))
    assert set(parser.targets) <= set(parser.ids)
    parser.text = " ".join(parser.text.split())
    return parser


def one(method="rdkv", budget="keep=0.1", samples=3, **changes):
    return [row(method, budget, sample, **changes) for sample in range(samples)]


FULL = one("full", "", ratio=1.0, kl=0.0)
CASES = {
    "only errors": (one(error="out of memory: 2 GiB"), "out of memory (3 of 3)"),
    "full fails too": (one("full", "", error="boom") + one(), "No full cache"),
    "one method": (FULL + one(), "100 % of the score"),
    "full cache alone": (FULL, "No method keeps 95 %"),
    "one sample": (one("full", "", 1, ratio=1.0, kl=0.0) + one(samples=1), "only 1 sample"),
    "no full cache": (one(), "No score of the full cache"),
    "full cache at zero": (
        one("full", "", ratio=1.0, kl=0.0, score=0.0) + one(score=0.0),
        "beyond the model",
    ),
    "no fidelity": (one("full", "", ratio=1.0, kl=None) + one(kl=None), "fidelity was not measured here"),
    "no score": (one("full", "", ratio=1.0, score=None) + one(score=None), "no method has a score here"),
    "mixed metrics": (
        FULL
        + one()
        + one("full", "", ratio=1.0, kl=0.0, task="perplexity", metric="perplexity", score=9.0)
        + one(task="perplexity", metric="perplexity", score=9.5)
        + one("full", "", ratio=1.0, kl=0.0, task="qa", metric="F1")
        + one(task="qa", metric="F1", score=0.5),
        "F1 / recall",
    ),
    "hostile labels": (one("<b>&|\"'</b>", task="<i>", model="</script><script>"), "<b>&|\"'</b>"),
    "passed through": (FULL + [replace(r, note="30 tokens") for r in one()], "nothing folded (3 of 3)"),
    "infinite": (FULL + one(kl=float("inf")), "∞"),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_results_give_a_right_page(case):
    rows, wanted = CASES[case]
    report = aggregate([run()], rows)
    page = to_html(report)
    assert wanted in parsed(page).text
    assert page.count("<script>") == 1
    assert "NaN" not in page and "nan" not in re.sub("[a-z]*nan[a-z]+", "", page)
    tables = to_markdown(report)
    if case == "only errors":
        assert wanted in tables
    for block in re.findall(r"(?:^\|.*\n)+", tables, re.M):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(columns) == 1, block


@pytest.fixture(scope="module")
def rows():
    return grid(
        models=("SmolLM2-135M-Instruct",),
        lengths=(2048,),
        samples=5,
        tasks=("needle", "perplexity"),
        budgets=(0.25, 0.1),
    )


@pytest.fixture(scope="module")
def page(rows, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(aggregate([run(), run("r2")], rows, notes=["a torn line was left out"])), "utf-8")
    return path


def test_nothing_is_fetched(page):
    html = page.read_text("utf-8")
    assert not re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", html)
    assert "@import" not in html
    assert len(html) < 5_000_000


def test_says_what_a_reader_needs(page):
    told = parsed(page.read_text("utf-8")).text
    for wanted in (
        "kvfold eval --models",
        "2 x Intel Xeon",
        "torch 2.13.0",
        "bfloat16",
        "a torn line",
        "paired",
    ):
        assert wanted in told, wanted
    for protocol in ("Question unseen, folded after prefill", "Question in view, folded after prefill"):
        assert protocol in told


def test_markdown_has_the_same_figures(rows):
    report = aggregate([run()], rows)
    tables = to_markdown(report)
    assert tables.count("\n### ") == len(report.settings)
    found = next(e for e in report.settings[0].entries if (e.method, e.budget) == ("adakv", "keep=0.1"))
    assert (
        f"| adakv | keep=0.1 | {words.share(found.ratio)} | {found.score.mean:.2f} [{found.score.low:.2f}, {found.score.high:.2f}] |"
        in tables
    )


needs_chromium = pytest.mark.skipif(
    chromium() is None,
    reason="no Chromium on PATH: apt-get install chromium-headless-shell, or set KVFOLD_CHROMIUM",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(chromium(), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


LOOK = """(() => {
  const shown = [...document.querySelectorAll('svg.pareto, svg.map')].filter(s => s.checkVisibility());
  const wide = document.documentElement.clientWidth;
  const inScroller = e => e.closest('.scroll, nav > div') !== null;
  return {
    overflow: document.documentElement.scrollWidth - wide,
    outside: [...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && !inScroller(e)
      && e.getBoundingClientRect().width > 0 && e.getBoundingClientRect().right > wide + 1
      ).map(e => e.tagName + '.' + (e.getAttribute('class') || '')).slice(0, 5),
    charts: shown.filter(s => s.classList.contains('pareto')).length,
    maps: shown.filter(s => s.classList.contains('map')).length,
    smallest: Math.min(...shown.map(s => Math.min(s.getBoundingClientRect().width, s.getBoundingClientRect().height))),
    text: Math.min(...shown.map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
  };
})()"""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_looks_right(browser, page, tmp_path, width, dark):
    browser.open(page, width, dark=dark)
    seen = browser.evaluate(LOOK)
    assert seen["overflow"] <= 0
    assert seen["outside"] == []
    # Two protocols, each with a mean over tasks and two tasks, of score and KL.
    assert seen["charts"] == 2 * 3 * 2
    assert seen["maps"] > 50
    assert seen["smallest"] > 40
    assert seen["text"] > 0.95, "charts are shown at their own size, so that their text stays legible"
    light, ink = (sum(map(int, re.findall(r"\d+", seen[key]))) for key in ("paper", "ink"))
    assert (light < ink) == dark
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    picture = browser.screenshot(tmp_path / "page.png", whole=False)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000, "an empty page would be smaller"


@needs_chromium
def test_a_method_is_brought_forward_by_mouse_and_keyboard(browser, page):
    browser.open(page, 1280)
    faded = "[...document.querySelectorAll('.line')].filter(e => getComputedStyle(e).opacity < 0.5).length"
    button = "document.querySelector('.legend li[data-m] button')"
    assert browser.evaluate(faded) == 0
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(faded) > 0
    assert browser.evaluate(f"{button}.getAttribute('aria-pressed')") == "true"
    browser.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.evaluate(faded) == 0
    tip = browser.evaluate("""(() => {
      const dot = document.querySelector('.dot');
      dot.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
      const tip = document.getElementById('tip');
      return tip.hidden ? '' : tip.textContent;
    })()""")
    assert "of the bytes" in tip
    assert browser.complaints == []


@needs_chromium
def test_details_open_for_print(browser, tmp_path):
    rows = [
        measured
        for task in ("needle", "qa", "vt")
        for measured in one("full", "", ratio=1.0, kl=0.0, task=task) + one(task=task)
    ]
    page = tmp_path / "report.html"
    page.write_text(to_html(aggregate([run()], rows)), "utf-8")
    browser.open(page, 1280)
    closed = "document.querySelectorAll('details:not([open])').length"
    before = browser.evaluate(closed)
    assert before > 0
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate(closed) == 0
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate(closed) == before
    assert browser.pdf().startswith(b"%PDF")
