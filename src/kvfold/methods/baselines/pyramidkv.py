"""PyramidKV: lower layers keep more tokens than upper ones (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.methods.base import LayerView
from kvfold.methods.baselines.snapkv import SnapKV
from kvfold.stores.trizone import Layout


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV with a budget beyond the window that falls linearly from the first layer to the last.

    The last layer gets 1 / beta of an equal share and the first what makes the sum that of equal shares, but no more
    than all its tokens. The steps are taken in bytes, which at 16 bits is the paper's formula in tokens. With a budget
    that does not exceed the window all layers are alike.

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    window, pool, pooling, heads
        As for `SnapKV`.
    beta : float
        Steepness, at least 1 (flat).
    """

    name = "pyramidkv"
    paper = "PyramidKV, arXiv 2406.02069"

    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:
            raise ValueError(f"beta must be at least 1, got {self.beta}")

    def share(self, view: LayerView, row: int, layout: Layout) -> int:
        # Layers are folded one after the other: the account counts them.
        account = view.account.setdefault(row, {"layers": 0})
        layer, last = account["layers"], view.folding_layers - 1
        account["layers"] += 1
        equal, heads = super().share(view, row, layout), view.keys.shape[1]
        window = heads * self.head_bytes(layout, self.window)
        room = equal - window
        if room <= 0 or last == 0:
            return equal
        most = heads * self.head_bytes(layout, view.real_tokens[row]) - window
        first = min(2 * room - room / self.beta, most)
        step = 2 * (first - room) / last
        return int(window + first - layer * step)
