"""The kernel for codes of many channels against float64, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kvfold.codecs.packing import unpack
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels import wide_encode
from tests import interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CODES = {
    "every width": RotatedCode(
        tuple((width, 9 + 5 * width) for width in (8, 7, 6, 5, 4, 3, 2, 1)), norms="group"
    ),
    "more than a piece of channels": RotatedCode(((8, 2), (6, 141), (2, 70)), norms="group"),
    "one group": RotatedCode(((4, 128),)),
    "norms as they are": RotatedCode(((5, 24), (2, 56)), norms="group", keep_norm=False),
}


def near(codes, norms, y, code):
    """Each code is the nearest level's, but where two are as near; norms make the levels as long as the vector."""
    at = 0
    for group, ((width, channels), (_, levels)) in enumerate(
        zip(code.groups, code.tables(torch.device("cpu")), strict=True)
    ):
        start = sum(count for _, count in code.groups[:group])
        part = y[:, start : start + channels].double()
        unit = part / part.norm(dim=1, keepdim=True).clamp_min(1e-30)
        size = (channels * width + 7) // 8 if width in (1, 2, 4, 8) else None
        size = size or sum(-(-channels * plane // 8) for plane in (1, 2, 4) if width & plane)
        found = levels.double()[unpack(codes[:, at : at + size], width, channels).int()]
        best = (unit[..., None] - levels.double()).abs().amin(-1)
        assert ((unit - found).abs() <= best + 1e-5).all()
        length = part.norm(dim=1) / (found.norm(dim=1).clamp_min(1e-30) if code.keep_norm else 1)
        torch.testing.assert_close(norms[:, group].double(), length, rtol=1e-5, atol=1e-30)
        at += size
    assert at == codes.shape[1] and norms.shape[1] == len(code.groups)


def check(monkeypatch):
    from kvfold.kernels import triton_wide_encode

    for code in CODES.values():
        y = torch.randn(19, code.dim, generator=torch.Generator().manual_seed(code.dim))
        y *= torch.logspace(-4, 3, 19)[:, None]
        y[5] = 0
        codes, norms = triton_wide_encode.encode(y.to(DEVICE), code)
        near(codes.cpu(), norms.cpu(), y, code)
    # As the store asks for them: any shape, 16-bit norms, NaN refused.
    monkeypatch.setattr(wide_encode, "serves", lambda *_: True)
    y = y.view(19, 1, -1).to(DEVICE)
    codes, norms = wide_encode.encode(y, code)
    plain, scales = code.encode_rotated(y)
    assert codes.shape == plain.shape and (codes == plain).double().mean() > 0.999
    assert norms.dtype == scales.dtype == torch.float16
    torch.testing.assert_close(norms, scales, rtol=1e-3, atol=1e-6)
    assert wide_encode.encode(y * 1e5, code)[1].dtype == torch.bfloat16
    y[3, 0, 7] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        wide_encode.encode(y, code)


def test_kernel():
    interpreted.run(check)


def test_elsewhere_the_code_itself_serves():
    code = CODES["one group"]
    y = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(0))
    for one, two in zip(wide_encode.encode(y, code), code.encode_rotated(y), strict=True):
        assert torch.equal(one, two)
