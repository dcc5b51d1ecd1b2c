"""The low-rank decode kernels against float64 attention over what a store decodes to, interpreted where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels import lowrank_decode
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.lowrank_decode import Factors
from kvfold.methods import XKV
from kvfold.stores.base import AttendContext
from kvfold.stores.lowrank import decode
from tests.methods.baselines.views import view
from tests.stores.checks import Turn

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PUBLISHED = dict(key_rank=12, value_rank=20, widths=(16,), basis_bits=16, metric="plain", centre=False)
SPARSE = dict(keep=0.6, chunk=4, recent=4, outlier_chunks=2, split=False, sparse_budget=12)

# options of the method, of the views, softcap
CASES = {
    "coded": (dict(keep=0.4), {}, None),
    "published": (dict(PUBLISHED, sinks=0, recent=0), {}, 3.0),
    "16-bit bases, no RoPE, odd sizes": (
        dict(keep=0.6, basis_bits=16, widths=(3, 5)),
        dict(rotary=False, kv_heads=1, group=7, key_dim=24, value_dim=40),
        None,
    ),
    "layer": (dict(SPARSE, choice="layer"), dict(tokens=90), 2.0),
    "window": (dict(SPARSE, choice="window"), dict(tokens=90), None),
    "chosen 16-bit": (dict(SPARSE, **{**PUBLISHED, "keep": None}, choice="head"), dict(tokens=90), None),
}


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


def recommended(store, query, scaling):
    """Chunks by a softmax over landmarks in float64, (kv_heads or 1, chunks) bool."""
    marks = store.landmarks(0).double().cpu()
    query = query[0, :, 0].double().cpu().unflatten(0, (store.kv_heads, -1)) * scaling
    logits = query @ marks.transpose(1, 2)
    out = torch.zeros(marks.shape[:2], dtype=torch.bool)
    out.scatter_(1, store.buffers["outliers.0"].long().cpu(), True)
    share = logits.masked_fill(out[:, None], -torch.inf).softmax(-1).sum(1)
    if store.layout.choice != "head":
        share = share.sum(0, keepdim=True)
    return torch.zeros_like(share, dtype=torch.bool).scatter_(
        1, share.topk(store.layout.selected).indices, True
    )


def expected(store, query, context, chosen, tail):
    """Softmax attention in float64 over the tokens read."""
    start, count = store.coded(0)
    outputs, lses = [], []
    for head in range(query.shape[1]):
        own = head * store.kv_heads // query.shape[1]
        kept = store.kept(0, own, Turn() if context.rotary else None)
        read = torch.ones(len(kept.positions), dtype=torch.bool)
        if chosen is not None:
            chunk = (kept.positions - start) // store.layout.chunk
            inside = (kept.positions >= start) & (kept.positions < start + count)
            wanted = chosen[min(own, len(chosen) - 1)].nonzero().flatten().tolist()
            wanted += store.buffers["outliers.0"][own].tolist()
            read = ~inside | torch.tensor([int(one) in wanted for one in chunk])
        keys = torch.cat([kept.keys[read], tail.keys[0, own].float().cpu()]).double()
        values = torch.cat([kept.values[read], tail.values[0, own].float().cpu()]).double()
        scores = query[0, head, 0].double().cpu() @ keys.T * context.scaling
        if context.softcap:
            scores = torch.tanh(scores / context.softcap) * context.softcap
        outputs.append(scores.softmax(-1) @ values)
        lses.append(scores.logsumexp(-1))
    return torch.stack(outputs), torch.stack(lses)


def check():
    torch.manual_seed(0)
    for name, (options, shape, softcap) in CASES.items():
        views = [view(pads=(3,), seed=seed, **shape) for seed in range(2)]
        for one in views:
            # A large mean, as a bias of the key projection makes, and a 16-bit model.
            one.keys, one.values = (one.keys + 3).half(), (one.values - 1).half()
        rotary = None if views[0].rotary is None else SharedTurn()
        context = AttendContext(views[0].scaling, softcap, rotary=rotary)
        stores = XKV(**options).fold(views)
        heads = views[0].sampled.shape[1]
        query = torch.randn(1, heads, 1, stores[0].key_dim).half() * 2
        tail = Exact(
            *(
                torch.randn(1, stores[0].kv_heads, 9, dim).half()
                for dim in (stores[0].key_dim, stores[0].value_dim)
            ),
        )
        moved_stores = [store.to(DEVICE) for store in stores]
        chosen = None
        for number, store in enumerate(stores if options.get("choice") == "window" else stores[:1]):
            if store.layout.selected and (number == 0 or store.layout.choice != "window"):
                chosen = recommended(store, query, context.scaling)
            want, want_lse = expected(store, query, context, chosen, tail)
            on = moved_stores[number]
            moved = replace(tail, keys=tail.keys.to(DEVICE), values=tail.values.to(DEVICE))
            assert decode.serves(on, query.to(DEVICE), context), name
            output, lse = decode.attend(on, query.to(DEVICE), context, moved)
            error = (output[0, :, 0].cpu() - want).norm() / want.norm()
            assert error < 3e-3, (name, number, error)
            torch.testing.assert_close(lse[0, :, 0].cpu().double(), want_lse, atol=1e-2, rtol=1e-3)
            if name == "coded":
                check_pieces(on, query.to(DEVICE), context)


def check_pieces(store, query, context):
    """Decoded in pieces, and merged."""
    turned = decode._turns(store, 0, context, query.device)
    sides = [decode._factors(store, 0, name) for name in ("key", "value")]
    whole, pieces = (
        lowrank_decode.attend(query, *sides, turned, store.coded(0)[0], context.scaling, piece=piece)
        for piece in (1 << 13, 16)
    )
    for one, two in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, two, atol=2e-3, rtol=1e-3)


def check_choice():
    """The largest of many to within a bin, ties and infinities among them."""
    kernels = lowrank_decode._kernels()
    for chunks, selected in ((5, 2), (300, 299), (9000, 400)):
        logits = torch.randn(2, chunks) * 3
        logits[:, ::7] = -torch.inf
        logits[:, 1::3] = logits[:, 1:2]
        blocks = -(-chunks // 128)
        padded = torch.full((2, blocks * 128), -torch.inf)
        padded[:, :chunks] = logits
        block_lse = padded.view(2, blocks, 128).logsumexp(-1)
        shares = torch.empty(2, chunks, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(2, kernels.BINS, dtype=torch.int32, device=DEVICE)
        chosen = torch.full((2, selected), -1, dtype=torch.int32, device=DEVICE)
        kernels.share[(blocks, 2)](
            logits.to(DEVICE), block_lse.to(DEVICE), shares, counts, chunks, blocks, 0.0, HEADS=1, HEADS_UP=16,
            BLOCKS_UP=max(16, 1 << (blocks - 1).bit_length()), BLOCK=128, num_warps=4,
        )  # fmt: skip
        kernels.choose[(-(-chunks // 1024), 2)](
            shares, counts, chosen, chunks, selected, BLOCK=1024, WIDE=8192, num_warps=4
        )
        chosen = chosen.cpu().long()
        assert bool((chosen.diff(dim=1) > 0).all()) and bool((chosen[:, 0] >= 0).all())
        share = logits.softmax(-1)
        got, best = share.gather(1, chosen).sort().values, share.topk(selected).values.sort().values
        torch.testing.assert_close(got, best, rtol=0.01, atol=1e-13)


def check_unpacking():
    """Rows of every width, in groups of eights, and of odd sizes, there of chosen chunks too."""
    chosen = torch.tensor([[1, 2, 6], [0, 5, 7]], dtype=torch.int32, device=DEVICE)
    for first, second in ((296, 24), (13, 9)):
        for width in range(1, 9):
            code = RotatedCode(((width, first), (9 - width, second)), norms="group")
            codes, norms = code.encode(torch.randn(40, code.dim, device=DEVICE))
            basis = torch.zeros(1, code.dim, 16, dtype=torch.uint8, device=DEVICE)
            side = Factors(codes, norms, code, basis, norms, None)
            expected = code.decode(codes, norms)
            for some, chunk in ((None, 1), (chosen, 5))[: 1 + first % 2]:
                if some is not None:
                    expected = expected.view(8, 5, -1)[some.long()].flatten(1, 2)
                sets, count = (1, 40) if some is None else (2, 15)
                scratch = lowrank_decode._Scratch(side, side, sets, count, some, chunk)
                rows, scales, stride = scratch.fill(1, 0, count)
                found = rows[..., : code.dim].float() * scales[..., None]
                torch.testing.assert_close(found, expected.view_as(found), rtol=2e-3, atol=1e-6)
                assert stride == rows.shape[-1] and not rows[..., code.dim :].any()


def check_all(monkeypatch):
    monkeypatch.setattr(lowrank_decode, "problem", lambda device: None)
    check_unpacking()
    check_choice()
    check()


def test_kernels(monkeypatch):
    pytest.importorskip("triton")
    if CUDA or os.environ.get("TRITON_INTERPRET") == "1":
        check_all(monkeypatch)
        return
    # Triton decides when it is first imported whether to interpret.
    code = "import pytest; from tests.kernels.test_lowrank_decode import check_all; check_all(pytest.MonkeyPatch())"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
