"""kvfold inspect --cka: how much the layers of a model resemble each other on a text, and windows for xkv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvfold.cli import console
from kvfold.errors import KvfoldError

PARTS = ("keys", "values")


def measure(model: str, text: Path, layers: int, tokens: int, *, quiet: bool = False) -> dict[str, Any]:
    """Alignment between the layers of a model, of keys before RoPE and of values, and windows by it.

    Parameters
    ----------
    model : str
        A local folder, a hub id, or `demo`.
    text : Path
    layers : int
        Layers of an average window.
    tokens : int
        Of the text, from its beginning, at most.

    Returns
    -------
    dict
        "layers": the folding layers; "tokens"; "keys" and "values": alignment as nested lists; "borders" for
        `xkv:borders=...`, counted among folding layers; "mean" and "mean_equal": alignment within those windows and
        within equal ones.

    Raises
    ------
    KvfoldError
        No such model or text, too short a text, or a model whose layers cannot be compared.
    """
    import torch

    from kvfold.allocate.windows import alignment, propose, within
    from kvfold.cli.models import load_model
    from kvfold.evaluate.prefill import Prefill
    from kvfold.methods import XKV

    if layers < 1:
        raise KvfoldError(f"--layers {layers}: a window has at least 1 layer")
    words = text.expanduser().read_text(encoding="utf-8-sig")
    loaded, tokenizer = load_model(model, quiet=quiet)
    ids = tokenizer(words, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < 64:
        raise KvfoldError(
            f"--text {text}: {len(ids)} tokens are too few to compare layers by: give at least 64"
        )
    views = Prefill(loaded, torch.tensor([ids], device=loaded.device), [XKV(keep=0.5, metric="plain")]).views
    keys, values = [], []
    for view in views:
        one = view.keys[0]
        plain = one if view.rotary is None else view.rotary.unrotate(one, view.positions[0])
        keys.append(plain.transpose(0, 1).flatten(1))
        values.append(view.values[0].transpose(0, 1).flatten(1))
    found = {name: alignment(states) for name, states in zip(PARTS, (keys, values), strict=True)}
    both = (found["keys"] + found["values"]) / 2
    borders = propose(both, layers)
    equal = tuple(range(layers, len(views), layers))

    def mean(starts: tuple[int, ...]) -> float:
        ends = [*starts, len(views)]
        windows = list(zip([0, *starts], ends, strict=True))
        return sum((stop - start) * within(both, start, stop) for start, stop in windows) / len(views)

    return {
        "layers": [view.layer_idx for view in views],
        "tokens": len(ids),
        **{name: [[round(value, 4) for value in row] for row in one.tolist()] for name, one in found.items()},
        "borders": list(borders),
        "mean": round(mean(borders), 4),
        "mean_equal": round(mean(equal), 4),
    }


def show(found: dict[str, Any], layers: int) -> None:
    """Print windows and how they compare with equal ones."""
    out = console.out()
    names = found["layers"]
    starts = [0, *found["borders"]]
    windows = [
        f"{names[start]}-{names[stop - 1]}" if stop - start > 1 else f"{names[start]}"
        for start, stop in zip(starts, [*found["borders"], len(names)], strict=True)
    ]
    out.print(f"{len(names)} layers, {found['tokens']} tokens: alignment of keys before RoPE and of values")
    out.print(f"windows by alignment: {', '.join(windows)} (mean within them {found['mean']:.3f})")
    out.print(f"windows of {layers}: mean within them {found['mean_equal']:.3f}")
    if found["borders"]:
        out.print(f"to use them: --method xkv --option borders={','.join(map(str, found['borders']))}")
    else:
        out.print(f"to use one window: --method xkv --option layers={len(names)}")


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the alignment of keys and values, layers by layers, as PNG; lines are the windows' borders."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PARTS), sharey=True)
    for axes, part in zip(panels, PARTS, strict=True):
        axes.imshow(found[part], vmin=0, vmax=1, cmap="viridis")
        for border in found["borders"]:
            axes.axhline(border - 0.5, color="white", linewidth=0.8)
            axes.axvline(border - 0.5, color="white", linewidth=0.8)
        axes.set(title=part, xlabel="layer")
    panels[0].set(ylabel="layer")
    figure.colorbar(panels[0].images[0], ax=panels, label="centred kernel alignment")
    figure.savefig(path, format="png", dpi=150)
