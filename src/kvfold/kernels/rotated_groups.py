"""What the C loops read about the rotated codes of several heads."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode

MAX_DIM = 256
"""Channels that the loops take."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Of floats, as floats.h has them"""


class Group(ctypes.Structure):
    """As rotated_groups.h's `group`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("width", "channels")),
        *((name, ctypes.c_void_p) for name in ("rotation", "boundaries", "levels")),
        ("share", ctypes.c_double),
    ]


class Groups:
    """Of all heads.

    Parameters
    ----------
    codes : tuple of RotatedCode
        One for each head.
    """

    def __init__(self, codes: tuple[RotatedCode, ...]):
        found, self._kept = [], []
        for code in codes:
            for (width, channels), (rotation, levels) in zip(code.groups, code.tables(torch.device("cpu"))):
                boundaries = (levels[1:] + levels[:-1]) / 2
                self._kept += [rotation := rotation.contiguous(), boundaries, levels]
                pointers = rotation.data_ptr(), boundaries.data_ptr(), levels.data_ptr()
                found.append(Group(width, channels, *pointers, (channels / code.dim) ** 0.5))
        self._groups = (Group * len(found))(*found)
        self._count = torch.tensor([len(code.groups) for code in codes])
        self._code_start = torch.tensor([0, *accumulate(code.nbytes for code in codes)])
        self._scale_start = torch.tensor([0, *accumulate(code.scales for code in codes)])

    def fields(self) -> dict[str, Any]:
        """By the names that the loops' arguments have for them; they last as long as this object."""
        return {
            "count": self._count.data_ptr(),
            "code_start": self._code_start.data_ptr(),
            "scale_start": self._scale_start.data_ptr(),
            "groups": ctypes.addressof(self._groups),
        }


groups_of = lru_cache(maxsize=64)(Groups)
