"""The model's own rotary embedding, found from an attention module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from kvfold.hf.support import text_config
from kvfold.kernels.position_bias import planes
from kvfold.ledger import tensors_in

T = TypeVar("T")


class ModelRotary:
    """Rotate and un-rotate with the functions of the model's own modelling file.

    Using the file's `apply_rotary_pos_emb` and rotary module makes partial, interleaved and scaled RoPE right
    without knowing which one a model has.

    Parameters
    ----------
    embedding : module mapping (x, position_ids (1, tokens)) to (cos, sin)
    apply : callable (q, k, cos, sin) -> (q, k), or (x, cos, sin) -> x
    layer_type : str, optional
        Which of its kinds an embedding with several (gemma3) is to use.
    """

    def __init__(self, embedding: torch.nn.Module, apply: Callable[..., Any], layer_type: str | None = None):
        self.embedding, self.apply = embedding, apply
        self._one = "cos" in list(inspect.signature(apply).parameters)[:2]
        self.partial = False
        """Whether `apply` wants only the channels that turn (phi, persimmon, stablelm split heads before the call)."""
        self.options = {} if layer_type is None else {"layer_type": layer_type}
        name = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
        self.scale = float(getattr(embedding, name, 1.0))
        self._shared: dict[Hashable, Any] = {}

    def cos_sin(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (1, tokens, rotary_dim) at positions (1, tokens), times the scale, on the device of x."""
        cos, sin = self.embedding(x, positions, **self.options)
        return cos, sin

    def shared(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns: made once for the layers of a step, and kept until `forget`."""
        if name not in self._shared:
            self._shared[name] = make()
        found: T = self._shared[name]
        return found

    def tables(self) -> list[torch.Tensor]:
        """Every live tensor: frequencies and what the layers of a step share."""
        return [*self.embedding.buffers(), *tensors_in(self._shared)]

    def forget(self) -> None:
        """Drop what the layers of a step shared."""
        self._shared = {}

    def _turn(self, x: torch.Tensor, positions: torch.Tensor, backwards: bool) -> torch.Tensor:
        shape = x.shape
        flat = x.float().reshape(1, -1, *shape[-2:])
        cos, sin = (angle.float() for angle in self.cos_sin(flat, positions.reshape(1, -1).to(x.device)))
        scale = self.scale
        rotary_dims = cos.shape[-1]
        states = flat[..., :rotary_dims] if self.partial else flat
        angles = cos / scale, (-sin if backwards else sin) / scale
        turned = self.apply(states, *angles) if self._one else self.apply(states, states[:, :1], *angles)[0]
        if self.partial:
            turned = torch.cat([turned, flat[..., rotary_dims:]], -1)
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
    """False for the layers without RoPE of models that mix both kinds (smollm3, full attention of cohere2, exaone4)."""
    if not getattr(module, "use_rope", True):
        return False
    name, windowed = type(module).__name__, getattr(module, "sliding_window", None) is not None
    if name.startswith("Cohere2"):
        return windowed or bool(getattr(module, "force_rope", False))
    if name.startswith("Exaone"):
        return not windowed or bool(getattr(module, "is_sliding", True))
    return not name.startswith("Afmoe") or bool(getattr(module, "is_local_attention", True))


def rotary_of(module: torch.nn.Module, device: torch.device) -> ModelRotary | None:
    """Rotary embedding that an attention module's model uses, on the device of its states, or None.

    None for models without RoPE, for dynamic scaling (frequencies depend on the length seen), for those whose images
    have positions on three axes (M-RoPE), and for modelling files that lay theirs out in a way this cannot follow.
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
    layer_type = None
    if any(isinstance(value, dict) for value in parameters.values()):
        # Each layer type has its own (gemma3); the embedding is then told which.
        layer_type = config.layer_types[module.layer_idx]
        if layer_type not in parameters:
            return None
        parameters = parameters[layer_type] or {}
    if parameters.get("rope_type", "default") in ("dynamic", "longrope") or "mrope_section" in parameters:
        return None
    stem = type(module).__name__.removesuffix("Attention")
    embedding_class = getattr(source, f"{stem}RotaryEmbedding", None)
    if embedding_class is None:
        return None
    with torch.no_grad():
        rotary = ModelRotary(embedding_class(config=config).to(device), apply, layer_type)
        cos, _ = rotary.cos_sin(
            torch.zeros(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
        )
    head_dim = int(getattr(module, "head_dim", 0) or cos.shape[-1])
    if rotary.scale != 1 and cos.shape[-1] != head_dim:
        return None
    if getattr(config, "kv_lora_rank", None) or _turns(rotary, head_dim, device):
        return rotary
    rotary.partial = True
    return rotary if _turns(rotary, head_dim, device) else None


def _turns(rotary: ModelRotary, head_dim: int, device: torch.device) -> bool:
    """Whether the modelling file's function takes heads of that size, and turns planes of two channels."""
    try:
        with torch.no_grad():
            return planes(rotary, head_dim, device) is not None
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
