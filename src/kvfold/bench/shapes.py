"""Configs of known models, and models of random weights made from a config."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvfold.errors import KvfoldError
from kvfold.hf.support import cache_shape, text_config

LONG = 1 << 20
_LLAMA: dict[str, Any] = dict(model_type="llama", vocab_size=128256, head_dim=128, rope_theta=500000.0)
_QWEN: dict[str, Any] = dict(model_type="qwen2", vocab_size=151936, head_dim=128, rope_theta=1000000.0)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        _LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama-3.2-3b": dict(
        _LLAMA,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "qwen2.5-3b": dict(
        _QWEN,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": dict(
        _QWEN,
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "smollm2-135m": dict(
        _LLAMA,
        vocab_size=49152,
        head_dim=64,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}
"""What each config says; positions have no end, since weights are random."""


def config_of(shape: str, layers: int | None = None) -> Any:
    """The config of a known shape.

    Parameters
    ----------
    shape : str
        A name in `SHAPES`.
    layers : int, optional
        Only so many of its layers.

    Raises
    ------
    KvfoldError
        No such shape, or not so many layers.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if shape not in SHAPES:
        raise KvfoldError(f"--shape {shape}: choose from {', '.join(SHAPES)}, or give --model")
    fields = {**SHAPES[shape], "max_position_embeddings": LONG}
    if layers is not None:
        if not 1 <= layers <= fields["num_hidden_layers"]:
            raise KvfoldError(f"--layers {layers}: {shape} has 1 to {fields['num_hidden_layers']}")
        fields["num_hidden_layers"] = layers
    kind = fields.pop("model_type")
    theta = fields.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta}
    return CONFIG_MAPPING[kind](**fields, rope_parameters=rope, bos_token_id=None, eos_token_id=None)


def few_layers(config: Any, layers: int = 1) -> Any:
    """The config of a model of some full-attention layers, all else small: its cache is like that of the model's own."""
    config = copy.deepcopy(text_config(config))
    # Layers that are factorised together would be of no higher rank than there are tokens to tell apart.
    config.num_hidden_layers, config.vocab_size = layers, 256 if layers == 1 else 1 << 14
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    # The MLP comes after the cache.
    config.intermediate_size = 64
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    return config


def random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def token_ids(config: Any, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Random tokens (batch, tokens) int64, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, text_config(config).vocab_size, (batch, tokens), generator=generator).to(device)


def full_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of so many tokens, all layers, in the dtype."""
    shape = cache_shape(config)
    layers = text_config(config).num_hidden_layers
    return layers * tokens * shape.kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize


def read_bytes(model: Any) -> int:
    """Weights that one token reads: all but the embedding table, where that is not also the output's."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)
