"""Retention gates: how fast each KV head may forget a token, told from what its layer is given (TrimKV, DBTrimKV).

A gate gives log beta, beta in (0, 1); t steps later the token is worth beta^t. Everything is in log space and float32:
a beta of 1 - 1e-8, where training starts, is 1 in any 16-bit dtype.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from kvfold.errors import KvfoldError

KIND = "kvfold retention gates 1"
SHIPPED = Path(__file__).parent.parent / "gates"
"""Gates that come with the package."""
TRAIN = "train some with: kvfold train-gates MODEL --text FILE -o gates.safetensors"
Tie = Literal["all", "layers", "none"]
"""What the last projection is shared by: all layers and heads (DBTrimKV's text), heads of equal index of all layers (its
released code), or nothing (TrimKV)."""


@dataclass(frozen=True)
class GateConfig:
    """Shape of a model's gates.

    Attributes
    ----------
    layers : tuple of int
        Indices of the layers that have one.
    hidden_size, kv_heads : int
        Of those layers.
    width : int
        Hidden units of a trunk.
    depth : int
        Hidden linear layers of a trunk, SiLU after each: 2 for DBTrimKV, 1 for TrimKV.
    features : int
        Outputs of a trunk for each head, where `tie` is "all".
    tie : "all", "layers" or "none"
        See `Tie`.
    bias : float
        What the last bias begins with. 18 (authors) is a beta of 1 - 1.5e-8.
    """

    layers: tuple[int, ...]
    hidden_size: int
    kv_heads: int
    width: int = 512
    depth: int = 2
    features: int = 32
    tie: Tie = "all"
    bias: float = 18.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "kv_heads", "width", "depth", "features"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers must be distinct and at least one, got {self.layers}")
        if self.tie not in ("all", "layers", "none"):
            raise ValueError(f"tie must be all, layers or none, got {self.tie!r}")


class RetentionGates(nn.Module):
    """The gates of a model: a trunk for each layer, then a projection and a bias, shared as `tie` says.

    Parameters
    ----------
    config : GateConfig
    generator : torch.Generator, optional
        Weights are drawn from N(0, 0.02), biases but the last are 0.

    References
    ----------
    DBTrimKV, section 3; TrimKV (arXiv 2512.03324), equations 5 and 6.
    """

    def __init__(self, config: GateConfig, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        heads, outputs = config.kv_heads, config.width
        if config.tie == "all":
            outputs = heads * config.features
        sizes = [config.hidden_size, *[config.width] * (config.depth - 1), outputs]
        self.trunks = nn.ModuleDict({str(index): _trunk(sizes) for index in config.layers})
        own = (len(config.layers),) if config.tie == "none" else ()
        shape = (config.features,) if config.tie == "all" else (*own, heads, outputs)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.full(() if config.tie == "all" else (*own, heads), config.bias))
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(self, inputs: Tensor, layer_idx: int) -> Tensor:
        """Log beta.

        Parameters
        ----------
        inputs : (batch, tokens, hidden_size)
            What the layer's attention module is given.
        layer_idx : int

        Returns
        -------
        (batch, kv_heads, tokens) float32, negative
        """
        found = self.trunks[str(layer_idx)](inputs.float())
        if self.config.tie == "all":
            logits = found.unflatten(-1, (self.config.kv_heads, -1)) @ self.weight + self.bias
        else:
            own = self.config.layers.index(layer_idx) if self.config.tie == "none" else ...
            weight, bias = self.weight[own], self.bias[own]
            logits = nn.functional.linear(found, weight, bias)
        return nn.functional.logsigmoid(logits).transpose(1, 2)


def _trunk(sizes: list[int]) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        linear = nn.Linear(inputs, outputs)
        nn.init.zeros_(linear.bias)
        parts += [linear, nn.SiLU()]
    return nn.Sequential(*parts)


@dataclass(eq=False)
class TrainedGates:
    """Gates as a method uses them, on whatever device the layer is.

    Attributes
    ----------
    gates : RetentionGates
    fingerprint : str
        Of the model they are for (`kvfold.hf.fingerprint`); empty where that is not known.
    facts : dict of str to Any
        How they were made, for people.
    """

    gates: RetentionGates
    fingerprint: str
    facts: dict[str, Any] = field(default_factory=dict)
    _copies: dict[torch.device, RetentionGates] = field(default_factory=dict, repr=False)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, layer_idx: int) -> Tensor:
        """Log beta (batch, kv_heads, tokens) float32 of what a layer is given (batch, tokens, hidden_size).

        Raises
        ------
        KvfoldError
            They have none for the layer, or for layers of another size.
        """
        config = self.gates.config
        if layer_idx not in config.layers or inputs.shape[-1] != config.hidden_size:
            raise KvfoldError(
                f"the gates are for layers {', '.join(map(str, config.layers))} of {config.hidden_size} channels, not for"
                f" layer {layer_idx} of {inputs.shape[-1]}: they are another model's; {TRAIN}"
            )
        if inputs.device not in self._copies:
            self._copies[inputs.device] = copy.deepcopy(self.gates).float().to(inputs.device)
        found: Tensor = self._copies[inputs.device](inputs, layer_idx)
        return found

    def to_bytes(self, dtype: torch.dtype = torch.float16) -> bytes:
        """The content of a safetensors file; trunks in `dtype`, what is tied in float32."""
        tensors = {
            name: tensor.detach()
            .cpu()
            .to(dtype if name.startswith("trunks.") else torch.float32)
            .contiguous()
            for name, tensor in self.gates.state_dict().items()
        }
        about = {"kind": KIND, "fingerprint": self.fingerprint}
        config, facts = json.dumps(asdict(self.gates.config)), json.dumps(self.facts)
        return save(tensors, {**about, "config": config, "facts": facts})


def load_gates(name: str | os.PathLike[str]) -> TrainedGates:
    """Gates from a file that `kvfold train-gates` wrote, or those of the package by name.

    The same file is read once.

    Raises
    ------
    KvfoldError
        It cannot be read, or is no such file.
    """
    path = Path(name).expanduser()
    if path.name == str(name) and not path.exists() and (SHIPPED / f"{name}.safetensors").exists():
        path = SHIPPED / f"{name}.safetensors"
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.safetensors"))) or "none"
        raise KvfoldError(
            f"the retention gates {name} cannot be read ({error.strerror or error}); the package has: {known}; {TRAIN}"
        ) from error


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> TrainedGates:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("kind") != KIND:
                raise KvfoldError(f"{path} holds no retention gates of kvfold's; {TRAIN}")
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        options = json.loads(about["config"])
        gates = RetentionGates(GateConfig(**{**options, "layers": tuple(options["layers"])}))
        gates.load_state_dict(tensors)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise ValueError("a weight is not finite")
        return TrainedGates(gates.requires_grad_(False), about["fingerprint"], json.loads(about["facts"]))
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, KvfoldError):
            raise
        raise KvfoldError(f"{path} is no file of retention gates ({error}); {TRAIN}") from error


_RELEASED = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.retention_gate\.(.+)")
_LINEAR = {
    frozenset({"linear1.weight", "linear1.bias", "linear2.weight", "bias"}): 1,
    frozenset(
        {"linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias", "linear3.weight", "bias"}
    ): 2,
}
"""Tensors of a layer's gate in the authors' checkpoints, and how deep its trunk is: "rg" (TrimKV), "rg10" (DBTrimKV)."""


def gates_from_released(state: Mapping[str, Tensor]) -> RetentionGates:
    """Gates from the state dict of one of the authors' checkpoints; other tensors in it are passed over.

    Parameters
    ----------
    state : mapping of str to Tensor
        "model.layers.0.self_attn.retention_gate.linear1.weight", ... The last projection is tied where all layers have
        the same one.

    Raises
    ------
    KvfoldError
        No gates, or of a kind that reads keys and values ("rg2", "rg3").
    """
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if match := _RELEASED.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor.float()
    kinds = {frozenset(tensors) for tensors in layers.values()}
    if not layers:
        raise KvfoldError(
            "the checkpoint has no tensor named ...self_attn.retention_gate...: it has no gates"
        )
    if len(kinds) > 1 or not kinds <= _LINEAR.keys():
        raise KvfoldError(
            f"gates of tensors {', '.join(sorted(set().union(*kinds)))} are not known: kvfold reads those of linear1,"
            " linear2 (and linear3) and bias, which see the attention input"
        )
    depth = _LINEAR[kinds.pop()]
    last = f"linear{depth + 1}.weight"
    order = sorted(layers)
    first = layers[order[0]]
    tied = all(torch.equal(layers[index][name], first[name]) for index in order for name in (last, "bias"))
    config = GateConfig(
        layers=tuple(order),
        hidden_size=first["linear1.weight"].shape[1],
        kv_heads=len(first["bias"]),
        width=len(first["linear1.bias"]),
        depth=depth,
        tie="layers" if tied else "none",
    )
    found = {
        f"trunks.{index}.{2 * place}.{part}": layers[index][f"linear{place + 1}.{part}"]
        for index in order
        for place in range(depth)
        for part in ("weight", "bias")
    }
    ends = {
        name: [layers[index][key] for index in order] for name, key in (("weight", last), ("bias", "bias"))
    }
    found |= {name: tensors[0] if tied else torch.stack(tensors) for name, tensors in ends.items()}
    gates = RetentionGates(config)
    try:
        gates.load_state_dict(found)
    except RuntimeError as error:
        raise KvfoldError(f"the checkpoint's gates do not fit together: {error}") from error
    return gates.requires_grad_(False)
