"""A training run in one safetensors file: weights, both of AdamW's averages, and what the run is; nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvfold.artifact.files import written_in_one_step
from kvfold.errors import KvfoldError
from kvfold.methods.gates import RetentionGates

KIND = "kvfold training state 1"


def save_state(
    path: Path, gates: RetentionGates, optimizer: torch.optim.Optimizer, about: dict[str, Any]
) -> None:
    """Write the state in one step: a run that is killed meanwhile has the one before."""
    tensors = {}
    for name, parameter in gates.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        for part, tensor in optimizer.state[parameter].items():
            tensors[f"{part}.{name}"] = tensor.detach().cpu().contiguous()
    content = save(tensors, {"kind": KIND, "about": json.dumps(about)})
    with written_in_one_step(str(path), len(content)) as file:
        file.write(content)


def load_state(path: Path, gates: RetentionGates, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read what `save_state` wrote into gates and optimizer; returns `about`.

    Raises
    ------
    KvfoldError
        It is no such file, or of gates of another shape.
    """
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            if facts.get("kind") != KIND:
                raise ValueError("it is of another kind")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about: dict[str, Any] = json.loads(facts["about"])
        with torch.no_grad():
            for name, parameter in gates.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                optimizer.state[parameter] = {
                    part: tensors[f"{part}.{name}"].to("cpu" if part == "step" else parameter.device)
                    for part in ("step", "exp_avg", "exp_avg_sq")
                }
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise KvfoldError(
            f"{path} cannot be gone on with ({error}): remove it to begin anew, or choose another folder"
        ) from error
    return about
