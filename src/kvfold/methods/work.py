"""What a fold that takes long tells while it works, and keeps to go on from if it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor


class Work:
    """Tells how far a fold is; keeps nothing.

    Parameters
    ----------
    told : callable, optional
        Called with (done, total), in units of the method's own, as it works.
    """

    def __init__(self, told: Callable[[int, int], None] | None = None):
        self.told = told

    def tell(self, done: int, total: int) -> None:
        """So much is done."""
        if self.told is not None:
            self.told(done, total)

    def kept(self, name: str) -> dict[str, Tensor] | None:
        """What an earlier run of the same fold kept under a name, or None; on the CPU."""
        return None

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a finished part, so that a run that is stopped later need not do it again."""
