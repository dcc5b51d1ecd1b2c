"""TurboQuant: a random rotation, then a Lloyd-Max codebook for the density that it gives every coordinate, and a norm.

Channels may be cut into groups, each with its own rotation and width: Block-GTQ's code for keys is this one with the
channels permuted beforehand. Everything stays in rotated coordinates until a mixture of many vectors is turned back once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.codecs.codebook import decode, encode, integer_levels
from kvfold.codecs.packing import pack, packed_bytes, unpack
from kvfold.codecs.rotation import haar, hadamard


@dataclass(frozen=True)
class RotatedCode:
    """How vectors of one kind are coded.

    Attributes
    ----------
    groups : tuple of (width, channels)
        Consecutive channels, at least two, and the width of their codes.
    norms : "token" or "group"
        One norm for a vector (each group then has a fixed share of it), or one for each group.
    rotation : "hadamard" or "haar"
    sketch : bool
        TurboQuant's "prod": what the codes lose is projected by a Gaussian matrix, of which the signs and one more norm
        are stored, so that inner products are unbiased (QJL).
    keep_norm : bool
        Store the norm divided by that of the levels, so that decoded vectors are as long as they were.
    seed : int

    References
    ----------
    TurboQuant (arXiv 2504.19874), algorithms 1 (MSE) and 2 (prod).
    """

    groups: tuple[tuple[int, int], ...]
    norms: Literal["token", "group"] = "token"
    rotation: Literal["hadamard", "haar"] = "hadamard"
    sketch: bool = False
    keep_norm: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if any(width not in range(1, 9) for width, _ in self.groups):
            raise ValueError(f"widths must be from 1 to 8, got {[width for width, _ in self.groups]}")
        if any(channels < 2 for _, channels in self.groups):
            raise ValueError("a rotation needs at least 2 channels in a group")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RotatedCode:
        """From its fields as JSON gives them back, lists for tuples."""
        return cls(**{**data, "groups": tuple((width, channels) for width, channels in data["groups"])})

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        return sum(channels for _, channels in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of one vector's codes and signs."""
        signs = packed_bytes(self.dim, 1) if self.sketch else 0
        return sum(packed_bytes(channels, width) for width, channels in self.groups) + signs

    @property
    def scales(self) -> int:
        """16-bit numbers that one vector stores."""
        return (len(self.groups) if self.norms == "group" else 1) + self.sketch

    # ---- bases ----

    def rotate(self, x: Tensor) -> Tensor:
        """Turn vectors (..., dim), group by group; float32."""
        parts = x.float().split([channels for _, channels in self.groups], -1)
        return torch.cat([part @ matrix.t() for part, matrix in zip(parts, self._rotations(x.device))], -1)

    def rotate_back(self, y: Tensor) -> Tensor:
        """Turn rotated vectors (..., dim) back; float32."""
        parts = y.split([channels for _, channels in self.groups], -1)
        return torch.cat([part @ matrix for part, matrix in zip(parts, self._rotations(y.device))], -1)

    def query(self, q: Tensor) -> Tensor:
        """What vectors (..., dim) are multiplied with `decode`'s coordinates as: their product is that of the vectors."""
        turned = self.rotate(q)
        return (
            torch.cat([turned, turned @ _gaussian(self.dim, self.seed, q.device).t()], -1)
            if self.sketch
            else turned
        )

    def restore(self, coordinates: Tensor) -> Tensor:
        """Vectors (..., dim) from the coordinates that `decode` gives."""
        if self.sketch:
            main, signs = coordinates.split(self.dim, -1)
            coordinates = main + signs @ _gaussian(self.dim, self.seed, main.device)
        return self.rotate_back(coordinates)

    def _rotations(self, device: torch.device) -> list[Tensor]:
        return [rotation for rotation, _ in self.tables(device)]

    def tables(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Rotation (channels, channels) and levels (2^width,) of each group."""
        return [self.table(group, device) for group in range(len(self.groups))]

    def table(self, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rotation and levels of one group."""
        width, channels = self.groups[group]
        # A group with a fixed share of the norm is not on a sphere: its density is Gaussian.
        on_sphere = self.norms == "group" or len(self.groups) == 1
        return _rotation(self.rotation, channels, self.seed + group, device), _book(
            width, channels, on_sphere, device
        )

    # ---- codes ----

    def encode(self, x: Tensor, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Code vectors.

        Parameters
        ----------
        x : (..., dim)
        shares : (..., groups), optional
            Broadcastable: length of each group's part of a unit vector, for norms="token" with several groups. Equal
            lengths for equal numbers of channels if not given.

        Returns
        -------
        codes : (..., nbytes) uint8
        scales : (..., scales) float16, or bfloat16 where float16 is too narrow

        Raises
        ------
        ValueError
            x holds NaN or infinity.
        """
        return self.encode_rotated(self.rotate(x), shares)

    def encode_rotated(self, y: Tensor, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `encode`, of vectors that `rotate` has turned: y (..., dim) float32."""
        if not bool(torch.isfinite(y).all()):
            raise ValueError("x holds NaN or infinity; remove padding or masked positions before coding")
        lengths = self._lengths(y, shares)
        codes, levels = [], []
        for part, length, (width, _), book in zip(
            y.split([channels for _, channels in self.groups], -1),
            lengths,
            self.groups,
            self._books(y.device),
        ):
            code = encode(part / length.clamp_min(1e-30), book)
            codes.append(pack(code, width))
            levels.append(decode(code, book))
        scales = self._scales(y, levels, lengths, shares)
        scales = stored_norms(scales)
        if self.sketch:
            lost = y - self._scaled(levels, scales.float(), shares)
            codes.append(pack((lost @ _gaussian(self.dim, self.seed, y.device).t() >= 0).to(torch.uint8), 1))
            scales = torch.cat([scales, lost.norm(dim=-1, keepdim=True).to(scales.dtype)], -1)
        return torch.cat(codes, -1), scales

    def decode(self, codes: Tensor, scales: Tensor, shares: Tensor | None = None) -> Tensor:
        """Rotated coordinates (..., dim) float32 of coded vectors; with a sketch (..., 2 dim), its signs' weights last."""
        sizes = [packed_bytes(channels, width) for width, channels in self.groups]
        parts = codes.split([*sizes, codes.shape[-1] - sum(sizes)], -1)
        levels = [
            decode(unpack(part, width, channels), book)
            for part, (width, channels), book in zip(parts, self.groups, self._books(codes.device))
        ]
        scales = scales.float()
        main = self._scaled(levels, scales[..., : scales.shape[-1] - self.sketch], shares)
        if not self.sketch:
            return main
        signs = unpack(parts[-1], 1, self.dim).float() * 2 - 1
        return torch.cat([main, signs * (scales[..., -1:] * math.sqrt(math.pi / 2) / self.dim)], -1)

    def _lengths(self, y: Tensor, shares: Tensor | None) -> list[Tensor]:
        """What each group is divided by before its codebook, (..., 1) each."""
        if self.norms == "group":
            return [part.norm(dim=-1, keepdim=True) for part in y.split([c for _, c in self.groups], -1)]
        norm = y.norm(dim=-1, keepdim=True)
        return [norm * share for share in self._shares(shares, y.device)]

    def _shares(self, shares: Tensor | None, device: torch.device) -> list[Tensor]:
        if shares is None:
            shares = _even_shares(tuple(channels for _, channels in self.groups), device)
        return list(shares.float().split(1, -1))

    def _scales(
        self, y: Tensor, levels: list[Tensor], lengths: list[Tensor], shares: Tensor | None
    ) -> Tensor:
        """The stored norms (..., 1 | groups), float32."""
        if self.norms == "group":
            norms, coded = torch.cat(lengths, -1), [level.norm(dim=-1, keepdim=True) for level in levels]
            return norms / torch.cat(coded, -1).clamp_min(1e-30) if self.keep_norm else norms
        norm = y.norm(dim=-1, keepdim=True)
        if not self.keep_norm:
            return norm
        pieces = [level * share for level, share in zip(levels, self._shares(shares, y.device))]
        return norm / torch.cat(pieces, -1).norm(dim=-1, keepdim=True).clamp_min(1e-30)

    def _scaled(self, levels: list[Tensor], scales: Tensor, shares: Tensor | None) -> Tensor:
        if self.norms == "group":
            return torch.cat([level * scale for level, scale in zip(levels, scales.split(1, -1))], -1)
        pieces = [level * share for level, share in zip(levels, self._shares(shares, scales.device))]
        return torch.cat(pieces, -1) * scales

    def _books(self, device: torch.device) -> list[Tensor]:
        """Levels of each group."""
        return [levels for _, levels in self.tables(device)]


def prepare(codes: Iterable[RotatedCode], device: torch.device) -> None:
    """Make the rotations and levels of codes, which are kept, beside each other: each takes a processor milliseconds."""
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda one: one[0].table(one[1], device),
                [(code, group) for code in codes for group in range(len(code.groups))],
            )
        )


def stored_norms(norms: Tensor) -> Tensor:
    """Norms as they are stored: float16, or bfloat16 where that is too narrow."""
    beyond = bool((norms > torch.finfo(torch.float16).max).any())
    return norms.to(torch.bfloat16 if beyond else torch.float16)


@cache
def _even_shares(channels: tuple[int, ...], device: torch.device) -> Tensor:
    """Equal lengths for equal numbers of channels; kept, since a decode step must not copy from the host."""
    return (torch.tensor(channels, device=device) / sum(channels)).sqrt()


@cache
def _rotation(kind: str, dim: int, seed: int, device: torch.device) -> Tensor:
    return (hadamard if kind == "hadamard" else haar)(dim, seed).to(device)


@cache
def _gaussian(dim: int, seed: int, device: torch.device) -> Tensor:
    """The projection of the sketch, (dim, dim) float32."""
    generator = torch.Generator("cpu").manual_seed(seed + 7919)
    return torch.randn(dim, dim, dtype=torch.float64, generator=generator).float().to(device)


@cache
def _book(width: int, channels: int, on_sphere: bool, device: torch.device) -> Tensor:
    levels = integer_levels(width, channels) if on_sphere else integer_levels(width) / math.sqrt(channels)
    return levels.to(device)
