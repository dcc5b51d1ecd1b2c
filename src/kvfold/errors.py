"""The errors kvfold raises, each a ValueError whose message says what to do."""

from __future__ import annotations

import math


class KvfoldError(ValueError):
    """Base of every error that kvfold raises on purpose."""


class UnsupportedModelError(KvfoldError):
    """The model, or its attention implementation, cannot read a folded cache."""


class BudgetError(KvfoldError):
    """The byte budget is impossible; the message names the smallest possible one."""

    @classmethod
    def of(cls, what: str, least: int, full: int) -> BudgetError:
        """What a budget cannot pay for, the bytes that this takes at least, and those of the exact 16-bit cache."""
        if least > full:
            return cls(
                f"{what}, which takes more than its exact cache: the prompt is too short to be folded so"
            )
        keep = math.ceil(1e4 * least / full) / 1e4
        return cls(f"{what}: at least keep={keep:.4f} ({16 * keep:.3f} bits per element) is needed")


class NonFiniteError(KvfoldError):
    """Keys or values hold NaN or infinity; the message names the layer."""


class CacheMismatchError(KvfoldError):
    """A folded cache meets a model, dtype, device or batch it was not made for."""


class ArtifactError(KvfoldError):
    """A saved cache is missing, truncated, altered, too new, or belongs to another model."""
