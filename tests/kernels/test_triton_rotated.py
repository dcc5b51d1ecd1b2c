"""The Triton kernels over rotated codes against float64, interpreted where there is no GPU."""

from __future__ import annotations

import torch

from kvfold.codecs import logarithm
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.position_bias import Turns, turned_rows, turns
from kvfold.stores import rotated
from kvfold.stores.base import AttendContext
from kvfold.stores.rotated import RotatedLayout, RotatedStore
from tests import interpreted
from tests.kernels.test_rotated_encode import HEADS, check, made
from tests.stores.checks import Turn

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def check_encoding():
    from kvfold.kernels.triton_rotated_encode import encode

    # Widths of records too: their levels are few, or even.
    recorded = [((8, 16), (4, 16), (3, 16), (1, 32)), ((8, 64), (2, 16))]
    for groups in (*HEADS.values(), recorded):
        for by_group in (True, False):
            x, codes, shares, order = made(groups, by_group, torch.float32)
            packed, norms = encode(*(on(t) if torch.is_tensor(t) else t for t in (x, codes, shares, order)))
            check(packed.cpu(), norms.cpu(), x, codes, shares, order)
    # No order, no shares, padded channels, strides of a cache's layout, 16 bits; and the norms of vectors as they are.
    codes = tuple(RotatedCode(((5, 24), (2, 56)), keep_norm=keep, seed=3) for keep in (False, False))
    x = torch.randn(2, 33, 2, 80, generator=torch.Generator().manual_seed(1)).half().transpose(1, 2)
    packed, norms = encode(on(x), codes)
    for head, code in enumerate(codes):
        plain, scales = code.encode(x[:, head])
        same = packed[..., head * code.nbytes :][..., : code.nbytes].cpu() == plain
        assert same.double().mean() > 0.999
        torch.testing.assert_close(norms[..., head : head + 1].half().cpu(), scales, rtol=2e-3, atol=0)
    # Less a constant, as it is or turned to each token's position, which differs between the rows.
    constant = torch.randn(2, 2, 80, generator=torch.Generator().manual_seed(2)).half()
    for turned in (False, True):
        tables = [turns(Turn(), 80, 33, shift, x.device) for shift in (3, 200)] if turned else []
        tables = [Turns(*(on(table) for table in own)) for own in tables]
        rows = [turned_rows(one.float(), Turn(), 33, shift) for one, shift in zip(constant, (3, 200))]
        left = x.float() - (torch.stack(rows) if turned else constant[:, :, None].float())
        packed, norms = encode(on(x), codes, constant=on(constant), turn=tables)
        plain, scales = encode(on(left), codes)
        assert (packed == plain).double().mean() > 0.999
        torch.testing.assert_close(norms, scales, rtol=1e-4, atol=0)
    # Nothing waits to find out, but nothing is hidden either.
    x[0, 1, 7, 5] = torch.inf
    norms = encode(on(x), codes)[1].cpu()
    assert not norms[0, 7, 1].isfinite() and bool(norms[0, :7].isfinite().all())


# keys' groups of each head, values' groups, by group, queries, tokens, rows read, options
CASES = {
    "one width": ([((4, 64),)] * 2, [((4, 64),)] * 2, False, 4, 150, None, {}),
    "groups": (
        [((8, 4), (5, 6), (3, 54)), ((2, 64),)],
        [((3, 64),)] * 2,
        True,
        7,
        90,
        None,
        {"softcap": 5.0},
    ),
    "one norm": (
        [((7, 2), (6, 10), (1, 68))],
        [((2, 40), (4, 40))],
        False,
        1,
        70,
        [1, 0, 1],
        {"valid": True},
    ),
    "values by group": (
        [((3, 96),)],
        [((8, 16), (1, 80))],
        True,
        16,
        40,
        [1, 1],
        {"lengths": True, "more": True},
    ),
    "logarithms": (
        [((4, 16), (2, 64))] * 2,
        [((3, 64),)] * 2,
        True,
        4,
        50,
        None,
        {"logarithms": True, "valid": True},
    ),
    "large": ([((3, 256),)] * 2, [((5, 128),)] * 2, False, 2, 67, None, {"more": True}),
}


def case(keys, values, by_group, queries, tokens, sources, options, rows=2, seed=0):
    """Arguments of `attend`, and output and log-sum-exp in float64."""
    generator = torch.Generator().manual_seed(seed)
    norms = "group" if by_group else "token"
    sides, decoded, buffers = [], [], {}
    for groups in (keys, values):
        codes = tuple(RotatedCode(one, norms=norms, seed=head) for head, one in enumerate(groups))
        shares = None
        if not by_group and max(map(len, groups)) > 1:
            shares = torch.rand(rows, len(groups), max(map(len, groups)), generator=generator) + 0.2
        x = torch.randn(rows, tokens, len(groups), codes[0].dim, generator=generator)
        # Norms beyond float16's range times a weight, and vectors that are next to nothing.
        x *= torch.logspace(-4, 2, tokens)[torch.randperm(tokens, generator=generator), None, None]
        parts = [
            code.encode(x[:, :, head], None if shares is None else shares[:, None, head])
            for head, code in enumerate(codes)
        ]
        packed, scales = (torch.cat([part[i] for part in parts], -1) for i in (0, 1))
        name = ("key", "value")[len(decoded)]
        buffers |= {f"{name}_codes": packed, f"{name}_norms": scales}
        if "logarithms" in options:
            buffers[f"{name}_units"] = logarithm.unit_of(scales.float())
            buffers[f"{name}_norms"] = logarithm.encode(scales, buffers[f"{name}_units"][:, None])
            scales = logarithm.decode(buffers[f"{name}_norms"], buffers[f"{name}_units"][:, None])
        if shares is not None:
            buffers[f"{name}_shares"] = shares
        split = scales.split([code.scales for code in codes], -1)
        decoded.append(
            torch.stack(
                [
                    code.decode(part[0], norm, None if shares is None else shares[:, None, head])
                    for head, (code, part, norm) in enumerate(zip(codes, parts, split, strict=True))
                ],
                1,
            ).double()
        )
        sides.append(codes)
    batch = rows if sources is None else len(sources)
    query = torch.randn(batch, len(keys), queries, decoded[0].shape[-1], generator=generator) / 3
    given, read = {}, list(range(rows)) if sources is None else sources
    scores = query.double() @ decoded[0][read].transpose(2, 3)
    if sources is not None:
        given["sources"] = torch.tensor(sources)
    if "more" in options:
        given["more"] = torch.randn(scores.shape, generator=generator)
        scores += given["more"]
    if "softcap" in options:
        given["softcap"] = options["softcap"]
        scores = torch.tanh(scores / given["softcap"]) * given["softcap"]
    shown = torch.ones(batch, 1, 1, tokens, dtype=torch.bool)
    if "valid" in options:
        buffers["valid"] = torch.rand(rows, tokens, generator=generator) > 0.4
        shown &= buffers["valid"][read][:, None, None]
    if "lengths" in options:
        given["lengths"] = torch.tensor([tokens // 3, 0][:batch])
        shown &= torch.arange(tokens) < given["lengths"][:, None, None, None]
    scores = scores.masked_fill(~shown, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return (query, *sides, buffers), given, weights @ decoded[1][read], scores.logsumexp(-1)


def on(x):
    if isinstance(x, dict):
        return {name: on(tensor) for name, tensor in x.items()}
    return x.to(DEVICE) if torch.is_tensor(x) else x


def check_decoding():
    from kvfold.kernels.triton_rotated_decode import attend

    for name, what in CASES.items():
        arguments, given, expected, expected_lse = case(*what)
        output, lse = attend(*map(on, arguments), **on(given))
        error = (output.cpu() - expected).norm() / expected.norm()
        assert error < 2e-3, (name, error)
        torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=2e-3, rtol=1e-3, msg=name)
        nothing = expected_lse == -torch.inf
        assert not output.cpu()[nothing].any(), name


def check_store():
    """A store's attention is that of the tokens that it says it keeps: padding, sinks, norms as logarithms, a mean, channels out of order."""
    rows, heads, tokens, dim = 2, 2, 60, 64
    generator = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, rows, heads, tokens, dim, generator=generator)
    groups = ((4, 24), (2, 40)), ((3, 64),)
    layout = RotatedLayout(
        tokens=tokens, real_tokens=(tokens, 40), shifts=(0, -20), kv_heads=heads, key_dim=dim, value_dim=dim,
        keys=tuple(RotatedCode(one, norms="group") for one in groups),
        values=(RotatedCode(((3, dim),)),) * heads, sinks=4, norm_bits=8,
    )  # fmt: skip
    order = torch.stack([torch.randperm(dim, generator=generator) for _ in range(rows * heads)])
    extra = {
        "key_order": order.view(rows, heads, dim).to(torch.uint8),
        "key_mean": torch.randn(rows, heads, dim, generator=generator).half(),
        "valid": torch.arange(tokens) >= torch.tensor([[0], [20]]),
    }
    store = RotatedStore.encode(keys, values, layout, extra)
    query = torch.randn(3, 2 * heads, 2, dim, generator=generator)
    context, sources = AttendContext(dim**-0.5, softcap=30.0), torch.tensor([1, 0, 1])
    output, lse = (part.cpu().double() for part in store.to(DEVICE).attend(on(query), on(sources), context))
    for index, row in enumerate(sources.tolist()):
        for head in range(heads):
            kept, mine = store.kept(row, head), slice(2 * head, 2 * head + 2)
            logits = torch.tanh(query[index, mine].double() @ kept.keys.double().T * dim**-0.5 / 30) * 30
            expected = logits.softmax(-1) @ kept.values.double()
            assert (output[index, mine] - expected).norm() < 2e-3 * expected.norm()
            torch.testing.assert_close(lse[index, mine], logits.logsumexp(-1), atol=2e-3, rtol=0)


def check_all(monkeypatch):
    check_encoding()
    check_decoding()
    monkeypatch.setattr(rotated, "serves", lambda *_: True)
    monkeypatch.setenv("KVFOLD_CPU_KERNEL", "0")  # the C loop comes first on a CPU
    check_store()


def test_kernels():
    interpreted.run(check_all)
