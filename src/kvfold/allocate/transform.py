"""Bits for the components of a factorisation: reverse water-filling in which a component pays for its basis row too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from kvfold.codecs.packing import packed_bytes

ERROR = {
    1: 0.3634,
    2: 0.1175,
    3: 0.03454,
    4: 0.009497,
    5: 0.002499,
    6: 0.000641,
    7: 0.000163,
    8: 0.000041,
    16: 0.0,
}
"""Relative squared error of N(0, 1) by Lloyd-Max codes of each width."""

Groups = tuple[tuple[int, int], ...]
"""(width, components) of consecutive components, the widest first."""


@dataclass(frozen=True)
class Components:
    """The components of one factorisation, largest first.

    Attributes
    ----------
    energy : (components,) float32
        Squared error that leaving one out causes, over all tokens.
    basis_bytes : int
        Of one component's basis row.
    rest : float
        Squared error of components that are not listed.
    """

    energy: Tensor
    basis_bytes: int
    rest: float = 0.0

    def lost(self, groups: Groups) -> float:
        """Squared error left by groups of widths."""
        total, start = float(self.energy.sum()) + self.rest, 0
        for width, count in groups:
            total -= (1 - ERROR[width]) * float(self.energy[start : start + count].sum())
            start += count
        return total

    def nbytes(self, groups: Groups, tokens: int) -> int:
        """Bytes of the factors of `tokens` tokens, a 16-bit norm of each group with them, and of the basis."""
        row = sum(2 * count if width == 16 else packed_bytes(count, width) + 2 for width, count in groups)
        return tokens * row + sum(count for _, count in groups) * self.basis_bytes


def fill(
    parts: Sequence[Components], tokens: int, budget: int, widths: Sequence[int], tile: int = 8
) -> list[Groups] | None:
    """Widths that minimise the squared error of several factorisations within one budget.

    Parameters
    ----------
    parts : sequence of Components
        In units that may be added.
    tokens : int
    budget : int
        Bytes for factors, norms and bases.
    widths : sequence of int
        To choose from, 1 to 8, or 16 alone (no code, no norm).
    tile : int
        Components, in order, that have one width.

    Returns
    -------
    list of Groups, or None
        At least one tile of each part is kept; None if the budget is too small for that.

    References
    ----------
    Cover and Thomas, Elements of Information Theory, section 10.3.3.
    """
    choices = np.array([0, *sorted(widths)])
    error = np.array([1.0, *(ERROR[width] for width in sorted(widths))], dtype=np.float32)
    lost = [_tiles(part.energy, tile)[:, None] * error for part in parts]
    costs = [tile * (tokens * choices / 8 + (choices > 0) * part.basis_bytes) for part in parts]

    def groups_at(price: float) -> list[Groups]:
        result = []
        for part, loss, cost in zip(parts, lost, costs, strict=True):
            chosen = np.bincount((loss + price * cost).argmin(1), minlength=len(choices))
            counts = dict(zip(choices.tolist(), chosen.tolist(), strict=True))
            result.append(_groups(counts, len(part.energy), tile))
        return result

    def nbytes(groups: Sequence[Groups]) -> int:
        return sum(part.nbytes(one, tokens) for part, one in zip(parts, groups, strict=True))

    low, high = -80.0, 80.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if nbytes(groups_at(math.exp(middle))) > budget else (low, middle)
    found = groups_at(math.exp(high))
    return found if nbytes(found) <= budget else None


def _tiles(energy: Tensor, tile: int) -> NDArray[np.float32]:
    sums: NDArray[np.float32] = (
        pad(energy, (0, -len(energy) % tile)).view(-1, tile).sum(1).float().cpu().numpy()
    )
    return sums


def _groups(tiles: dict[int, int], components: int, tile: int) -> Groups:
    """Runs of equal widths, from the widest on, of so many tiles of each width, of which 0 is one."""
    bought = sorted(((width, count) for width, count in tiles.items() if width and count), reverse=True)
    runs = [(width, count * tile) for width, count in bought] or [(min(filter(None, tiles)), tile)]
    excess = max(sum(count for _, count in runs) - components, 0)
    runs[-1] = runs[-1][0], runs[-1][1] - excess
    if runs[-1][1] < 2 and len(runs) > 1:
        # A rotation needs two channels.
        last = runs.pop()
        runs[-1] = runs[-1][0], runs[-1][1] + last[1]
    return tuple(runs)
