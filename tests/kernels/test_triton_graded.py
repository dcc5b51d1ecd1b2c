"""The Triton kernels over graded tokens, interpreted where there is no GPU: losses against float64, codes against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvfold.codecs.codebook import common_levels
from kvfold.kernels import dense_decode
from kvfold.kernels.position_bias import turned_rows
from kvfold.methods.base import LayerView
from kvfold.methods.grade_errors import squared_errors_by_kernels
from kvfold.stores.graded import Frame
from kvfold.stores.graded import encode as graded_encode
from kvfold.stores.graded.frame import value_rotation
from tests.kernels.test_channel_sums import Doubled
from tests.stores.test_graded import random_store

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# store's options; its key_dim, value_dim, widths
CASES = [
    {"tokens": 150, "heads": 2, "rows": 1, "dtype": torch.float16},
    {"tokens": 70, "heads": 1, "rows": 2, "key_dim": 40, "value_dim": 24, "widths": (8, 5, 3, 1), "turned": False},
    {"tokens": 40, "heads": 2, "rows": 1, "key_dim": 96, "value_dim": 128, "widths": (6, 2)},
]  # fmt: skip

LOOSE = {"key_codes", "value_codes", "fine_keys", "fine_values"}


def quantised(x):
    """8 bits between the extremes of each vector, in float64, with scale and minimum as wide as they come."""
    x = x.double()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / 255
    return ((x - low) / step).round() * step + low


def nearest(z, width):
    if not width:
        return torch.zeros_like(z)
    levels = common_levels(width).double()
    return levels[(z[..., None] - levels).abs().argmin(-1)]


def losses(view, layout, frame, row, energy):
    """Squared distances of values from their mean, and squared output errors at each grade, fine last; float64."""
    keys, values = view.keys[row].double(), view.values[row].double()
    z = keys
    if frame.key_turned is not None:
        z = z - turned_rows(frame.key_turned[row].float(), Doubled(), view.tokens, layout.shifts[row])
    deviation = frame.key_deviation[row].double()[:, None]
    z = (z - frame.key_mean[row].double()[:, None]) / deviation
    centred = values - frame.value_mean[row].double()[:, None]
    w = centred @ value_rotation(values.shape[-1], values.device).double().t()
    size = w.square().mean(-1, keepdim=True).sqrt()
    unit = frame.value_magnitude[row].double()[:, None, None]
    step = ((size / unit).log2() * 16 + 128).round().clamp(0, 255)
    w = w / (torch.exp2((step - 128) / 16) * unit)
    spread = centred.square().sum(-1)
    found = []
    for grade in range(frame.value_bits.shape[2]):
        lost = torch.zeros_like(z)
        own = torch.zeros_like(spread)
        for head, order in enumerate(frame.order[row].long()):
            start = 0
            for count, width in [
                *zip(frame.key_counts[row, head, grade].tolist(), layout.widths),
                (keys.shape[-1], 0),
            ]:
                channels = order[start : start + count]
                lost[head, :, channels] = z[head, :, channels] - nearest(z[head, :, channels], width)
                start += count
            bits = int(frame.value_bits[row, head, grade])
            error = (w[head] - nearest(w[head], bits)).square().sum(-1) / w[head].square().sum(-1)
            own[head] = error * spread[head]
        key = ((lost * deviation).square() * energy.double()[:, None]).sum(-1)
        found.append(spread * key + own)
    key = ((quantised(keys) - keys).square() * energy.double()[:, None]).sum(-1)
    found.append(spread * key + (quantised(values) - values).square().sum(-1))
    return spread, torch.stack(found, -1)


def on(frame):
    return Frame(
        **{"key_turned": None, **{name: tensor.to(DEVICE) for name, tensor in frame.tensors().items()}}
    )


def check_losses(monkeypatch):
    for options in CASES:
        store, _, keys, values = random_store(**options)
        if not CUDA:
            monkeypatch.setattr(dense_decode, "problem", lambda device: None)
        for row in range(store.rows):
            view = LayerView(
                keys.to(DEVICE), values.to(DEVICE), torch.ones(keys.shape[:3], dtype=torch.bool, device=DEVICE),
                (store.tokens,) * store.rows, torch.arange(store.tokens)[None], 1.0, rotary=Doubled(),
            )  # fmt: skip
            energy = torch.rand(keys.shape[1], keys.shape[3], generator=torch.Generator().manual_seed(1))
            frame = on(store.frame)
            spread, errors = squared_errors_by_kernels(view, store.layout, frame, row, energy.to(DEVICE))
            there = LayerView(
                keys, values, view.valid.cpu(), view.real_tokens, view.positions, 1.0, rotary=Doubled()
            )
            right, wanted = losses(there, store.layout, store.frame, row, energy)
            torch.testing.assert_close(spread.cpu().double(), right, rtol=1e-4, atol=0)
            # A rounded scale moves single codes of a token's 8 bits, and their errors with them.
            torch.testing.assert_close(
                errors.cpu().double()[..., :-1], wanted[..., :-1], rtol=3e-3, atol=1e-5
            )
            fine = errors.cpu().double()[..., -1].sum() / wanted[..., -1].sum()
            assert 0.98 < fine < 1.02
        monkeypatch.undo()


def check_codes(monkeypatch):
    for options in CASES:
        store, grades, keys, values = random_store(**options)
        rotary = Doubled()
        plain = graded_encode.encode(keys, values, grades, store.layout, store.frame, rotary)[0]
        if not CUDA:
            monkeypatch.setattr(dense_decode, "problem", lambda device: None)
        frame = on(store.frame)
        given = (x.to(DEVICE) for x in (keys, values, grades))
        found = graded_encode.encode(*given, store.layout, frame, rotary)[0]
        monkeypatch.undo()
        assert plain.keys() == found.keys()
        for name, right in plain.items():
            own = found[name].cpu()
            assert own.shape == right.shape and own.dtype == right.dtype
            # A number on the boundary between two levels may fall on either side.
            assert (own == right).double().mean() > (0.998 if name in LOOSE else 0.9999)


def check_all(monkeypatch):
    check_losses(monkeypatch)
    check_codes(monkeypatch)


def test_kernels(monkeypatch):
    pytest.importorskip("triton")
    if CUDA or os.environ.get("TRITON_INTERPRET") == "1":
        check_all(monkeypatch)
        return
    # Triton decides when it is first imported whether to interpret.
    code = "import pytest; from tests.kernels.test_triton_graded import check_all; check_all(pytest.MonkeyPatch())"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
