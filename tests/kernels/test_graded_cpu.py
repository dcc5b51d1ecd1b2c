"""The C loop over graded tokens equals plain torch, and plain torch serves where it cannot be compiled."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels import graded_cpu, native
from kvfold.kernels.reference import attend, merge
from kvfold.stores.base import AttendContext
from tests.stores.test_graded import CASES, GRADES, ROTARY, exact, random_store

needs_loop = pytest.mark.skipif(graded_cpu.problem() is not None, reason=f"no C loop: {graded_cpu.problem()}")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graded_cpu.NATIVE.forget()
    yield tmp_path / "kvfold" / "kernels"
    graded_cpu.NATIVE.forget()


def both(monkeypatch, store, queries=1, group=2, rows=None, softcap=None):
    """Attention by plain torch and by the loop."""
    batch = store.rows if rows is None else len(rows)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, group * store.kv_heads, queries, store.key_dim, generator=generator)
    context = AttendContext(0.1, softcap, None, ROTARY)
    found = store.attend(query, rows, context)
    with monkeypatch.context() as patch:
        patch.setenv("KVFOLD_CPU_KERNEL", "0")
        return store.attend(query, rows, context), found


def watch(monkeypatch):
    """What the loop returned, call by call."""
    calls, attend = [], graded_cpu.RowLoop.attend
    monkeypatch.setattr(graded_cpu.RowLoop, "attend", lambda *args: calls.append(attend(*args)) or calls[-1])
    return calls


def close(found, expected):
    for one, other in zip(found, expected):
        scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1
        torch.testing.assert_close(one, other, atol=1e-5 * max(scale, 1), rtol=1e-5)


def same(monkeypatch, store, **options):
    calls = watch(monkeypatch)
    expected, found = both(monkeypatch, store, **options)
    monkeypatch.undo()
    assert calls and None not in calls
    close(found, expected)


@needs_loop
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loop_equals_torch(case, monkeypatch):
    store, *_ = random_store(**case)
    same(monkeypatch, store)
    same(monkeypatch, store, rows=torch.tensor([0] if store.rows == 1 else [1, 1, 0]))
    same(monkeypatch, store.crop(store.tokens // 2), queries=3, softcap=2.0)


@needs_loop
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_groups_and_threads(group, threads, monkeypatch):
    store, *_ = random_store(tokens=3000, only=2 if group == 3 else None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same(monkeypatch, store, group=group)
    finally:
        torch.set_num_threads(before)


@needs_loop
@pytest.mark.parametrize("tokens", [0, 1, 2500])
def test_hidden_tokens(tokens, monkeypatch):
    store, *_ = random_store(tokens=3000)
    same(monkeypatch, store.crop(tokens))


@needs_loop
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tail", [0, 1, 300])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", [dict(), dict(only=0), dict(key_dim=80, value_dim=96)], ids=str)
def test_one_softmax_over_the_store_the_tail_and_what_came_before(case, before, tail, dtype):
    store, *_ = random_store(**case)
    generator = torch.Generator().manual_seed(2)
    dims = {
        "query": (6, 1, store.key_dim),
        "key": (3, tail, store.key_dim),
        "value": (3, tail, store.value_dim),
    }
    query, key, value = (torch.randn(2, *d, generator=generator).to(dtype) for d in dims.values())
    other = torch.randn(2, 6, 1, store.value_dim), torch.randn(2, 6, 1)
    other[1][0, 0] = -torch.inf
    context = AttendContext(0.1, None, None, ROTARY)
    found = store.attend_with_tail(query, key, value, context, other if before else None)
    parts = [exact(store, query, None, 0.1), attend(query, key, value, 0.1), *([other] * before)]
    close(found, [part.float() for part in merge([(p[0].double(), p[1].double()) for p in parts])])


@needs_loop
def test_many_queries_are_left_to_torch(monkeypatch):
    calls = watch(monkeypatch)
    store, *_ = random_store()
    both(monkeypatch, store, queries=graded_cpu.MAX_QUERIES)
    assert calls and not any(calls)


@needs_loop
def test_wide_heads_are_left_to_torch(monkeypatch):
    store, *_ = random_store(value_dim=320)
    expected, found = both(monkeypatch, store)
    assert torch.equal(expected[0], found[0])


def test_without_a_compiler_torch_serves(monkeypatch, fresh):
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in graded_cpu.problem()
    store, *_ = random_store(only=GRADES)
    expected, found = both(monkeypatch, store)
    assert torch.equal(expected[0], found[0])


def test_a_compiler_that_fails_is_told(monkeypatch, fresh):
    monkeypatch.setenv("CC", "false")
    assert "cannot compile" in graded_cpu.problem()
    assert not list(fresh.glob("*"))


@needs_loop
@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_file_is_made_again(monkeypatch, fresh, damage):
    path = native.build(graded_cpu.NATIVE.source)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-100] if damage is None else damage)
    assert graded_cpu.problem() is None
    assert native.build(graded_cpu.NATIVE.source) == path and native.intact(path)
    assert list(fresh.iterdir()) == [path]
    store, *_ = random_store()
    same(monkeypatch, store)


def test_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("KVFOLD_CPU_KERNEL", "0")
    assert graded_cpu.problem() == "KVFOLD_CPU_KERNEL is 0"
