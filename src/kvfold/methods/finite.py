"""What is to be folded must be numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.errors import NonFiniteError


def check_finite(named: Sequence[tuple[str, Tensor]], layer_idx: int) -> None:
    """Raise NonFiniteError, naming the layer, if one of some states of a layer holds NaN or infinity."""
    # Extremes are NaN where anything is; several times faster on a CPU than a look at every element.
    extremes = torch.stack([torch.stack(torch.aminmax(states)).float() for _, states in named])
    finite = extremes.isfinite().all(1).tolist()  # one wait for the device
    for (name, states), found in zip(named, finite, strict=True):
        if not found:
            raise NonFiniteError(
                f"layer {layer_idx}: the {name} to fold hold NaN or infinity; the model overflowed"
                f" (try bfloat16 or float32 instead of {states.dtype})"
            )
