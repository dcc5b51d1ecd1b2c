"""The C loop over rotated codes equals float64 attention over what the store holds, and plain torch serves where it cannot."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels import rotated_cpu
from kvfold.kernels.reference import attend, merge
from kvfold.stores.base import AttendContext
from kvfold.stores.rotated import RotatedLayout, RotatedStore
from tests.stores.checks import SharingTurn, exact

no_loop = rotated_cpu.NATIVE.problem()
needs_loop = pytest.mark.skipif(no_loop is not None, reason=f"no C loop: {no_loop}")
ROTARY = SharingTurn(scale=1.1)


def made(
    keys, values, *, by_group=True, tokens=300, real=None, sinks=0, mean=None, norm_bits=8, order=False, dtype=None, **code
):  # fmt: skip
    """A store of random vectors; `keys` and `values` are the groups of each head, `mean` None, "still" or "turned"."""
    generator = torch.Generator().manual_seed(len(keys) + tokens)
    rows, heads = 2, len(keys)
    dims = [sum(channels for _, channels in groups[0]) for groups in (keys, values)]
    x = [torch.randn(rows, heads, tokens, dim, generator=generator) for dim in dims]
    x = [
        part * torch.logspace(-1, 1, tokens)[torch.randperm(tokens, generator=generator), None] for part in x
    ]
    real = (tokens, tokens) if real is None else real
    extra = {}
    if mean is not None:
        extra["key_mean"] = torch.randn(rows, heads, dims[0], generator=generator).half()
    if order:
        channels = torch.stack([torch.randperm(dims[0], generator=generator) for _ in range(rows * heads)])
        extra["key_order"] = channels.view(rows, heads, -1).to(
            torch.int16 if order == "wide" else torch.uint8
        )
    if min(real) < tokens:
        extra["valid"] = torch.arange(tokens) >= tokens - torch.tensor(real)[:, None]
    if not by_group:
        for name, groups in (("key", keys), ("value", values)):
            most = max(map(len, groups))
            if most > 1:
                extra[f"{name}_shares"] = torch.rand(rows, heads, most, generator=generator).half() + 0.2
    norms = "group" if by_group else "token"
    coders = [
        tuple(RotatedCode(one, norms=norms, seed=head, **code) for head, one in enumerate(groups))
        for groups in (keys, values)
    ]
    layout = RotatedLayout(
        tokens=tokens, real_tokens=real, shifts=(0, real[1] - tokens), kv_heads=heads, key_dim=dims[0],
        value_dim=dims[1], keys=coders[0], values=coders[1], turned=mean == "turned", sinks=sinks, norm_bits=norm_bits,
    )  # fmt: skip
    store = RotatedStore.encode(*(part.to(dtype or torch.float32) for part in x), layout, extra, ROTARY)
    return store


def plain(width, dim, heads=2):
    return [((width, dim),)] * heads


MIXED = [((8, 4), (5, 6), (3, 54)), ((2, 64),), ((7, 2), (6, 10), (4, 12), (1, 40))]
CASES = {
    **{f"width {width}": dict(keys=plain(width, 64), values=plain(9 - width, 64)) for width in range(1, 9)},
    **{f"{dim} channels": dict(keys=plain(3, dim), values=plain(4, dim)) for dim in (80, 96, 128, 256)},
    "few channels": dict(keys=plain(1, 16), values=plain(3, 6)),
    "keys and values differ": dict(keys=plain(2, 80), values=plain(3, 48)),
    "mixed": dict(keys=MIXED, values=plain(3, 64, 3), order=True),
    "wide order": dict(keys=MIXED, values=plain(3, 64, 3), order="wide"),
    "odd sizes": dict(keys=[((3, 80),), ((6, 13), (2, 67))], values=[((4, 33), (3, 3)), ((7, 36),)]),
    "one norm": dict(keys=MIXED, values=[((2, 40), (4, 40))] * 3, by_group=False),
    "norms of 16 bits": dict(keys=MIXED, values=plain(3, 64, 3), norm_bits=16),
    "norms as they are": dict(keys=plain(3, 64), values=plain(3, 64), keep_norm=False, rotation="haar"),
    "padding": dict(keys=plain(3, 64), values=plain(3, 64), real=(300, 17)),
    "sinks": dict(keys=plain(3, 64), values=plain(3, 64), sinks=4, real=(2, 250), mean="turned"),
    "sinks in bfloat16": dict(keys=plain(3, 64), values=plain(3, 64), sinks=4, dtype=torch.bfloat16),
    "mean": dict(keys=plain(3, 64), values=plain(3, 64), mean="still", sinks=1),
    "turned mean": dict(keys=MIXED, values=plain(3, 64, 3), mean="turned", order=True, sinks=4, real=(300, 290)),
    "whole pieces": dict(keys=plain(3, 64), values=plain(3, 64), tokens=512),
    "no tokens of a tile": dict(keys=plain(3, 64), values=plain(3, 64), tokens=5),
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """What the loop returned, call by call."""
    found, own = [], rotated_cpu.StoreLoop.attend

    def watched(*args, **options):
        found.append(own(*args, **options))
        return found[-1]

    monkeypatch.setattr(rotated_cpu.StoreLoop, "attend", watched)
    return found


def close(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected):
        scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1
        torch.testing.assert_close(one.double(), other, atol=tolerance * max(scale, 1), rtol=tolerance)


def ask(store, queries=1, group=2, rows=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    batch = store.rows if rows is None else len(rows)
    return torch.randn(batch, group * store.kv_heads, queries, store.key_dim, generator=generator).to(dtype)


def check(store, softcap=None, rows=None, threads=1, **options):
    query, before = ask(store, rows=rows, **options), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = store.attend(query, rows, AttendContext(0.1, softcap, None, ROTARY))
    finally:
        torch.set_num_threads(before)
    close(found, exact(store, query, rows, 0.1, ROTARY, softcap))


@needs_loop
@pytest.mark.parametrize("case", CASES)
def test_loop_equals_float64(case, calls):
    store = made(**CASES[case])
    check(store)
    check(store, rows=torch.tensor([1, 1, 0]), queries=2)
    check(store, queries=3, group=1, softcap=2.0)
    check(store.crop(store.tokens // 2))
    assert len(calls) == 2 + 2 + 2 + 2


@needs_loop
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_groups_and_threads(group, threads, calls):
    store = made(MIXED, plain(3, 64, 3), tokens=1500, mean="turned", sinks=4)
    check(store, group=group, threads=threads)
    assert calls


@needs_loop
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tail", [0, 1, 300])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", ["width 3", "turned mean", "keys and values differ", "256 channels"])
def test_one_softmax_over_the_store_the_tail_and_what_came_before(case, before, tail, dtype, calls):
    store = made(**CASES[case])
    generator = torch.Generator().manual_seed(2)
    query = ask(store, dtype=dtype)
    key, value = (
        torch.randn(2, store.kv_heads, tail, dim, generator=generator).to(dtype)
        for dim in (store.key_dim, store.value_dim)
    )
    heads = query.shape[1]
    other = torch.randn(2, heads, 1, store.value_dim), torch.randn(2, heads, 1)
    other[1][0, 0] = -torch.inf
    context = AttendContext(0.1, None, None, ROTARY)
    found = store.attend_with_tail(query, key, value, context, other if before else None)
    parts = [exact(store, query, None, 0.1, ROTARY), attend(query, key, value, 0.1), *([other] * before)]
    close(found, merge([(p[0].double(), p[1].double()) for p in parts]))
    assert len(calls) == 2


@needs_loop
def test_a_row_of_which_all_is_hidden_is_nothing(calls):
    store = made(plain(3, 64), plain(3, 64), real=(300, 0))
    output, lse = store.attend(ask(store), None, AttendContext(0.1))
    assert calls and not output[1].any() and bool((lse[1] == -torch.inf).all())


@needs_loop
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects a page as Linux does")
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("tokens", [63, 64])
def test_nothing_beyond_the_codes_is_read(width, tokens, calls):
    store = made(plain(width, 34), plain(width, 34), tokens=tokens)
    kept = []
    for name in ("key_codes", "value_codes", "key_norms", "value_norms"):
        store.buffers[name], memory = at_the_end(store.buffers[name])
        kept.append(memory)
    check(store)
    assert calls


def at_the_end(tensor):
    """A copy that ends where a page begins that must not be touched, and its memory, which must be kept."""
    whole = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
    start = torch.frombuffer(memory, dtype=torch.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start.data_ptr() + whole), mmap.PAGESIZE, 0) == 0
    copy = start[whole - tensor.nbytes : whole].view(tensor.dtype).view_as(tensor)
    return copy.copy_(tensor), memory


OTHERS = {
    "sketch": dict(keys=plain(3, 64), values=plain(3, 64), sketch=True),
    "wide heads": dict(keys=plain(3, 320), values=plain(3, 64)),
}


@needs_loop
@pytest.mark.parametrize("case", OTHERS)
def test_other_codes_are_left_to_torch(case, calls):
    store = made(**OTHERS[case])
    check(store)
    assert not calls and store.attend_with_tail(*[ask(store)] * 3, AttendContext(0.1), None) is None


@needs_loop
@pytest.mark.parametrize("group", [1, 3, 16])
def test_many_queries_are_taken_in_turns(group, calls):
    store = made(plain(3, 64), plain(3, 64), tokens=70, mean="turned", sinks=2)
    check(store, group=group, queries=40 // group + 5)
    assert len(calls) > 2


@needs_loop
@pytest.mark.parametrize("group, queries", [(2, rotated_cpu.MOST_QUERIES // 2 + 1), (17, 1)])
def test_more_queries_are_left_to_torch(group, queries, calls):
    check(made(plain(3, 64), plain(3, 64), tokens=70), group=group, queries=queries)
    assert not calls


def test_without_a_compiler_torch_serves(monkeypatch, tmp_path, calls):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    rotated_cpu.NATIVE.forget()
    try:
        store = made(**CASES["turned mean"])
        check(store)
        assert "no C compiler" in store._loop.problem()
    finally:
        rotated_cpu.NATIVE.forget()
    assert not calls


def test_can_be_turned_off(monkeypatch, calls):
    monkeypatch.setenv("KVFOLD_CPU_KERNEL", "0")
    store = made(**CASES["mixed"])
    check(store)
    assert not calls and store._loop.problem() == "KVFOLD_CPU_KERNEL is 0"
