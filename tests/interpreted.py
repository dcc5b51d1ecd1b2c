"""Checks of Triton kernels: on the GPU, or interpreted where there is none."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run(check: Callable[..., Any]) -> None:
    """Call a test module's check, with a `monkeypatch` if it takes one; skip the test where there is no Triton."""
    pytest.importorskip("triton")
    if torch.cuda.is_available() or INTERPRETED:
        with pytest.MonkeyPatch.context() as patch:
            wants = "monkeypatch" in inspect.signature(check).parameters
            check(**{"monkeypatch": patch} if wants else {})
        return
    # Triton decides when it is first imported whether to interpret.
    code = f"from tests import interpreted; from {check.__module__} import {check.__name__} as check; interpreted.run(check)"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
