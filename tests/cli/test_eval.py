"""kvfold eval: grids from flags and YAML, what it prints, and its exit codes."""

from __future__ import annotations

import json

import pytest

from kvfold.cli.eval import TASK_HELP
from kvfold.evaluate import read
from kvfold.evaluate.tasks import GROUPS, TASKS

GRID = """
models: [{model}]
tasks: perplexity:continuation=16
methods: [snapkv:window=4, kivi:bits=2]
keep: [0.3, 0.2]
tokens: 200
samples: 1
"""


@pytest.fixture
def grid(tmp_path, model_folder):
    path = tmp_path / "grid.yaml"
    path.write_text(GRID.format(model=model_folder))
    return path


def test_a_table_with_score_and_kl_side_by_side(kvfold, grid):
    result = kvfold("eval", grid, "-o", "found")
    assert result.exit_code == 0, result.output
    assert "200 tokens, question unseen, folded after prefill, chat" in result.stdout
    assert "perplexity" in result.stdout and "KL" in result.stdout
    lines = [[part.strip() for part in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    table = {tuple(line[:2]): line[2:] for line in lines if len(line) == 5}
    assert list(table) == [
        ("full", ""),
        ("kivi:bits=2", ""),
        ("snapkv:window=4", "keep=0.3"),
        ("snapkv:window=4", "keep=0.2"),
    ]
    rows = {(row.cell.method, row.cell.budget): row for row in read("found").rows}
    for key, (ratio, score, kl) in table.items():
        assert float(ratio) == pytest.approx(rows[key].ratio, abs=1e-4)
        assert float(score) == pytest.approx(rows[key].score, abs=1e-3)
        assert float(kl) == pytest.approx(rows[key].fidelity.kl, abs=1e-4)
    assert "4 cells measured, 0 there before; rows are in found" in result.stdout
    (made,) = read("found").runs
    assert made.versions["torch"] and made.hardware and made.dtype == "float32"


def test_fidelity_has_one_column_and_a_log_its_progress(kvfold, grid):
    result = kvfold("eval", grid, "--task", "fidelity:continuation=16", "-o", "found")
    assert result.exit_code == 0, result.output
    lines = [line.split("│")[1:-1] for line in result.stdout.splitlines()]
    assert {len(line) for line in lines if line} == {4}
    assert "measured 0 of 4 cells" in result.stderr and "measured 4 of 4 cells" in result.stderr


def test_help_names_the_tasks():
    for name in TASKS:
        assert name in TASK_HELP or name in GROUPS["ruler"] or name == "mmdu"


def test_flags_are_the_same_grid(kvfold, grid, model_folder):
    flags = ["--task", "perplexity:continuation=16", "--method", "snapkv:window=4", "--method", "kivi:bits=2"]
    flags += ["--keep", "0.3,0.2", "--tokens", "200", "--samples", "1"]
    result = kvfold("eval", "-m", model_folder, *flags, "-o", "found", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["measured"] == 4 and told["errors"] == []
    assert {entry["kl"] is not None and entry["samples"] for entry in told["summary"]} == {1}
    again = json.loads(kvfold("eval", grid, "-o", "found", "--json").stdout)
    assert again["measured"] == 0 and again["skipped"] == 4
    assert again["summary"] == told["summary"]
    # Flags replace what the file says.
    more = json.loads(kvfold("eval", grid, "--keep", "0.5", "--view", "both", "-o", "found", "--json").stdout)
    assert more["measured"] == 1 and more["skipped"] == 2


def test_a_method_that_fails_is_told_at_the_end(kvfold, grid):
    result = kvfold("eval", grid, "--keep", "0.0001", "-o", "found")
    assert result.exit_code == 1
    assert "kivi:bits=2" in result.stdout and "error" in result.stdout
    assert "snapkv:window=4 keep=0.0001: the budget does not pay for one token" in result.stderr
    assert "1 cells have no figures; --retry measures them again" in result.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give --model"),
        (["-m", "MODEL"], "give --task"),
        (["-m", "MODEL", "--task", "perplexty"], "did you mean perplexity"),
        (["-m", "MODEL", "--task", "needle", "--method", "kivy"], "did you mean kivi"),
        (["-m", "MODEL", "--task", "needle", "--tokens", "2k"], "--tokens 2k: expected whole numbers"),
        (["-m", "MODEL", "--task", "needle", "--tokens", "9999"], "reads at most 640"),
        (["-m", "MODEL", "--task", "needle", "--tokens", "9"], "needle at 9 tokens: needle takes at least "),
        (["-m", "MODEL", "--task", "needle", "--view", "sometimes"], "unknown choice 'sometimes'"),
        (["-m", "MODEL", "--task", "needle", "--device", "tpu"], "--device tpu: choose from"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input(kvfold, model_folder, flags, message):
    result = kvfold("eval", *[model_folder if flag == "MODEL" else flag for flag in flags])
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    "text, message",
    [
        ("modles: [a]\ntasks: [needle]", "unknown key 'modles': did you mean models"),
        ("models: [a]\ntasks: [needle]\nmodels: [b]", "models is there twice"),
        ("- a", "a grid is a mapping"),
        ("models: [a", "is no YAML"),
        ("models: [a]\ntasks: [needle]\nsamples: many", "samples: 'many' is not a whole number"),
        ("models: [a]\ntasks: [needle]\nkeep: [lots]", "keep: 'lots' is no number"),
    ],
)
def test_a_bad_file(kvfold, tmp_path, text, message):
    (tmp_path / "grid.yaml").write_text(text)
    result = kvfold("eval", "grid.yaml")
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")


def test_base_model_has_no_chat(kvfold, base_folder):
    flags = ["-m", base_folder, "--task", "perplexity:continuation=8", "--tokens", "200", "--samples", "1"]
    result = kvfold("eval", *flags, "--method", "kivi", "--format", "chat")
    assert result.exit_code == 2 and "has no chat template" in result.stderr
    result = kvfold("eval", *flags, "--method", "kivi", "--json")
    assert result.exit_code == 0, result.output
    assert {entry["format"] for entry in json.loads(result.stdout)["summary"]} == {"plain"}
