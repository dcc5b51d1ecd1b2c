"""A store of folded caches: found by content, safe among processes, the least recently used goes first."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
import uuid
from pathlib import Path

import pytest
import torch

import kvfold.api
from kvfold import KIVI, BlockGTQ, Full, SnapKV, fold
from kvfold.artifact import ArtifactStore, load, read_manifest
from kvfold.errors import ArtifactError, KvfoldError
from tests.tiny import prompt, tiny_model


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return ArtifactStore(
        str(tmp_path / "kept") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    )


@pytest.fixture
def folds(monkeypatch):
    """Counts what is really folded."""
    counted, real = [], kvfold.api.fold

    def counting(*args, **kwargs):
        counted.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr("kvfold.api.fold", counting)
    return counted


def damage(store, key):
    fs, root = store._opened()
    content = bytearray(fs.cat_file(f"{root}/{key}.kvf"))
    content[-3] ^= 1
    fs.pipe_file(f"{root}/{key}.kvf", bytes(content))


def test_what_was_folded_is_found(store, folds):
    model, ids, method = tiny_model("llama"), prompt(150), KIVI(bits=4)
    first = store.fold(model, ids, method)
    second = store.fold(model, ids, KIVI(bits=4))
    assert len(folds) == 1
    for one, two in zip(first.layers, second.layers):
        assert one.segments
        for a, b in zip(one.segments, two.segments):
            assert all(torch.equal(t, b.store.tensors()[name]) for name, t in a.store.tensors().items())
    store.fold(model, ids, KIVI(bits=2))
    assert len(folds) == 2 and len(store.entries()) == 2


def test_the_key_is_of_everything_that_counts(tmp_path):
    model, ids, method = tiny_model("llama"), prompt(40, batch=2), SnapKV(keep=0.5)
    mask = torch.ones_like(ids)
    key = ArtifactStore.key(model, ids, method)
    assert key == ArtifactStore.key(model, ids.clone(), SnapKV(keep=0.5), mask)
    padded = mask.clone()
    padded[0, :3] = 0
    rope = tiny_model.__wrapped__(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    )
    weights = tiny_model.__wrapped__("llama")
    with torch.no_grad():
        weights.model.layers[2].self_attn.k_proj.weight.mul_(1.01)
    others = [
        ArtifactStore.key(rope, ids, method),
        ArtifactStore.key(weights, ids, method),
        ArtifactStore.key(tiny_model("llama", dtype=torch.bfloat16), ids, method),
        ArtifactStore.key(model, ids + 1, method),
        ArtifactStore.key(model, ids.reshape(1, -1), method),
        ArtifactStore.key(model, ids, method, padded),
        ArtifactStore.key(model, ids, SnapKV(keep=0.4)),
        ArtifactStore.key(model, ids, method >> BlockGTQ(bits=4)),
        ArtifactStore.key(model, ids, method >> BlockGTQ(bits=3)),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_a_calibration_counts_by_its_content(tmp_path):
    model, ids = tiny_model("llama"), prompt(40)
    here, there = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    here.write_bytes(b"one"), there.write_bytes(b"one")
    keys = [ArtifactStore.key(model, ids, BlockGTQ(bits=3, calibration=str(path))) for path in (here, there)]
    here.write_bytes(b"two")
    keys.append(ArtifactStore.key(model, ids, BlockGTQ(bits=3, calibration=str(here))))
    assert keys[0] == keys[1] != keys[2]


def test_another_rope_scaling_is_refused(store):
    model, ids = tiny_model("llama"), prompt(40)
    store.fold(model, ids, Full())
    (entry,) = store.entries()
    scaled = tiny_model.__wrapped__(
        "llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    )
    with pytest.raises(ArtifactError, match="rope"):
        load(store.path(entry.key), scaled)


def test_a_damaged_entry_is_told_and_folded_again(store, folds, caplog):
    model, ids = tiny_model("llama"), prompt(40)
    store.fold(model, ids, Full())
    (entry,) = store.entries()
    damage(store, entry.key)
    with pytest.raises(ArtifactError, match="damaged"):
        store.find(entry.key)
    store.fold(model, ids, Full())
    assert len(folds) == 2 and "damaged" in caplog.text
    assert store.find(entry.key)["tokens"] == 40


def test_the_least_recently_used_goes_first(store):
    model = tiny_model("llama")
    keys = [store.key(model, prompt(40, seed=seed), Full()) for seed in range(3)]
    for seed, key in enumerate(keys):
        store.put(key, fold(model, prompt(40, seed=seed), Full()))
    assert [entry.key for entry in store.entries()] == keys[::-1]
    size = store.entries()[0].nbytes
    assert store.find(keys[0]) is not None  # now the newest
    limited = dataclasses.replace(store, limit=3 * size)
    fourth = limited.key(model, prompt(40, seed=3), Full())
    limited.put(fourth, fold(model, prompt(40, seed=3), Full()))
    assert [entry.key for entry in store.entries()] == [fourth, keys[0], keys[2]]
    assert [entry.key for entry in store.collect(size)] == [keys[2], keys[0]]
    dataclasses.replace(store, limit=0).put(keys[1], fold(model, prompt(40, seed=1), Full()))
    assert [entry.key for entry in store.entries()] == [keys[1]]  # what was added stays
    store.remove(keys[1])
    store.remove(keys[1])
    fs, root = store._opened()
    assert fs.ls(root) == []


def test_what_a_killed_process_left_goes_after_a_day(tmp_path):
    store = ArtifactStore(str(tmp_path))
    old, new, orphan = tmp_path / ".kvfold-1.tmp", tmp_path / ".kvfold-2.tmp", tmp_path / f"{'a' * 64}.used"
    for path in (old, new, orphan):
        path.write_bytes(b"1")
    parts = [tmp_path / f"{letter * 64}.parts" for letter in "bc"]
    for path in parts:
        path.mkdir()
        (path / "main-0-0.part").write_bytes(b"1")
    for path in (old, orphan, parts[0]):
        os.utime(path, (time.time() - 90_000,) * 2)
    store.collect(10**9)
    assert sorted(tmp_path.iterdir()) == [new, parts[1]]
    assert store.entries() == []


def test_keys_may_be_cut_short(store):
    for key in ("ab" * 32, "ac" * 32):
        fs, root = store._opened()
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/{key}.kvf", b"x")
    assert store.resolve("AB") == "ab" * 32
    for start, words in (("a", "2 entries"), ("f", "no entry"), ("", "no entry")):
        with pytest.raises(ArtifactError, match=words):
            store.resolve(start)


def test_a_new_store_is_empty_and_a_bad_one_refused(tmp_path):
    assert ArtifactStore(str(tmp_path / "none")).entries() == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="cannot be made"):
        ArtifactStore(str(tmp_path / "file")).prepare()
    for bad in ({"url": ""}, {"url": "x", "limit": -1}):
        with pytest.raises(KvfoldError):
            ArtifactStore(**bad)


def _write(url, key, path, model, start, times):
    store, cache = ArtifactStore(url), load(path, model)
    start.wait()
    for _ in range(times):
        store.put(key, cache)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_two_processes_write_the_same_document_while_a_third_reads(tmp_path):
    model, ids = tiny_model("llama"), prompt(200)
    store = ArtifactStore(str(tmp_path / "kept"))
    key = store.key(model, ids, Full())
    path = store.put(key, fold(model, ids, Full()))
    told = read_manifest(path)
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    writers = [
        context.Process(target=_write, args=(store.url, key, path, model, start, 30)) for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    start.wait(60)
    reads, inodes = 0, set()
    while any(writer.is_alive() for writer in writers):
        assert store.find(key) == told  # every byte checked
        reads += 1
        inodes.add(os.stat(path).st_ino)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert reads > 3 and len(inodes) > 1  # it was replaced under the reader
    assert sorted(file.name for file in Path(store.url).iterdir()) == [f"{key}.kvf", f"{key}.used"]
