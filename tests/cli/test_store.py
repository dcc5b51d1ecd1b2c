"""kvfold store, and --store of fold, ask and chat."""

from __future__ import annotations

import json

import pytest

from kvfold.cli.store import size_of
from kvfold.errors import KvfoldError


@pytest.fixture
def kept(kvfold, document, model_folder):
    """A store with one document: (fold again, what the first fold told)."""

    def fold(*more):
        result = kvfold(
            "fold", document, "--model", model_folder, "--method", "full", "--store", "kept", "--json", *more
        )
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout), result.stderr

    return fold, fold()[0]


def test_a_document_is_folded_once_and_asked_by_its_key(kvfold, kept, monkeypatch):
    fold, first = kept
    assert first["found"] is False
    with monkeypatch.context() as patch:
        patch.setattr("kvfold.cli.fold.fold_ids", lambda *a, **k: pytest.fail("folded again"))
        second, _ = fold()
    assert second["found"] is True
    same = ("path", "key", "tokens", "method", "ledger", "document", "model")
    assert {name: first[name] for name in same} == {name: second[name] for name in same}

    arguments = ("Is it green?", "--max-new-tokens", "4", "--json")
    by_key = kvfold("ask", first["key"][:8], *arguments, "--store", "kept")
    by_path = kvfold("ask", first["path"], *arguments)
    assert by_key.exit_code == 0, by_key.output
    assert json.loads(by_key.stdout)[0]["answer"] == json.loads(by_path.stdout)[0]["answer"]
    chat = kvfold("chat", first["key"], "--store", "kept", "--max-new-tokens", "4", stdin="Is it?\n")
    assert chat.exit_code == 0, chat.output
    missing = kvfold("ask", "ffff", "Who?", "--store", "kept")
    assert missing.exit_code == 2 and "no entry" in missing.stderr


def test_a_damaged_entry_is_told_and_folded_again(kept):
    fold, first = kept
    with open(first["path"], "r+b") as file:
        file.truncate(first["ledger"]["total"] // 2)
    again, told = fold()
    assert again["found"] is False and "truncated" in told and "folding it again" in told
    assert fold()[0]["found"] is True


def test_list_rm_and_gc(kvfold, kept, monkeypatch):
    fold, first = kept
    second, _ = fold("--truncate", "--chunk-size", "100")
    assert second["found"] is True  # neither changes the result
    other = kvfold("fold", "lamp.txt", "-m", first["model"], "--method", "kivi", "--store", "kept", "--json")
    assert other.exit_code == 0, other.output
    listed = json.loads(kvfold("store", "list", "--store", "kept", "--json").stdout)
    assert [entry["label"] for entry in listed["entries"]] == ["kivi", "full"]
    assert listed["bytes"] == sum(entry["bytes"] for entry in listed["entries"]) > first["ledger"]["total"]
    assert "lamp.txt" in kvfold("store", "list", "--store", "kept").stdout
    monkeypatch.setenv("COLUMNS", "50")
    table = kvfold("store", "list", "--store", "kept").stdout
    assert first["key"][:12] in table and listed["entries"][0]["key"][:12] in table

    size = listed["entries"][0]["bytes"]
    swept = json.loads(kvfold("store", "gc", "--limit", str(size), "--store", "kept", "--json").stdout)
    assert swept["removed"] == [first["key"]] and swept["bytes"] == listed["entries"][1]["bytes"]
    key = json.loads(other.stdout)["key"]
    assert kvfold("store", "rm", key[:10], "--store", "kept").exit_code == 0
    assert json.loads(kvfold("store", "list", "--store", "kept", "--json").stdout)["entries"] == []


def test_the_limit_of_fold_lets_the_older_go(kvfold, kept):
    _, first = kept
    result = kvfold(
        "fold",
        "lamp.txt",
        "-m",
        first["model"],
        "--method",
        "kivi",
        "--store",
        "kept",
        "--store-limit",
        "1kB",
    )
    assert result.exit_code == 0, result.output
    assert "saved" in result.stdout and "kept" in result.stdout
    listed = json.loads(kvfold("store", "list", "--store", "kept", "--json").stdout)
    assert [entry["label"] for entry in listed["entries"]] == ["kivi"]


def test_an_unreadable_entry_is_listed_with_its_problem(kvfold, kept):
    _, first = kept
    with open(first["path"], "wb") as file:
        file.write(b"x" * 100)
    result = kvfold("store", "list", "--store", "kept", "--json")
    assert result.exit_code == 0, result.output
    assert "no saved cache" in json.loads(result.stdout)["entries"][0]["problem"]


@pytest.mark.parametrize(
    "more, words",
    [
        (["--store", "kept", "-o", "a.kvf"], "not both"),
        (["--store-limit", "1GB"], "is for --store"),
        (["--store", "kept", "--store-limit", "much"], "give a size"),
        (["--store", "lamp.txt"], "cannot be made"),
    ],
)
def test_wrong_usage_is_told_before_the_model_is_loaded(kvfold, document, more, words):
    result = kvfold("fold", document, "--model", "nowhere", *more)
    assert result.exit_code == 2
    assert words in result.stderr


def test_sizes():
    assert [size_of("", text) for text in ("0", "12", "500MB", "1.5 gb", "2kB")] == [
        0,
        12,
        500_000_000,
        1_500_000_000,
        2000,
    ]
    for text in ("", "GB", "-1", "5GiB", "1e9"):
        with pytest.raises(KvfoldError):
            size_of("--limit", text)
