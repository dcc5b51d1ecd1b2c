"""What makes a model the one a cache was folded with: its shape, its RoPE, and a sample of its attention weights.

The sample is a few values of every tensor of an attention module, so that it costs microseconds a layer, needs no
copy of the weights, and can be taken from the attention call itself: a cache never holds its model.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.errors import CacheMismatchError
from kvfold.hf.support import folds, stock_layers, text_config

SAMPLES = 32
"""Values taken of each weight tensor."""

_FACTS = (
    "model_type",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "vocab_size",
)


@dataclass(frozen=True)
class Identity:
    """What one attention module's weights say about it.

    Attributes
    ----------
    digest : str
        SHA-256 over names, shapes and sampled values of its tensors.
    dtype : str
        Of its weights, such as "bfloat16".
    """

    digest: str
    dtype: str


_Key = tuple[tuple[str, int, int], ...]
_known: weakref.WeakKeyDictionary[torch.nn.Module, tuple[_Key, Identity]] = weakref.WeakKeyDictionary()


def identity_of(module: torch.nn.Module) -> Identity:
    """Identity of an attention module; remembered until its weights are replaced or written to.

    Raises
    ------
    CacheMismatchError
        The weights are on the meta device and no offload hook tells where they are.
    """
    weights = dict(_weights(module))
    key = tuple((name, tensor.data_ptr(), _version(tensor)) for name, tensor in sorted(weights.items()))
    known = _known.get(module)
    if known is not None and known[0] == key:
        return known[1]
    digest = hashlib.sha256()
    dtype = "none"
    samples: list[torch.Tensor] = []
    with torch.no_grad():
        for name, tensor in sorted(weights.items()):
            digest.update(f"{name}{list(tensor.shape)};".encode())
            if dtype == "none" and tensor.is_floating_point():
                dtype = str(tensor.dtype).removeprefix("torch.")
            samples.append(_sample(tensor))
        devices = {sample.device for sample in samples}
        # One transfer for each device: on a GPU every copy waits for it.
        for device in sorted(devices, key=str):
            together = torch.cat([sample for sample in samples if sample.device == device])
            digest.update(together.cpu().numpy().tobytes())
    identity = Identity(digest.hexdigest(), dtype)
    _known[module] = (key, identity)
    return identity


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a module, quantised ones (kept as buffers) and offloaded ones too."""
    for prefix, part in module.named_modules():
        passing = part._non_persistent_buffers_set
        named = {**part._parameters, **{n: b for n, b in part._buffers.items() if n not in passing}}
        for name, tensor in named.items():
            if tensor is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            tensor = tensor.detach()
            if tensor.is_meta:
                tensor = _offloaded(part, name, full_name)
            to_local = getattr(tensor, "to_local", None)
            yield full_name, tensor if to_local is None else to_local()


def _offloaded(part: torch.nn.Module, name: str, full_name: str) -> torch.Tensor:
    """A weight that accelerate keeps elsewhere between calls."""
    for hook in _hooks(part):
        held = getattr(hook, "weights_map", None)
        if held is not None:
            found = held[name]
            if isinstance(found, torch.Tensor) and not found.is_meta:
                return found.detach()
    raise CacheMismatchError(
        f"weight {full_name} of {type(part).__name__} is on the meta device, so the model cannot be recognised:"
        " load it onto a device first"
    )


def _hooks(part: torch.nn.Module) -> list[Any]:
    """Hooks that accelerate put on a module."""
    hook = getattr(part, "_hf_hook", None)
    return [] if hook is None else [hook, *getattr(hook, "hooks", ())]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel()
    if not count:
        return torch.zeros(0, device=tensor.device)
    # Scattered, so that no regular structure (one column, one head) is all that is seen.
    index = (torch.arange(min(SAMPLES, count), device=tensor.device) * 2654435761 + 40503) % count
    if tensor.is_contiguous():
        return tensor.view(-1)[index].float()
    return tensor[torch.unravel_index(index, tensor.shape)].float()


def attention_modules(model: Any) -> dict[int, list[torch.nn.Module]]:
    """Attention modules of a model by layer index; more than one where names cannot tell which one caches."""
    found: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            found.setdefault(index, []).append(module)
    return found


def device_of(module: torch.nn.Module) -> torch.device | None:
    """Where a module runs, or None where nothing tells."""
    for part in module.modules():
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.empty(0, device=device).device
    return next((weight.device for weight in module.parameters() if not weight.is_meta), None)


def layer_type(layer: Any) -> str:
    """Name of a cache layer's type in facts and saved caches."""
    return "full" if folds(layer) else type(layer).__name__


def facts(config: Any) -> dict[str, Any]:
    """Readable facts that two models must share, whatever transformers version wrote their config."""
    config = text_config(config)
    known = {name: getattr(config, name, None) for name in _FACTS}
    types = [layer_type(layer) for layer in stock_layers(config)]
    while types and types[-1] == "DummyLayer":
        # Layers that read another's cache: absent from the list in older versions.
        types.pop()
    result: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    result["num_hidden_layers"] = int(config.num_hidden_layers)
    result["layer_types"] = types
    if any("Sliding" in kind for kind in types):
        result["sliding_window"] = config.sliding_window
    plain: dict[str, Any] = json.loads(json.dumps(result, default=str))
    return plain


def rope_facts(config: Any) -> dict[str, Any]:
    """RoPE parameters of a config as plain data, the same for all ways of writing them."""
    config = text_config(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    plain = json.loads(json.dumps(_plain(parameters)))
    nested = bool(plain) and all(isinstance(value, dict) for value in plain.values())
    whole = getattr(config, "partial_rotary_factor", None)
    for part in plain.values() if nested else [plain]:
        if whole is not None:
            part.setdefault("partial_rotary_factor", float(whole))
        if part.get("partial_rotary_factor") == 1.0:
            del part["partial_rotary_factor"]
    result: dict[str, Any] = plain
    return result


def _plain(value: Any) -> Any:
    """Numbers as floats and no empty entries, so that 10000 and 10000.0 are one."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(value, (str, bool)) else str(value)


def fingerprint(model: Any) -> str:
    """SHA-256 of a model: facts, RoPE, and the weights of the attention layers that fold.

    Parameters
    ----------
    model : transformers model

    Returns
    -------
    str
        The same for every copy of the same weights in the same dtype on any device.
    """
    modules = attention_modules(model)
    folding = [index for index, layer in enumerate(stock_layers(model.config)) if folds(layer)]
    digests = [identity_of(modules[index][0]).digest for index in folding if index in modules]
    return fingerprint_of(facts(model.config), rope_facts(model.config), digests)


def fingerprint_of(model_facts: dict[str, Any], rope: dict[str, Any], digests: list[str]) -> str:
    """Fingerprint from its parts: see `fingerprint`."""
    text = json.dumps([model_facts, rope, digests], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
