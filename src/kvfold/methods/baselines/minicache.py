"""MiniCache: neighbouring layers share the directions of keys and values (arXiv 2405.14366)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.methods.base import LayerView, Method
from kvfold.methods.full import Full
from kvfold.stores.base import Store
from kvfold.stores.merged import MergedStore
from kvfold.stores.tokenwise import TokenwiseLayout, padding_of, shifts_of


@dataclass(frozen=True, kw_only=True)
class MiniCache(Method):
    """Spherical interpolation between two layers, pair by pair in the upper half of the model; lengths stay exact.

    Vectors are those of one token in one KV head. The pairs whose angle is in the top `gamma` of the range that angles
    span are kept as they are. (The paper prints "d < d_min + (d_max - d_min) gamma" for an angular distance d, which
    would keep the most alike; its text asks for the most distinct.) The lower half of the layers and an odd last one are
    not folded.

    Parameters
    ----------
    t : float
        Where between the lower layer (0) and the upper one (1) the shared direction lies.
    gamma : float
        Share of the range of angles, from its top, whose vectors stay unmerged.
    start : float
        Share of the layers, from the first, that stay as they are.
    """

    name = "minicache"
    paper = "MiniCache, arXiv 2405.14366"

    t: float = 0.6
    gamma: float = 0.05
    start: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("t", "gamma", "start"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    @property
    def granularity(self) -> Literal["layer", "model"]:
        return "model"

    @property
    def shortest(self) -> int:
        return 32

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        stores: list[Store] = []
        while len(stores) < len(views):
            lower, *others = views[len(stores) :]
            if len(stores) >= int(self.start * len(views)) and others and _alike(lower, others[0]):
                stores += self._merge(lower, others[0])
            else:
                stores += Full().fold([lower])
        return stores

    def _merge(self, lower: LayerView, upper: LayerView) -> list[MergedStore]:
        pair: list[dict[str, Tensor]] = [padding_of(view.valid) for view in (lower, upper)]
        for name in ("key", "value"):
            first, second = (getattr(view, f"{name}s").transpose(1, 2).float() for view in (lower, upper))
            direction, angle = slerp(first, second, self.t)
            apart = self._apart(angle, lower.valid.transpose(1, 2))
            # A unit vector fits float16, whatever the model's range.
            shared, index = direction.half(), apart.nonzero()[:, [0, 2, 1]].int()
            for buffers, states in zip(pair, (first, second)):
                buffers[f"{name}_directions"] = shared
                buffers[f"{name}_norms"] = _narrow(states.norm(dim=-1))
                buffers[f"{name}_index"] = index
                buffers[f"kept_{name}s"] = _narrow(states[apart])
        return [
            MergedStore(
                TokenwiseLayout(
                    tokens=view.tokens,
                    real_tokens=view.real_tokens,
                    shifts=shifts_of(view.positions),
                    kv_heads=view.keys.shape[1],
                    key_dim=view.keys.shape[-1],
                    value_dim=view.values.shape[-1],
                ),
                buffers,
            )
            for view, buffers in zip((lower, upper), pair)
        ]

    def _apart(self, angle: Tensor, valid: Tensor) -> Tensor:
        """Which vectors (rows, tokens, kv_heads) stay unmerged, by the range of each row and head."""
        least = angle.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
        most = angle.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
        return valid & (angle > most - self.gamma * (most - least))


def slerp(first: Tensor, second: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Spherical interpolation of directions.

    Parameters
    ----------
    first, second : (..., dim) float32
    t : float
        0: the first, 1: the second.

    Returns
    -------
    (unit vectors (..., dim), angle (...) in radians)
    """
    a, b = (torch.nn.functional.normalize(x, dim=-1) for x in (first, second))
    angle = torch.arccos((a * b).sum(-1).clamp(-1, 1))
    # Between parallel vectors the sine vanishes: the straight line is the arc.
    sine = angle.sin()[..., None]
    arc = angle[..., None]
    mix = torch.where(sine > 1e-4, ((1 - t) * arc).sin() * a + (t * arc).sin() * b, (1 - t) * a + t * b)
    return torch.nn.functional.normalize(mix, dim=-1), angle


def _alike(lower: LayerView, upper: LayerView) -> bool:
    """Whether two layers' states have one shape and device."""
    return all(
        getattr(lower, name).shape == getattr(upper, name).shape
        and getattr(lower, name).device == getattr(upper, name).device
        for name in ("keys", "values")
    )


def _narrow(x: Tensor) -> Tensor:
    beyond = bool((x.abs() > torch.finfo(torch.float16).max).any())
    return x.to(torch.bfloat16 if beyond else torch.float16)
