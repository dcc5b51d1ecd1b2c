"""StreamingLLM: keep the attention sinks and the newest tokens (arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.methods.base import LayerView
from kvfold.methods.baselines.select import Selection, sink_tokens


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Selection):
    """The first tokens of the context and the newest of the prompt, the same in every head.

    Kept keys stay at their original positions, as everywhere in kvfold (the paper numbers them anew). A later turn is
    folded by itself: its own newest tokens, and no sinks.

    Parameters
    ----------
    keep, bits_per_element, tokens, bits, group
        As for `Selection`.
    sinks : int
        First tokens of the context, always kept.
    """

    name = "streaming-llm"
    paper = "StreamingLLM, arXiv 2309.17453"

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0 tokens, got {self.sinks}")

    def scores(self, view: LayerView) -> Tensor:
        newest = torch.arange(view.tokens, dtype=torch.float32, device=view.keys.device)
        return newest.expand(view.valid.shape).masked_fill(sink_tokens(view, self.sinks), torch.inf)
