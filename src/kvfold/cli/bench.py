"""kvfold bench: time, memory and bytes of folded caches on this machine, beside the full cache in the same run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvfold.cli import console
from kvfold.cli.fold import check_choice, check_output
from kvfold.cli.models import DEVICES, DTYPES
from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from kvfold.bench import Candidate, Setup

METHODS = ("blockgtq:bits=4", "blockgtq:bits=3", "blockgtq:bits=2", "rdkv")
UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

Shape = Annotated[
    str | None,
    typer.Option(
        "--shape", help="Random weights of a known shape. Default: llama-3.1-8b; smollm2-135m on a CPU."
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A model instead: folder, hub id, or 'demo'.")
]
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="8192,32768", help="Tokens that the cache holds."),
]
Batch = Annotated[str, typer.Option("--batch", metavar="1,8", help="Rows that are decoded together.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"See `kvfold methods`; repeatable. Default: {', '.join(METHODS)}.",
    ),
]
Keep = Annotated[
    float, typer.Option("--keep", help="Budget of methods that are given no other: bytes over 16-bit bytes.")
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Only so many layers of the --shape.")]
Dtype = Annotated[str, typer.Option("--dtype", help="|".join(DTYPES))]
Device = Annotated[str, typer.Option("--device", help="|".join(DEVICES))]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write every figure there; - prints instead of tables."),
]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE.html", help="Write a chart there.")]

app = typer.Typer(
    name="bench",
    help="Measure folded caches on this machine: time, memory, bytes, beside the full cache in the same run.",
    epilog="Example: kvfold bench attention --context 8192,131072 --json attention.json --plot attention.html",
    no_args_is_help=True,
)  # fmt: skip


@app.command(epilog="Example: kvfold bench attention --method blockgtq:bits=3 --context 131072 --json a.json")
def attention(
    shape: Shape = None,
    model: Model = None,
    context: Context = None,
    batch: Batch = "1",
    method: Methods = None,
    keep: Keep = 0.1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_: Json = None,
    plot: Plot = None,
) -> None:
    """One layer, one token: every SDPA backend and FlashInfer, folded caches, and the floor of their bytes.

    Results are checked against float64 first; a wrong one is not timed. Weights are random, also with --model.
    """
    run = _Run("attention", json_, plot)
    setup = run.setup(shape, model, context, batch, method, keep, dtype, device, outline=True)

    from kvfold.bench import attention as bench

    run.measure(setup, bench(setup), _ATTENTION)


@app.command(
    epilog="Example: kvfold bench decode --shape qwen2.5-3b --context 8192,131072 --plot decode.html"
)
def decode(
    shape: Shape = None,
    model: Model = None,
    context: Context = None,
    batch: Batch = "1",
    method: Methods = None,
    keep: Keep = 0.1,
    layers: Layers = None,
    stock: Annotated[
        bool, typer.Option("--stock/--no-stock", help="model.generate with a DynamicCache beside it.")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_: Json = None,
    plot: Plot = None,
) -> None:
    """A whole decode step by kvfold.generate's engine, and its share of (weights + cache) / bandwidth."""
    run = _Run("decode", json_, plot)
    setup = run.setup(shape, model, context, batch, method, keep, dtype, device, layers)

    from kvfold.bench import decode as bench

    run.measure(setup, bench(setup, stock), _DECODE)


@app.command(
    epilog="Example: kvfold bench memory --context 32768 --method rdkv --keep 0.1 --json memory.json"
)
def memory(
    shape: Shape = None,
    model: Model = None,
    context: Context = None,
    batch: Batch = "1",
    method: Methods = None,
    keep: Keep = 0.1,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_: Json = None,
    plot: Plot = None,
) -> None:
    """Peak and live bytes of a prefill that is folded, the ledger beside the allocator, the longest context that fits."""
    run = _Run("memory", json_, plot)
    setup = run.setup(shape, model, context, batch, method, keep, dtype, device, layers)

    from kvfold.bench import memory as bench

    run.measure(setup, bench(setup), _MEMORY)


@app.command(epilog="Example: kvfold bench throughput --budget 40GB --context 65536 --json throughput.json")
def throughput(
    budget: Annotated[str, typer.Option("--budget", metavar="40GB", help="Bytes of all caches together.")],
    shape: Shape = None,
    model: Model = None,
    context: Context = None,
    batch: Batch = "1",
    method: Methods = None,
    keep: Keep = 0.1,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_: Json = None,
    plot: Plot = None,
) -> None:
    """Tokens a second with as many requests as the budget holds; smaller batches too, as --batch says."""
    size = _bytes("--budget", budget)
    run = _Run("throughput", json_, plot, {"budget": size})
    setup = run.setup(shape, model, context, batch, method, keep, dtype, device, layers)

    from kvfold.bench import throughput as bench

    run.measure(setup, bench(setup, size), _THROUGHPUT)


@app.command(epilog="Example: kvfold bench fold --layers 4 --context 32768,131072 --json fold.json")
def fold(
    shape: Shape = None,
    model: Model = None,
    context: Context = None,
    batch: Batch = "1",
    method: Methods = None,
    keep: Keep = 0.1,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_: Json = None,
    plot: Plot = None,
) -> None:
    """What folding takes beside the prefill, and its peak above the folded cache."""
    run = _Run("fold", json_, plot)
    setup = run.setup(shape, model, context, batch, method, keep, dtype, device, layers)

    from kvfold.bench import fold as bench

    run.measure(setup, bench(setup), _FOLD)


# ---- from the command line to a setup ----


class _Run:
    """One command: checks first where it will write, then measures and writes as it goes."""

    def __init__(self, bench: str, json_: str | None, plot: str | None, settings: Any = None):
        self.bench, self.json, self.plot, self.settings = bench, json_, plot, settings or {}
        self.printed = json_ == "-"
        for flag, path in (("--json", None if self.printed else json_), ("--plot", plot)):
            if path is not None:
                _check_writable(flag, path)
        if plot is not None and Path(plot).suffix.lower() not in (".html", ".htm"):
            raise KvfoldError(f"--plot {plot}: end the name in .html")

    def setup(
        self,
        shape: str | None,
        model: str | None,
        context: str | None,
        batch: str,
        method: list[str] | None,
        keep: float,
        dtype: str,
        device: str,
        layers: int | None = None,
        *,
        outline: bool = False,
    ) -> Setup:
        """Everything checked, the model's weights not made yet."""
        check_choice("--dtype", dtype, DTYPES)
        check_choice("--device", device, DEVICES)
        if shape is not None and model is not None:
            raise KvfoldError("--shape and --model: give one of them")
        if layers is not None and model is not None:
            raise KvfoldError("--layers: only a --shape can be cut")
        counts = _counts("--batch", batch)
        lengths = None if context is None else _counts("--context", context)

        import torch

        from kvfold.bench import Setup
        from kvfold.bench.shapes import config_of
        from kvfold.cli.models import load_model, load_outline

        if device == "cuda" and not torch.cuda.is_available():
            raise KvfoldError("--device cuda: torch sees no CUDA device (kvfold doctor tells more)")
        kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        usual = torch.bfloat16 if kind == "cuda" else torch.float32
        number = usual if dtype == "auto" else getattr(torch, dtype)
        if lengths is None:
            lengths = (8192, 32768) if kind == "cuda" else (1024, 4096)
        candidates = candidates_of(method or METHODS, keep)
        loaded = None
        if model is None:
            shape = shape or ("llama-3.1-8b" if kind == "cuda" else "smollm2-135m")
            config = config_of(shape, layers)
        elif outline:
            config, _ = load_outline(model, quiet=self.printed)
        else:
            loaded, _ = load_model(model, dtype=dtype, device=kind, quiet=self.printed)
            loaded.generation_config.eos_token_id = None
            config, number = loaded.config, loaded.dtype
        self.model = (model or shape or "") + (f", {layers} layers" if layers else "")
        self.settings |= {"keep": keep}
        return Setup(config, candidates, lengths, counts, number, torch.device(kind), loaded)

    def measure(self, setup: Setup, rows: Iterator[dict[str, Any]], columns: _Columns) -> None:
        """Run the bench; what it has found so far is in the files even if it fails later."""
        from kvfold.bench.page import to_html
        from kvfold.bench.record import Record, write

        record = Record(
            self.bench,
            self.model,
            str(setup.dtype).removeprefix("torch."),
            setup.device.type,
            shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            self.settings,
        )
        with console.progress(f"bench {self.bench}", quiet=self.printed) as advance:
            for row in rows:
                record.rows.append(row)
                advance(f"{row['label']}, {row['context']:,} tokens, batch {row['batch']}")
                if self.json is not None and not self.printed:
                    record.write(self.json)
                if self.plot is not None:
                    write(self.plot, to_html(record))
        if self.printed:
            console.print_json(record.to_dict())
            return
        told = record.to_dict()
        title = f"{self.model}, {record.dtype}, {told['hardware']}"
        console.out().print(table(record.rows, columns, title))
        for remark in remarks(record.rows):
            console.note(remark)
        for path in (self.json, self.plot):
            if path is not None:
                console.out().print(f"wrote {path}", soft_wrap=True)


def candidates_of(labels: Iterable[str], keep: float) -> tuple[Candidate, ...]:
    """Methods from labels, each with `keep` where it takes that and is given no other budget."""
    from dataclasses import fields

    from kvfold.bench import Candidate
    from kvfold.cli.options import build_method, split_label
    from kvfold.methods import METHODS as KNOWN

    found = []
    for label in labels:
        name, own = split_label(label.partition(">>")[0].strip())
        kind = KNOWN.get(name)
        takes = kind is not None and "keep" in {field.name for field in fields(kind)}
        budgeted = kind is not None and any(option in kind.budgets for option in own)
        given = {"keep": keep} if takes and not budgeted else {}
        method = build_method(label, given, ())
        found.append(Candidate(label + (f", keep {keep:g}" if given else ""), method))
    return tuple(found)


def _counts(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise KvfoldError(
            f"{flag} {text}: write whole numbers with commas between, such as 1024,4096"
        ) from None


def _bytes(flag: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise KvfoldError(f"{flag} {text}: write bytes as 40GB, 500MB, ... (units of 1000)")
    return int(float(match[1]) * UNITS[match[2]])


def _check_writable(flag: str, path: str) -> None:
    """Refuse, before any work, a file that cannot be written."""
    import os

    try:
        check_output(path)
    except KvfoldError as error:
        raise KvfoldError(str(error).replace("-o", flag, 1)) from None
    if not os.access(Path(path).expanduser().resolve().parent, os.W_OK):
        raise KvfoldError(f"{flag} {path}: its folder cannot be written to; choose another place")


# ---- tables ----

_Columns = tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]


def _figure(key: str, pattern: str = "{:.4g}") -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else pattern.format(row[key])


def _size(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else console.megabytes(int(row[key]))


_ATTENTION: _Columns = (
    ("ms", _figure("ms")),
    ("alone, ms", _figure("single_ms")),
    ("bytes", _size("bytes")),
    ("times best full", _figure("speedup", "{:.2f}")),
    ("floor, ms", _figure("floor_ms")),
    ("times floor", _figure("times_floor", "{:.2f}")),
    ("error", _figure("error", "{:.0e}")),
)
_DECODE: _Columns = (
    ("ms a token", _figure("ms")),
    ("graph, ms", _figure("step_ms")),
    ("cache", _size("bytes")),
    ("times full", _figure("speedup", "{:.2f}")),
    ("floor, ms", _figure("floor_ms")),
    ("of bandwidth", _figure("share", "{:.0%}")),
)
_MEMORY: _Columns = (
    ("peak", _size("peak_bytes")),
    ("live", _size("live_bytes")),
    ("ledger", _size("ledger_bytes")),
    ("bytes a token", _figure("bytes_per_token", "{:,.0f}")),
    ("longest context", _figure("longest", "{:,}")),
    ("had", lambda row: {True: "yes", False: "no", None: ""}[row.get("confirmed")]),
)
_THROUGHPUT: _Columns = (
    ("a request", _size("bytes")),
    ("most", _figure("most", "{:,}")),
    ("ms a step", _figure("ms")),
    ("graph, ms", _figure("step_ms")),
    ("tokens/s", _figure("tokens_per_second", "{:,.1f}")),
    ("times full", _figure("speedup", "{:.2f}")),
)
_FOLD: _Columns = (
    ("prefill, s", _figure("prefill_seconds", "{:.3f}")),
    ("fold, s", _figure("fold_seconds", "{:.3f}")),
    ("of prefill", _figure("share", "{:.1%}")),
    ("scratch", _size("scratch_bytes")),
    ("peak above, layers", _figure("above_layers", "{:.2f}")),
)


def table(rows: list[dict[str, Any]], columns: _Columns, title: str) -> Table:
    """Rows by context and batch, in the order of their measurement; columns without a figure are left out."""
    shown = [(name, write) for name, write in columns if any(write(row) for row in rows)]
    found = Table(title=title, title_justify="left")
    found.add_column("tokens", justify="right", no_wrap=True)
    found.add_column("cache", overflow="fold")
    for name, write in shown:
        # A narrow console breaks headings and names, never cuts a figure.
        widest = max(len(write(row)) for row in rows)
        found.add_column(name, justify="right", min_width=widest, overflow="fold")
    before = None
    for row in rows:
        if before is not None and before != row["context"]:
            found.add_section()
        before = row["context"]
        found.add_row(f"{row['batch']:,} x {before:,}", row["label"], *(write(row) for _, write in shown))
    return found


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Why rows have no figures, or no graph: each reason once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if why := row.get("problem") or row.get("reason"):
            found.setdefault(why, []).append(row["label"])
    return [f"{', '.join(dict.fromkeys(labels))}: {why}" for why, labels in found.items()]
