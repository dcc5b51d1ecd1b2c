"""Which models can read a folded cache, and what their configs say about shapes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_utils import AttentionInterface

from kvfold.errors import UnsupportedModelError

MINIMUM_TRANSFORMERS = "5.16"

CACHE_KEYWORD = "cache" if Version(transformers.__version__) >= Version("5.24.dev0") else "past_key_values"
"""Name under which models and `generate` take a cache."""


UNREADABLE = {
    "diffllama": "it attends twice with one set of keys",
    "doge": "it computes its mask from the cached values",
    "dory": "its layers read each other's cache",
    "jetmoe": "it repeats keys after caching them",
    "minimax": "its forward pass takes only a cache class of its own",
}
"""Model types that fetch attention from the interface, but not in a way that a folded cache can serve."""


def check_version() -> None:
    """Refuse a transformers that lacks the cache interface kvfold speaks."""
    if Version(transformers.__version__) < Version(MINIMUM_TRANSFORMERS):
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is too old: kvfold needs >= {MINIMUM_TRANSFORMERS}"
            f" (pip install 'transformers>={MINIMUM_TRANSFORMERS}')"
        )


def check_supported(model: Any) -> None:
    """Refuse, before any work, a model whose attention cannot read a folded cache.

    Raises
    ------
    UnsupportedModelError
        Encoder-decoder models, models that do not dispatch attention through transformers' attention interface
        (bloom, falcon, ...), models without any full-attention layer, flex attention.
    """
    check_version()
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; kvfold folds decoder-only models")
    if not _attends_through_interface(model):
        raise UnsupportedModelError(
            f"{name} does not call transformers' attention interface, so its attention cannot read a folded cache;"
            " use a model whose modelling file takes it from ALL_ATTENTION_FUNCTIONS (llama, qwen, mistral, gemma, ...)"
        )
    kind = getattr(text_config(config), "model_type", None)
    why = UNREADABLE.get(kind) if isinstance(kind, str) else None
    if any(getattr(module, "is_kv_shared_layer", False) for module in model.modules()):
        why = "some of its layers attend to the keys and values of others"
    if why is not None:
        raise UnsupportedModelError(f"{name} cannot read a folded cache: {why}")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation is not None and "flex" in implementation:
        raise UnsupportedModelError(
            "flex_attention masks cannot be split between folded and exact tokens;"
            " load the model with attn_implementation='sdpa'"
        )
    if not any(folds(layer) for layer in stock_layers(config)):
        raise UnsupportedModelError(f"{name} has no full-attention layer, so there is nothing to fold")


def _attends_through_interface(model: Any) -> bool:
    """Whether the modelling file of a layer that has a cache fetches attention from the interface.

    The file tells, not the class attribute `_supports_attention_backend`, which hybrid models leave False for their
    linear layers' sake. Layers that have a cache know their `layer_idx`; a vision tower's do not.
    """
    sources = {
        cls.__module__
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        for cls in type(module).__mro__
    }
    functions = (getattr(sys.modules.get(source), "ALL_ATTENTION_FUNCTIONS", None) for source in sources)
    return any(isinstance(found, AttentionInterface) for found in functions)


def text_config(config: Any) -> Any:
    """The decoder's own config (of a vision-language model, its text part)."""
    return config.get_text_config(decoder=True)


def stock_layers(config: Any) -> list[Any]:
    """The cache layers transformers itself would make for this config."""
    return list(DynamicCache(config=config).layers)


def folds(layer: Any) -> bool:
    """Whether a stock layer is plain full attention; sliding, linear and indexed layers stay as they are."""
    return type(layer) is DynamicLayer


@dataclass(frozen=True)
class CacheShape:
    """Shape of one folding layer's cache: KV heads and widths of what methods call keys and values."""

    kv_heads: int
    key_dim: int
    value_dim: int


def caches_latent(config: Any) -> bool:
    """Whether attention is multi-head latent (MLA): one latent of a token is cached for all heads."""
    return bool(getattr(text_config(config), "kv_lora_rank", None))


def cache_shape(config: Any) -> CacheShape:
    """Cache shape from a config; for multi-head latent attention, one head: rotary part and latent."""
    config = text_config(config)
    if getattr(config, "is_heterogeneous", False):  # layers differ (Gemma 4): those that fold decide
        of_layer = zip(config.per_layer_config, stock_layers(config), strict=False)
        config = next((own for own, layer in of_layer if folds(layer)), config.per_layer_config[0])
    if caches_latent(config):
        return CacheShape(1, int(config.qk_rope_head_dim), int(config.kv_lora_rank))
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return CacheShape(int(getattr(config, "num_key_value_heads", None) or heads), head_dim, head_dim)
