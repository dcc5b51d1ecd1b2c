"""kvfold calibrate: measure the tables that a method takes as given, on a model of your own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli import console
from kvfold.cli.fold import absolute, check_choice, check_output, read_document
from kvfold.cli.models import DEVICES, DTYPES
from kvfold.errors import KvfoldError

CALIBRATED = ("rdkv", "rdkv-published")


def calibrate(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="rdkv: the distortion tables of rdkv-published.")
    ],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, hub id, or 'demo' (SmolLM2-135M).")
    ],
    text: Annotated[
        str,
        typer.Option("--text", metavar="FILE", help="A UTF-8 text to measure on, or - for standard input."),
    ],
    tokens: Annotated[int, typer.Option("--tokens", min=32, help="Use this many tokens of it.")] = 2048,
    output: Annotated[str, typer.Option("--output", "-o", help="Where to write the table.")] = "table.json",
    key_group: Annotated[
        int | None, typer.Option("--key-group", min=1, help="Tokens of a key channel that share a scale.")
    ] = None,
    value_group: Annotated[
        int | None, typer.Option("--value-group", min=1, help="Channels of a value that share a scale.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="|".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON that is written, no table.")] = False,
) -> None:
    """Measure a model's distortion tables, for `kvfold fold --method rdkv-published --calibration`."""
    if method not in CALIBRATED:
        raise KvfoldError(f"method {method!r} takes no calibration: choose from {', '.join(CALIBRATED)}")
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--device", device, DEVICES)
    check_output(output)
    name, content = read_document(text)
    if not content.strip():
        raise KvfoldError(f"{name} is empty: give a text of at least 32 tokens")

    import torch

    from kvfold import __version__
    from kvfold.artifact.files import written_in_one_step
    from kvfold.cli.models import load_model
    from kvfold.evaluate.distortion import distortion_tables

    loaded, tokenizer = load_model(model, dtype=dtype, device=device, quiet=json_)
    # No model reads further than its context, and a character is at most a few tokens.
    ids = tokenizer(content[: 64 * tokens], add_special_tokens=True)["input_ids"][:tokens]
    start = time.perf_counter()
    with console.working(f"measuring {len(ids)} tokens", quiet=json_):
        tables = distortion_tables(
            loaded,
            torch.tensor([ids], device=loaded.device),
            key_group=key_group,
            value_group=value_group,
        )
    seconds = time.perf_counter() - start
    result = {
        "model": absolute(model) if Path(model).expanduser().is_dir() else model,
        "text": name,
        "tokens": len(ids),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "key_group": key_group,
        "value_group": value_group,
        "kvfold": __version__,
        **tables,
    }
    written = (json.dumps(result, indent=1) + "\n").encode()
    with written_in_one_step(
        str(Path(output).expanduser()) if "://" not in output else output, len(written)
    ) as file:
        file.write(written)
    if json_:
        console.print_json(result)
        return

    from rich.table import Table

    if len(ids) < tokens:
        console.note(f"{name} has only {len(ids)} tokens")
    table = Table(title=f"{name}: {len(ids)} tokens in {seconds:.1f} s", title_justify="left")
    for title in ("bits", "value error", "key error"):
        table.add_column(title, justify="right")
    for (width, value), (_, key) in zip(tables["value_error"], tables["key_error"], strict=True):
        table.add_row(str(width), f"{value:.4g}", f"{key:.4g}")
    out = console.out()
    out.print(table)
    out.print(
        f"saved {output}; use it with: kvfold fold DOC --method rdkv-published --calibration {output}",
        soft_wrap=True,
    )
