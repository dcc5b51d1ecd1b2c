"""While decoding, fewer and faster launches for what lies around attention.

One token's norm is half a dozen launches of a few microseconds each, as long as reading a megabyte: `torch.compile` makes one
of each norm and of the rotary embedding. Projections and gated MLPs go to a kernel of their own (`kernels.matvec`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvfold.kernels import dense_decode, matvec

GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
"""What transformers calls the parts of a gated MLP, down(act(gate x) * up x)."""
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


@contextmanager
def fused(model: nn.Module, attention: set[type[nn.Module]]) -> Iterator[None]:
    """Run the model with its small operations fused inside the block.

    Modules whose `forward` is somebody's own already (offloading hooks) stay as they are.

    Parameters
    ----------
    model : Module
    attention : set of type
        Classes of its attention modules: what stands beside them, and their own parts, is what a step is made of.
    """
    compiled: dict[Any, Any] = {}
    changed: list[nn.Module] = []

    def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
        if "forward" not in vars(module):
            module.forward = forward  # type: ignore[method-assign]
            changed.append(module)

    files = {sys.modules[kind.__module__] for kind in attention}
    rotary = {file: file.apply_rotary_pos_emb for file in files if hasattr(file, "apply_rotary_pos_emb")}
    try:
        for module in model.modules():
            if type(module) in attention and (several := same_input(module)):
                shared = Together(several)
                for index, projection in enumerate(several):
                    replace(projection, partial(shared, index))
        for module in parts(model, attention):
            kind = type(module)
            if "norm" in kind.__name__.lower():
                if kind not in compiled:
                    compiled[kind] = torch.compile(kind.forward, dynamic=False)
                replace(module, MethodType(compiled[kind], module))
            elif isinstance(module, nn.Linear) and kind is nn.Linear and fast(module.weight):
                replace(module, partial(project, module))
            elif gated(module):
                replace(module, partial(mlp, module))
        for file, function in rotary.items():
            file.apply_rotary_pos_emb = torch.compile(function, dynamic=False)  # type: ignore[attr-defined]
        yield
    finally:
        for module in changed:
            del module.forward
        for file, function in rotary.items():
            file.apply_rotary_pos_emb = function  # type: ignore[attr-defined]


def parts(model: nn.Module, attention: set[type[nn.Module]]) -> list[nn.Module]:
    """Every module of the layers that have attention, attention itself left out."""
    layers = [
        module for module in model.modules() if any(type(child) in attention for child in module.children())
    ]
    found = (part for layer in layers for part in layer.modules() if part is not layer)
    return [part for part in found if type(part) not in attention]


def same_input(module: nn.Module) -> list[nn.Linear]:
    """The projections of queries, keys and values, in that order, if one launch can do all three."""
    found: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    linears = [one for one in found if type(one) is nn.Linear and one.bias is None and fast(one.weight)]
    whole = all(one.out_features % matvec.TOGETHER == 0 for one in linears)
    return linears if len(linears) == 3 and whole and len({one.in_features for one in linears}) == 1 else []


class Together:
    """Several projections of the same vectors: the first that is asked for computes all, the others find theirs."""

    def __init__(self, projections: list[nn.Linear]):
        self.projections = projections
        self._given: Tensor | None = None
        self._found: dict[int, Tensor] = {}

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """The product of projection `index`."""
        if self._given is not x:
            if index or not matvec.fits(x, self.projections[0].weight):
                return project(self.projections[index], x)
            self._given = x
            self._found = dict(enumerate(matvec.together(x, [one.weight for one in self.projections])))
        found = self._found.pop(index)
        if not self._found:
            self._given = None
        return found


def fast(weight: Tensor) -> bool:
    """Whether the kernel can multiply with a weight."""
    return weight.is_contiguous() and weight.itemsize <= 4 and dense_decode.problem(weight.device) is None


def gated(module: nn.Module) -> bool:
    """Whether a module is a gated MLP without biases that the kernel can do."""
    if not all(hasattr(module, name) for name in GATED):
        return False
    projections = [module.gate_proj, module.up_proj, module.down_proj]
    plain = all(type(one) is nn.Linear and one.bias is None and fast(one.weight) for one in projections)  # type: ignore[arg-type]
    return plain and type(module.act_fn).__name__ in _ACTIVATIONS


def project(module: Any, x: Tensor) -> Tensor:
    """`Linear.forward` for few vectors."""
    if matvec.fits(x, module.weight):
        return matvec.linear(x, module.weight, module.bias)
    return linear(x, module.weight, module.bias)


def mlp(module: Any, x: Tensor) -> Tensor:
    """The forward pass of a gated MLP for few vectors."""
    if not matvec.fits(x, module.gate_proj.weight):
        result: Tensor = type(module).forward(module, x)
        return result
    activation: Any = _ACTIVATIONS[type(module.act_fn).__name__]
    inner = matvec.gated(x, module.gate_proj.weight, module.up_proj.weight, activation)
    return matvec.linear(inner, module.down_proj.weight)
