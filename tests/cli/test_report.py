"""kvfold report: a results folder to a page, tables or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfold.evaluate.results import SCHEMA, Appender
from tests.evaluate.report.synthetic import row, run


def write(folder: Path, rows, *runs) -> Path:
    folder.mkdir()
    with Appender(folder / "runs.jsonl") as file:
        for one in runs or (run(),):
            file.write(one)
    with Appender(folder / "rows-0.jsonl") as file:
        for one in rows:
            file.write(one)
    return folder


@pytest.fixture
def results(tmp_path) -> Path:
    rows = [row("full", "", i, ratio=1.0, kl=0.0) for i in range(3)]
    rows += [row("rdkv", "keep=0.1", i, score=float(i > 0)) for i in range(3)]
    return write(tmp_path / "results", rows)


def test_writes_a_page_here_by_default(kvfold, results, tmp_path):
    result = kvfold("report", results)
    assert result.exit_code == 0, result.output
    assert result.stdout == "wrote report.html: 6 measurements\n"
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "2 x Intel Xeon" in page
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize(("name", "start"), [("a.html", "<!doctype"), ("a.md", "## tiny"), ("a.json", "{")])
def test_the_ending_says_what_to_write(kvfold, results, tmp_path, name, start):
    assert kvfold("report", results, "-o", name).exit_code == 0
    assert (tmp_path / name).read_text("utf-8").startswith(start)


def test_json_and_markdown_are_printed_and_nothing_is_written(kvfold, results, tmp_path):
    told = json.loads(kvfold("report", results, "--json").stdout)
    entry = next(e for e in told["settings"][0]["entries"] if e["method"] == "rdkv")
    assert entry["score"]["mean"] == pytest.approx(2 / 3)
    assert entry["difference"]["mean"] == pytest.approx(-1 / 3)
    assert entry["ours"]
    assert told["runs"][0]["hardware"] == "2 x Intel Xeon, 2 threads"
    assert "| rdkv | keep=0.1 | 10 % | 0.67 [" in kvfold("report", results, "--markdown").stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]


def test_several_folders_are_shown_as_one(kvfold, results, tmp_path):
    more = write(tmp_path / "more", [row("snapkv", run="r2", sample=i) for i in range(3)], run("r2"))
    told = json.loads(kvfold("report", results, more, "--json").stdout)
    assert {e["method"] for e in told["settings"][0]["entries"]} == {"full", "rdkv", "snapkv"}
    assert [one["id"] for one in told["runs"]] == ["r1", "r2"]


def test_a_torn_last_line_is_left_out_and_said(kvfold, results, tmp_path):
    with (results / "rows-0.jsonl").open("a") as file:
        file.write('{"cell": {"mod')
    result = kvfold("report", results)
    assert result.exit_code == 0
    assert "torn" in result.stderr
    assert "torn" in (tmp_path / "report.html").read_text("utf-8")


def test_highlight(kvfold, results):
    told = json.loads(kvfold("report", results, "--json", "--highlight", "full").stdout)
    assert {e["method"] for e in told["settings"][0]["entries"] if e["ours"]} == {"full"}


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_bad_input(kvfold, results, tmp_path):
    refused(kvfold("report", "nowhere"), "nowhere", "kvfold eval")
    (tmp_path / "empty").mkdir()
    refused(kvfold("report", "empty"), "empty", "kvfold eval")
    write(tmp_path / "no rows", [])
    refused(kvfold("report", "no rows"), "kvfold eval")
    write(tmp_path / "other", [], run(schema=SCHEMA + 1))
    refused(kvfold("report", "other"), f"schema {SCHEMA + 1}")
    refused(kvfold("report", results, "-o", "report.pdf"), ".html")
    refused(kvfold("report", results, "-o", "nowhere/report.html"), "no folder")
    refused(kvfold("report", results, "--json", "--markdown"), "one of them")
    refused(kvfold("report", results, "--highlight", "nosuch"), "nosuch", "rdkv")


def test_a_page_that_was_there_survives_a_failure(kvfold, results, tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("precious")

    def broken(*arguments, **options):
        raise RuntimeError("no page today")

    monkeypatch.setattr("kvfold.evaluate.report.to_html", broken)
    assert kvfold("report", results).exit_code == 1
    assert (tmp_path / "report.html").read_text() == "precious"
