"""The next token from its logits, as transformers' own loop chooses it, written so that a CUDA graph can hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

FIXED = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "LogitNormalization",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
)
"""Processors that read the scores alone and never wait for the device."""


class Chooser:
    """What has been generated, and what comes next.

    Parameters
    ----------
    input_ids : (batch, tokens) int64
    processors : LogitsProcessorList
    criteria : StoppingCriteriaList
    config : GenerationConfig

    Attributes
    ----------
    tokens : (batch, 1) int64
        The newest token of each row, at a fixed address.
    capturable : bool
        Whether choosing is device work only.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ):
        batch, self.length = input_ids.shape
        self.processors, self.sample = processors, bool(config.do_sample)
        self.capturable = all(type(processor) in FIXED for processor in processors)
        self.most = int(criteria.max_length)
        self._sequences = input_ids.new_zeros(batch, max(self.most, self.length + 1))
        self._sequences[:, : self.length] = input_ids
        self._at = torch.tensor([self.length], device=input_ids.device)
        self.tokens = input_ids.new_zeros(batch, 1)
        self._ends = [c.eos_token_id.to(input_ids.device) for c in criteria if type(c) is EosTokenCriteria]
        self._others = StoppingCriteriaList(
            [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        )
        pad: Any = config._pad_token_tensor
        self._pad = None if pad is None else pad.to(input_ids.device)
        self._unfinished = input_ids.new_ones(batch)
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    @property
    def sequences(self) -> Tensor:
        """Prompt and generated tokens, (batch, tokens)."""
        return self._sequences[:, : self.length]

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.most - self.length

    def choose(self, logits: Tensor) -> None:
        """Choose each row's next token from logits (batch, vocabulary) float32: device work only, if `capturable`."""
        scores = self.processors(self.sequences, logits)
        if self.sample:
            tokens = torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        if self._pads and self._pad is not None:
            tokens = tokens * self._unfinished + self._pad * (1 - self._unfinished)
        self.tokens.copy_(tokens[:, None])
        self._sequences.index_copy_(1, self._at, self.tokens)
        self._at += 1
        for ends in self._ends:
            self._unfinished *= ~torch.isin(tokens, ends)

    def finished(self) -> bool:
        """Count the token in; whether it was the last. Waits for the device."""
        self.length += 1
        if self._others:
            self._unfinished *= ~self._others(self.sequences, None)
        return self.left <= 0 or not bool(self._unfinished.any())
