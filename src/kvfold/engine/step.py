"""One decode step: as transformers runs it, or the whole of it as one CUDA graph."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from kvfold.engine.choose import Chooser
from kvfold.engine.fixed import FixedCache
from kvfold.engine.graph import CaptureError, captured
from kvfold.engine.layer import NotFixedError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, bridge

logger = logging.getLogger(__name__)

PLAIN = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "return_dict",
    CACHE_KEYWORD,
}
"""What a decode step may be given for its graph to hold; anything else might change from step to step."""


class EagerStep:
    """A step as `model.generate` runs it.

    Parameters
    ----------
    model : transformers causal language model
    chooser : Chooser
    inputs : dict
        What `generate` keeps for the model from step to step: mask, positions, cache.
    """

    def __init__(self, model: Any, chooser: Chooser, inputs: dict[str, Any]):
        self.model, self.chooser, self.inputs = model, chooser, inputs

    def __call__(self) -> None:
        """Read the newest token and choose the next."""
        outputs = self.model(**self.prepared(), return_dict=True)
        self.count(outputs)
        self.chooser.choose(last_logits(outputs))

    def prepared(self) -> dict[str, Any]:
        """The model's arguments for the newest token."""
        prepared: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self.chooser.sequences, next_sequence_length=1, **self.inputs
        )
        return prepared

    def count(self, outputs: Any, tokens: int = 1) -> None:
        """Tell masks and positions that so many tokens more are there."""
        for _ in range(tokens):
            self.inputs = self.model._update_model_kwargs_for_generation(
                outputs, self.inputs, is_encoder_decoder=False
            )


class FixedStep:
    """A step at fixed addresses, captured in a CUDA graph after it ran once.

    Parameters
    ----------
    eager : EagerStep
        Whose work it takes over.
    cache : FoldedCache
    room : int
        Steps it is good for.
    capture : bool
        False: run every step without a graph.

    Raises
    ------
    NotFixedError
        The model or the cache does not allow it.
    """

    def __init__(self, eager: EagerStep, cache: FoldedCache, room: int, capture: bool):
        self.eager, self.model, self.chooser = eager, eager.model, eager.chooser
        prepared = eager.prepared()
        more = sorted(name for name, value in prepared.items() if name not in PLAIN and value is not None)
        if more:
            raise NotFixedError(f"the model takes {', '.join(more)} at every step")
        positions = prepared.get("position_ids")
        if positions is None:
            raise NotFixedError("the model takes no position_ids")
        self.positions = positions.clone()
        self.fixed = FixedCache(cache, room, prepared.get("attention_mask"))
        # A mask of four dimensions is passed on as it is, so none is made; the cache masks for itself.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.positions.device)
        self.arguments: dict[str, Any] = {
            name: prepared[name] for name in ("use_cache", "logits_to_keep") if name in prepared
        }
        self.arguments |= {"attention_mask": mask, "position_ids": self.positions, CACHE_KEYWORD: self.fixed}
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture, self.reason = capture, None if capture else "it was not asked for"

    def __call__(self) -> None:
        """Read the newest token and choose the next."""
        if self.graph is not None:
            self.graph.replay()
        else:
            try:
                self._run()
            except Exception:
                if not self.fixed.taken:
                    self.fixed.undo()
                raise
        self.fixed.count(capture=self.graph is not None)
        if not self.chooser.capturable:
            assert self.logits is not None
            self.chooser.choose(self.logits.clone())
        if self.capture and self.graph is None and self.fixed.taken < self.fixed.room:
            self._capture()

    def _forward(self) -> Tensor:
        self.fixed.begin()
        outputs = self.model(input_ids=self.chooser.tokens, return_dict=True, **self.arguments)
        return last_logits(outputs)

    def again(self, token: Tensor) -> Tensor:
        """Logits (batch, vocabulary) float32 of the step just made, which read `token` (batch,), run without a graph.

        Leaves everything as it is. Not for layers that are recurrent or evict: those have moved on.
        """
        chosen = self.chooser.tokens.clone()
        for counted in (self.positions, self.fixed.step):
            counted -= 1
        self.chooser.tokens.copy_(token[:, None])
        logits = self._forward()
        self.chooser.tokens.copy_(chosen)
        self.positions += 1
        self.fixed.advance()
        return logits

    def _run(self) -> None:
        logits = self._forward()
        if self.logits is None:
            self.logits = logits
        else:
            self.logits.copy_(logits)
        self.positions += 1
        self.fixed.advance()
        if self.chooser.capturable:
            self.chooser.choose(self.logits)

    def _capture(self) -> None:
        """Capture the next step. Nothing runs; the step just made has built kernels and workspaces."""
        try:
            self.graph = captured(self._run, self.positions.device)
        except CaptureError as error:
            bridge.forget()
            self.capture, self.reason = False, f"capture failed: {error}"
            logger.warning("kvfold decodes without a CUDA graph: %s", self.reason)

    @property
    def full(self) -> bool:
        """Whether it is good for no step more."""
        return self.fixed.full

    def close(self) -> None:
        """Give the tokens back to the cache; masks and positions follow."""
        self.graph = None
        last = self.positions - 1
        self.fixed.give_back(last if last.dim() == 2 else None)
        self.eager.count(ModelOutput(), self.fixed.taken)


def last_logits(outputs: Any) -> Tensor:
    """Logits of the newest token, (batch, vocabulary) float32, in memory of their own."""
    logits: Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    return logits
