"""A tiny random llama with a byte tokenizer, saved as an ordinary model folder: no hub, no download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvfold.cli import app

CONTEXT = 640
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def save_model(folder: Path, *, chat: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write a random two-layer llama whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, of other weights."""
    return save_model(tmp_path_factory.mktemp("base"), chat=False, seed=1)


TEXT = "The lamp in the hall is green.\n\nNobody knows who lit it, and nobody has asked. " * 4


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A text of about 320 tokens."""
    path = tmp_path / "lamp.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def kvfold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a command line in an empty folder, without a hub; returns exit_code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture(scope="session")
def saved(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document folded once, for the commands that read one."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "lamp.txt").write_text(TEXT, encoding="utf-8")
    path = folder / "lamp.kvf"
    arguments = ["fold", folder / "lamp.txt", "--model", model_folder, "--method", "full", "-o", path]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return path
