"""kvfold calibrate, and its table in kvfold fold and from Python."""

from __future__ import annotations

import json

import pytest

from kvfold import PublishedRDKV
from kvfold.errors import KvfoldError
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
