"""Every wrong file and every wrong model is refused with what to do, and no failure leaves anything behind."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import signal
import zipfile

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file

from kvfold import Full, fold
from kvfold.artifact import container, load, load_stores, read_manifest, save
from kvfold.artifact.files import is_url
from kvfold.errors import ArtifactError, CacheMismatchError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, bridge
from kvfold.hf.fingerprint import fingerprint
from tests.tiny import prompt, tiny_model


@pytest.fixture
def saved(tmp_path):
    """Path of a good file; its bytes are a few KB."""
    path = tmp_path / "doc.kvf"
    save(fold(tiny_model("llama", num_hidden_layers=1), prompt(6), Full()), path)
    return path


def refused(path, *words, readers=(read_manifest, load_stores), model="default"):
    """All readers raise ArtifactError; with the model too. Returns the message."""
    model = tiny_model("llama", num_hidden_layers=1) if model == "default" else model
    for reader in (*readers, lambda path: load(path, model)):
        with pytest.raises(ArtifactError) as error:
            reader(path)
        for word in words:
            assert word in str(error.value)
    assert str(os.fspath(path)) in str(error.value)
    return str(error.value)


# ---- files ----


def test_missing(tmp_path):
    refused(tmp_path / "doc.kvf", "does not exist")
    refused("memory://nowhere/doc.kvf", "does not exist")
    refused(f"file://{tmp_path}/doc.kvf", "does not exist")
    refused(tmp_path, "is a folder")
    refused("nosuchscheme://bucket/doc.kvf", "cannot be used")


def test_not_ours(tmp_path):
    path = tmp_path / "doc.kvf"
    path.write_bytes(b"")
    refused(path, "is empty")
    path.write_bytes(b"abc")
    refused(path, "only 3 bytes")
    for seed in range(20):
        path.write_bytes(random.Random(seed).randbytes(2000))
        refused(path, "is no saved cache")
    save_file({"weight": torch.zeros(64)}, path)
    refused(path, "without a kvfold manifest")
    save_file({"weight": torch.zeros(64)}, path, metadata={"format": "pt"})
    refused(path, "without a kvfold manifest")
    torch.save({"weight": torch.zeros(64)}, path)
    assert zipfile.is_zipfile(path)
    refused(path, "never opens")
    path.write_text(json.dumps({"version": 1, "text": "x" * 100}))
    refused(path, "is no saved cache")
    path.write_bytes((40).to_bytes(8, "little") + b'{"a": 1}' + b" " * 32)
    refused(path, "manifest")
    path.write_bytes((5000).to_bytes(8, "little") + b'{"__metadata__":{}}' + b" " * 5000)
    refused(path, "manifest")


def test_truncated_anywhere(saved):
    whole = saved.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    places = {0, 1, 7, 8, 9, 31, 32, 33, 100, length - 1, length, length + 1, len(whole) - 1}
    places |= set(random.Random(0).sample(range(len(whole)), 60))
    for place in sorted(places):
        saved.write_bytes(whole[:place])
        message = refused(saved)
        if place >= 33:
            what = "its header's" if place < length else "its"
            assert f"truncated: {place:,} of {what} " in message
    saved.write_bytes(whole + b"x")
    refused(saved, "goes on after its end")
    # A stream of unknown size tells only when it ends.
    for place in (length + 3, len(whole) - 1):
        MemoryFileSystem().pipe_file("/cut.kvf", whole[:place])
        refused("memory://cut.kvf", "truncated")


def test_one_byte_changed_anywhere(saved):
    whole = saved.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(40), *range(length - 10, length + 10), len(whole) - 1]
    places += random.Random(1).sample(range(len(whole)), 250)
    for place in places:
        for flip in (0x01, 0x20, 0x80):
            changed = bytearray(whole)
            changed[place] ^= flip
            saved.write_bytes(changed)
            with pytest.raises(ArtifactError):
                read_manifest(saved)
    for place, what in ((length - 200, "header"), (length + 5, "tensors")):
        changed = bytearray(whole)
        changed[place] ^= 1
        saved.write_bytes(changed)
        refused(saved, "damaged", what)


def rewritten(path, change, tensors=None):
    """Write a changed manifest with right checksums, as a hostile or a newer program would."""
    manifest, found = container.read(str(path))
    change(manifest)
    manifest.pop("data_sha256", None)
    container.write(str(path), manifest, found if tensors is None else tensors)


def test_newer_version(saved):
    rewritten(saved, lambda manifest: manifest.update(version=2, kvfold="9.0"))
    refused(saved, "format version 2", "kvfold 9.0", "pip install -U kvfold")


@pytest.mark.parametrize("version", [0, "1", None, 1.5, []])
def test_nonsense_version(saved, version):
    rewritten(saved, lambda manifest: manifest.update(version=version))
    refused(saved)


def test_unknown_store_and_method(saved):
    rewritten(saved, lambda manifest: manifest["layers"][0]["segments"][0].update(store="quantum"))
    refused(saved, "quantum", "upgrade kvfold", readers=[load_stores])
    rewritten(saved, lambda manifest: manifest["layers"][0]["segments"][0].update(store="dense"))
    rewritten(saved, lambda manifest: manifest["method"].update(method="quantum"))
    refused(saved, "quantum", "upgrade kvfold", readers=[])
    rewritten(saved, lambda manifest: manifest.update(method={"method": "full", "budget": 3}))
    refused(saved, "budget", readers=[])


CRAFTED = {
    "no tensors": lambda layer: layer["segments"][0].update(tensors={}),
    "no such tensor": lambda layer: layer["segments"][0]["tensors"].update(keys="layers.9.nothing"),
    "wrong tensor": lambda layer: layer["segments"][0]["tensors"].update(keys="layers.0.tail.keys"),
    "wrong tokens": lambda layer: layer.update(tokens=99),
    "wrong kind": lambda layer: layer.update(kind="stock", state={}, **{"class": "DynamicLayer"}),
    "segment missing": lambda layer: layer.update(segments=[]),
    "rows": lambda layer: layer["segments"][0].update(rows="layers.0.tail.keys"),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_crafted_layers(saved, change):
    rewritten(saved, lambda manifest: change(manifest["layers"][0]))
    refused(saved, "upgrade kvfold, or fold", readers=[])
    assert not bridge.installed()


def test_crafted_stock_state(tmp_path):
    model = tiny_model("gemma3_text")
    save(fold(model, prompt(24), Full()), tmp_path / "doc.kvf")
    rewritten(tmp_path / "doc.kvf", lambda manifest: manifest["layers"][0]["state"].update(update=3))
    refused(tmp_path / "doc.kvf", "update", readers=[], model=model)


# ---- models ----


def other_weights(name="llama", **options):
    model = copy.deepcopy(tiny_model(name, **options))
    with torch.no_grad():
        for weight in model.model.layers[1].self_attn.k_proj.parameters():
            weight.mul_(1.01)
    return model


def test_other_models(tmp_path):
    path = tmp_path / "doc.kvf"
    model = tiny_model("llama")
    save(fold(model, prompt(24), Full()), path)
    cases = {
        ("other weights", "attention layer 1"): other_weights(),
        (
            "other RoPE parameters",
            "'rope_theta': 10000.0",
            "'rope_theta': 5000.0} here",
        ): tiny_model.__wrapped__("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        ("float32 model", "bfloat16", "dtype=torch.float32"): copy.deepcopy(model).to(torch.bfloat16),
        ("another model", "num_hidden_layers 3 there, 2 here"): tiny_model("llama", num_hidden_layers=2),
        ("another model", "num_key_value_heads 2 there, 4 here"): tiny_model("llama", num_key_value_heads=4),
        ("another model", "model_type llama there, qwen3 here"): tiny_model("qwen3"),
        ("another model", "vocab_size"): tiny_model("llama", vocab_size=160),
    }
    for words, other in cases.items():
        refused(path, *words, readers=[], model=other)
    assert not bridge.installed()
    load(path, copy.deepcopy(model))


def test_fingerprint():
    model = tiny_model("llama")
    assert (
        fingerprint(model)
        == fingerprint(copy.deepcopy(model))
        == fingerprint(tiny_model.__wrapped__("llama"))
    )
    others = [other_weights(), tiny_model("llama", num_key_value_heads=4), tiny_model("qwen2")]
    assert len({fingerprint(other) for other in [model, *others]}) == 4
    # Remembered, but not past a change of the weights.
    other = copy.deepcopy(model)
    assert fingerprint(other) == fingerprint(model)
    with torch.no_grad():
        other.model.layers[2].self_attn.k_proj.weight.mul_(2)
    assert fingerprint(other) != fingerprint(model)
    other.load_state_dict(model.state_dict())
    assert fingerprint(other) == fingerprint(model)


def test_a_cache_in_memory_knows_its_model(tmp_path):
    model, other, ids = tiny_model("llama"), other_weights(), prompt(24)
    with torch.no_grad():
        other.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
    cache = fold(model, ids, Full())
    save(cache, tmp_path / "doc.kvf")
    more = torch.cat([ids, prompt(4, seed=1)], 1)
    for victim in (cache, cache.fork(), load(tmp_path / "doc.kvf", model)):
        twin = victim.fork()
        with pytest.raises(CacheMismatchError, match=r"layer 0: .* other weights"):
            other.generate(more, max_new_tokens=2, **{CACHE_KEYWORD: victim})
        # The refused states are gone, and the right model goes on; so does an equal copy of it.
        assert victim.get_seq_length() == 24
        expected = model.generate(more, max_new_tokens=4, do_sample=False, **{CACHE_KEYWORD: victim})
        copied = copy.deepcopy(model)
        assert torch.equal(
            expected, copied.generate(more, max_new_tokens=4, do_sample=False, **{CACHE_KEYWORD: twin})
        )


# ---- caches that are not complete ----


def test_incomplete_caches(tmp_path):
    model, ids = tiny_model("llama"), prompt(24)
    path = tmp_path / "doc.kvf"

    def refuse(cache, *words):
        with pytest.raises(ArtifactError) as error:
            save(cache, path)
        assert all(word in str(error.value) for word in words)
        assert os.listdir(tmp_path) == []

    refuse(FoldedCache(Full()), "empty")
    refuse(FoldedCache(Full(), model.config), "empty")
    cache = FoldedCache(Full(), prompt_tokens=24)
    with torch.no_grad():
        model(ids[:, :10], use_cache=True, **{CACHE_KEYWORD: cache})
    refuse(cache, "10 of 24 tokens", "cache.expect(10)")
    with torch.no_grad():
        model(ids[:, 10:], use_cache=True, **{CACHE_KEYWORD: cache})
    save(cache, path)


def test_a_forward_pass_that_failed_midway(tmp_path):
    for name in ("llama", "gemma3_text"):
        model, ids = copy.deepcopy(tiny_model(name)), prompt(24)
        cache = fold(model, ids, Full())

        def fail(*args):
            raise RuntimeError("out of memory")

        model.model.layers[1].mlp.forward = fail
        with pytest.raises(RuntimeError):
            model(prompt(1), use_cache=True, **{CACHE_KEYWORD: cache})
        with pytest.raises(ArtifactError, match="stopped midway"):
            save(cache, tmp_path / "doc.kvf")
        del cache


@pytest.mark.parametrize("extra", [{"x": object()}, {"x": float("nan")}, {("a",): 1}])
def test_extra_must_be_json(tmp_path, extra):
    cache = fold(tiny_model("llama"), prompt(24), Full())
    with pytest.raises(ArtifactError, match="plain JSON"):
        save(cache, tmp_path / "doc.kvf", extra=extra)
    assert os.listdir(tmp_path) == []


# ---- failures while writing ----


@pytest.fixture(params=["new", "replacing"])
def target(request, tmp_path):
    """A folder to write in, empty or with an older file; afterwards it must be as it was."""
    if request.param == "replacing":
        (tmp_path / "doc.kvf").write_bytes(b"old")
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    yield tmp_path
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_file_size_limit(target):
    """A real failure in the middle of the file, as with a full disk or a quota."""
    cache = fold(tiny_model("llama"), prompt(200), Full())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ArtifactError, match="nothing was changed"):
            save(cache, target / "doc.kvf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_out_of_space(target, monkeypatch, failing):
    cache = fold(tiny_model("llama"), prompt(24), Full())

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"kvfold.artifact.files.os.{failing}", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        save(cache, target / "doc.kvf")


def test_interrupted(target, monkeypatch):
    cache = fold(tiny_model("llama"), prompt(24), Full())

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.artifact.files.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(cache, target / "doc.kvf")


@pytest.mark.parametrize("failing", ["write", "mv"])
def test_remote_failure(monkeypatch, failing):
    cache = fold(tiny_model("llama"), prompt(24), Full())
    fs = MemoryFileSystem()
    fs.store.clear()
    fs.pipe_file("/doc.kvf", b"old")

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if failing == "write":
        monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.write", fail, raising=False)
    else:
        monkeypatch.setattr(MemoryFileSystem, "mv", fail)
    for url in ("memory://doc.kvf", "memory://new.kvf"):
        with pytest.raises(ArtifactError, match="No space left on device"):
            save(cache, url)
    assert list(fs.store) == ["/doc.kvf"] and fs.cat_file("/doc.kvf") == b"old"


def test_places_that_cannot_be_written(tmp_path):
    cache = fold(tiny_model("llama"), prompt(24), Full())
    with pytest.raises(ArtifactError, match="folder does not exist"):
        save(cache, tmp_path / "nowhere" / "doc.kvf")
    with pytest.raises(ArtifactError, match="is a folder"):
        save(cache, tmp_path)
    with pytest.raises(ArtifactError, match="cannot be written"):
        save(cache, "/proc/doc.kvf")
    with pytest.raises(ArtifactError, match="cannot be used"):
        save(cache, "nosuchscheme://bucket/doc.kvf")
    assert os.listdir(tmp_path) == []


def test_is_url():
    assert all(map(is_url, ["s3://b/x", "file:///x", "memory://x", "simplecache::s3://b/x", "gs+x://b"]))
    assert not any(map(is_url, ["x.kvf", "/a/b", "C:\\x", "c://x", "a b://c", "./s3:/x"]))
