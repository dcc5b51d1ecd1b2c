"""The other commands, help, method options, and the demo on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Literal

import pytest

from kvfold import METHODS, __version__, demo
from kvfold.cli.options import describe, parse
from kvfold.errors import KvfoldError
from kvfold.prompt import PLAIN, Template

from .conftest import save_model

COMMANDS = ("fold", "ask", "chat", "inspect", "methods", "calibrate", "doctor", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example(kvfold, command):
    result = kvfold(command, "--help")
    assert result.exit_code == 0
    assert f"Example: kvfold {command}" in result.stdout.strip().splitlines()[-1]


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "kvfold", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and __version__ in done.stdout


def test_help_names_every_command_and_is_quick():
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        code = "import sys; sys.argv = ['kvfold', '--help']; from kvfold.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        best = min(best, time.perf_counter() - start)
    for command in COMMANDS:
        assert command in done.stdout
    # Loading torch alone takes longer than this.
    assert best < 1.0


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from kvfold.cli import app\n"
        "assert CliRunner().invoke(app, ['fold', '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_version(kvfold):
    assert kvfold("--version").stdout.strip() == f"kvfold {__version__}"


def test_unknown_command(kvfold):
    assert kvfold("origami").exit_code == 2


def test_methods(kvfold):
    told = json.loads(kvfold("methods", "--json").stdout)
    assert [method["name"] for method in told] == sorted(METHODS)
    table = kvfold("methods")
    assert table.exit_code == 0
    for name in METHODS:
        assert name in table.stdout
    for method in told:
        assert method["paper"]
        for option in method["options"]:
            assert option["name"] in table.stdout
    assert [one["name"] for one in json.loads(kvfold("methods", "kivi", "--json").stdout)] == ["kivi"]
    wrong = kvfold("methods", "kivy")
    assert wrong.exit_code == 2 and "unknown method 'kivy': choose from adakv" in wrong.stderr


def test_doctor(kvfold):
    told = json.loads(kvfold("doctor", "--json").stdout)
    assert told["versions"]["kvfold"] == __version__
    assert told["cpu"]["torch threads"] >= 1
    assert told["attention"]["sdpa"] is True
    assert "sdpa" in kvfold("doctor").stdout


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3", int | None, 3),
        ("none", int | None, None),
        ("0.5", float, 0.5),
        ("yes", bool, True),
        ("False", bool, False),
        ("model", Literal["layer", "model"], "model"),
        ("32", Literal["prompt", 32], 32),
        ("0,4,8", tuple[int, ...], (0, 4, 8)),
        ("auto", tuple[int, ...] | Literal["auto"], "auto"),
        ("(0, 2)", tuple[int, ...] | Literal["auto"], (0, 2)),
        ("7", str | int, 7),
        ("seven", str | int, "seven"),
    ],
)
def test_options_are_read_by_type(text, kind, value):
    read = parse(text, kind, "name")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"), [("x", int), ("maybe", bool), ("town", Literal["layer"]), ("0,x", tuple[int, ...])]
)
def test_options_of_the_wrong_type(text, kind):
    with pytest.raises(KvfoldError, match="expected"):
        parse(text, kind, "name")
    assert describe(kind)


def test_a_cache_saved_from_python_is_continued_as_plain_text():
    assert Template.from_dict(None) == PLAIN
    assert Template.from_dict(PLAIN.to_dict()) == PLAIN


def test_the_demo_text_is_shipped_and_facts_are_not_in_it():
    text = demo.text()
    assert 25_000 < len(text.encode()) < 35_000
    facts = demo.facts()
    assert len(facts) == 3
    for fact in facts:
        assert fact.sentence not in text
        assert not fact.in_answer(text)
        assert fact.in_answer(fact.sentence)
    planted = demo.planted(text, facts)
    assert len(planted) == len(text) + sum(len(fact.sentence) + 2 for fact in facts)
    for fact in facts:
        assert abs(planted.index(f"\n\n{fact.sentence}\n\n") / len(planted) - fact.depth) < 0.1


def test_planting_in_a_text_without_paragraphs():
    planted = demo.planted("one line", demo.facts())
    assert planted.startswith("one line\n\n")
    assert all(fact.sentence in planted for fact in demo.facts())


def test_an_answer_is_a_word_of_its_own():
    fact = demo.Fact("The train leaves from platform 17.", "Which?", "17", 0.5)
    assert fact.in_answer("From platform 17.")
    assert not fact.in_answer("In 1798.")
    assert not fact.in_answer("From platform 170.")


@pytest.fixture
def short_demo(kvfold, document, model_folder):
    """The demo's command line on a tiny model and text."""
    options = ["--model", model_folder, "--document", document, "--max-new-tokens", "4"]
    return lambda *more: kvfold("demo", *options, *more)


def test_demo_compares_two_caches(short_demo):
    result = short_demo("--method", "full", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert len(told["facts"]) == 3
    for row in told["facts"]:
        # A lossless store answers as the full cache does.
        assert row["full"]["answer"] == row["folded"]["answer"]
    assert told["right"]["full"] == told["right"]["folded"]
    assert told["ledger"]["ratio"] == 2.0  # this model is float32
    shown = short_demo("--method", "full")
    assert shown.exit_code == 0, shown.output
    assert "these sentences are not in it" in shown.stdout
    for fact in demo.facts():
        assert fact.sentence in shown.stdout
    assert "tokens/s" in shown.stdout


def test_demo_refuses_what_fold_refuses(short_demo, kvfold, tmp_path):
    assert short_demo("--keep", "2").exit_code == 2
    assert short_demo("--method", "origami").exit_code == 2
    small = save_model(tmp_path / "small", max_position_embeddings=64)
    result = kvfold("demo", "--model", small, "--method", "full", "--document", tmp_path / "lamp.txt")
    assert result.exit_code == 2
    assert "at most 64" in result.stderr


def test_a_demo_text_that_is_missing(kvfold, model_folder):
    assert (
        kvfold("demo", "--model", model_folder, "--method", "full", "--document", "missing.txt").exit_code
        == 2
    )
