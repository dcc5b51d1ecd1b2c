"""What surrounds attention over records, against its plain twin; interpreted where there is no GPU."""

from __future__ import annotations

import torch

from kvfold.codecs.fragments import RecordFormat
from kvfold.kernels import around_records, dense_decode, records
from kvfold.kernels.around_records import Basis, Rotations, Turned
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.position_bias import Circles, in_few_planes
from tests import interpreted
from tests.kernels.test_records import Case
from tests.stores.checks import SharingTurn

CUDA = records.problem(torch.device("cuda")) is None
DEVICE = "cuda" if CUDA else "cpu"


CASES = [
    # dim, group, queries, rows, tokens, shifts or None, basis, exact, tail, before, hidden
    (64, 4, 1, 2, 150, (0, 0), "rotated", True, True, True, False),
    (64, 3, 2, 3, 200, (5, 0, 700), "rotated", True, False, False, True),
    (80, 16, 1, 1, 70, (9,), "graded", False, True, False, False),
    (128, 1, 1, 2, 300, None, "graded", False, False, True, False),
    (128, 8, 1, 1, 1000, (3,), "plain", True, True, False, False),
]


def check():
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    for dim, group, queries, rows, tokens, shifts, kind, exact, tail, before, hide in CASES:
        heads = 2
        layout = RecordFormat((4, 2) * (dim // 32) + (3,) * (dim // 16 % 2), 3)
        runs = [[(layout, tokens)]] * heads * rows
        coded = Case(runs, rows=rows, seed=dim, device=DEVICE).records
        if kind == "rotated":
            described = [(records.Run(layout, tokens, 3 + 2 * index),) for index in range(heads * rows)]
            coded = records.Records(coded.data, coded.books, described)
        basis = Basis(random(rows, heads, dim).abs() / 60, random(rows, heads).abs() / 60)
        if kind != "plain":
            order = torch.rand(rows, heads, dim, generator=generator).argsort(-1).to(DEVICE, torch.uint8)
            matrices = torch.stack([torch.linalg.qr(random(dim, dim))[0] for _ in range(2)])
            which = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
            means = {}
            if kind == "graded":
                means = {"key_mean": random(rows, heads, dim).half(), "value_mean": random(rows, heads, dim)}
            turn = Rotations(matrices, which) if kind == "rotated" else None
            basis = Basis(
                basis.scale, basis.value_scale, order, turn, Rotations(matrices, 1 - which), **means
            )
        turned = None
        if shifts is not None:
            rotary = SharingTurn(still=16 if dim == 80 else 0, scale=1.3)
            vector = random(rows, heads, dim).half()
            if dim == 128:
                vector = in_few_planes(vector, rotary)
            turned = Turned(vector, Circles.of(vector, rotary), rotary, tokens, shifts)
        dtype = torch.float16 if dim == 128 else torch.float32
        query = random(rows, heads * group, queries, dim, dtype=dtype)
        more = {}
        if exact:
            valid = torch.arange(4, device=DEVICE) < torch.tensor([[4], [1], [2]], device=DEVICE)[:rows]
            more["exact"] = Exact(random(rows, heads, 4, dim), random(rows, heads, 4, dim), valid=valid)
            if dtype == torch.float16:
                more["exact"] = Exact(more["exact"].keys.half(), more["exact"].values.half())
        if tail:
            states = [random(rows, heads, 9, dim, dtype=dtype) for _ in range(2)]
            more["tail"] = Exact(*states, length=torch.tensor([7], device=DEVICE))
        if before:
            more["before"] = random(rows, heads * group, queries, dim), random(rows, heads * group, queries)
        hidden = None
        if hide:
            slots = -(-tokens // 64) * 64
            hidden = torch.rand(rows * heads * slots, generator=generator).to(DEVICE) < 0.5
        found = around_records.attend(query, coded, basis, dim**-0.5, turned, hidden, **more)
        expected = around_records.attend_plain(query, coded, basis, dim**-0.5, turned, hidden, **more)
        error = (found[0] - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
        assert float(error.max()) < 2e-3, (dim, float(error.max()))
        assert torch.allclose(found[1], expected[1], atol=2e-3), (dim, found[1] - expected[1])
        assert found[0].shape == query.shape and found[1].shape == query.shape[:-1]


def test_against_the_plain_twin():
    interpreted.run(check)


def test_nothing_seen():
    """A row all of whose tokens are hidden leaves what came before."""
    layout = RecordFormat((2,) * 4, 2)
    coded = Case([[(layout, 40)]] * 2).records
    basis = Basis(torch.ones(1, 2, 64), torch.ones(1, 2))
    query, before = torch.randn(1, 4, 1, 64), (torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1))
    hidden = torch.ones(sum(coded.slots), dtype=torch.bool)
    output, lse = around_records.attend_plain(query, coded, basis, 0.1, hidden=hidden, before=before)
    assert torch.equal(output, before[0]) and torch.equal(lse, before[1])


def test_says_why_it_cannot_run():
    assert around_records.problem(torch.device("cpu"), 128, 4) == "no CUDA device"
    assert dense_decode.problem(torch.device("cpu")) is not None
