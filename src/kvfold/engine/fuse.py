"""While decoding, the model's small operations compiled: norms, the MLP's products, the rotary embedding.

One token's norm is half a dozen launches of a few microseconds each, as long as reading a megabyte. `torch.compile` makes
one launch of each; projections and attention stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn


def small_modules(model: nn.Module, attention: set[type[nn.Module]]) -> list[nn.Module]:
    """What stands beside a layer's attention (norms, MLP), and what attention itself has of norms.

    Parameters
    ----------
    model : Module
    attention : set of type
        Classes of its attention modules.
    """
    found: list[nn.Module] = []
    for module in model.modules():
        children = list(module.children())
        if type(module) in attention:
            found += [child for child in children if "norm" in type(child).__name__.lower()]
        elif any(type(child) in attention for child in children):
            found += [child for child in children if type(child) not in attention]
    return found


@contextmanager
def fused(model: nn.Module, attention: set[type[nn.Module]]) -> Iterator[None]:
    """Run the model with its small operations compiled inside the block.

    Modules whose `forward` is somebody's own already (offloading hooks) stay as they are.
    """
    compiled: dict[Any, Any] = {}
    modules = [module for module in small_modules(model, attention) if "forward" not in vars(module)]
    files = {sys.modules[kind.__module__] for kind in attention}
    rotary = {file: file.apply_rotary_pos_emb for file in files if hasattr(file, "apply_rotary_pos_emb")}
    try:
        for module in modules:
            forward = type(module).forward
            if forward not in compiled:
                compiled[forward] = torch.compile(forward, dynamic=False)
            module.forward = MethodType(compiled[forward], module)  # type: ignore[method-assign]
        for file, function in rotary.items():
            file.apply_rotary_pos_emb = torch.compile(function, dynamic=False)  # type: ignore[attr-defined]
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)
        for file, function in rotary.items():
            file.apply_rotary_pos_emb = function  # type: ignore[attr-defined]
