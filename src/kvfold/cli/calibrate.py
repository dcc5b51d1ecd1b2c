"""kvfold calibrate: measure what a method takes as given, on a model of your own."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.fold import absolute, check_choice, check_output, read_document
from kvfold.cli.models import DEVICES, DTYPES
from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from rich.table import Table

TABLES = ("rdkv", "rdkv-published")
ENERGIES = "blockgtq"
CALIBRATED = (ENERGIES, *TABLES)
BIASES = ("out", "mean", "in")
BITS = 3
"""Average width that the table of energies shows an allocation for."""


def calibrate(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="rdkv: the distortion tables of rdkv-published. blockgtq: the energies of its blocks.",
        ),
    ],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, hub id, or 'demo' (SmolLM2-135M).")
    ],
    text: Annotated[
        str,
        typer.Option("--text", metavar="FILE", help="A UTF-8 text to measure on, or - for standard input."),
    ],
    tokens: Annotated[int, typer.Option("--tokens", min=32, help="Use this many tokens of it.")] = 2048,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write. Default: table.json, or energies.safetensors for blockgtq.",
        ),
    ] = None,
    key_group: Annotated[
        int | None,
        typer.Option("--key-group", min=1, help="rdkv: tokens of a key channel that share a scale."),
    ] = None,
    value_group: Annotated[
        int | None, typer.Option("--value-group", min=1, help="rdkv: channels of a value that share a scale.")
    ] = None,
    bias: Annotated[
        str | None,
        typer.Option(
            "--bias",
            help=f"blockgtq: its option of that name, {'|'.join(BIASES)}. Default: that of the method.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="|".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
) -> None:
    """Measure what a method takes as given, for `kvfold fold --calibration`.

    kvfold calibrate blockgtq demo --text book.txt -o energies.safetensors

    kvfold fold DOC --model demo --method blockgtq --calibration energies.safetensors
    """
    if method not in CALIBRATED:
        raise KvfoldError(f"method {method!r} takes no calibration: choose from {', '.join(CALIBRATED)}")
    _check_options(method, key_group=key_group, value_group=value_group, bias=bias)
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--device", device, DEVICES)
    path = output or ("energies.safetensors" if method == ENERGIES else "table.json")
    check_output(path)
    name, content = read_document(text)
    if not content.strip():
        raise KvfoldError(f"{name} is empty: give a text of at least 32 tokens")

    import torch

    from kvfold.artifact.files import written_in_one_step
    from kvfold.cli.models import load_model

    loaded, tokenizer = load_model(model, dtype=dtype, device=device, quiet=json_)
    # No model reads further than its context, and a character is at most a few tokens.
    ids = tokenizer(content[: 64 * tokens], add_special_tokens=True)["input_ids"][:tokens]
    input_ids = torch.tensor([ids], device=loaded.device)
    start = time.perf_counter()
    with console.working(f"measuring {len(ids)} tokens", quiet=json_):
        if method == ENERGIES:
            measured = _energies(loaded, input_ids, name, bias)
        else:
            measured = _tables(loaded, input_ids, key_group, value_group)
    seconds = time.perf_counter() - start
    facts = {
        "model": absolute(model) if Path(model).expanduser().is_dir() else model,
        "text": name,
        "tokens": len(ids),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        **measured.facts,
    }
    written = (
        measured.content if measured.content is not None else (json.dumps(facts, indent=1) + "\n").encode()
    )
    with written_in_one_step(
        str(Path(path).expanduser()) if "://" not in path else path, len(written)
    ) as file:
        file.write(written)
    if json_:
        console.print_json(facts)
        return
    if len(ids) < tokens:
        console.note(f"{name} has only {len(ids)} tokens")
    table = measured.table
    table.title, table.title_justify = f"{name}: {len(ids)} tokens in {seconds:.1f} s", "left"
    out = console.out()
    out.print(table)
    user = ENERGIES if method == ENERGIES else "rdkv-published"
    out.print(
        f"saved {path}; use it with: kvfold fold DOC --method {user} --calibration {path}", soft_wrap=True
    )


@dataclass
class _Measured:
    """Facts for people and JSON, a table of them, and the file's content where that is not the facts."""

    facts: dict[str, Any]
    table: Table
    content: bytes | None = None


def _check_options(method: str, **given: Any) -> None:
    """Refuse options of the other kind of calibration, and a bias that is none."""
    own = ("bias",) if method == ENERGIES else ("key_group", "value_group")
    for option, value in given.items():
        if value is not None and option not in own:
            raise KvfoldError(f"--{option.replace('_', '-')} is not for calibrating {method}")
    if given["bias"] is not None:
        check_choice("--bias", given["bias"], BIASES)


def _tables(model: Any, input_ids: Any, key_group: int | None, value_group: int | None) -> _Measured:
    from rich.table import Table

    from kvfold import __version__
    from kvfold.evaluate.distortion import distortion_tables

    tables = distortion_tables(model, input_ids, key_group=key_group, value_group=value_group)
    facts = {"key_group": key_group, "value_group": value_group, "kvfold": __version__, **tables}
    table = Table("bits", "value error", "key error")
    for column in table.columns:
        column.justify = "right"
    for (width, value), (_, key) in zip(tables["value_error"], tables["key_error"], strict=True):
        table.add_row(str(width), f"{value:.4g}", f"{key:.4g}")
    return _Measured(facts, table)


def _energies(model: Any, input_ids: Any, text: str, bias: Any | None) -> _Measured:
    import torch
    from rich.table import Table

    from kvfold.allocate.blocks import allocate_blocks
    from kvfold.evaluate.energies import block_energies
    from kvfold.methods.blockgtq import BlockGTQ
    from kvfold.methods.energies import worth

    energies = block_energies(model, input_ids, bias=bias or BlockGTQ.bias, text=text)
    table = Table("layer", "best 4 blocks", *(f"{width} bit" for width in range(1, 9)))
    for column in table.columns:
        column.justify = "right"
    table.caption = (
        f"What the best four blocks are worth, of all; channels of each width at {BITS} bits on average"
    )
    layers = []
    for index, energy in energies.layers.items():
        scores = worth(*energy.in_blocks(energy.blocks(BlockGTQ.score)), BlockGTQ.score)
        best = scores.topk(min(4, scores.shape[1])).values.sum(1) / scores.sum(1).clamp_min(1e-30)
        widths = allocate_blocks(scores, torch.full(scores.shape[:1], BITS * scores.shape[1]))
        values, counts = widths.unique(return_counts=True)
        by_width = dict(zip(values.tolist(), (2 * counts).tolist(), strict=True))
        layers.append({"layer": index, "best_4_blocks": round(float(best.mean()), 4), "widths": by_width})
        told = (str(by_width.get(width, "")) for width in range(1, 9))
        table.add_row(str(index), f"{float(best.mean()):.0%}", *told)
    facts = {
        "bias": energies.bias,
        "fingerprint": energies.fingerprint,
        "kvfold": energies.kvfold,
        "layers": layers,
    }
    return _Measured(facts, table, energies.to_bytes())
