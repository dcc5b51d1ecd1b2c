"""kvfold fold: read a document with a model, fold its cache, save it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.models import DEMO, DEVICES, DTYPES
from kvfold.cli.store import DIGITS, open_store, size_of
from kvfold.errors import ArtifactError, KvfoldError

if TYPE_CHECKING:
    from kvfold.methods.work import Work

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
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Instead of -o: keep it by content in this folder or fsspec URL ('default': kvfold's own), and find it"
            " there the next time.",
        ),
    ] = None,
    store_limit: Annotated[
        str | None,
        typer.Option(
            "--store-limit",
            metavar="SIZE",
            help="With --store: what was least recently used goes beyond this.",
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
    """Read a document with a model, fold its cache and save it.

    A method that takes long (kvsculpt) keeps what it has finished beside a local output or in the store: stopped, the same
    command goes on from there.
    """
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--device", device, DEVICES)
    name, text = read_document(document)
    kept = _opened_store(store, store_limit, output)
    path = ""
    if kept is None:
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
    for part in chosen.parts:
        _ = part.calibrated_for  # raises where its file is no calibration

    from kvfold.artifact import save
    from kvfold.cli.models import load_model

    loaded, tokenizer = load_model(model, dtype=dtype, device=device, quiet=json_)
    ids, template = document_prompt(loaded, tokenizer, text, truncate=truncate)
    extra: dict[str, Any] = {
        "document": name,
        "model": model if model == DEMO or not os.path.isdir(os.path.expanduser(model)) else absolute(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "prompt": template.to_dict(),
    }
    key = None if kept is None else kept.key(loaded, ids, chosen)
    found = None if kept is None or key is None else _found(kept, key)
    if found is None:
        parts = f"{path}.parts" if kept is None or key is None else kept.parts(key)
        with _resumed(parts, loaded, ids, chosen) as work:
            cache, seconds = fold_ids(loaded, ids, chosen, chunk_size=chunk_size, quiet=json_, work=work)
            ledger, report = cache.ledger().to_dict(), cache.report
            if kept is None or key is None:
                save(cache, path, extra)
            else:
                path = kept.put(key, cache, extra)
    else:
        assert kept is not None and key is not None
        path, extra, seconds = kept.path(key), found["extra"], 0.0
        ledger, report = found["ledger"], found["report"]
    whole = [entry["why"] for entry in report if not entry["folded"]]
    if json_:
        console.print_json(
            {
                "path": path,
                **({} if key is None else {"key": key, "found": found is not None}),
                **extra,
                "tokens": ledger["tokens"],
                "method": chosen.to_dict(),
                "folded": not whole,
                "seconds": round(seconds, 3),
                "ledger": ledger,
                "report": report,
            }
        )
        return
    for head in (head for entry in report for head in entry.get("heads", ()) if head.get("diverged")):
        console.note(
            f"layer {head['layer']}, KV head {head['head']}: the optimiser diverged; its best keys before that are kept,"
            " those of tokens (Select+Fit) if none were better"
        )
    if whole:
        console.note(f"not folded: {whole[0]}; all of it is kept as it is")
    out = console.out()
    how = "folded before" if found else f"in {seconds:.1f} s"
    out.print(console.ledger_table(ledger, f"{name}: {ledger['tokens']} tokens {how}"))
    ratio = f"{ledger['full_bytes'] / ledger['total']:.1f} times smaller" if ledger["total"] else "empty"
    where = path if kept is None or key is None else f"{key[:DIGITS]} in {kept.url}"
    out.print(
        f"{'found' if found else 'saved'} {where} ({console.megabytes(ledger['total'])} in memory, {ratio})",
        soft_wrap=True,
    )


def calibrated(method: str, path: str) -> dict[str, Any]:
    """Options of a method that is to use a file of `kvfold calibrate`."""
    from kvfold.methods.rdkv_published import load_table

    if method == "blockgtq":
        return {"calibration": absolute(path)}
    return dict(load_table(Path(path).expanduser()))


def _opened_store(url: str | None, limit: str | None, output: str | None) -> Any:
    """The store to fold into, made if it is new, or None."""
    if url is None:
        if limit is not None:
            raise KvfoldError("--store-limit is for --store")
        return None
    if output is not None:
        raise KvfoldError("give -o or --store, not both: a store names its files itself")
    kept = open_store(url, None if limit is None else size_of("--store-limit", limit))
    kept.prepare()
    return kept


def _found(kept: Any, key: str) -> dict[str, Any] | None:
    """Manifest of what was folded before, or None; a damaged entry is told and counts as none."""
    try:
        manifest: dict[str, Any] | None = kept.find(key)
    except ArtifactError as error:
        console.note(f"{error}: folding it again")
        return None
    return manifest


def document_prompt(model: Any, tokenizer: Any, text: str, *, truncate: bool = False) -> tuple[Any, Any]:
    """The prompt that a document makes: (token ids (1, tokens) on the model's device, template of questions)."""
    import torch

    from kvfold.prompt import PLAIN, document_tokens, prompt_of

    prefix, template = prompt_of(tokenizer, text)
    ids = document_tokens(tokenizer, prefix, model.config, templated=template != PLAIN, truncate=truncate)
    return torch.tensor([ids], device=model.device), template


@contextmanager
def _resumed(parts: str, model: Any, ids: Any, method: Any) -> Iterator[Any]:
    """Work that is kept beside a local output until the block ends well, so that the same command goes on with it."""
    from kvfold.artifact import SavedWork
    from kvfold.artifact.files import is_url
    from kvfold.methods.work import Work

    if is_url(parts):
        yield Work()
        return
    work = SavedWork(parts, model, ids, method)
    if work.parts:
        console.note(f"going on with what is in {parts}, where that is of this fold")
    try:
        yield work
    except BaseException:
        if work.parts:
            console.note(f"what is done is kept in {parts}: the same command goes on from there")
        raise
    work.remove()


def fold_ids(
    model: Any,
    ids: Any,
    method: Any,
    *,
    chunk_size: int | None = None,
    quiet: bool = False,
    work: Work | None = None,
) -> tuple[Any, float]:
    """Fold a prompt with a progress bar: (cache, seconds)."""
    from kvfold.api import fold as fold_prompt
    from kvfold.methods.work import Work

    start, work = time.perf_counter(), work or Work()
    with _progress(f"folding {ids.shape[1]} tokens", quiet) as (advance, tell):
        work.told = tell
        cache = fold_prompt(model, ids, method, chunk_size=chunk_size, progress=advance, work=work)
    return cache, time.perf_counter() - start


@contextmanager
def _progress(
    title: str, quiet: bool
) -> Iterator[tuple[Callable[[int, int], None], Callable[[int, int], None]]]:
    """Bars of layers folded and, where a method tells of it, of work done within: called to move the one, the other."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    screen = console.err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None, count="")
        within: list[Any] = []

        def advance(layer: int, layers: int) -> None:
            bar.update(task, completed=layer + 1, total=layers, count=f"layer {layer + 1}/{layers}")

        def tell(done: int, total: int) -> None:
            if not within:
                within.append(bar.add_task("of which distilled", total=total, count=""))
            bar.update(within[0], completed=done, total=total, count=f"{done / max(total, 1):.0%}")

        yield advance, tell


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
    from kvfold.artifact.files import check_folder

    if "://" in path:
        return
    folder = Path(path).expanduser().parent
    if not folder.is_dir():
        raise KvfoldError(f"-o {path}: there is no folder {folder}")
    if Path(path).expanduser().is_dir():
        raise KvfoldError(f"-o {path}: a folder; give a file name")
    check_folder(folder)
