"""Attention over records: the plain path and the kernel against float64 on the codes that records were made of."""

import math
from dataclasses import replace

import pytest
import torch

from kvfold.codecs.codebook import gaussian_levels
from kvfold.codecs.fragments import Coded, RecordFormat, pack
from kvfold.kernels.cuda_library import no_compiler
from kvfold.kernels.position_bias import Circles, coarse_pairs, in_few_planes, turned_rows, turns
from kvfold.kernels.record_plan import make_plan
from kvfold.kernels.records import (
    Records,
    Run,
    attend,
    attend_plain,
    book,
    problem,
)
from kvfold.kernels.turned_biases import Turning, turned_biases
from tests.stores.checks import SharingTurn

no_kernel = problem(torch.device("cuda"))
needs_kernel = pytest.mark.skipif(no_kernel is not None, reason=str(no_kernel))

UNIT = 63 / float(gaussian_levels(4).max())
LEVELS = {width: (gaussian_levels(width) * UNIT).round().int().tolist() for width in (1, 2, 3, 4)}


class Case:
    """Random codes of every (row, KV head), their records, and attention over them in float64."""

    def __init__(self, runs, group=4, groups=None, rows=1, seed=0, device="cpu"):
        """`runs` of each row and head: lists of (format, tokens); `groups`: index of each tile's group of norms."""
        self.generator = torch.Generator().manual_seed(seed)
        self.rows, self.kv_heads, self.group = rows, len(runs) // rows, group
        tiles = len(runs[0][0][0].key_widths) if runs[0] else len(groups)
        groups = groups or [0] * tiles
        self.dim = 16 * tiles
        books = torch.stack([*(book(LEVELS, index) for index in groups), book(LEVELS)])
        data, self.keys, self.values, self.slots = [], [], [], []
        for own in runs:
            keys, values, slots, slot = (
                [torch.zeros(0, self.dim).double()],
                [torch.zeros(0, self.dim).double()],
                [],
                0,
            )
            for layout, tokens in own:
                coded, one, other = self._random(layout, tokens, groups)
                data.append(pack(coded, layout).flatten())
                keys.append(one)
                values.append(other)
                slots += range(slot, slot + tokens)
                slot += -(-tokens // 64) * 64
            self.keys.append(torch.cat(keys))
            self.values.append(torch.cat(values))
            self.slots.append(slots)
        described = [tuple(Run(layout, tokens) for layout, tokens in own) for own in runs]
        books = books.expand(rows, self.kv_heads, -1, -1).contiguous()
        empty = torch.empty(0, dtype=torch.uint8)
        self.records = Records(torch.cat([empty, *data]).to(device), books.to(device), described)
        self.query = (
            torch.randn(rows, self.kv_heads * group, self.dim, generator=self.generator).to(device) / UNIT
        )

    def _random(self, layout, tokens, groups):
        """Codes as normal numbers have them, norms spread over a factor of a few."""

        def codes(width):
            if width == 8:
                return (
                    (torch.randn(tokens, 16, generator=self.generator) * 24 + 127.5)
                    .round()
                    .clamp(0, 255)
                    .to(torch.uint8)
                )
            x = torch.randn(tokens, 16, generator=self.generator) * UNIT
            return (x[..., None] - torch.tensor(LEVELS[width])).abs().argmin(-1).to(torch.uint8)

        def numbers(*shape):
            spread = (torch.randn(shape, generator=self.generator) * 0.5).exp()
            if layout.logarithms:
                return (spread.log2() * 16 + 128).round().to(torch.uint8)
            return spread.half()

        def values(codes, width):
            return codes.double() - 127.5 if width == 8 else torch.tensor(LEVELS[width]).double()[codes.int()]

        def size(x):
            return torch.exp2((x.double() - 128) / 16) if x.dtype == torch.uint8 else x.double()

        norms = numbers(tokens, layout.key_norms) if layout.key_norms else None
        magnitudes = numbers(tokens) if layout.magnitudes else None
        tiles = [
            codes(width) if width else torch.zeros(tokens, 16, dtype=torch.uint8)
            for width in layout.key_widths
        ]
        keys = [
            values(tile, width) if width else torch.zeros(tokens, 16).double()
            for tile, width in zip(tiles, layout.key_widths)
        ]
        if norms is not None:
            keys = [key * size(norms[:, index, None]) for key, index in zip(keys, groups)]
        value_codes = torch.cat([codes(layout.value_width) for _ in tiles], -1)
        other = values(value_codes, layout.value_width)
        if magnitudes is not None:
            other = other * size(magnitudes)[:, None]
        return Coded(torch.cat(tiles, -1), value_codes, norms, magnitudes), torch.cat(keys, -1), other

    def expected(self, scaling, bias=None):
        """(output, log-sum-exp) in float64."""
        outputs, lses = [], []
        grouped = self.query.double().cpu().view(-1, self.group, self.dim)
        for index, (q, keys, values) in enumerate(zip(grouped, self.keys, self.values)):
            logits = q @ keys.t() * scaling
            if bias is not None:
                first = sum(self.records.slots[:index])
                logits += bias[[first + slot for slot in self.slots[index]]].double().cpu().t()
            lses.append(logits.logsumexp(-1))
            outputs.append(logits.softmax(-1).nan_to_num() @ values)
        shape = self.query.shape
        return torch.stack(outputs).view(shape), torch.stack(lses).view(shape[:2])


def same(found, expected, tolerance):
    output, lse = (x.double().cpu() for x in found)
    there = torch.isfinite(expected[1])
    assert torch.equal(torch.isfinite(lse), there)
    assert (output[~there] == 0).all()
    error = (output[there] - expected[0][there]).norm(dim=-1) / expected[0][there].norm(dim=-1)
    assert error.max() < tolerance
    assert (lse[there] - expected[1][there]).abs().max() < tolerance * max(
        1, float(expected[1][there].abs().max())
    )


def mixed(*widths, value=4, **kwargs):
    return RecordFormat(widths, value, **kwargs)


UNIFORM = [RecordFormat((width,) * 8, width) for width in (1, 2, 3, 4, 8)]
CASES = {
    **{f"width {layout.value_width}": dict(runs=[[(layout, 640)]] * 2) for layout in UNIFORM},
    "partial": dict(runs=[[(mixed(4, 4, 4, 4), 1)], [(mixed(4, 4, 4, 4), 63)], [(mixed(4, 4, 4, 4), 65)]]),
    "mixed": dict(runs=[[(mixed(4, 3, 2, 1, 8, 0, 2, 4, value=3), 300)], [(mixed(8, *[2] * 7, value=2), 300)]]),
    "groups": dict(
        runs=[[(mixed(8, 4, 4, 3, 2, 2, 2, 2, value=2, key_norms=3), 500)]] * 2, groups=[0, 1, 1, 1, 2, 2, 2, 2]
    ),
    "logarithms": dict(
        runs=[[(mixed(4, 4, 3, 3, 2, 2, 2, 2, key_norms=2, logarithms=True), 500)]], groups=[0] * 4 + [1] * 4
    ),
    "no numbers": dict(runs=[[(mixed(4, 2, 3, 4, value=3, key_norms=0, magnitudes=False), 200)]]),
    "grades": dict(
        runs=[
            [
                (mixed(8, 4, 4, 2, value=value, key_norms=0, logarithms=True), tokens)
                for value, tokens in ((8, 70), (4, 130), (2, 300), (1, 64))
            ],
            [(mixed(4, 2, 0, 0, value=2, key_norms=0, logarithms=True), 90)],
            [],
            [(mixed(3, 3, 2, 1, value=value, key_norms=0, logarithms=True), 1000) for value in (3, 4)],
        ],
        rows=2,
    ),
    **{
        f"group {group}": dict(runs=[[(mixed(4, 3, 4, 2), 700)]] * 2, group=group) for group in (1, 2, 3, 6, 8, 12, 16)
    },
    **{f"dim {16 * tiles}": dict(runs=[[(mixed(*([4, 2] * 8)[:tiles]), 400)]] * 3) for tiles in (4, 5, 6, 7, 16)},
    "dim 256, group 8": dict(runs=[[(mixed(*[3] * 16), 400)]], group=8),
    "dim 256, 8 bits": dict(runs=[[(mixed(*[8] * 16, value=8), 400)]], group=2),
    "rows": dict(runs=[[(mixed(4, 3, 4, 2), 700)]] * 6, rows=3, group=2),
    "uneven": dict(runs=[[(mixed(4, 3, 4, 2), tokens)] for tokens in (20000, 64, 3000)], group=2),
    "long": dict(runs=[[(mixed(*[2] * 8, value=2), 40000)]] * 2, group=2),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("long", "uneven")])
def test_plain(name):
    case = Case(**CASES[name])
    same(attend_plain(case.query.double(), case.records, 0.3), case.expected(0.3), 1e-6)
    same(attend(case.query, case.records, 0.3), case.expected(0.3), 1e-4)


def bias_of(case, device="cpu"):
    """Of every place; every third hides its token."""
    bias = torch.randn(sum(case.records.slots), case.group, generator=case.generator)
    bias[::3] = -math.inf
    return bias.to(device)


def scattered(case):
    """The same records in a pool, in any order, with gaps and others' bytes between them."""
    sizes = [run.layout.nbytes for own in case.records.runs for run in own for _ in range(run.records)]
    parts, begin, table = case.records.data.split(sizes), 0, torch.zeros(len(sizes), dtype=torch.int32)
    pool = torch.randint(0, 256, (2 * sum(sizes) + 160,), generator=case.generator, dtype=torch.uint8)
    pool = pool.to(case.records.data.device)
    for index in torch.randperm(len(sizes), generator=case.generator).tolist():
        begin += 128 * int(torch.randint(0, 2, (), generator=case.generator))
        table[index] = begin // 16
        pool[begin : begin + sizes[index]] = parts[index]
        begin += sizes[index]
    return Records(pool, case.records.books, case.records.runs, table=table.to(pool.device))


@pytest.mark.parametrize("name", CASES)
def test_block_tables(name):
    case = Case(**CASES[name])
    one, other = attend(case.query, case.records, 0.3), attend(case.query, scattered(case), 0.3)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@needs_kernel
@pytest.mark.parametrize("name", CASES)
def test_kernel_with_block_tables(name):
    case = Case(**CASES[name], device="cuda")
    for bias in (None, bias_of(case, "cuda")):
        one, other = (attend(case.query, records, 0.3, bias) for records in (case.records, scattered(case)))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_bias():
    case = Case(**CASES["grades"])
    bias = bias_of(case)
    same(attend(case.query, case.records, 0.3, bias), case.expected(0.3, bias), 1e-4)


@needs_kernel
@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("name", CASES)
def test_kernel(name, scale):
    case = Case(**CASES[name], device="cuda")
    case.query *= scale
    for _ in range(2):  # the second time counters must be as they were
        same(attend(case.query, case.records, 0.1), case.expected(0.1), 2e-3)


@needs_kernel
@pytest.mark.parametrize("name", ["grades", "long", "group 8", "rows"])
def test_kernel_bias(name):
    case = Case(**CASES[name], device="cuda")
    bias = bias_of(case, "cuda")
    same(attend(case.query, case.records, 0.1, bias), case.expected(0.1, bias), 2e-3)


TURNED = [
    # dim, group, tokens, planes that are not zero, channels that RoPE leaves alone
    (64, 4, 300, 32, 0),
    (64, 1, 64, 5, 0),
    (80, 3, 1000, 16, 16),
    (128, 4, 5000, 32, 0),
    (128, 8, 1001, 16, 0),
    (128, 16, 200, 32, 96),
    (256, 2, 777, 20, 0),
]


def check_turned(dim, group, tokens, planes, still, device):
    """Logits of a constant at every token's position, against float64 products with what folding takes out there."""
    layout = RecordFormat((3,) * (dim // 16), 2)
    case = Case([[(layout, tokens)]] * 4, group=group, rows=2, seed=dim + group, device=device)
    rotary = SharingTurn(still=still, scale=1.2)
    query = torch.randn(2, 2, group, dim, generator=case.generator).to(device)
    vector = torch.randn(2, 2, dim, generator=case.generator).to(device) * (4 if dim > 64 else 1)
    vector = in_few_planes(vector, rotary, planes)
    circles = Circles.of(vector, rotary)
    assert circles.count == (16 if planes <= 16 or still == 96 else 32)
    tables = turns(rotary, dim, tokens, 0, query.device)
    factors = circles.factors(query, vector, tables).flatten(1, 2)
    turned = torch.stack([turned_rows(own, rotary, tokens, 0) for own in vector])
    if circles.still is not None:
        turned = turned - circles.still[:, :, None]
    logits = torch.zeros(2, 2, -(-tokens // 64) * 64, group, device=device)
    logits[:, :, :tokens] = (turned.double() @ query.double().transpose(2, 3)).float()
    turning = Turning(circles, factors, coarse_pairs(tables), tables.fine)
    alone = turned_biases(turning, case.records).view_as(logits)
    assert torch.allclose(alone[:, :, :tokens], logits[:, :, :tokens], atol=2e-5 * float(logits.abs().max()))
    found = attend(case.query, case.records, 0.1, turned=turning)
    same(found, case.expected(0.1, logits.flatten(0, 2)), 2e-3)


@pytest.mark.parametrize("dim, group, tokens, planes, still", TURNED)
def test_turned(dim, group, tokens, planes, still):
    check_turned(dim, group, tokens, planes, still, "cpu")


@needs_kernel
@pytest.mark.parametrize("dim, group, tokens, planes, still", TURNED)
def test_kernel_turned(dim, group, tokens, planes, still):
    check_turned(dim, group, tokens, planes, still, "cuda")


SPREAD = [
    # dim, group, tokens, planes, runs: tokens of each, by row and head
    (64, 4, 700, 32, [[300, 200, 64], [], [700], [1, 1, 130]]),
    (128, 4, 3000, 32, [[900, 1800], [2999, 1], [65, 64, 63, 1], [5]]),
    (128, 6, 1000, 16, [[128, 640], [500], [], [32, 900]]),
    (96, 1, 200, 12, [[10], [200], [100, 100], [64]]),
    (128, 16, 500, 32, [[100, 300], [500], [1], [250, 250]]),
]


def check_turned_at_positions(dim, group, tokens, planes, counts, device):
    """The same, of tokens in any grade and any number of them left out, each at its own position."""
    runs = [
        [(RecordFormat((width,) * (dim // 16), 2), n) for width, n in zip((2, 3, 4, 8), own)]
        for own in counts
    ]
    case = Case(runs, group=group, rows=2, seed=dim + group, device=device)
    positions, generator = torch.zeros(sum(case.records.slots), dtype=torch.int32), case.generator
    real, place = torch.zeros(len(positions), dtype=torch.bool), 0
    for own in case.records.runs:
        order, taken = torch.randperm(tokens, generator=generator), 0
        for run in own:
            at = order[taken : taken + run.tokens].sort().values
            positions[place : place + run.tokens] = at.int()
            real[place : place + run.tokens] = True
            taken, place = taken + run.tokens, place + 64 * run.records
    records = Records(case.records.data, case.records.books, case.records.runs, positions.to(device))
    rotary = SharingTurn(still=0, scale=1.2)
    query = torch.randn(2, 2, group, dim, generator=generator).to(device)
    vector = in_few_planes(torch.randn(2, 2, dim, generator=generator).to(device), rotary, planes)
    circles, tables = Circles.of(vector, rotary), turns(rotary, dim, tokens, 0, query.device)
    factors = circles.factors(query, vector, tables).flatten(1, 2)
    turned = torch.stack([turned_rows(own, rotary, tokens, 0) for own in vector])
    logits = (turned.double() @ query.double().transpose(2, 3)).flatten(0, 1).cpu()
    heads = torch.arange(4).repeat_interleave(torch.tensor(case.records.slots))
    expected = logits[heads, positions.long()]
    found = turned_biases(Turning(circles, factors, coarse_pairs(tables), tables.fine), records).cpu()
    assert found.shape == expected.shape
    assert torch.allclose(found[real].double(), expected[real], atol=2e-5 * float(logits.abs().max()))


@pytest.mark.parametrize("dim, group, tokens, planes, counts", SPREAD)
def test_turned_at_positions(dim, group, tokens, planes, counts):
    check_turned_at_positions(dim, group, tokens, planes, counts, "cpu")


@needs_kernel
@pytest.mark.parametrize("dim, group, tokens, planes, counts", SPREAD)
def test_kernel_turned_at_positions(dim, group, tokens, planes, counts):
    check_turned_at_positions(dim, group, tokens, planes, counts, "cuda")


@pytest.mark.parametrize("positions", [True, False])
def test_where_tokens_begin(positions):
    """Of every run and coarse turn the places between two begins are those of its tokens there, and no others."""
    layout, counts = RecordFormat((2,) * 4, 2), [[300, 64, 1], [], [130]]
    case = Case([[(layout, n) for n in own] for own in counts] if positions else [[(layout, 200)]] * 3)
    where = None
    if positions:
        where = torch.cat([
            torch.cat([torch.randperm(640, generator=case.generator)[:n].sort().values, torch.zeros(-n % 64).long()])
            for own in counts for n in own
        ]).int()  # fmt: skip
    records = Records(case.records.data, case.records.books, case.records.runs, where)
    runs, begins = records.begins(10)
    assert runs.tolist() == ([0, 3, 3, 4] if positions else [0, 1, 2, 3])
    first = 0
    for number, count in enumerate([n for own in counts for n in own] if positions else [256] * 3):
        for turn in range(10):
            own = range(int(begins[number, turn]), int(begins[number, turn + 1]))
            at = range(count) if where is None else where[first : first + count].tolist()
            assert [*own] == [first + k for k, position in enumerate(at) if position // 64 == turn]
        first += -(-count // 64) * 64


@needs_kernel
def test_kernel_in_a_graph():
    case = Case(**CASES["long"], device="cuda")
    attend(case.query, case.records, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend(case.query, case.records, 0.1)
    case.query.copy_(case.query.flip(0, 1, 2))
    graph.replay()
    torch.cuda.synchronize()
    same(found, case.expected(0.1), 2e-3)


def test_every_record_is_someones():
    """Work lists: each record of each head exactly once, with its format; places of partial results apart."""
    for name in ("grades", "partial", "mixed", "uneven"):
        records = Case(**CASES[name]).records
        work = make_plan(records, 4, 0, 132, 227 * 1024).work
        assert work is not None
        found = []
        for block, own in enumerate(work.tolist()):
            head, index, splits, first, run_index, run_blocks, count, tokens, begin, units = own[:10]
            assert block == first + index and index < splits and work[first, 0] == head
            assert sum(row[0] == head for row in work.tolist()) == splits
            for record in range(run_index, count, run_blocks):
                found.append((begin + record * units, head, *own[9:14], own[14] + record * 64))
                found[-1] += (tokens if record == count - 1 else 64,)
        at, place, expected = 0, 0, []
        for head, own in enumerate(records.runs):
            for run in own:
                widths = list(run.layout.key_widths) + [0] * 16
                words = [sum(w << 4 * i for i, w in enumerate(widths[start : start + 8])) for start in (0, 8)]
                words = [word - 2**32 if word >= 2**31 else word for word in words]
                flags = bool(run.layout.key_norms) + 2 * run.layout.magnitudes + 4 * run.layout.logarithms
                units = run.layout.nbytes // 16
                for record in range(run.records):
                    tokens = min(64, run.tokens - 64 * record)
                    expected.append((at, head, units, *words, run.layout.value_width, flags, place, tokens))
                    at, place = at + units, place + 64
        assert sorted(found) == expected


@pytest.mark.parametrize("heads, tokens", [(8, 131072), (8, 8192), (64, 32768), (2, 131072)])
def test_blocks_fill_the_gpu(heads, tokens):
    run = Run(RecordFormat((4,) * 8, 4), tokens)
    data = torch.empty(0, dtype=torch.uint8).expand(0)
    records = Records.__new__(Records)
    records.data, records.dim, records.runs = data, 128, [(run,)] * heads
    plan = make_plan(records, 4, 0, 132, 227 * 1024)
    assert 112 <= plan.blocks <= 132 and plan.work is None
    assert plan.warps * plan.ring_bytes <= 220 * 1024
    rounds = -(-run.records // (plan.common[2] * plan.warps))
    assert tokens * heads / 64 > 0.9 * plan.blocks * plan.warps * rounds


def test_fake():
    case = Case(**CASES["rows"])
    records = case.records
    plan = make_plan(records, 4, 0, 132, 227 * 1024)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        query = mode.from_tensor(case.query)
        output, lse = torch.ops.kvfold.attend_records(
            query, records.data, records.books, *[None] * 7, plan.arrived, plan.numbers, 0.1, False
        )
    assert output.shape == query.shape and lse.shape == query.shape[:2]
    assert output.dtype == lse.dtype == torch.float32


def test_why_not():
    assert "96" in problem(torch.device("cuda"), 72)
    assert "17" in problem(torch.device("cuda"), 128, 17)
    assert problem(torch.device("cpu")) == "no CUDA device"


def test_why_not_on_a_gpu(monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "8.9" in problem(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    no_compiler.cache_clear()
    assert "nvcc" in problem(torch.device("cuda"))
    no_compiler.cache_clear()


def test_bad_input():
    case = Case(**CASES["rows"])
    with pytest.raises(ValueError, match="does not fit"):
        attend(case.query[:, :3], case.records, 1.0)
    with pytest.raises(ValueError, match="bias"):
        attend(case.query, case.records, 1.0, torch.zeros(3, 4, 64))
    with pytest.raises(ValueError, match="positions"):
        Records(case.records.data, case.records.books, case.records.runs, torch.zeros(63, dtype=torch.int32))
    with pytest.raises(ValueError, match="bytes"):
        Records(case.records.data[:-16], case.records.books, case.records.runs)
    pool = scattered(case)
    for index in (0, -1):
        for wrong in (-1, (len(pool.data) - pool.runs[0][0].layout.nbytes) // 16 + 1, 2**31 - 1):
            table = pool.table.clone()
            table[index] = wrong
            with pytest.raises(ValueError, match="within the pool"):
                Records(pool.data, pool.books, pool.runs, table=table)
    with pytest.raises(ValueError, match="table must be"):
        Records(pool.data, pool.books, pool.runs, table=pool.table[1:])
    with pytest.raises(ValueError, match="table must be"):
        Records(pool.data, pool.books, pool.runs, table=pool.table.long())
    with pytest.raises(ValueError, match="tiles"):
        other = replace(UNIFORM[0], key_widths=(1,) * 3)
        Records(case.records.data, case.records.books, [(Run(other, 700),)] * 6)
    with pytest.raises(ValueError, match="levels"):
        book({2: [0, 1, 2, 128]})
    with pytest.raises(ValueError, match="levels"):
        book({3: [0, 1, 2, 3]})
    with pytest.raises(ValueError, match="eight below 0"):
        book({4: list(range(16))})
