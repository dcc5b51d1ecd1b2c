"""kvfold inspect: what a saved cache holds, without its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli import console
from kvfold.errors import KvfoldError

PARTS = ("keys", "values")


def inspect(
    path: Annotated[
        str | None, typer.Argument(metavar="FOLDED", help="A folded document: a path or any fsspec URL.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", help="Draw a heat map, layers by heads, of mean bits a cached number."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--cka",
            metavar="MODEL",
            help="Instead: how alike a model's layers are on --text, and windows for xkv.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", help="With --cka: a UTF-8 text file.")] = None,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="With --cka: layers of an average window.")
    ] = 4,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, help="With --cka: tokens of the text, at most.")
    ] = 2048,
    every: Annotated[
        bool, typer.Option("--all", help="Bits of every head, instead of a row for layers alike.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show a folded document: manifest, bytes by purpose, bits by layer and head; or how alike a model's layers are."""
    if png is not None:
        _need_matplotlib()
        if not png.parent.is_dir():
            raise KvfoldError(f"--png {png}: there is no folder {png.parent}")

    if (path is None) == (model is None) or (model is None) != (text is None):
        raise KvfoldError("give a folded document, or --cka MODEL with --text FILE")
    if model is not None and text is not None:
        _alignment(model, text, layers, tokens, png, json_)
        return
    assert path is not None

    from kvfold.artifact import load_stores

    manifest, stores = load_stores(path)
    bits = layer_bits(stores)
    if png is not None:
        draw(bits, png, manifest)
    if json_:
        told = {key: value for key, value in manifest.items() if key != "layers"}
        console.print_json({"manifest": told, "ledger": manifest["ledger"], "bits": bits})
        return
    _show(manifest, bits, every)
    if png is not None:
        console.out().print(f"wrote {png}", soft_wrap=True)


def _alignment(model: str, text: Path, layers: int, tokens: int, png: Path | None, json_: bool) -> None:
    from kvfold.cli import cka

    found = cka.measure(model, text, layers, tokens, quiet=json_)
    if png is not None:
        cka.draw(found, png)
    if json_:
        console.print_json(found)
        return
    cka.show(found, layers)
    if png is not None:
        console.out().print(f"wrote {png}", soft_wrap=True)


def layer_bits(layers: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """How many bits each head of each folded layer spends.

    Parameters
    ----------
    layers : list over layers of list of Store

    Returns
    -------
    list of {"layer": int, "tokens": int, "heads": list}, layers without a store left out; a head holds
    "keys" and "values", histograms {bits: share}: of channels for keys, of tokens for values, evicted ones as 0 bits;
    and "mean_keys", "mean_values", "mean": bits a number of the full cache, evicted tokens counted as 0.
    """
    result = []
    for index, stores in enumerate(layers):
        if not stores:
            continue
        heads = []
        for head in range(stores[0].kv_heads):
            tokens = sum(sum(store.real_tokens) for store in stores)
            values = _counted(stores, head, "values")
            keys = _counted(stores, head, "keys")
            kept = sum(count for bits, count in values.items() if bits)
            values[0] = max(tokens - kept, 0)
            channels = sum(keys.values()) or 1
            mean_values = sum(bits * count for bits, count in values.items()) / tokens
            # A kept token's key costs each channel's width.
            mean_keys = sum(bits * count for bits, count in keys.items()) / channels * kept / tokens
            key_dim, value_dim = stores[0].key_dim, stores[0].value_dim
            heads.append(
                {
                    "keys": {
                        str(bits): round(count / channels, 4) for bits, count in sorted(keys.items()) if count
                    },
                    "values": {
                        str(bits): round(count / tokens, 4) for bits, count in sorted(values.items()) if count
                    },
                    "mean_keys": round(mean_keys, 4),
                    "mean_values": round(mean_values, 4),
                    "mean": round((mean_keys * key_dim + mean_values * value_dim) / (key_dim + value_dim), 4),
                }
            )
        result.append(
            {"layer": index, "tokens": stores[0].tokens if len(stores) == 1 else tokens, "heads": heads}
        )
    return result


def _counted(stores: Sequence[Any], head: int, part: str) -> dict[int, int]:
    total: dict[int, int] = {}
    for store in stores:
        for bits, count in store.widths()[head][part].items():
            total[int(bits)] = total.get(int(bits), 0) + count
    return total


def _show(manifest: dict[str, Any], bits: list[dict[str, Any]], every: bool) -> None:
    from rich.table import Table

    from kvfold.cli.options import changed_options

    out = console.out()
    facts = Table(show_header=False)
    changed = changed_options(manifest["method"])
    extra, model = manifest.get("extra") or {}, manifest.get("model") or {}
    rows = {
        "document": extra.get("document"),
        "tokens": manifest["tokens"],
        "method": manifest["method"]["method"],
        "options": ", ".join(f"{key}={value}" for key, value in changed.items()) or "defaults",
        "model": extra.get("model") or model.get("name"),
        "layers": f"{model.get('layers')}, {model.get('kv_heads')} KV heads of {model.get('head_dim')}",
        "dtype": model.get("dtype"),
        "written by": f"kvfold {manifest['kvfold']}",
        "not folded": next(
            (entry["why"] for entry in manifest.get("report", []) if not entry["folded"]), None
        ),
    }
    for name, fact in rows.items():
        if fact is not None:
            facts.add_row(name, str(fact))
    out.print(facts)
    out.print(console.ledger_table(manifest["ledger"]))
    if not bits:
        return
    by, columns, rows_of = ("layer and head", ("layer", "head", "mean"), _rows_of_heads)
    if not every:
        by, columns, rows_of = ("layer (--all: and head)", ("layer", "mean", "of heads"), _rows_of_layers)
    table = Table(
        title=f"Bits by {by}: share of key channels, of value tokens (0: evicted)", title_justify="left"
    )
    for column in (*columns, *PARTS):
        table.add_column(column, justify="left" if column in PARTS else "right")
    for row in rows_of(bits):
        table.add_row(*row)
    out.print(table)


def _rows_of_heads(bits: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for layer in bits:
        for number, head in enumerate(layer["heads"]):
            name = str(layer["layer"]) if number == 0 else ""
            yield name, str(number), f"{head['mean']:.2f}", *(_shares([head[part]]) for part in PARTS)


def _rows_of_layers(bits: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Layers that follow each other and look alike are one row."""

    def cells(layer: dict[str, Any]) -> tuple[str, ...]:
        means = [head["mean"] for head in layer["heads"]]
        ends = f"{min(means):.2f}", f"{max(means):.2f}"
        spread = "" if ends[0] == ends[1] else " to ".join(ends)
        parts = (_shares([head[part] for head in layer["heads"]]) for part in PARTS)
        return f"{sum(means) / len(means):.2f}", spread, *parts

    for told, alike in groupby(bits, cells):
        numbers = [layer["layer"] for layer in alike]
        yield _numbers(numbers), *told


def _shares(heads: Sequence[dict[str, float]]) -> str:
    """The mean of heads' histograms."""
    widths = sorted({width for head in heads for width in head}, key=int)
    means = {width: sum(head.get(width, 0) for head in heads) / len(heads) for width in widths}
    return "  ".join(f"{width}:{share:.0%}" for width, share in means.items())


def _numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers, those without a gap as a range."""
    found = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        own = [number for _, number in run]
        found.append(str(own[0]) if len(own) == 1 else f"{own[0]} to {own[-1]}")
    return ", ".join(found)


def _need_matplotlib() -> None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise KvfoldError("--png needs matplotlib: pip install 'kvfold[plot]'")


def draw(bits: list[dict[str, Any]], path: Path, manifest: dict[str, Any]) -> None:
    """Write the heat maps of keys and values, layers by heads, as PNG."""
    if not bits:
        raise KvfoldError("--png: nothing in this cache was folded, so there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heads = max(len(layer["heads"]) for layer in bits)
    figure = Figure(figsize=(4 + 0.5 * heads, 2 + 0.18 * len(bits)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PARTS), sharey=True)
    grids = {part: [[head[f"mean_{part}"] for head in layer["heads"]] for layer in bits] for part in PARTS}
    top = max(value for grid in grids.values() for row in grid for value in row) or 1
    for axes, part in zip(panels, PARTS, strict=True):
        padded = [row + [float("nan")] * (heads - len(row)) for row in grids[part]]
        axes.imshow(padded, aspect="auto", vmin=0, vmax=top, cmap="viridis")
        axes.set(title=part, xlabel="KV head", xticks=range(heads))
    panels[0].set(
        ylabel="layer", yticks=range(len(bits)), yticklabels=[str(layer["layer"]) for layer in bits]
    )
    panels[0].tick_params(axis="y", labelsize=6)
    figure.colorbar(panels[0].images[0], ax=panels, label="mean bits a number (16 in a full cache)")
    method = manifest["method"]
    keep = f", keep {method['keep']}" if method.get("keep") is not None else ""
    figure.suptitle(f"{method['method']}{keep}, {manifest['tokens']} tokens", fontsize=10)
    figure.savefig(path, format="png", dpi=150)
