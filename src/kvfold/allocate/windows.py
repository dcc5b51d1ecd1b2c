"""Which layers resemble each other: centred kernel alignment, and windows of layers by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def alignment(states: Sequence[Tensor]) -> Tensor:
    """Linear centred kernel alignment of every two layers.

    Parameters
    ----------
    states : sequence of (tokens, channels)
        One matrix a layer, of the same tokens; channels may differ.

    Returns
    -------
    (layers, layers) float32
        From 0 to 1, symmetric; 1 where one layer's tokens are a rotation and scaling of another's.

    References
    ----------
    Kornblith et al. (arXiv 1905.00414), equation 3 with linear kernels; xKV (arXiv 2503.18893), section 3.
    """
    centred = [(x.float() - x.float().mean(0)) for x in states]
    own = [float((x.t() @ x).norm()) for x in centred]
    result = torch.eye(len(states))
    for first, x in enumerate(centred):
        for second in range(first):
            shared = float((x.t() @ centred[second]).square().sum())
            scale = own[first] * own[second]
            result[first, second] = result[second, first] = shared / scale if scale else 0.0
    return result


def within(aligned: Tensor, start: int, stop: int) -> float:
    """Mean alignment of the pairs of layers of a window; 1 for a single layer."""
    count = stop - start
    if count < 2:
        return 1.0
    inside = aligned[start:stop, start:stop]
    return float((inside.sum() - count) / (count * (count - 1)))


def propose(aligned: Tensor, layers: int) -> tuple[int, ...]:
    """Borders of windows whose layers are alike: as many windows as equal ones of `layers`, none of more than twice that.

    Parameters
    ----------
    aligned : (n, n) float32
        From `alignment`.
    layers : int
        Layers of an average window.

    Returns
    -------
    tuple of int
        The layers that begin a window, the first one left out. The mean alignment within windows, each counted by its
        layers, is as large as can be.

    Raises
    ------
    ValueError
        `layers` is below 1.
    """
    if layers < 1:
        raise ValueError(f"windows must have at least 1 layer, got {layers}")
    n = len(aligned)
    windows, longest = -(-n // layers), 2 * layers
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for _ in range(windows):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (score, borders) in best[-1].items():
            for stop in range(start + 1, min(start + longest, n) + 1):
                total = score + (stop - start) * within(aligned, start, stop)
                if stop not in reached or total > reached[stop][0]:
                    reached[stop] = total, (*borders, start)
        best.append(reached)
    return best[-1][n][1][1:]
