"""Rows to entries: pairing, means over tasks, what is compared and what only shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.evaluate.report.synthetic import grid, row, run

from kvfold.errors import KvfoldError
from kvfold.evaluate.report import aggregate
from kvfold.evaluate.report.aggregate import OURS
from kvfold.evaluate.report.bits import head_bits
from kvfold.evaluate.report.levels import levels, smallest_good


def entry(setting, method, budget=None):
    (found,) = [e for e in setting.entries if e.method == method and budget in (None, e.budget)]
    return found


@pytest.fixture(scope="module")
def rows():
    return grid(models=("SmolLM2-135M-Instruct",), lengths=(2048, 4096), samples=10, budgets=(0.1,))


@pytest.fixture(scope="module")
def report(rows):
    return aggregate([run()], rows)


def test_means_and_paired_differences_against_a_direct_computation(rows, report):
    setting = next(s for s in report.settings if (s.task, s.tokens, s.view) == ("needle", 4096, "unseen"))
    found = entry(setting, "snapkv", "keep=0.1")
    mine = {
        r.cell.sample: r
        for r in rows
        if (r.cell.task, r.cell.tokens, r.cell.view) == ("needle", 4096, "unseen")
        and (r.cell.method, r.cell.budget) == ("snapkv", "keep=0.1")
    }
    full = {
        r.cell.sample: r.score
        for r in rows
        if (r.cell.task, r.cell.tokens, r.cell.view) == ("needle", 4096, "unseen") and r.cell.method == "full"
    }
    assert found.score.mean == pytest.approx(np.mean([r.score for r in mine.values()]))
    assert found.difference.mean == pytest.approx(np.mean([r.score - full[i] for i, r in mine.items()]))
    assert found.kl.mean == pytest.approx(np.mean([r.fidelity.kl for r in mine.values()]))
    assert found.perplexity.mean == pytest.approx(math.exp(np.mean([r.fidelity.nll for r in mine.values()])))
    assert found.ratio == pytest.approx(np.mean([r.folded_bytes / r.full_bytes for r in mine.values()]))
    assert (found.n, found.expected, found.complete) == (10, 10, True)
    assert found.difference.low <= found.difference.mean <= found.difference.high


def test_mean_over_tasks_weighs_each_task_and_length_alike_and_leaves_perplexity_to_kl(report, rows):
    overview = report.settings[0]
    assert (overview.task, overview.tokens, overview.tasks, overview.metric) == ("", None, 6, "recall")
    found = entry(overview, "rdkv", "keep=0.1")
    parts = [s for s in report.settings if s.task and s.view == overview.view]
    scores = [entry(s, "rdkv", "keep=0.1").score.mean for s in parts if s.metric == "recall"]
    assert found.score.mean == pytest.approx(np.mean(scores))
    assert found.kl.mean == pytest.approx(np.mean([entry(s, "rdkv", "keep=0.1").kl.mean for s in parts]))
    assert len(parts) == 8


def test_what_measured_too_little_is_shown_and_compared_with_nobody(report):
    overview = report.settings[0]
    failed = entry(overview, "rkv", "keep=0.1")
    assert failed.errors == {"out of memory: tried to allocate 2.1 GiB": 40}
    assert (failed.n, failed.expected, failed.complete) == (40, 80, False)
    early = entry(overview, "random", "keep=0.1")
    assert (early.n, early.complete) == (48, False)
    for setting in report.settings:
        for one in setting.entries:
            assert one.complete or not (one.on_score_frontier or one.on_kl_frontier)


def test_a_method_better_at_fewer_bytes_takes_the_frontier():
    rows = [row("full", "", i, 1.0, 0.0, 1.0) for i in range(4)]
    rows += [row("snapkv", "keep=0.1", i, 0.5, 0.2, 0.1) for i in range(4)]
    rows += [row("rdkv", "keep=0.05", i, 0.75, 0.1, 0.05) for i in range(4)]
    rows += [row("kivi", "", i, 1.0, 0.3, 0.3) for i in range(4)]
    (setting,) = aggregate([run()], rows).settings
    assert [e.method for e in setting.entries if e.on_score_frontier] == ["kivi", "rdkv"]
    assert [e.method for e in setting.entries if e.on_kl_frontier] == ["rdkv"]
    assert [(round(level.ratio, 3), level.by_score.method, level.by_kl.method) for level in levels(setting)] == [
        (0.1, "rdkv", "rdkv"), (0.05, "rdkv", "rdkv")
    ]  # fmt: skip
    assert smallest_good(setting).method == "kivi"


def test_perplexity_is_better_when_lower():
    rows = [row("full", "", i, 8.0, 0.0, 1.0, metric="perplexity") for i in range(3)]
    rows += [row("rdkv", "keep=0.1", i, 8.2, 0.1, 0.1, metric="perplexity") for i in range(3)]
    rows += [row("snapkv", "keep=0.1", i, 20.0, 0.1, 0.1, metric="perplexity") for i in range(3)]
    (setting,) = aggregate([run()], rows).settings
    assert not setting.higher_is_better
    assert [e.method for e in setting.entries if e.on_score_frontier] == ["rdkv"]
    assert smallest_good(setting).method == "rdkv"


def test_pairs_are_of_the_same_sample_and_seed():
    rows = [row("full", "", 0, 1.0, 0.0, 1.0, seed=0), row("full", "", 0, 0.0, 0.0, 1.0, seed=1)]
    rows += [row("rdkv", "keep=0.1", 0, 1.0, 0.1, 0.1, seed=1)]
    (setting,) = aggregate([run()], rows).settings
    assert entry(setting, "rdkv").difference.mean == 1.0
    assert entry(setting, "rdkv").difference.n == 1


def test_protocols_are_never_mixed(report):
    places = [(s.view, s.when, s.format) for s in report.settings]
    assert places == sorted(places, key=lambda p: p[0] != "unseen")
    rows = [
        row(view=v, when=w, format=f)
        for v in ("unseen", "in view")
        for w in ("prefill", "generating")
        for f in ("chat", "plain")
    ]
    assert len(aggregate([run()], rows).settings) == 8


def test_of_equal_cells_the_last_counts():
    rows = [row(error="out of memory: x"), row(score=0.25)]
    (setting,) = aggregate([run()], rows).settings
    assert entry(setting, "rdkv").score.mean == 0.25
    assert not entry(setting, "rdkv").errors


def test_needles_by_depth_and_length_with_failures_placed(report, rows):
    maps = [m for m in report.needles if m.view == "unseen"]
    assert maps[0].method == "full"
    assert (maps[0].depths, maps[0].lengths) == ([0, 0.25, 0.5, 0.75, 1], [2048, 4096])
    found = next(m for m in maps if (m.method, m.budget) == ("snapkv", "keep=0.1"))
    direct = [
        r.score
        for r in rows
        if (r.cell.task, r.cell.tokens, r.cell.view) == ("needle", 4096, "unseen")
        and (r.cell.method, r.cell.budget) == ("snapkv", "keep=0.1")
        and r.about["depth"] == 0.75
    ]
    assert len(direct) == 2
    assert found.scores[3][1] == np.mean(direct)
    failed = next(m for m in maps if (m.method, m.budget) == ("rkv", "keep=0.1"))
    assert [line[1] for line in failed.scores] == [None] * 5
    assert [line[1] for line in failed.errors] == [2] * 5


def test_bits_count_evicted_tokens_as_nothing():
    head = {"values": {"8": 30, "4": 10}, "keys": {"2": 8, "4": 8}}
    keys, values = head_bits([[head, head], []], tokens=80)
    assert values == [[(8 * 30 + 4 * 10) / 80] * 2, []]
    assert keys == [[(2 * 8 + 4 * 8) / 16 * 40 / 80] * 2, []]


def test_bits_of_the_longest_prompt(report):
    assert {m.tokens for m in report.bits} == {4096}
    kivi = next(m for m in report.bits if m.method == "kivi:bits=2")
    assert {bits for grid_ in (kivi.keys, kivi.values) for layer in grid_ for bits in layer} == {2.0}
    snap = next(m for m in report.bits if (m.method, m.budget) == ("snapkv", "keep=0.1"))
    assert snap.keys[0][0] == pytest.approx(1.6, rel=0.01)


def test_notes_say_what_to_distrust():
    other = run("r2", hardware="NVIDIA H200", dtype="float16")
    rows = [row(sample=0), row(sample=1, run="r2"), row(sample=2, error="boom"), row(sample=3, run="r9")]
    notes = " ".join(aggregate([run(), other, run("unused", hardware="abacus")], rows, notes=["torn"]).notes)
    for words in (
        "torn",
        "1 of 4 measurements failed",
        "r9",
        "dtypes",
        "hardware",
        "No full cache",
        "only 3 samples",
    ):
        assert words in notes, words
    assert "versions" not in notes


def test_json_holds_finite_numbers_only():
    bad = row(kl=float("inf"))
    told = aggregate([run()], [bad, row("full", "", kl=0.0)]).to_dict()
    text = json.dumps(told, allow_nan=False)
    assert json.loads(text)["settings"][0]["entries"][1]["kl"]["mean"] is None
    assert told["runs"][0]["command"].startswith("kvfold eval")


def test_no_rows():
    with pytest.raises(KvfoldError, match="kvfold eval"):
        aggregate([run()], [])


def test_rows_with_only_errors():
    report = aggregate([run()], [row(sample=i, error="out of memory: x") for i in range(3)])
    (setting,) = report.settings
    assert entry(setting, "rdkv").errors == {"out of memory: x": 3}
    assert entry(setting, "rdkv").ratio is None
    assert levels(setting) == []
    assert smallest_good(setting) is None


def test_ours_are_the_registered_methods_that_are_no_baseline():
    from kvfold.methods import METHODS

    own = {
        name
        for name, cls in METHODS.items()
        if ".baselines" not in cls.__module__ and name != "full" and not name.endswith("-published")
    }
    assert own <= set(OURS), "name the new method in kvfold.evaluate.report.aggregate.OURS"


def test_ours_may_be_chosen():
    rows = [row("snapkv:bits=4"), row("rdkv >> kivi"), replace(row("tova"), score=0.0)]
    (setting,) = aggregate([run()], rows, ours=["snapkv"]).settings
    assert {e.method: e.ours for e in setting.entries} == {
        "snapkv:bits=4": True, "rdkv >> kivi": False, "tova": False
    }  # fmt: skip
