"""Grids: every cell once, the same rows whatever the order, and nothing lost when a run is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvfold.errors import KvfoldError
from kvfold.evaluate import Grid, read, run
from kvfold.evaluate.results import SCHEMA, Appender, Cell, Row
from kvfold.hf import bridge
from kvfold.methods import METHODS, BlockGTQ, Full, SnapKV

FAST = ["snapkv:window=4", "kivi:bits=2,group=16,residual=16"]


def grid(folder, **changes):
    settings = dict(
        models=[str(folder)], tasks=["letters"], methods=FAST, budgets=["keep=0.3"], tokens=[120], samples=2
    )
    return Grid(**{**settings, **changes})


def figures(rows):
    """Rows without what differs from run to run."""
    times = dict(prefill_seconds=None, fold_seconds=None, decode_seconds=None, run="")
    return [dataclasses.replace(row, **times).to_dict() for row in rows]


def test_every_cell_is_measured_once(folder, letters, tmp_path):
    wanted = grid(
        folder,
        tasks=["letters:turns=2", "perplexity:continuation=20"],
        budgets=["keep=0.3", "keep=0.2"],
        tokens=[120, 140],
        views=["unseen", "in view"],
        when=["prefill", "generating"],
    )
    summary = run(wanted, tmp_path / "results")
    cells = [row.cell for row in summary.rows]
    # full, snapkv at two budgets, kivi once; letters in both views, perplexity in one.
    assert len(cells) == len(set(cells)) == 4 * (2 + 1) * 2 * 2 * 2
    assert summary.measured == len(cells) and summary.skipped == 0 and not summary.errors
    assert {(cell.method, cell.budget) for cell in cells} == {
        ("full", ""),
        ("snapkv:window=4", "keep=0.3"),
        ("snapkv:window=4", "keep=0.2"),
        ("kivi:bits=2,group=16,residual=16", ""),
    }
    assert {cell.model for cell in cells} == {"tiny"}
    for row in summary.rows:
        assert row.fidelity is not None and row.fidelity.tokens > 0
        assert (row.widths is None) == (row.cell.sample > 0)
        assert row.prefill_seconds > 0 and row.fold_seconds > 0
        assert sum(row.ledger.values()) > 0
        if row.cell.method == "full":
            assert row.fidelity.kl == 0 and row.fidelity.top1 == 1
            assert row.folded_bytes == 2 * row.full_bytes  # float32
        else:
            assert row.fidelity.kl > 0
        if row.cell.method.startswith("snapkv"):
            assert 0 < row.ratio <= float(row.cell.budget.partition("=")[2])
        if row.cell.task.startswith("perplexity"):
            assert row.metric == "perplexity" and row.answers == []
            assert row.score == pytest.approx(torch.tensor(row.fidelity.nll).exp().item(), rel=1e-5)
        else:
            assert len(row.answers) == len(row.references) == 2
            assert row.score == sum("e" in answer for answer in row.answers) / 2
            assert row.about == {"index": row.cell.sample}
    # Blocks of 16 fold in the middle of the 20 tokens.
    kivi = {
        (row.cell.when, row.fidelity.kl)
        for row in summary.rows
        if (row.cell.method[:4], row.cell.tokens, row.cell.sample, row.cell.task[:4])
        == ("kivi", 120, 0, "perp")
    }
    assert len({kl for _, kl in kivi}) == 2


def test_rows_do_not_depend_on_order_or_company(folder, letters, tmp_path):
    whole = run(grid(folder), tmp_path / "whole")
    run(grid(folder, methods=FAST[1:], samples=1), tmp_path / "parts")
    parts = run(grid(folder, methods=FAST[::-1]), tmp_path / "parts")
    assert parts.skipped == 2 and parts.measured == 4
    assert figures(parts.rows) == figures(whole.rows)


def test_another_seed_is_another_cell(folder, letters, tmp_path):
    first = run(grid(folder, samples=1), tmp_path)
    second = run(grid(folder, samples=1, seed=1), tmp_path)
    assert second.skipped == 0 and second.measured == 3
    assert len(read(tmp_path).rows) == 6
    assert figures(first.rows) != figures(second.rows)
    assert run(grid(folder, samples=1), tmp_path).measured == 0


def test_workers_find_the_same(folder, tmp_path):
    wanted = grid(folder, tasks=["perplexity:continuation=20", "needle"], tokens=[400])
    alone = run(wanted, tmp_path / "alone")
    seen = []
    shared = run(
        wanted, tmp_path / "shared", workers=2, progress=lambda done, total: seen.append((done, total))
    )
    assert sorted(path.name for path in (tmp_path / "shared").glob("rows*")) == [
        "rows-0.jsonl",
        "rows-1.jsonl",
    ]
    assert all((tmp_path / "shared" / f"rows-{index}.jsonl").read_text() for index in range(2))
    assert figures(shared.rows) == figures(alone.rows)
    assert seen[-1] == (12, 12) and not shared.notes


KILLED = """
import sys
from kvfold.evaluate import Grid, run
grid = Grid(models=[sys.argv[1]], tasks=["perplexity:continuation=20"], methods=["snapkv:window=4"],
            budgets=[f"keep={n / 100}" for n in range(20, 60)], tokens=[300], samples=50)
run(grid, sys.argv[2], workers=int(sys.argv[3]))
"""


def test_a_killed_run_goes_on(folder, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(tmp_path), "1"])
    file = tmp_path / "rows-0.jsonl"
    deadline = time.monotonic() + 300
    while not (file.exists() and file.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = file.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    count = whole.count(b"\n")
    # Wherever the kill fell: the line it would have torn.
    file.write_bytes(whole + whole.splitlines()[0][:99])
    wanted = Grid(
        models=[str(folder)],
        tasks=["perplexity:continuation=20"],
        methods=["snapkv:window=4"],
        budgets=[f"keep={n / 100}" for n in range(20, 60)],
        tokens=[300],
        samples=1 + (count - 1) // 41,
    )
    summary = run(wanted, tmp_path)
    assert any("torn" in note for note in summary.notes)
    assert summary.skipped == count and summary.measured == 41 * wanted.samples - count
    after = file.read_bytes()
    assert after.startswith(whole)
    cells = [json.dumps(json.loads(line)["cell"]) for line in after.splitlines()]
    assert len(cells) == len(set(cells)) == 41 * wanted.samples
    fresh = run(wanted, tmp_path / "fresh")
    assert figures(fresh.rows) == figures(summary.rows)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_run(folder, tmp_path, sent):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), str(tmp_path), "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What runs in the background may start deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while len(children.read_text().split()) < 3:  # the workers, and what tracks their resources
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1)  # they import torch now, where nothing of ours catches anything
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal does
    else:
        process.send_signal(sent)
    # Ends when the last process that holds it has ended.
    _, told = process.communicate(timeout=120)
    assert told.count("Traceback") == (sent == signal.SIGINT), told


@dataclass(frozen=True, kw_only=True)
class Hungry(Full):
    name = "hungry"
    paper = "made up"

    def fold(self, views):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")


@dataclass(frozen=True, kw_only=True)
class Broken(Full):
    name = "broken"
    paper = "made up"

    def fold(self, views):
        return [None][5]


def test_failures_are_rows_and_the_grid_goes_on(folder, letters, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "hungry", Hungry)
    monkeypatch.setitem(METHODS, "broken", Broken)
    wanted = grid(folder, methods=["hungry", "broken", *FAST], budgets=["keep=0.0001", "keep=0.3"], samples=1)
    summary = run(wanted, tmp_path)
    errors = {(row.cell.method, row.cell.budget): row.error for row in summary.errors}
    assert errors.pop(("hungry", "")).startswith("out of memory: CUDA out of memory. Tried")
    assert "IndexError: list index out of range (test_runner.py:" in errors.pop(("broken", ""))
    assert "does not pay for one token" in errors.pop(("snapkv:window=4", "keep=0.0001"))
    assert not errors
    assert all(row.score is None and row.fidelity is None for row in summary.errors)
    assert len(summary.rows) == 6
    # Errors stay as they are, unless asked for again.
    assert run(wanted, tmp_path).measured == 0
    monkeypatch.setitem(METHODS, "hungry", Full)
    again = run(wanted, tmp_path, retry=True)
    assert again.skipped == 3 and {row.cell.method for row in again.errors} == {"broken", "snapkv:window=4"}


def test_out_of_memory_in_the_prefill(folder, letters, tmp_path, monkeypatch):
    from kvfold.evaluate import measure

    def fail(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(measure, "Prefill", fail)
    summary = run(grid(folder, samples=1), tmp_path)
    assert [row.error for row in summary.rows] == ["out of memory: none left"] * 3


def test_folded_caches_are_let_go(folder, letters, tmp_path):
    alive = []
    run(
        grid(folder, budgets=[f"keep={n / 20}" for n in range(4, 14)]),
        tmp_path,
        # Nothing lives before the first cell.
        progress=lambda done, _: alive.append(len(bridge._live)) if done else None,
    )
    # The exact prefill of the group, and nothing of any method that was measured.
    assert set(alive) == {1}


def test_nothing_is_loaded_for_a_grid_that_cannot_be(folder, letters, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("kvfold.cli.models.load_model", fail)
    for changes, message in (
        (dict(tokens=[200, 4096]), "--tokens 4096: .* reads at most 640"),
        (dict(tokens=[636]), "takes .* positions with its answers, .* at most --tokens 6"),
        (
            dict(tasks=["perplexity:continuation=2000"], tokens=[200]),
            "reads at most 640: ask for less of them",
        ),
        (dict(tasks=["needle"], tokens=[30]), "task needle at 30 tokens"),
        (dict(tasks=["letters:rows=0"]), "task letters:rows=0 has no samples"),
        (dict(models=[str(folder) + "x"]), "did you mean .*tiny"),
    ):
        with pytest.raises(KvfoldError, match=message):
            run(grid(folder, **changes), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_data_set_with_fewer_samples_ends_early(folder, letters, tmp_path):
    summary = run(grid(folder, tasks=["letters:rows=1"], samples=3), tmp_path)
    assert [row.cell.sample for row in summary.rows] == [0, 0, 0]
    assert any("fewer than 3 samples" in note for note in summary.notes)


def test_a_prompt_too_short_to_fold_says_so(folder, letters, tmp_path):
    summary = run(grid(folder, methods=["snapkv:window=300"], samples=1), tmp_path)
    notes = {row.cell.method: row.note for row in summary.rows}
    assert "too short to fold" in notes["snapkv:window=300"] and notes["full"] == ""


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(methods=["snapvk"]), "unknown method 'snapvk': did you mean snapkv"),
        (dict(methods=["snapkv:windw=3"]), "unknown option 'windw': did you mean window"),
        (dict(methods=["snapkv:window=x"]), "window=x: expected int"),
        (dict(methods=["snapkv:window"]), "write options as snapkv:option=value"),
        (dict(methods=["snapkv>>kivi"]), "kivi cannot code what another method keeps"),
        (dict(methods=["snapkv >> blockgtq:keep=0.1"]), "give it bits, and the budget to snapkv"),
        (dict(budgets=["kep=0.1"]), "unknown term 'kep': did you mean keep"),
        (dict(budgets=["keep=3"]), "keep"),
        (dict(budgets=[]), "needs a budget"),
        (dict(tasks=["neddle"]), "did you mean needle"),
        (dict(tasks=["needle:dephts=3"]), "did you mean depths"),
        (dict(views=["seen"]), "unknown choice 'seen'"),
        (dict(samples=0), "at least 1"),
        (dict(dtype="float13"), "dtype: unknown choice 'float13': did you mean float32"),
        (dict(device="tpu"), "device: unknown choice 'tpu'"),
        (dict(methods=["kivi:bits=9"]), "bits must be an integer from 1 to 8, got 9"),
        (dict(tokens=["many"]), "is no number"),
        (dict(models=[]), "models: give at least one"),
    ],
)
def test_a_bad_grid(changes, message):
    settings = dict(models=["demo"], tasks=["needle"])
    with pytest.raises(KvfoldError, match=message):
        Grid(**{**settings, **changes})


def test_labels_say_what_differs_from_the_defaults():
    labels = ["kivi:residual=64,bits=2", "kivi:bits=2,group=32,residual=64", "snapkv:keep=0.5", "snapkv"]
    labels += ["blockgtq", "blockgtq:bits=2.5,sinks=0", "snapkv:window=8>>blockgtq:bits=4"]
    made = Grid(models=["m"], tasks=["needle"], methods=labels, budgets=["keep=0.10"]).variants()
    assert [(variant.label, variant.budget) for variant in made] == [
        ("full", ""),
        ("kivi:bits=2,residual=64", ""),
        ("snapkv", "keep=0.5"),
        ("snapkv", "keep=0.1"),
        ("blockgtq", "keep=0.1"),
        ("blockgtq:sinks=0", "bits=2.5"),
        ("snapkv:window=8 >> blockgtq:bits=4.0", "keep=0.1"),
    ]
    assert made[-1].method == SnapKV(keep=0.1, window=8) >> BlockGTQ(bits=4)


def test_a_group_of_tasks_stands_for_all_of_them():
    made = Grid(models=["m"], tasks=["ruler", "needle"], methods=["kivi"])
    assert len(made.tasks) == 14 and made.tasks[-1] == "needle"


# ---- the results folder ----

CELL = Cell("m", "full", "", "needle", 100, "unseen", "prefill", "chat", 0)


def write(folder, *lines, name="rows-0.jsonl"):
    folder.mkdir(exist_ok=True)
    (folder / "runs.jsonl").write_text(json.dumps(RUN) + "\n")
    (folder / name).write_text("".join(lines))


RUN = dict(
    id="r", started="", command="", hardware="", versions={"kvfold": "9.9"}, seed=0, dtype="", schema=SCHEMA
)


def line(**changes):
    return json.dumps(Row(CELL, "r", **changes).to_dict()) + "\n"


def test_a_torn_last_line_is_left_out_and_said(tmp_path):
    other = dataclasses.replace(CELL, sample=1)
    write(tmp_path, line(score=1.0), json.dumps(Row(other, "r", score=1.0).to_dict())[:-1])
    found = read(tmp_path)
    assert [row.cell for row in found.rows] == [CELL]
    assert found.notes == ["rows-0.jsonl: the last line is torn and left out"]
    with Appender(tmp_path / "rows-0.jsonl") as file:
        assert file.repaired
        file.write(Row(other, "r", score=0.5))
    found = read(tmp_path)
    assert [row.score for row in found.rows] == [1.0, 0.5] and not found.notes


def test_a_damaged_line_is_named(tmp_path):
    write(tmp_path, line(), "}{\n", line())
    with pytest.raises(KvfoldError, match=r"rows-0.jsonl, line 2 is damaged"):
        read(tmp_path)
    write(tmp_path, line(), '{"cell": {}}\n')
    with pytest.raises(KvfoldError, match=r"rows-0.jsonl, line 2 is no row"):
        read(tmp_path)


def test_another_schema_is_refused(folder, letters, tmp_path):
    write(tmp_path, line())
    (tmp_path / "runs.jsonl").write_text(json.dumps({**RUN, "schema": SCHEMA + 1}) + "\n")
    for action in (lambda: read(tmp_path), lambda: run(grid(folder), tmp_path)):
        with pytest.raises(KvfoldError, match=r"use kvfold 9\.9, which wrote them, or choose another"):
            action()


def test_no_results(tmp_path):
    with pytest.raises(KvfoldError, match="holds no results"):
        read(tmp_path)
    (tmp_path / "rows-0.jsonl").write_text(line())
    with pytest.raises(KvfoldError, match=r"no runs.jsonl"):
        run(Grid(models=["m"], tasks=["needle"]), tmp_path)


def test_figures_outlive_errors(tmp_path):
    write(tmp_path, line(score=1.0), line(error="out of memory"))
    assert [row.score for row in read(tmp_path).rows] == [1.0]
    write(tmp_path, line(error="out of memory"), line(error="another"), name="rows-0.jsonl")
    assert [row.error for row in read(tmp_path).rows] == ["another"]
    write(tmp_path, line(score=0.0), name="rows-1.jsonl")
    assert [row.score for row in read(tmp_path).rows] == [0.0]


def test_two_runs_do_not_write_one_file(tmp_path):
    writing = pytest.raises(KvfoldError, match="another process is writing")
    with Appender(tmp_path / "rows-0.jsonl"), writing:
        Appender(tmp_path / "rows-0.jsonl")
    Appender(tmp_path / "rows-0.jsonl").close()


def test_rows_come_back_as_they_were(tmp_path):
    from kvfold.evaluate.results import Fidelity

    row = Row(CELL, "r", score=0.1, fidelity=Fidelity(0.1, 0.5, 0.2, 1.0, 0.9, 3), answers=["ä\n"], note="n")
    write(tmp_path, "")
    with Appender(tmp_path / "rows-0.jsonl") as file:
        file.write(row)
    assert read(tmp_path).rows == [row]
