"""kvfold fold: read a document with a model, fold its cache, save it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.models import DEMO, DEVICES, DTYPES
from kvfold.errors import KvfoldError

STDIN = "-"


def fold(
    document: Annotated[
        str, typer.Argument(metavar="DOC", help="A UTF-8 text file, or - for standard input.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model folder, hub id, or 'demo' (SmolLM2-135M).")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="Where to save: a path or any fsspec URL. Default: DOC.kvf here."
        ),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="How to fold: see `kvfold methods`.")] = "rdkv",
    keep: Annotated[
        float | None, typer.Option("--keep", help="Budget: all folded bytes over those of the 16-bit cache.")
    ] = None,
    bits_per_element: Annotated[
        float | None,
        typer.Option("--bits-per-element", help="Budget instead of --keep: bits a cached number."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Budget instead of --keep: 16-bit tokens a head, payload only."),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option("--bits", help="Width of codes, for methods that are told it: blockgtq, kivi, ..."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="A method option; repeatable.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration", metavar="FILE", help="From `kvfold calibrate`, for rdkv-published or blockgtq."
        ),
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option("--chunk-size", min=1, help="Read the document this many tokens at a time.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a document longer than the context.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="|".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Read a document with a model, fold its cache and save it."""
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--device", device, DEVICES)
    name, text = read_document(document)
    path = output or _default_output(document)
    check_output(path)
    if not text.strip():
        raise KvfoldError(f"{name} is empty: give a document with at least one word")

    from kvfold.cli.options import build_method

    given: dict[str, Any] = {"keep": keep, "bits_per_element": bits_per_element, "tokens": tokens}
    if calibration is not None:
        given |= calibrated(method, calibration)
    options = [*(option or []), *([] if bits is None else [f"bits={bits:g}"])]
    chosen = build_method(method, given, options)
    _ = chosen.calibrated_for  # raises where its file is no calibration

    from kvfold.artifact import save
    from kvfold.cli.models import load_model

    loaded, tokenizer = load_model(model, dtype=dtype, device=device, quiet=json_)
    cache, template, seconds = fold_document(
        loaded, tokenizer, text, chosen, chunk_size=chunk_size, truncate=truncate, quiet=json_
    )
    extra = {
        "document": name,
        "model": model if model == DEMO or not os.path.isdir(os.path.expanduser(model)) else absolute(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prompt": template.to_dict(),
    }
    save(cache, path, extra)
    ledger = cache.ledger().to_dict()
    whole = [entry["why"] for entry in cache.report if not entry["folded"]]
    if json_:
        console.print_json(
            {
                "path": path,
                **extra,
                "tokens": ledger["tokens"],
                "method": chosen.to_dict(),
                "folded": not whole,
                "seconds": round(seconds, 3),
                "ledger": ledger,
            }
        )
        return
    if whole:
        console.note(f"not folded: {whole[0]}; all of it is kept as it is")
    out = console.out()
    out.print(console.ledger_table(ledger, f"{name}: {ledger['tokens']} tokens in {seconds:.1f} s"))
    ratio = f"{ledger['full_bytes'] / ledger['total']:.1f} times smaller" if ledger["total"] else "empty"
    out.print(f"saved {path} ({console.megabytes(ledger['total'])} in memory, {ratio})", soft_wrap=True)


def calibrated(method: str, path: str) -> dict[str, Any]:
    """Options of a method that is to use a file of `kvfold calibrate`."""
    from kvfold.methods.rdkv_published import load_table

    if method == "blockgtq":
        return {"calibration": absolute(path)}
    return dict(load_table(Path(path).expanduser()))


def fold_document(
    model: Any,
    tokenizer: Any,
    text: str,
    method: Any,
    *,
    chunk_size: int | None = None,
    truncate: bool = False,
    quiet: bool = False,
) -> tuple[Any, Any, float]:
    """Fold a document's prompt with a progress bar: (cache, template of questions, seconds)."""
    import torch

    from kvfold.api import fold as fold_prompt
    from kvfold.prompt import PLAIN, document_tokens, prompt_of

    prefix, template = prompt_of(tokenizer, text)
    ids = document_tokens(tokenizer, prefix, model.config, templated=template != PLAIN, truncate=truncate)
    start = time.perf_counter()
    with _progress(f"folding {len(ids)} tokens", quiet) as advance:
        cache = fold_prompt(
            model, torch.tensor([ids], device=model.device), method, chunk_size=chunk_size, progress=advance
        )
    return cache, template, time.perf_counter() - start


@contextmanager
def _progress(title: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console.err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("layer"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def advance(layer: int, layers: int) -> None:
            bar.update(task, completed=layer + 1, total=layers)

        yield advance


def read_document(document: str) -> tuple[str, str]:
    """Name and text of a file or of standard input."""
    if document == STDIN:
        return "standard input", sys.stdin.buffer.read().decode("utf-8-sig")
    path = Path(document).expanduser()
    return path.name, path.read_text(encoding="utf-8-sig")


def absolute(path: str) -> str:
    """A local path that means the same from another folder."""
    return str(Path(path).expanduser().resolve())


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise KvfoldError(f"{flag} {value}: choose from {', '.join(choices)}")


def _default_output(document: str) -> str:
    if document == STDIN:
        raise KvfoldError("reading standard input: say where to save with -o FILE")
    return Path(document).with_suffix(".kvf").name


def check_output(path: str) -> None:
    """Refuse, before any work, a local path that cannot be written."""
    if "://" in path:
        return
    folder = Path(path).expanduser().parent
    if not folder.is_dir():
        raise KvfoldError(f"-o {path}: there is no folder {folder}")
    if Path(path).expanduser().is_dir():
        raise KvfoldError(f"-o {path}: a folder; give a file name")
