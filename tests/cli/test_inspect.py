"""kvfold inspect: a saved cache seen without its model."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from kvfold.cli.inspect import _rows_of_layers, layer_bits
from kvfold.stores.dense import DenseStore


def test_shows_manifest_ledger_and_bits(kvfold, saved):
    result = kvfold("inspect", saved)
    assert result.exit_code == 0, result.output
    for text in ("lamp.txt", "full 16-bit cache", "16:100%", "0 to 1"):
        assert text in result.stdout


def rows_of_bits(output):
    """Cells of the last table, whose first row is of layer 0."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    rows = [row for row in rows if len(row) == 5]
    return rows[next(index for index, row in enumerate(rows) if row[0].startswith("0")) :]


def test_a_row_for_layers_alike_or_for_every_head(kvfold, saved):
    assert rows_of_bits(kvfold("inspect", saved).stdout) == [["0 to 1", "16.00", "", "16:100%", "16:100%"]]
    heads = rows_of_bits(kvfold("inspect", saved, "--all").stdout)
    assert [row[:2] for row in heads] == [["0", "0"], ["", "1"], ["1", "0"], ["", "1"]]


def test_a_row_of_heads_that_differ():
    def layer(index, *means):
        heads = [{"keys": {"2": 1.0}, "values": {"0": 1 - x / 4, "4": x / 4}, "mean": x} for x in means]
        return {"layer": index, "tokens": 60, "heads": heads}

    alike = [layer(index, 1.0, 3.0) for index in (0, 1, 2, 5)]
    rows = list(_rows_of_layers([*alike, layer(6, 2.0, 2.0), layer(7, 1.0, 3.0)]))
    assert rows == [
        ("0 to 2, 5", "2.00", "1.00 to 3.00", "2:100%", "0:50%  4:50%"),
        ("6", "2.00", "", "2:100%", "0:50%  4:50%"),
        ("7", "2.00", "1.00 to 3.00", "2:100%", "0:50%  4:50%"),
    ]


def test_json(kvfold, saved):
    told = json.loads(kvfold("inspect", saved, "--json").stdout)
    assert told["manifest"]["method"]["method"] == "full"
    assert sum(told["ledger"]["by_purpose"].values()) == told["ledger"]["total"]
    assert [layer["layer"] for layer in told["bits"]] == [0, 1]
    for layer in told["bits"]:
        assert [head["mean"] for head in layer["heads"]] == [16.0, 16.0]


def test_needs_no_model(kvfold, saved, monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("inspect loaded a model")

    monkeypatch.setattr("kvfold.cli.models.load_model", forbidden)
    assert kvfold("inspect", saved).exit_code == 0


def test_mean_bits_never_exceed_what_was_kept(kvfold, document, model_folder):
    kvfold("fold", document, "--model", model_folder, "--keep", "0.3")
    told = json.loads(kvfold("inspect", "lamp.kvf", "--json").stdout)
    for layer in told["bits"]:
        for head in layer["heads"]:
            assert sum(head["values"].values()) == pytest.approx(1, abs=1e-3)
            assert sum(head["keys"].values()) == pytest.approx(1, abs=1e-3)
    heads = [head["mean"] for layer in told["bits"] for head in layer["heads"]]
    # Codes alone are at most the whole budget: 30 % of 16 bits.
    assert 0 < sum(heads) / len(heads) <= 0.3 * 16


def test_evicted_tokens_count_as_nothing():
    class Half(DenseStore):
        def widths(self):
            return [{"values": {8: 30}, "keys": {4: 8, 8: 8}}] * 2

    states = torch.zeros(1, 2, 60, 16)
    (layer,) = layer_bits([[], [Half(states, states)]])
    assert layer["layer"] == 1
    head = layer["heads"][0]
    assert head["values"] == {"0": 0.5, "8": 0.5}
    assert head["mean_values"] == 4
    assert head["mean_keys"] == 3
    assert head["mean"] == 3.5


def test_heat_map(kvfold, saved, tmp_path):
    result = kvfold("inspect", saved, "--png", "heat.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_heat_map_without_matplotlib_names_the_extra(kvfold, saved, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name, *rest)
    )
    result = kvfold("inspect", saved, "--png", "heat.png")
    assert result.exit_code == 2
    assert "kvfold[plot]" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["missing.kvf"], ["lamp.txt"], ["lamp.kvf", "--png", "nowhere/heat.png"]]
)
def test_bad_input(kvfold, document, arguments):
    result = kvfold("inspect", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
