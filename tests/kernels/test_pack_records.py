"""Records from packed codes by the Triton kernel, interpreted where there is no GPU: byte for byte those of plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvfold.codecs import lookup, packing
from kvfold.codecs.fragments import RecordFormat, pack_mixed
from kvfold.kernels import pack_records
from kvfold.kernels.pack_records import Codes, Numbers, Tokens
from kvfold.stores.graded import RecordedGradedStore
from kvfold.stores.recorded import RecordedStore
from tests.stores.test_graded_recorded import CASES, graded
from tests.stores.test_recorded import CODES, rotated

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# widths of keys with channels, width of values, norms, tokens, whether bytes hold neighbours
DIM = 32
RUNS = [
    (((8, 16), (4, 16)), 3, 2, 150, True),
    (((3, 32),), 8, 1, 64, False),
    ((), 4, 0, 3, False),
    (((2, 16), (1, 16)), 1, 1, 290, False),
]


def drawn(shape, width, generator):
    return torch.randint(0, 2**width, shape, dtype=torch.uint8, generator=generator)


def check_kernel():
    generator = torch.Generator().manual_seed(0)
    for logarithms, cases in ((True, RUNS), (False, RUNS[:1])):
        runs, kept, plain, layouts = [], [], [], []
        for key_widths, value_width, norms, count, near in cases:
            tiles = tuple(width for width, channels in key_widths for _ in range(channels // 16))
            tiles += (0,) * (DIM // 16 - len(tiles))
            layouts.append(RecordFormat(tiles, value_width, norms, True, logarithms))
            whole = torch.zeros(2, -(-count // 64) * 64, DIM, dtype=torch.uint8)
            found: list[Codes] = []
            for side, own in enumerate((key_widths, ((value_width, DIM),))):
                column = 0
                for width, channels in own:
                    codes = drawn((count, channels), width, generator)
                    whole[side, :count, column : column + channels] = codes
                    neighbours = near and width in lookup.NEIGHBOURS
                    packed = (lookup if neighbours else packing).pack(codes, width)
                    # Rows lie apart, as those of one head among many.
                    rows = torch.nn.functional.pad(packed, (3, 2)).to(DEVICE)
                    kept.append(rows)
                    found.append(Codes(rows.data_ptr() + 3, rows.shape[1], width, channels, neighbours))
                    column += channels
            numbers = torch.randn(whole.shape[1], 3, generator=generator).half()
            numbers = drawn(numbers.shape, 8, generator) if logarithms else numbers
            numbers[count:] = 0
            kept.append(numbers.to(DEVICE))
            size = numbers.element_size()
            columns = [Numbers(kept[-1].data_ptr() + size * n, 3 * size) for n in range(norms + 1)]
            runs.append(Tokens(layouts[-1], count, found[:-1], found[-1], columns))
            plain.append((*whole, numbers))
        expected = pack_mixed(*map(torch.cat, zip(*plain)), layouts, [run.records for run in runs])
        assert torch.equal(pack_records.pack_records(runs, DEVICE).cpu(), expected)
    assert pack_records.pack_records([], DEVICE).shape == (0,)


def check_stores(monkeypatch):
    if CUDA:
        stores = [rotated(name, norm_bits=bits) for name in CODES for bits in (8, 16)]
        stores += [graded(**case) for case in CASES]
    else:  # interpreted, a tile takes a fifth of a second
        rows = torch.tensor([1, 0])
        stores = [rotated("groups", tokens=70).select(rows), graded(dim=32).select(rows)]
    for store in stores:
        kind = RecordedStore if store.kind == "rotated" else RecordedGradedStore
        right = kind.of(store)
        if not CUDA:
            monkeypatch.setattr(pack_records, "problem", lambda device: None)
        on = {name: tensor.to(DEVICE) for name, tensor in store.tensors().items()}
        found = kind.of(type(store).from_state(on, store.meta()))
        monkeypatch.undo()
        assert found.buffers.keys() == right.buffers.keys()
        for name, tensor in right.buffers.items():
            own = found.buffers[name].cpu()
            assert own.dtype == tensor.dtype and own.shape == tensor.shape
            # Scales are products, which a device may round as it likes.
            same = (
                torch.allclose(own, tensor, rtol=1e-6)
                if own.is_floating_point()
                else torch.equal(own, tensor)
            )
            assert same, (kind, name)


def check_all(monkeypatch):
    check_kernel()
    check_stores(monkeypatch)


def test_kernels(monkeypatch):
    pytest.importorskip("triton")
    if CUDA or os.environ.get("TRITON_INTERPRET") == "1":
        check_all(monkeypatch)
        return
    # Triton decides when it is first imported whether to interpret.
    code = "import pytest; from tests.kernels.test_pack_records import check_all; check_all(pytest.MonkeyPatch())"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_not_as_the_format_says_is_refused():
    codes, value = Codes(0, 8, 4, 16), Codes(0, 16, 2, 32)
    run = Tokens(RecordFormat((4, 0), 2, 0), 5, [codes], value, [Numbers(0, 2)])
    for wrong, message in (
        ({"keys": []}, "bits are not"),
        ({"values": codes}, "bits are not"),
        ({"numbers": ()}, "1 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(run, **wrong)
