"""What to measure: a model or its shape, methods, contexts and batches, checked before any work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvfold.bench.shapes import full_bytes, random_model
from kvfold.errors import KvfoldError, UnsupportedModelError
from kvfold.hf.support import cache_shape, caches_latent, check_supported, folds, stock_layers, text_config
from kvfold.methods import Full
from kvfold.methods.base import Method


@dataclass(frozen=True)
class Candidate:
    """A method and what it is called in rows and charts."""

    label: str
    method: Method


FULL = Candidate("full", Full())


@dataclass(frozen=True)
class Setup:
    """What a bench measures, and on what.

    Attributes
    ----------
    config : PretrainedConfig
        Of a model all of whose layers cache keys and values of every token.
    candidates : tuple of Candidate
        The full cache is always measured beside them.
    contexts, batches : tuple of int
        Tokens of a row, and rows.
    dtype : torch.dtype
    device : torch.device
    loaded : model, optional
        Where weights matter; else they are random.

    Raises
    ------
    KvfoldError
        A context or batch below 1, no such device, or a cache of other layers than plain attention.
    """

    config: Any
    candidates: tuple[Candidate, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    loaded: Any = None

    def __post_init__(self) -> None:
        for name, counts, least in (("--context", self.contexts, 2), ("--batch", self.batches, 1)):
            if not counts:
                raise KvfoldError(f"{name}: give at least one number")
            for count in counts:
                if count < least:
                    raise KvfoldError(f"{name} {count}: at least {least}")
        most = getattr(text_config(self.config), "max_position_embeddings", None)
        if most is not None and max(self.contexts) >= most:
            raise KvfoldError(f"--context {max(self.contexts)}: the model reads at most {most - 1} tokens")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise KvfoldError("--device cuda: torch sees no CUDA device (kvfold doctor tells more)")
        if caches_latent(self.config) or not all(folds(layer) for layer in stock_layers(self.config)):
            raise UnsupportedModelError(
                "bench fills the caches of models all of whose layers attend to every token (llama, qwen2, mistral, ...);"
                " this one has others"
            )
        shape = cache_shape(self.config)
        for candidate in self.candidates:
            for tokens in self.contexts:
                candidate.method.check(tokens, shape.kv_heads, shape.key_dim, shape.value_dim)

    @property
    def everything(self) -> tuple[Candidate, ...]:
        """The full cache, then the others."""
        return FULL, *(c for c in self.candidates if not isinstance(c.method, Full))

    @cached_property
    def model(self) -> Any:
        """The model, made or taken over when first asked for."""
        if self.loaded is None:
            weights = _weights(self.config) * self.dtype.itemsize
            free = free_bytes(self.device)
            if weights > free:
                raise KvfoldError(
                    f"the weights take {weights / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: choose a smaller --shape, or"
                    " fewer --layers"
                )
            model = random_model(self.config, self.dtype, self.device)
        else:
            model = self.loaded
        check_supported(model)
        return model

    def cases(self) -> Iterator[tuple[int, int]]:
        """Contexts and batches, the shortest context first."""
        return ((tokens, batch) for tokens in sorted(self.contexts) for batch in sorted(self.batches))

    def check_room(self, tokens: int, batch: int, layers: int | None = None, copies: float = 1.1) -> None:
        """Refuse a full cache that does not fit, before it is made (KvfoldError: the message says what does)."""
        row = full_bytes(self.config, tokens, self.dtype)
        if layers is not None:
            row = row * layers // text_config(self.config).num_hidden_layers
        free = free_bytes(self.device)
        if copies * row * batch > free:
            most = int(free / (copies * row))
            advice = f"--batch {most} fits" if most else "choose a shorter --context"
            raise KvfoldError(
                f"--batch {batch} of {tokens} tokens takes {copies * row * batch / 1e9:.1f} GB as a full cache, and"
                f" {free / 1e9:.1f} GB are free: {advice}"
            )


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had, of the GPU or of the machine."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    try:
        with open("/proc/meminfo") as file:
            found = next(line for line in file if line.startswith("MemAvailable"))
        return 1024 * int(found.split()[1])
    except (OSError, StopIteration):
        return 1 << 62


def _weights(config: Any) -> int:
    """Parameters of the model, none of them made."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return int(sum(parameter.numel() for parameter in model.parameters()))
