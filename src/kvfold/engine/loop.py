"""The decode loop: prefill, then steps at fixed addresses where that is possible, until generation ends."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from kvfold.engine import fixed
from kvfold.engine.choose import Chooser
from kvfold.engine.fuse import fused
from kvfold.engine.layer import NotFixedError
from kvfold.engine.step import EagerStep, FixedStep, last_logits
from kvfold.errors import KvfoldError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, bridge

logger = logging.getLogger(__name__)

Graph = Literal["auto", "off", "dry"]


@dataclass(frozen=True)
class Engine:
    """How to decode.

    Attributes
    ----------
    graph : "auto", "off" or "dry"
        "auto": a CUDA graph where the device has them; "off": step by step as transformers does; "dry": the steps that
        a graph would hold, run without one (to look for what a model does in them).
    reserve : int
        Tokens for which room is reserved at a time; a graph is captured for each reservation.
    fuse : bool
        Compile the model's small operations (torch.compile) while decoding: slow to begin, faster afterwards.
    """

    graph: Graph = "auto"
    reserve: int = 256
    fuse: bool = False

    def __post_init__(self) -> None:
        if self.graph not in ("auto", "off", "dry"):
            raise KvfoldError(f'graph must be "auto", "off" or "dry", not {self.graph!r}')
        if self.reserve < 1:
            raise KvfoldError(f"reserve must be at least 1 token, not {self.reserve}")


class Decoding(Iterator[Tensor]):
    """A generation under way: an iterator over its tokens, (batch,) int64 each, on the model's device.

    Attributes
    ----------
    cache : FoldedCache
        Grows with every token; not to be used by others before the iterator ends or is closed.
    reason : str or None
        Why steps are not one CUDA graph; None if they are, and before the second token.
    step : FixedStep or None
        The step in use, while steps run at fixed addresses.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        engine: Engine,
        streamer: Any,
        inputs: dict[str, Any],
    ):
        self.model, self.config, self.engine, self.streamer = model, config, engine, streamer
        self.cache: FoldedCache = inputs[CACHE_KEYWORD]
        self.reason: str | None = None
        self._chooser = Chooser(input_ids, processors, criteria, config)
        self._eager = EagerStep(model, self._chooser, inputs)
        self.step: FixedStep | None = None
        self._refused: str | None = None
        self._tokens = self._generate(input_ids)

    @property
    def sequences(self) -> Tensor:
        """Prompt and tokens so far, (batch, tokens)."""
        return self._chooser.sequences

    def __next__(self) -> Tensor:
        return next(self._tokens)

    def close(self) -> None:
        """End early; the cache holds every token that was read."""
        self._tokens.close()

    def run(self) -> Tensor:
        """Generate to the end; prompt and tokens, (batch, tokens)."""
        for _ in self:
            pass
        return self.sequences

    @torch.no_grad()
    def _generate(self, input_ids: Tensor) -> Generator[Tensor]:
        chooser, eager = self._chooser, self._eager
        steps = self._steps()
        try:
            outputs = self.model._prefill(input_ids, self.config, eager.inputs)
            eager.count(outputs)
            chooser.choose(last_logits(outputs))
            del outputs
            while True:
                last = chooser.finished()
                token = chooser.tokens[:, 0].clone()
                if self.streamer is not None:
                    self.streamer.put(token.cpu())
                yield token
                if last:
                    break
                next(steps)
        except BaseException:
            bridge.forget()
            raise
        finally:
            steps.close()
        if self.streamer is not None:
            self.streamer.end()

    def _steps(self) -> Generator[None]:
        """One step each time: at fixed addresses as long as there is room, else as transformers does."""
        with self.model._optimize_model_for_decode(), self._fused():
            while True:
                self.step = step = self._reserve()
                if step is None:
                    self._eager()
                    yield
                    continue
                try:
                    while not step.full:
                        step()
                        self.reason = step.reason
                        yield
                except NotFixedError as error:
                    self._refuse(f"{type(self.model).__name__} cannot be captured: {error}")
                finally:
                    self.step = None
                    step.close()

    def _reserve(self) -> FixedStep | None:
        """Room for the next steps, or None if the next one must be eager; `reason` says why."""
        if self._refused is not None:
            return None
        device = self._chooser.tokens.device
        if self.engine.graph == "off":
            return self._refuse("it was switched off")
        if self.engine.graph == "auto" and device.type != "cuda":
            return self._refuse(f"{device.type} has no CUDA graphs")
        if not isinstance(self.cache, FoldedCache):
            return self._refuse(f"a {type(self.cache).__name__} has no fixed addresses")
        obstacle = fixed.obstacle(self.cache)
        if obstacle is not None:
            self.reason = obstacle
            return None
        room = fixed.room(self.cache, self.engine.reserve, self._chooser.left)
        if room < 2:
            return None  # a step by itself is not worth capturing
        try:
            return FixedStep(self._eager, self.cache, room, capture=self.engine.graph == "auto")
        except NotFixedError as error:
            return self._refuse(f"{type(self.model).__name__} cannot be captured: {error}")

    def _refuse(self, reason: str) -> FixedStep | None:
        """Decode eagerly from here on; None."""
        self._refused = self.reason = reason
        if self._chooser.tokens.is_cuda and self.engine.graph == "auto":
            logger.warning("kvfold decodes without a CUDA graph: %s", reason)
        return None

    def _fused(self) -> AbstractContextManager[None]:
        if not self.engine.fuse or not isinstance(self.cache, FoldedCache):
            return nullcontext()
        modules = (layer.attending_module for layer in self.cache.folded_layers)
        return fused(self.model, {type(module) for module in modules if module is not None})
