"""The model's own rotary embedding, found from an attention module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kvfold.hf.support import text_config


class ModelRotary:
    """Rotate and un-rotate with the functions of the model's own modelling file.

    Using the file's `apply_rotary_pos_emb` and rotary module makes partial, interleaved and scaled RoPE right
    without knowing which one a model has.

    Parameters
    ----------
    embedding : module mapping (x, position_ids (1, tokens)) to (cos, sin)
    apply : callable (q, k, cos, sin) -> (q, k)
    """

    def __init__(self, embedding: torch.nn.Module, apply: Callable[..., Any]):
        self.embedding, self.apply = embedding, apply
        self.scale = float(getattr(embedding, "attention_scaling", 1.0))

    def _turn(self, x: torch.Tensor, positions: torch.Tensor, backwards: bool) -> torch.Tensor:
        shape = x.shape
        flat = x.float().reshape(1, -1, *shape[-2:])
        cos, sin = self.embedding(flat, positions.reshape(1, -1).to(x.device))
        cos, sin = cos.float(), sin.float()
        scale = self.scale
        turned, _ = self.apply(flat, flat[:, :1], cos / scale, (-sin if backwards else sin) / scale)
        rotary_dims = cos.shape[-1]
        if scale != 1.0:
            turned = turned.clone()
            turned[..., :rotary_dims] *= 1 / scale if backwards else scale
        return turned.reshape(shape)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE on x (..., tokens, head_dim) at positions (tokens,); float32."""
        return self._turn(x, positions, backwards=False)

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`; float32."""
        return self._turn(x, positions, backwards=True)


def uses_rotary(module: torch.nn.Module) -> bool:
    """False for the layers without RoPE of models that mix both kinds (smollm3, cohere2's full attention)."""
    if getattr(module, "use_rope", True) is False:
        return False
    cohere2 = type(module).__name__.startswith("Cohere2")
    return not (cohere2 and getattr(module, "sliding_window", None) is None)


def rotary_of(module: torch.nn.Module) -> ModelRotary | None:
    """Rotary embedding that an attention module's model uses, or None where it cannot be told.

    None for models without RoPE, for dynamic scaling (frequencies depend on the length seen), and for
    modelling files that lay theirs out in a way this cannot follow.
    """
    source = sys.modules.get(type(module).__module__)
    apply = getattr(source, "apply_rotary_pos_emb", None)
    config = getattr(module, "config", None)
    if source is None or apply is None or config is None:
        return None
    config = text_config(config)
    if not uses_rotary(module):
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") in ("dynamic", "longrope") or any(
        isinstance(value, dict) for value in parameters.values()
    ):
        return None
    stem = type(module).__name__.removesuffix("Attention")
    embedding_class = getattr(source, f"{stem}RotaryEmbedding", None)
    if embedding_class is None:
        return None
    with torch.no_grad():
        device = next(module.parameters()).device
        rotary = ModelRotary(embedding_class(config=config).to(device), apply)
        cos, _ = rotary.embedding(torch.zeros(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device))
    head_dim = int(getattr(module, "head_dim", 0) or cos.shape[-1])
    return None if rotary.scale != 1 and cos.shape[-1] != head_dim else rotary
