"""What benchmarks/kvsculpt.py found, as tables: means over passages, and how much lower than each of three references.

    python benchmarks/kvsculpt_table.py OUT.jsonl...

KL is that of generated tokens / of the text's own, in nats, by text and over all passages; "loss" is that of the text's own.
"of ..." are quotients of summed KL over the passages that both forms have, below 1 where the form is better; in brackets the
largest of any one passage. "layers" is the largest layer's mean squared error over the smallest's, of those that lost anything,
its geometric mean over passages; "seconds" their median, since the first fold on a GPU compiles (a CPU's are processor
seconds). "kept keys": heads whose keys stayed those of tokens, since held-out queries wanted that. Passages that went together
have no seconds of their own, nor do rows marked "shared", of a run that shared its GPU with others. Generated tokens are other
draws in each run, so no quotient is one of a row so marked and one that is not.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

REFERENCES = ("select-fit", "select-fit, our queries and ridge", "attention-matching")
CONTROLS = {
    "kvsculpt": "fixed keys",
    "kvsculpt, uniform": "fixed keys, uniform",
    "adam, uniform": "kvsculpt, uniform",
}

Row = dict[str, Any]


def both(rows: list[Row]) -> str:
    return " / ".join(f"{fmean(row[name] for row in rows):.4f}" for name in ("kl_generated", "kl_text"))


def apart(layers: list[float]) -> float:
    """Largest over smallest, of layers that lost anything."""
    most = max(layers)
    return most / min(error for error in layers if error > 1e-8 * most)


def cell(row: Row) -> tuple[Any, ...]:
    return row["text"], row["passage"], row.get("shared", False)


def quotient(rows: list[Row], others: list[Row], names: tuple[str, ...] = ("kl_generated", "kl_text")) -> str:
    """Of sums over the passages that both have from one run."""
    of = {cell(row): row for row in others}
    pairs = [(row, of[cell(row)]) for row in rows if cell(row) in of]
    if not pairs:
        return ""
    sums = [[sum(row[name] for row in column) for column in zip(*pairs, strict=True)] for name in names]
    most = [max(own[name] / other[name] for own, other in pairs) for name in names]
    return " / ".join(f"{own / other:.2f} ({m:.2f})" for (own, other), m in zip(sums, most, strict=True))


def table(rows: list[Row]) -> str:
    """One setting's forms at one keep."""
    forms: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        forms[row["form"]].append(row)
    texts = sorted({row["text"] for row in rows})
    references = [name for name in REFERENCES if name in forms]
    head = ["", "n", "bytes", *texts, "all", "loss", *(f"of {name}" for name in references)]
    head += ["mse", "layers", "seconds", "kept keys"]
    lines = [head, ["---"] * len(head)]
    for form, own in forms.items():
        layers = [apart(row["layers"]) for row in own]
        line = [form, str(len(own)), f"{fmean(row['bytes'] for row in own):.3f}"]
        for text in texts:
            some = [row for row in own if row["text"] == text]
            line.append(both(some) if some else "")
        line += [both(own), f"{fmean(row['loss'] for row in own):.3f}"]
        line += [quotient(own, forms[name]) for name in references]
        line += [f"{fmean(row['mse'] for row in own):.2e}", f"{geometric_mean(layers):.0f}"]
        # A shared CPU's clock tells of its other work.
        clock = "cpu_seconds" if "threads" in own[0]["hardware"] else "seconds"
        timed = [row[clock] for row in own if clock in row]
        line.append(f"{median(timed):.2f}" if timed else "")
        known = [row for row in own if "heads" in row]
        line.append(
            f"{sum(row['keys_of_tokens'] for row in known)} of {sum(row['heads'] for row in known)}"
            if known
            else ""
        )
        lines.append(line)
    found = ["| " + " | ".join(line) + " |" for line in lines]
    for form, control in CONTROLS.items():
        if form in forms and control in forms:
            kl, mse = (
                quotient(forms[form], forms[control], names)
                for names in (("kl_generated", "kl_text"), ("mse",))
            )
            found.append(f"\n{form} over {control}: KL {kl}, mse {mse}")
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", metavar="OUT.jsonl")
    args = parser.parse_args()
    settings: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for path in args.rows:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            about = (row["model"], row["dtype"], row["tokens"], row["hardware"])
            settings[(*about, row["keep"])].append(row)
    for (model, dtype, tokens, hardware, keep), rows in sorted(settings.items()):
        print(f"\n## {model}, {dtype}, {tokens} tokens, keep {keep}, {hardware}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
