"""The low-rank decode kernels against float64 attention over what a store decodes to, interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvfold.codecs.codebook import integer_levels
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels import lowrank_choose, lowrank_decode, lowrank_rows
from kvfold.kernels.dense_decode import Exact, partials
from kvfold.kernels.lowrank_rows import Factors, Row, Rows
from kvfold.methods import XKV
from kvfold.stores.base import AttendContext
from kvfold.stores.lowrank import LowRankStore, decode, landmark_code
from tests import interpreted
from tests.methods.baselines.views import view
from tests.stores.checks import Turn

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PUBLISHED = dict(key_rank=12, value_rank=20, widths=(16,), basis_bits=16, metric="plain", centre=False)
SPARSE = dict(keep=0.6, chunk=4, recent=4, outlier_chunks=2, split=False, sparse_budget=12)

WIDE = dict(SPARSE, choice="layer", sparse_budget=40)

# rows' options of the method and paddings, options of the views, softcap
CASES = {
    "coded": ([dict(keep=0.4)], (3,), {}, None),
    "published": ([dict(PUBLISHED, sinks=0, recent=0)], (3,), {}, 3.0),
    "16-bit bases, no RoPE, odd sizes": (
        [dict(keep=0.6, basis_bits=16, widths=(3, 5))],
        (3,),
        dict(rotary=False, kv_heads=1, group=7, key_dim=24, value_dim=40),
        None,
    ),
    "layer": ([dict(SPARSE, choice="layer")], (3,), dict(tokens=90), 2.0),
    "window": ([dict(SPARSE, choice="window")], (3,), dict(tokens=90), None),
    "chosen 16-bit": (
        [dict(SPARSE, **{**PUBLISHED, "keep": None}, choice="head")],
        (3,),
        dict(tokens=90),
        None,
    ),
    # Batches: rows alike, rows of other lengths (one too short to choose, one for factors), ranks, widths and outliers, rows of other kinds.
    "rows alike": ([dict(SPARSE, choice="layer")] * 3, (3, 3, 3), dict(tokens=90), None),
    "rows of all tokens": (
        [dict(keep=0.4), dict(keep=0.6), dict(keep=0.5, centre=False)],
        (3, 0, 25),
        dict(tokens=64, kv_heads=2, group=1, key_dim=64, value_dim=80),
        None,
    ),
    "16-bit rows of all tokens": ([dict(PUBLISHED, sinks=2, recent=3)] * 2, (3, 8), {}, None),
    "rows apart": (
        [
            dict(WIDE),
            dict(WIDE, keep=0.75, sinks=2),
            dict(WIDE, widths=(3, 5), basis_bits=16),
            dict(WIDE),
            dict(WIDE, widths=(3, 5), basis_bits=16, recent=1),
            dict(WIDE, centre=False),
            dict(WIDE),
        ],
        (3, 20, 0, 46, 11, 0, 74),
        dict(tokens=90, group=4, kv_heads=1),
        5.0,
    ),
    "heads of rows apart": (
        [dict(SPARSE, choice="head"), dict(SPARSE, choice="head", outlier_chunks=1)],
        (0, 30),
        dict(tokens=80, kv_heads=2, group=1, key_dim=128, value_dim=64),
        None,
    ),
    "window of rows apart": (
        [dict(SPARSE, choice="window"), dict(SPARSE, choice="window", keep=0.8, outlier_chunks=0)],
        (7, 0),
        dict(tokens=90, key_dim=80, value_dim=80, group=4, kv_heads=1),
        None,
    ),
}


SIZES = dict(PIECE=1 << 13, CHOSEN=96), dict(PIECE=32, CHOSEN=96)
"""Of the scratch: two rows at a time that choose 40 tokens; all tokens of a row in one piece or in several."""


class SharedTurn(Turn):
    """A rotary embedding that remembers what the layers of a step share."""

    def __init__(self):
        self.known = {}

    def rotate(self, x, positions):
        return super().rotate(x.cpu(), positions.cpu()).to(x.device)

    def shared(self, name, make):
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]


def approximated(store, row):
    """Landmarks (kv_heads, chunks, key_dim) with the levels that the kernel's polynomial gives."""
    code = landmark_code(store.key_dim)
    scales = store.buffers[f"landmark_scales.{row}"].double().cpu()
    ((_, table),) = code.tables(torch.device("cpu"))
    exact, unit = table.double(), float(table[-1]) / float(integer_levels(4, store.key_dim)[-1])
    x = (torch.arange(16, dtype=torch.float64) * 2 - 15) / 16
    levels = sum(c * x**power for c, power in zip(lowrank_choose._polynomial(store.key_dim), (1, 3, 5, 7)))
    turned = code.rotate(store.landmarks(row).cpu()).double() / scales
    which = (turned[..., None] - exact).abs().argmin(-1)
    return code.rotate_back((levels[which] * unit * scales).float()).double()


def shares(store, row, query, scaling):
    """What a softmax over landmarks in float64 gives chunks, (kv_heads or 1, chunks)."""
    marks = approximated(store, row)
    query = query[row, :, 0].double().cpu().unflatten(0, (store.kv_heads, -1)) * scaling
    logits = query @ marks.transpose(1, 2)
    out = torch.zeros(marks.shape[:2], dtype=torch.bool)
    out.scatter_(1, store.buffers[f"outliers.{row}"].long().cpu(), True)
    share = logits.masked_fill(out[:, None], -torch.inf).softmax(-1).sum(1)
    return share if store.layout.choice == "head" else share.sum(0, keepdim=True)


def expected(store, row, query, context, chosen, tail, before):
    """Softmax attention of one row in float64 over the tokens read, and what came before."""
    start, count = store.coded(row)
    seen = tail.keys.shape[2] if tail.length is None else int(tail.length)
    outputs, lses = [], []
    for head in range(query.shape[1]):
        own = head * store.kv_heads // query.shape[1]
        kept = store.kept(row, own, Turn() if context.rotary else None)
        read = torch.ones(len(kept.positions), dtype=torch.bool)
        if chosen is not None:
            chunk = (kept.positions - start) // store.layout.chunk
            inside = (kept.positions >= start) & (kept.positions < start + count)
            wanted = chosen[min(own, len(chosen) - 1)].tolist()
            wanted += store.buffers[f"outliers.{row}"][own].tolist()
            read = ~inside | torch.tensor([int(one) in wanted for one in chunk])
        keys = torch.cat([kept.keys[read], tail.keys[row, own, :seen].float()]).double()
        values = torch.cat([kept.values[read], tail.values[row, own, :seen].float()]).double()
        scores = query[row, head, 0].double() @ keys.T * context.scaling
        if context.softcap:
            scores = torch.tanh(scores / context.softcap) * context.softcap
        if before is not None:
            scores = torch.cat([scores, before[1][row, head].double()])
            values = torch.cat([values, before[0][row, head].double()])
        outputs.append(scores.softmax(-1) @ values)
        lses.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(lses)


def batch(stores):
    """One store of several ones' rows."""
    layout = replace(
        stores[0].layout,
        rows=tuple(row for store in stores for row in store.layout.rows),
        real_tokens=tuple(count for store in stores for count in store.real_tokens),
    )
    buffers = {
        name.replace(".0", f".{number}"): tensor
        for number, store in enumerate(stores)
        for name, tensor in store.buffers.items()
    }
    return LowRankStore(layout, buffers)


def shifted(store):
    """The same, with the second row's tensors where no memory begins."""
    buffers = dict(store.buffers)
    for name, tensor in buffers.items():
        if name.endswith(".1"):
            room = tensor.new_empty(tensor.numel() + 1)[1:]
            buffers[name] = room.copy_(tensor.flatten()).view(tensor.shape)
    assert (
        lowrank_rows.alike([decode._row(LowRankStore(store.layout, buffers), row) for row in (0, 1)], 2)[
            0
        ].align
        == 1
    )
    return LowRankStore(store.layout, buffers)


def fold(rows, pads, shape):
    """Two layers' stores of a batch, each row folded as it says; and its view."""
    found = []
    for number, (options, pad) in enumerate(zip(rows, pads, strict=True)):
        views = [view(pads=(pad,), seed=10 * number + seed, **shape) for seed in range(2)]
        for one in views:
            # A large mean, as a bias of the key projection makes, and a 16-bit model.
            one.keys, one.values = (one.keys + 3).half(), (one.values - 1).half()
        found.append(XKV(**options).fold(views))
    return [batch(layer) for layer in zip(*found, strict=True)], views[0]


def check(cases=tuple(CASES)):
    torch.manual_seed(0)
    for name in cases:
        rows, pads, shape, softcap = CASES[name]
        stores, one = fold(rows, pads, shape)
        rotary = None if one.rotary is None else SharedTurn()
        context = AttendContext(one.scaling, softcap, rotary=rotary)
        heads, several = one.sampled.shape[1], len(rows) > 1
        query = torch.randn(len(rows), heads, 1, stores[0].key_dim).half() * 2
        dims = stores[0].key_dim, stores[0].value_dim
        # A batch's tail has room, and something was read before it.
        states = [torch.randn(len(rows), stores[0].kv_heads, 9, dim).half() for dim in dims]
        tail = Exact(*states, torch.tensor([5]) if several else None)
        before = None
        if several:
            before = torch.randn(len(rows), heads, 1, dims[1]), torch.randn(len(rows), heads, 1)
        moved_stores = [store.to(DEVICE) for store in stores]
        moved = Exact(*(x if x is None else x.to(DEVICE) for x in (tail.keys, tail.values, tail.length)))
        for number, store in enumerate(stores if rows[0].get("choice") == "window" else stores[:1]):
            on = shifted(moved_stores[number]) if name == "rows alike" else moved_stores[number]
            assert decode.serves(on, query.to(DEVICE), context), name
            made, some = decode._chosen(on, query.to(DEVICE), context)
            chosen = [made[row].cpu().long() if row in some else None for row in range(len(rows))]
            for row, mine in enumerate(chosen):
                assert (mine is not None) == store.selects(row)
                if mine is not None and f"landmarks.{row}" in store.buffers:
                    # Shares are counted in steps of a hundredth: of chunks as near as that to the last one either may be chosen.
                    share = shares(store, row, query, context.scaling)
                    best = share.topk(store.layout.selected)
                    last = best.values[:, -1:]
                    taken = torch.zeros_like(share, dtype=torch.bool).scatter_(1, mine, True)
                    assert bool((mine.diff(dim=1) > 0).all())
                    assert bool((share.gather(1, mine) > 0.98 * last).all()), (name, number, row)
                    assert bool(taken[share > last / 0.98].all()), (name, number, row)
            earlier = before and tuple(x.to(DEVICE) for x in before)
            for sizes in SIZES[: 1 + (name == "rows of all tokens")]:
                with pytest.MonkeyPatch.context() as patch:
                    for size, tokens in sizes.items():
                        patch.setattr(lowrank_decode, size, tokens)
                    patch.setattr(decode, "_chosen", lambda *_, known=(made, some): known)
                    output, lse = decode.attend(on, query.to(DEVICE), context, moved, earlier)
                for row in range(len(rows)):
                    want, want_lse = expected(store, row, query, context, chosen[row], tail, before)
                    error = (output[row, :, 0].cpu() - want).norm() / want.norm()
                    assert error < 3e-3, (name, number, row, error)
                    torch.testing.assert_close(lse[row, :, 0].cpu().double(), want_lse, atol=1e-2, rtol=1e-3)
            if name == "coded":
                check_pieces(on, query.to(DEVICE), context)


def check_pieces(store, query, context):
    """Decoded in pieces, and merged."""
    near = partials(query, decode._exact(store), None, context.scaling)
    (rows,) = decode._together(store, (0,))
    turned = decode._turns(store, context, query.device)
    found = []
    for piece in (1 << 13, 16):
        into = query.new_empty(*query.shape[:3], store.value_dim), query.new_empty(query.shape[:3]).float()
        lowrank_decode.attend(query, rows, turned, near, into, context.scaling, piece=piece)
        found.append(into)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=2e-3, rtol=1e-3)


def check_choice():
    """The largest of many to within a bin, ties and infinities among them."""
    kernels = lowrank_choose._kernels()
    for chunks, selected in ((5, 2), (300, 299), (9000, 400)):
        logits = torch.randn(2, chunks) * 3
        logits[:, ::7] = -torch.inf
        logits[:, 1::3] = logits[:, 1:2]
        blocks, pitch = -(-chunks // 128), -(-chunks // 16) * 16
        padded = torch.full((2, blocks * 128), -torch.inf)
        padded[:, :chunks] = logits
        block_lse = padded.view(2, blocks, 128).logsumexp(-1)
        shares = torch.empty(2, pitch, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(2, kernels.BINS, dtype=torch.int32, device=DEVICE)
        chosen = torch.full((2, selected), -1, dtype=torch.int32, device=DEVICE)
        kernels.share[(blocks, 2, 1)](
            padded[:, :pitch].contiguous().to(DEVICE), block_lse.to(DEVICE), shares, counts, counts, chunks, pitch, blocks, 0.0, HEADS=1, HEADS_UP=16,
            BLOCKS_UP=max(16, 1 << (blocks - 1).bit_length()), ALIGN=0, BLOCK=128, num_warps=4,
        )  # fmt: skip
        kernels.choose[(-(-chunks // 1024), 2, 1)](
            shares, counts, chosen, counts, chunks, pitch, selected, ALIGN=0, BLOCK=1024, WIDE=8192, num_warps=4
        )  # fmt: skip
        chosen = chosen.cpu().long()
        assert bool((chosen.diff(dim=1) > 0).all()) and bool((chosen[:, 0] >= 0).all())
        share = logits.softmax(-1)
        got, best = share.gather(1, chosen).sort().values, share.topk(selected).values.sort().values
        torch.testing.assert_close(got, best, rtol=0.01, atol=1e-13)


def check_unpacking():
    """Rows of every width, in groups of eights, and of odd sizes, there of chosen chunks too."""
    chosen = torch.tensor([[1, 2, 6], [0, 5, 7]], dtype=torch.int32, device=DEVICE)
    for first, second in ((296, 24), (13, 9)):
        for width in (1, 3, 5, 7):
            code = RotatedCode(((width, first), (9 - width, second)), norms="group")
            codes, norms = code.encode(torch.randn(40, code.dim, device=DEVICE))
            basis = torch.zeros(1, code.dim, 16, dtype=torch.uint8, device=DEVICE)
            side = Factors(codes, norms, code, basis, norms, None)
            expected = code.decode(codes, norms)
            for some, chunk in ((None, 1), (chosen, 5))[: 1 + first % 2]:
                if some is not None:
                    expected = expected.view(8, 5, -1)[some.long()].flatten(1, 2)
                sets, count = (1, 40) if some is None else (2, 15)
                rows = Rows([Row(0, side, side)], 1)
                scratch = lowrank_decode._Scratch(
                    rows, sets, 1, count, some if some is None else some[None], chunk
                )
                rows, scales, stride, _ = scratch.fill(1, 0, 1, 0, count)
                found = rows[..., : code.dim].float() * scales[..., None]
                torch.testing.assert_close(found, expected.view_as(found), rtol=2e-3, atol=1e-6)
                assert stride == rows.shape[-1] and not rows[..., code.dim :].any()


def check_windows():
    """Rows whose windows begin at different layers: each reads what its own window's first layer chose."""
    options = dict(SPARSE, choice="window")
    (first, second), one = fold([options] * 2, (7, 0), dict(tokens=90))
    (third, _), _ = fold([dict(options, keep=0.7)] * 2, (7, 0), dict(tokens=90))
    alone = torch.zeros(1, dtype=torch.long)
    # The second layer has the first row of the window before, and begins a window of the second row.
    apart = batch([second.select(alone), third.select(alone + 1)]).to(DEVICE)
    context = AttendContext(one.scaling, rotary=SharedTurn())
    queries = torch.randn(2, 2, one.sampled.shape[1], 1, first.key_dim, device=DEVICE).half() * 2
    before, _ = decode._chosen(first.to(DEVICE), queries[0], context)
    mixed, some = decode._chosen(apart, queries[1], context)
    own, _ = decode._chosen(
        third.to(DEVICE), queries[1], AttendContext(one.scaling, rotary=context.rotary.__class__())
    )
    assert some == (0, 1) and torch.equal(mixed[0], before[0]) and torch.equal(mixed[1], own[1])
    assert not torch.equal(before[1], own[1])


def check_shared_decoding():
    """A window's first layer decodes chosen chunks for all; nothing is left of it after the last, nor taken from another step."""
    # Two draws in a hundred have a logit that is what large parts of it leave, which 16 bits round by more than the bound.
    torch.manual_seed(2)
    rows = [dict(SPARSE, choice="window")] * 2
    plain, one = fold(rows, (3, 0), dict(tokens=90))
    stores = [store.to(DEVICE) for store in plain]
    rotary = SharedTurn()
    context = AttendContext(one.scaling, rotary=rotary)
    states = [
        torch.randn(2, stores[0].kv_heads, 9, dim).half() for dim in (stores[0].key_dim, stores[0].value_dim)
    ]
    tail = Exact(*states)
    moved = Exact(*(x.to(DEVICE) for x in states))
    counted, fill = [], lowrank_decode._Scratch.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            lowrank_decode._Scratch, "fill", lambda self, *a: (counted.append(self.filled), fill(self, *a))[1]
        )
        for step in range(2):
            for layer, store in enumerate(stores):
                query = torch.randn(2, one.sampled.shape[1], 1, store.key_dim).half() * 2
                with pytest.MonkeyPatch.context() as alone:
                    alone.setattr(decode, "_decoded", lambda *_: {})
                    own, _ = decode.attend(store, query.to(DEVICE), context, moved)
                assert counted == [False, False]
                counted.clear()
                output, _ = decode.attend(store, query.to(DEVICE), context, moved)
                assert torch.equal(output, own) and counted == [layer > 0] * 2
                counted.clear()
                made = rotary.shared(("chunks", store.buffers["key_factors.0"].data_ptr(), 0, None), dict)[
                    "last"
                ]
                for row in range(2):
                    want, _ = expected(plain[layer], row, query, context, made[row].cpu().long(), tail, None)
                    error = (output[row, :, 0].cpu() - want).norm() / want.norm()
                    assert error < 3e-3, (step, layer, row, error)
                held = rotary.shared("decoded chunks", dict)
                assert bool(held) == (layer == 0)
    # Fewer at a time than there are: each layer decodes its own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank_decode, "CHOSEN", 16)
        for store in stores:
            query = torch.randn(2, one.sampled.shape[1], 1, store.key_dim).half()
            decode.attend(store, query.to(DEVICE), context, moved)
            assert all(x is None for x in rotary.shared("decoded chunks", dict).get("rows", {}).values())


CHECKS = {
    **{name: partial(check, (name,)) for name in CASES},
    "unpacking": check_unpacking,
    "choice": check_choice,
    "windows": check_windows,
    "shared decoding": check_shared_decoding,
}


@pytest.mark.parametrize("name", CHECKS if CUDA or interpreted.INTERPRETED else ["interpreted"])
def test_kernels(name, monkeypatch):
    if name == "interpreted":
        interpreted.run(check_all)
        return
    pytest.importorskip("triton")
    monkeypatch.setattr(lowrank_decode, "problem", lambda device: None)
    CHECKS[name]()


def check_all(monkeypatch):
    monkeypatch.setattr(lowrank_decode, "problem", lambda device: None)
    for one in CHECKS.values():
        one()
