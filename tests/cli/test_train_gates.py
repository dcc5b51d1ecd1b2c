"""kvfold train-gates, and folding with what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

SMALL = [
    "--tokens",
    "32",
    "--budget",
    "8",
    "--steps",
    "2",
    "--accumulate",
    "1",
    "--width",
    "8",
    "--features",
    "2",
]


@pytest.fixture
def gates(kvfold, model_folder, document, tmp_path):
    options = [*SMALL, "--bias", "3", "-o", "gates.safetensors"]
    result = kvfold("train-gates", model_folder, "--text", document, *options)
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.stderr and "mean beta" in result.stderr
    assert "gates=gates.safetensors" in result.stdout
    return tmp_path / "gates.safetensors"


def test_training_then_folding(gates, kvfold, model_folder, document):
    options = [
        "--method",
        "dbtrimkv",
        "--keep",
        "0.3",
        "--option",
        f"gates={gates}",
        "-o",
        "doc.kvf",
        "--json",
    ]
    result = kvfold("fold", document, "--model", model_folder, *options)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["folded"] and told["ledger"]["folded_ratio"] <= 0.3
    assert told["ledger"]["by_purpose"]["retention"] > 0
    answer = kvfold("ask", "doc.kvf", "Who lit it?", "--max-new-tokens", "3")
    assert answer.exit_code == 0, answer.output


def test_a_model_they_were_not_trained_for(gates, kvfold, base_folder, document):
    options = ["--method", "dbtrimkv", "--keep", "0.3", "--option", f"gates={gates}", "-o", "doc.kvf"]
    result = kvfold("fold", document, "--model", base_folder, *options)
    assert result.exit_code == 2 and "kvfold train-gates" in result.stderr


def test_going_on(kvfold, model_folder, document):
    options = [*SMALL, "--resume", "run", "--save-every", "1", "--json"]
    one = kvfold("train-gates", model_folder, "--text", document, *options)
    assert [json.loads(line)["step"] for line in one.stdout.splitlines()] == [1, 2]
    two = kvfold("train-gates", model_folder, "--text", document, *options)
    assert two.exit_code == 0 and two.stdout == "", "nothing was left to do"
    other = kvfold("train-gates", model_folder, "--text", document, *options, "--lr", "0.1")
    assert other.exit_code == 2 and "other settings" in other.stderr


def test_released_gates(kvfold, model_folder, tmp_path):
    from kvfold.methods.gates import load_gates

    save_file(
        {
            f"model.layers.{layer}.self_attn.retention_gate.{name}": torch.ones(shape)
            for layer in range(2)
            for name, shape in (
                ("linear1.weight", (5, 64)), ("linear1.bias", (5,)), ("linear2.weight", (2, 5)), ("bias", (2,))
            )
        },
        tmp_path / "authors.safetensors",
    )  # fmt: skip
    result = kvfold(
        "train-gates", model_folder, "--released", "authors.safetensors", "-o", "gates.safetensors"
    )
    assert result.exit_code == 0, result.output
    assert load_gates(tmp_path / "gates.safetensors").gates.config.width == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "at least one --text"),
        (["--text", "empty.txt"], "is empty"),
        (["--text", "missing.txt"], "No such file"),
        (["--text", "lamp.txt", "--tokens", "9000"], "shorter than one sequence"),
        (["--text", "lamp.txt", "--tokens", "64", "--budget", "64"], "nothing is to be forgotten"),
        (["--text", "lamp.txt", "--tokens", "64", "--budget", "8", "--lr", "0"], "lr must be above 0"),
        (["--text", "lamp.txt", "--tie", "some"], "--tie some: choose from"),
        (["--text", "lamp.txt", "-o", "nowhere/gates.safetensors"], "no folder"),
        (["--released", "missing.safetensors"], "missing.safetensors"),
    ],
)
def test_refusals(arguments, message, kvfold, model_folder, document, tmp_path):
    (tmp_path / "empty.txt").write_text(" ")
    result = kvfold("train-gates", model_folder, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batches(model_folder, document, tmp_path):
    from kvfold.methods.gates import load_gates

    command = tmp_path / "command.py"
    command.write_text("from kvfold.cli import main; main()")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--text", document, "--tokens", "32", "--budget", "8", "--steps", "3", "--bias", "3"]
    options += ["--width", "8", "--features", "2", "--lr", "0.01", "--device", "cpu"]
    found = []
    for start, accumulate in ((launch, "1"), ([], "2")):
        output = tmp_path / f"{accumulate}.safetensors"
        more = ["--accumulate", accumulate, "-o", output]
        parts = [sys.executable, *start, command, "train-gates", model_folder, *options, *more]
        subprocess.run(list(map(str, parts)), check=True)
        found.append(load_gates(output).gates.state_dict())
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=2e-4), name
