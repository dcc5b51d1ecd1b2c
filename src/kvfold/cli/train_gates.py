"""kvfold train-gates: teach a model which of its cached tokens it may forget (DBTrimKV)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.fold import absolute, check_choice, check_output, read_document
from kvfold.cli.models import DEVICES, DTYPES
from kvfold.errors import KvfoldError


def train_gates(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, hub id, or 'demo' (SmolLM2-135M).")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", metavar="FILE", help="A UTF-8 text to train on; repeatable. - is standard input."
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to write the gates.")
    ] = "gates.safetensors",
    budget: Annotated[int, typer.Option("--budget", help="Tokens a head that the cache should fit.")] = 128,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Length of a training sequence.")] = 2048,
    steps: Annotated[int, typer.Option("--steps", help="Updates of the weights.")] = 300,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at a time on each device.")] = 1,
    accumulate: Annotated[int, typer.Option("--accumulate", help="That many times before an update.")] = 4,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate of AdamW.")] = 2e-4,
    width: Annotated[int, typer.Option("--width", help="Hidden units of a layer's gate.")] = 512,
    depth: Annotated[int, typer.Option("--depth", help="Hidden layers of it.")] = 2,
    features: Annotated[int, typer.Option("--features", help="Outputs for each head, with --tie all.")] = 32,
    tie: Annotated[
        str, typer.Option("--tie", help="What shares the last projection: all|layers|none.")
    ] = "all",
    scope: Annotated[str, typer.Option("--scope", help="Whose budget it is: model|head.")] = "model",
    bias: Annotated[float, typer.Option("--bias", help="Logit of beta that training begins with.")] = 18.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the first weights and the order of texts.")] = 0,
    folder: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="FOLDER", help="Keep the run's state here, and go on if it has one."
        ),
    ] = None,
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between two saves.")] = 50,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Less memory, a third more work.")
    ] = False,
    released: Annotated[
        str | None,
        typer.Option(
            "--released",
            metavar="PATH",
            help="Train nothing: take the gates of the authors' checkpoint for MODEL.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="|".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object a step.")] = False,
) -> None:
    """Train a model's retention gates, for `kvfold fold --method dbtrimkv --option gates=FILE`."""
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--device", device, DEVICES)
    check_choice("--tie", tie, ("all", "layers", "none"))
    check_choice("--scope", scope, ("model", "head"))
    check_output(output)
    if released is not None:
        _convert(model, released, output, dtype)
        return
    if not text:
        raise KvfoldError("give at least one --text to train on")
    texts = [read_document(name) for name in text]
    for name, content in texts:
        if not content.strip():
            raise KvfoldError(f"{name} is empty")

    from kvfold.cli.models import load_model
    from kvfold.training.data import pack
    from kvfold.training.trainer import TrainConfig, Trainer

    try:
        config = TrainConfig(
            budget=budget,
            scope=scope,  # type: ignore[arg-type]
            steps=steps,
            batch=batch,
            accumulate=accumulate,
            lr=lr,
            width=width,
            depth=depth,
            features=features,
            tie=tie,  # type: ignore[arg-type]
            bias=bias,
            seed=seed,
        )
    except ValueError as error:
        raise KvfoldError(str(error)) from error
    first = _join_others()
    if budget >= tokens:
        raise KvfoldError(
            f"--budget {budget} holds whole sequences of --tokens {tokens}: nothing is to be forgotten"
        )
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, quiet=json_)
    rows = pack(loaded, tokenizer, [content for _, content in texts], tokens)
    trainer = Trainer(
        loaded,
        rows,
        config,
        folder=None if folder is None else Path(folder).expanduser(),
        save_every=save_every,
        checkpointing=checkpointing,
    )
    if first and not json_:
        console.note(
            f"{len(rows)} sequences of {tokens} tokens, attention by {trainer.backend}"
            + (f", going on after step {trainer.step}" if trainer.step else "")
        )
    if first:
        with _progress(steps, quiet=json_) as advance:
            gates = trainer.train(advance)
    else:
        gates = trainer.train()
    if not first:
        return
    gates.facts["model"] = absolute(model) if Path(model).expanduser().is_dir() else model
    gates.facts["texts"] = [name for name, _ in texts]
    _write(gates, output)
    if not json_:
        console.out().print(
            f"saved {output}; use it with: kvfold fold DOC --model {model} --method dbtrimkv --option gates={output}",
            soft_wrap=True,
        )


def _convert(model: str, released: str, output: str, dtype: str) -> None:
    """Write the gates of a released checkpoint as kvfold's own."""
    from safetensors import safe_open

    from kvfold.cli.models import load_model
    from kvfold.hf.fingerprint import fingerprint
    from kvfold.methods.gates import TrainedGates, gates_from_released

    path = Path(released).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    state: dict[str, Any] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if "retention_gate" in name]  # noqa: SIM118
            state |= {name: tensors.get_tensor(name) for name in names}
    gates = gates_from_released(state)
    loaded, _ = load_model(model, dtype=dtype, device="cpu")
    _write(TrainedGates(gates, fingerprint(loaded), {"released": released}), output)
    console.out().print(f"saved {output}", soft_wrap=True)


def _write(gates: Any, output: str) -> None:
    from kvfold.artifact.files import written_in_one_step

    content = gates.to_bytes()
    path = output if "://" in output else str(Path(output).expanduser())
    with written_in_one_step(path, len(content)) as file:
        file.write(content)


def _join_others() -> bool:
    """Join the processes of an `accelerate launch`; whether this one is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise KvfoldError("several processes need accelerate: pip install accelerate") from error
    PartialState()
    import torch

    return torch.distributed.get_rank() == 0


@contextmanager
def _progress(steps: int, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar with the newest figures, or lines where there is no terminal; quiet: JSON on standard output."""
    from dataclasses import asdict

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console.err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task("training", total=steps)

        def advance(figures: Any) -> None:
            words = (
                f"kl {figures.kl:.4f}  next token {figures.ntp:.3f}  over capacity {figures.capacity:.4f}"
                f"  mean beta {figures.beta:.5f}  soft size {figures.size:.0f}"
            )
            bar.update(task, completed=figures.step, description=words)
            if quiet:
                sys.stdout.write(json.dumps(asdict(figures)) + "\n")
            elif not screen.is_terminal:
                screen.print(f"step {figures.step}/{steps}  {words}", soft_wrap=True)

        yield advance
