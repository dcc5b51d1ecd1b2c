"""kvfold bench: what is refused, what is written, what is shown."""

from __future__ import annotations

import json
import os
from io import StringIO

import pytest
from rich.console import Console

from kvfold.cli.bench import _DECODE, _bytes, candidates_of, table
from kvfold.errors import KvfoldError

QUICK = ("--device", "cpu", "--context", "64", "--method", "blockgtq:bits=4")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("attention", ()),
        ("decode", ("--no-stock",)),
        ("memory", ()),
        ("throughput", ("--budget", "200kB")),
        ("fold", ()),
    ],
)
def test_every_bench_writes_figures_and_a_chart(kvfold, model_folder, tmp_path, name, more):
    result = kvfold("bench", name, "-m", model_folder, *QUICK, *more, "--json", "a.json", "--plot", "a.html")
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert told["bench"] == name and told["dtype"] == "float32" and told["settings"]["keep"] == 0.1
    assert "blockgtq:bits=4" in {row["label"] for row in told["rows"]}
    assert "blockgtq:bits=4" in result.stdout and "wrote a.json" in result.stdout
    assert (tmp_path / "a.html").read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a.html", "a.json"]


def test_json_can_be_printed(kvfold, model_folder):
    result = kvfold("bench", "attention", "-m", model_folder, *QUICK, "--json", "-")
    assert result.exit_code == 0, result.output
    assert {row["context"] for row in json.loads(result.stdout)["rows"]} == {64}


def test_what_was_measured_before_a_failure_is_kept(kvfold, model_folder, tmp_path, monkeypatch):
    from kvfold.bench import attention as right

    def broken(setup):
        rows = right(setup)
        yield next(rows)
        raise RuntimeError("lost")

    monkeypatch.setattr("kvfold.bench.attention", broken)
    result = kvfold("bench", "attention", "-m", model_folder, *QUICK, "--json", "a.json")
    assert result.exit_code == 1 and "lost" in result.stderr
    assert len(json.loads((tmp_path / "a.json").read_text("utf-8"))["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--device", "tpu"), "choose from auto, cpu, cuda"),
        (("attention", "--context", "0"), "--context 0: at least 2"),
        (("attention", "--context", "8k"), "write whole numbers"),
        (("decode", "--batch", "0"), "--batch 0: at least 1"),
        (("decode", "--shape", "gpt-5"), "choose from llama-3.1-8b"),
        (("decode", "--shape", "qwen2.5-3b", "--layers", "99"), "has 1 to 36"),
        (("decode", "--shape", "qwen2.5-3b", "-m", "demo"), "give one of them"),
        (("decode", "-m", "demo", "--layers", "1"), "only a --shape can be cut"),
        (("fold", "--method", "zip"), "zip"),
        (("fold", "--keep", "0"), "keep"),
        (("memory", "--json", "none/a.json"), "--json none/a.json: there is no folder none"),
        (("memory", "--json", "."), "a folder; give a file name"),
        (("memory", "--plot", "a.png"), "end the name in .html"),
        (("throughput", "--budget", "lots"), "write bytes as 40GB"),
        (("throughput", "--budget", "0GB"), "write bytes as 40GB"),
        (("decode", "--device", "cpu", "--batch", "100000000", "--layers", "1"), "GB are free"),
    ],
)
def test_bad_input_is_one_line(kvfold, arguments, message):
    result = kvfold("bench", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


def test_a_gpu_that_is_not_there(kvfold, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = kvfold("bench", "attention", "--device", "cuda")
    assert result.exit_code == 2 and "torch sees no CUDA device" in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(kvfold, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    result = kvfold("bench", "attention", "--json", "locked/a.json")
    assert result.exit_code == 2 and "cannot be written to" in result.stderr


def test_keep_goes_to_methods_without_another_budget():
    found = candidates_of(["rdkv", "blockgtq:bits=3", "rdkv:keep=0.2", "snapkv >> blockgtq:bits=4"], 0.1)
    assert [candidate.label for candidate in found] == [
        "rdkv, keep 0.1",
        "blockgtq:bits=3",
        "rdkv:keep=0.2",
        "snapkv >> blockgtq:bits=4, keep 0.1",
    ]
    assert found[0].method.keep == 0.1 and found[1].method.keep is None and found[2].method.keep == 0.2
    assert found[3].method.first.keep == 0.1


def test_budgets_are_in_units_of_a_thousand():
    assert _bytes("--budget", "40GB") == 40 * 10**9 and _bytes("--budget", "1.5 MB") == 1_500_000
    with pytest.raises(KvfoldError, match="40GB"):
        _bytes("--budget", "40 GiB")


def test_a_narrow_console_cuts_no_figure():
    figures = dict(ms=123.4, step_ms=99.12, bytes=1_234_567_890, speedup=1.12, floor_ms=19.15, share=0.18)
    row = dict(context=131_072, batch=8, label="xkv:sparse_budget=64,choice=window, keep 0.3", **figures)
    console = Console(width=80, file=StringIO(), force_terminal=False)
    console.print(table([row], _DECODE, "a model"))
    shown = console.file.getvalue()
    assert "…" not in shown
    for figure in ("8 x 131,072", "123.4", "99.12", "1.23 GB", "1.12", "19.15", "18%"):
        assert f" {figure} " in shown
