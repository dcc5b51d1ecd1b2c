"""kvfold inspect --cka: how alike layers are, and xkv windows by it."""

from __future__ import annotations

import json

import pytest


def test_proposes_windows_that_xkv_takes(kvfold, document, model_folder):
    result = kvfold("inspect", "--cka", model_folder, "--text", document, "--layers", "1", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["borders"] == [1] and told["layers"] == [0, 1]
    assert told["keys"][0][0] == 1 and 0 < told["values"][0][1] == told["values"][1][0] <= 1
    fold = ("fold", document, "--model", model_folder, "--method", "xkv", "--keep", "0.3")
    assert kvfold(*fold, "--option", "borders=1", "-o", "lamp.kvf").exit_code == 0
    assert kvfold("ask", "lamp.kvf", "What is green?", "--max-new-tokens", "2").exit_code == 0


def test_draws(kvfold, document, model_folder, tmp_path):
    result = kvfold("inspect", "--cka", model_folder, "--text", document, "--png", "cka.png")
    assert result.exit_code == 0, result.output
    assert "--method xkv" in result.stdout
    assert (tmp_path / "cka.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", [[], ["--text", "lamp.txt"], ["a.kvf", "--cka", "demo", "--text", "lamp.txt"]]
)
def test_bad_input(kvfold, document, arguments):
    result = kvfold("inspect", *arguments)
    assert result.exit_code == 2
    assert "give a folded document, or --cka MODEL with --text FILE" in result.stderr
