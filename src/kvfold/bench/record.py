"""What a bench found, as one JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfold.artifact.files import written_in_one_step
from kvfold.evaluate.runner import hardware, versions


@dataclass
class Record:
    """Rows and what they depend on.

    Attributes
    ----------
    bench : str
        "attention", "decode", "memory", "throughput" or "fold".
    model, dtype, device, command : str
    settings : dict
        Whatever else was chosen.
    rows : list of dict
    """

    bench: str
    model: str
    dtype: str
    device: str
    command: str
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "bench": self.bench,
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "hardware": hardware(self.device),
            "versions": versions(),
            "command": self.command,
            "settings": self.settings,
            "rows": self.rows,
        }

    def write(self, path: str) -> None:
        """Write the file in one step: whole, or not at all (ArtifactError)."""
        write(path, json.dumps(self.to_dict(), indent=1) + "\n")


def write(path: str, content: str) -> None:
    """Write a text in one step (ArtifactError)."""
    data = content.encode()
    with written_in_one_step(str(Path(path).expanduser()), len(data)) as file:
        file.write(data)
