"""kvfold calibrate, and its table in kvfold fold and from Python."""

from __future__ import annotations

import json

import pytest
import torch

from kvfold import PublishedRDKV
from kvfold.errors import KvfoldError
from kvfold.methods.energies import Energies
from kvfold.methods.rdkv_published import load_table


@pytest.fixture
def table(kvfold, model_folder, document, tmp_path):
    result = kvfold(
        "calibrate", "rdkv", model_folder, "--text", document, "--tokens", "200", "-o", "table.json"
    )
    assert result.exit_code == 0, result.output
    assert "table.json" in result.stdout
    return tmp_path / "table.json"


def test_the_table_is_complete_and_falls(table, model_folder):
    told = json.loads(table.read_text())
    assert told["model"] == str(model_folder)
    assert told["tokens"] == 200
    for name in ("value_error", "key_error"):
        widths, errors = zip(*told[name])
        assert widths == (0, 2, 3, 4, 8, 16)
        assert errors[0] == 1 and errors[-1] == 0
        assert list(errors) == sorted(errors, reverse=True)
        # 16 channels or 200 tokens: about 4^-b times the peak-to-deviation ratio.
        assert 0.05 < errors[1] < 0.5 and errors[4] < 1e-4
    assert [path.name for path in table.parent.iterdir() if "tmp" in path.name] == []


def test_folding_with_a_table(table, kvfold, model_folder, document):
    options = [
        "--model",
        model_folder,
        "--method",
        "rdkv-published",
        "--keep",
        "0.5",
        "--json",
        "-o",
        "doc.kvf",
    ]
    one = kvfold("fold", document, *options, "--calibration", table)
    two = kvfold(
        "fold", document, *options, "--option", f"value_error=@{table}", "--option", f"key_error=@{table}"
    )
    assert one.exit_code == two.exit_code == 0, one.output + two.output
    method = json.loads(one.stdout)["method"]
    assert method == json.loads(two.stdout)["method"]
    assert method["value_error"] == json.loads(table.read_text())["value_error"]


def test_a_table_from_python(table):
    method = PublishedRDKV(keep=0.1, widths=(2, 3, 4, 8, 16), **load_table(table))
    assert dict(method.value_error)[3] < dict(method.value_error)[2]
    assert hash(method)


def test_groups_err_less(table, kvfold, model_folder, document):
    options = ["--text", document, "--tokens", "200", "-o", "fine.json", "--json"]
    result = kvfold("calibrate", "rdkv", model_folder, *options, "--key-group", "32", "--value-group", "8")
    fine = json.loads(result.stdout)
    assert fine == json.loads((table.parent / "fine.json").read_text())
    for name in ("value_error", "key_error"):
        assert dict(fine[name])[4] < dict(load_table(table)[name])[4]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"value_error": [[0, 1]]}',
        '{"value_error": [[2, -1]], "key_error": []}',
        '{"value_error": 3}',
    ],
)
def test_a_file_that_is_no_table(content, tmp_path, kvfold, model_folder, document):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(KvfoldError, match=r"bad\.json"):
        load_table(path)
    result = kvfold("fold", document, "--model", model_folder, "--keep", "0.5", "--calibration", path)
    assert result.exit_code == 2
    assert "bad.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_refusals(kvfold, model_folder, document, tmp_path):
    (tmp_path / "short.txt").write_text("Short.")
    (tmp_path / "empty.txt").write_text(" ")
    for arguments, message in (
        (["kivi", model_folder, "--text", document], "takes no calibration"),
        (["rdkv", model_folder, "--text", "missing.txt"], "No such file"),
        (["rdkv", model_folder, "--text", tmp_path / "short.txt"], "too few"),
        (["rdkv", model_folder, "--text", tmp_path / "empty.txt"], "is empty"),
        (["rdkv", model_folder, "--text", document, "-o", "nowhere/table.json"], "no folder"),
        (["rdkv", "nowhere/model", "--text", document], "nowhere/model"),
    ):
        result = kvfold("calibrate", *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
    assert not (tmp_path / "table.json").exists()


def test_a_table_for_a_method_without_one(table, kvfold, model_folder, document):
    result = kvfold("fold", document, "--model", model_folder, "--keep", "0.5", "--calibration", table)
    assert result.exit_code == 2
    assert "value_error" in result.stderr


# ---- block energies ----


@pytest.fixture
def energies(kvfold, model_folder, document, tmp_path):
    options = ["--text", document, "--tokens", "200", "--bias", "out"]
    result = kvfold("calibrate", "blockgtq", model_folder, *options)
    assert result.exit_code == 0, result.output
    assert "energies.safetensors" in result.stdout and "best 4 blocks" in result.stdout
    return tmp_path / "energies.safetensors"


def test_energies_are_written_and_told(energies, kvfold, model_folder, document):
    written = Energies.load(energies)
    assert (written.text, written.tokens, written.bias) == ("lamp.txt", 200, "none")
    options = ["--text", document, "--tokens", "200", "--bias", "in", "-o", "again.safetensors", "--json"]
    told = json.loads(kvfold("calibrate", "blockgtq", model_folder, *options).stdout)
    again = Energies.load(energies.parent / "again.safetensors")
    assert torch.equal(again.layers[1].key, written.layers[1].key)
    assert told["fingerprint"] == written.fingerprint and told["tokens"] == 200
    for layer in told["layers"]:
        # 2 KV heads of 16 channels: the best 4 of 8 blocks are worth more than half.
        assert 0.5 < layer["best_4_blocks"] <= 1
        assert sum(layer["widths"].values()) == 32
        assert sum(int(width) * channels for width, channels in layer["widths"].items()) == 3 * 32


def test_folding_with_energies(energies, kvfold, model_folder, document, tmp_path):
    options = [
        "--model",
        model_folder,
        "--method",
        "blockgtq",
        "--option",
        "bits=3",
        "--option",
        "bias=out",
        "--json",
    ]
    result = kvfold("fold", document, *options, "--calibration", energies.name, "-o", "doc.kvf")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["method"]["calibration"] == str(energies) and told["ledger"]["ratio"] < 0.3
    # The folded file needs it no more.
    energies.unlink()
    result = kvfold("ask", "doc.kvf", "Who lit it?", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.output


def test_energies_are_no_table(energies, kvfold, model_folder, document):
    options = [
        "--model",
        model_folder,
        "--method",
        "rdkv-published",
        "--keep",
        "0.5",
        "--calibration",
        energies.name,
    ]
    result = kvfold("fold", document, *options)
    assert result.exit_code and "no calibration table" in result.output and "blockgtq" in result.output


def test_energies_that_do_not_suit(energies, kvfold, model_folder, base_folder, document, tmp_path):
    (tmp_path / "bad.safetensors").write_text("{}")
    for model, path, more, message in (
        (base_folder, energies, ["--option", "bias=out"], "another model"),
        (model_folder, energies, ["--option", "bias=mean"], "bias='in'"),
        (model_folder, "bad.safetensors", [], "no file of block energies"),
        (model_folder, "missing.safetensors", [], "cannot be read"),
    ):
        options = ["--model", model, "--method", "blockgtq", *more, "--calibration", path, "-o", "doc.kvf"]
        result = kvfold("fold", document, *options)
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert "Traceback" not in result.stderr and not (tmp_path / "doc.kvf").exists()
    for arguments, message in (
        (["blockgtq", model_folder, "--text", document, "--key-group", "4"], "--key-group is not for"),
        (["rdkv", model_folder, "--text", document, "--bias", "out"], "--bias is not for"),
        (["blockgtq", model_folder, "--text", document, "--bias", "off"], "choose from out, mean, in"),
    ):
        result = kvfold("calibrate", *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output
