"""A tiny model folder whose attention chooses, and a task small enough for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from kvfold.evaluate import tasks
from kvfold.evaluate.tasks.base import Count, Sample, Task, Turn
from tests.cli.conftest import save_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("models") / "tiny")
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj")):
                weight.mul_(30)
            elif any(part in name for part in ("v_proj", "o_proj", "embed", "lm_head")):
                weight.mul_(8)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path):
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="session")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True, kw_only=True)
class Letters(Task):
    """Random letters, and questions about them that no random model answers."""

    name = "letters"
    source = "made up"
    metric = "recall"
    turns: int = 1
    rows: int = 100

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        if index >= self.rows:
            raise IndexError(f"{self.rows} rows")
        asked = tuple(Turn(f"Which letter is number {n}?", ("e",), "It is", 6) for n in range(self.turns))
        room = tokens - count(asked[0].question) - 1
        context = "".join(rng.choice("abcdefgh ") for _ in range(room - 2))
        return Sample(context=f"x{context}x", turns=asked, about={"index": index})

    def score(self, answer: str, turn: Turn) -> float:
        return float(turn.references[0] in answer)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tasks.TASKS, "letters", Letters)
