"""Finished parts of a fold on disk: taken up by the same fold only, and gone when it is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvfold import KVSculpt, fold
from kvfold.artifact import SavedWork
from kvfold.methods import kvsculpt
from tests.tiny import prompt, tiny_model

METHOD = KVSculpt(keep=0.4, sinks=2, window=6, horizon=16, steps=2, chunk=50)


@pytest.fixture
def solved(monkeypatch):
    """Each piece is a part of its own; what is solved, and how many parts at most."""
    monkeypatch.setattr(kvsculpt, "SLICE_BYTES", (1, 1))
    counted, real = [], KVSculpt._solve

    def counting(*given):
        if len(counted) == counting.limit:
            raise KeyboardInterrupt
        counted.append(given)
        return real(*given)

    counting.limit = None
    monkeypatch.setattr(KVSculpt, "_solve", counting)
    return counted, counting


def same(one, two):
    for first, second in zip(one.layers, two.layers, strict=True):
        tensors = second.segments[0].store.tensors()
        assert all(torch.equal(t, tensors[name]) for name, t in first.segments[0].store.tensors().items())


def test_goes_on_after_an_interrupt(tmp_path, solved):
    counted, counting = solved
    model, ids = tiny_model("llama"), prompt(120)
    whole = fold(model, ids, METHOD)
    each, counting.limit = len(counted), len(counted) + 7
    work = SavedWork(tmp_path / "parts", model, ids, METHOD)
    with pytest.raises(KeyboardInterrupt):
        fold(model, ids, METHOD, work=work)
    assert len(work.parts) == 7
    counting.limit = None
    # Another process: nothing but the folder is shared.
    later = SavedWork(tmp_path / "parts", model, ids, METHOD)
    same(whole, fold(model, ids, METHOD, work=later))
    assert len(counted) == 2 * each
    later.remove()
    assert not (tmp_path / "parts").exists()


def test_parts_of_another_fold_are_not_taken(tmp_path, solved):
    counted, _ = solved
    model, ids = tiny_model("llama"), prompt(120)
    fold(model, ids, METHOD, work=SavedWork(tmp_path, model, ids, METHOD))
    each = len(counted)
    others = [
        (model, prompt(120, seed=1), METHOD),
        (model, ids, replace(METHOD, steps=3)),
        (tiny_model("llama", num_hidden_layers=2), ids, METHOD),
    ]
    for number, (its_model, its_ids, method) in enumerate(others):
        del counted[:]
        fold(its_model, its_ids, method, work=SavedWork(tmp_path, its_model, its_ids, method))
        assert len(counted) >= each * 2 // 3, number


def test_a_damaged_part_is_made_again_and_other_files_stay(tmp_path, solved):
    counted, _ = solved
    model, ids = tiny_model("llama"), prompt(120)
    (tmp_path / "notes.txt").write_text("mine")
    work = SavedWork(tmp_path, model, ids, METHOD)
    whole, each = fold(model, ids, METHOD, work=work), len(counted)
    path = tmp_path / f"{work.parts[0]}.part"
    path.write_bytes(path.read_bytes()[:-9])
    same(whole, fold(model, ids, METHOD, work=work))
    assert len(counted) == each + 1
    work.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written_does_not_stop_the_fold(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    model, ids = tiny_model("llama"), prompt(120)
    work = SavedWork(tmp_path / "file" / "parts", model, ids, METHOD)
    same(fold(model, ids, METHOD), fold(model, ids, METHOD, work=work))
    assert caplog.text.count("begins anew") == 1 and work.parts == []


def test_later_turns_do_not_take_the_prompts_parts(tmp_path):
    model, ids = tiny_model("llama"), prompt(240)
    cache = fold(model, ids[:, :120], METHOD, work=SavedWork(tmp_path, model, ids[:, :120], METHOD))
    plain = fold(model, ids[:, :120], METHOD)
    for one in (cache, plain):
        one.expect(240)
        model(ids[:, 120:], past_key_values=one)
    assert len(cache.layers[0].segments) == 2
    for first, second in zip(cache.layers, plain.layers, strict=True):
        a, b = (layer.segments[1].store.tensors() for layer in (first, second))
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
