"""Needles and KL at equal physical bytes: RDKV beside its rivals, question in view and unseen.

    python benchmarks/needles.py prepare MODEL TEXT cases.pt        tokenise (needs the model's tokenizer)
    python benchmarks/needles.py run MODEL cases.pt results.json    measure

Each case is `TOKENS` tokens of a long text with one planted number at 10, 50 or 90 % of its depth. "unseen": the document
is folded, then the question is asked. "in view": document and question are folded together. `kl` is the mean
KL(full || folded), in nats, of next-token distributions: over the text's own next 128 tokens ("text"), and over question
and answer ("answer"). A needle is found if the folded cache's greedy answer is the full cache's, which holds the planted
number, up to its end. Every method is folded from the same exact prefill, and the full cache answers in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold import KIVI, RDKV, Full, PublishedRDKV, SnapKV
from kvfold.evaluate.prefill import Prefill, continue_logits, kl_divergence

TOKENS, NEXT = 4096, 128
DEPTHS = (0.1, 0.5, 0.9)
KEEPS = (0.5, 0.25, 0.1, 0.05, 0.025)
THINGS = ("lighthouse", "orchard gate", "harbour office")


def methods() -> dict[str, list[kvfold.Method]]:
    """Methods by label, one for each budget."""
    return {
        "rdkv": [RDKV(keep=keep) for keep in KEEPS],
        "rdkv published": [PublishedRDKV(keep=keep) for keep in KEEPS],
        "snapkv": [SnapKV(keep=keep) for keep in KEEPS],
        "snapkv then int4": [SnapKV(keep=keep, bits=4, group=64) for keep in KEEPS],
        "kivi int4": [KIVI(bits=4)],
        "kivi int2": [KIVI(bits=2)],
    }


def prepare(model: str, text: str, out: str) -> None:
    """Tokenised cases: document, question and answer for each depth and needle."""
    from kvfold.prompt import prompt_of

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = tokenizer(Path(text).read_text(), add_special_tokens=False)["input_ids"]
    rng = random.Random(0)
    cases = []
    for number, thing in enumerate(THINGS):
        start = 2000 + 20000 * number
        code = str(rng.randrange(1000, 10000))
        needle = tokenizer(f"\nThe secret number of the {thing} is {code}. Remember it.\n")["input_ids"]
        # The template of a one-word document gives the text around it.
        prefix, template = prompt_of(tokenizer, "DOC")
        before = tokenizer(prefix.partition("DOC")[0], add_special_tokens=False)["input_ids"]
        room = TOKENS - len(needle) - len(before)
        for depth in DEPTHS:
            cut = int(room * depth)
            document = before + words[start : start + cut] + needle + words[start + cut : start + room]
            question = template.first(f"What is the secret number of the {thing}?")
            cases.append(
                {
                    "document": document,
                    "next": words[start + room : start + room + NEXT],
                    # The answer's first words are given, so that models differ in what they know, not how they word it.
                    "question": tokenizer(
                        question + f"The secret number of the {thing} is ", add_special_tokens=False
                    )["input_ids"],
                    "number": tokenizer(code, add_special_tokens=False)["input_ids"],
                    "depth": depth,
                }
            )
    torch.save(cases, out)


def measure(model, case: dict, labels: list[str] | None, report) -> None:
    """Fold one case by every method, both protocols."""
    device = model.device
    document, question, following, number = (
        torch.tensor([case[name]], device=device) for name in ("document", "question", "next", "number")
    )
    every = {label: group for label, group in methods().items() if labels is None or label in labels}
    for view in ("unseen", "in view"):
        ids = document if view == "unseen" else torch.cat([document, question], 1)
        # What is fed after the fold: all but the last token of question and number, or of the number alone.
        fed = torch.cat([question, number], 1) if view == "unseen" else number
        prefill = Prefill(model, ids, [method for group in every.values() for method in group])
        first = prefill.logits.float()
        full = prefill.fold(Full())
        text = continue_logits(model, full.fork(), following)[0] if view == "unseen" else None
        reference = torch.cat([first, continue_logits(model, full, fed)[0]])
        count = number.shape[1]
        right = reference[-count - 1 : -1].argmax(-1)
        found = bool((right == number[0]).all())
        report(view=view, method="full", keep=1.0, ratio=1.0, found=found, kl={})
        for label, group in every.items():
            for method in group:
                begin = time.perf_counter()
                cache = prefill.fold(method)
                seconds = time.perf_counter() - begin
                kl = {}
                if text is not None:
                    kl["text"] = float(
                        kl_divergence(text, continue_logits(model, cache.fork(), following)[0]).mean()
                    )
                logits = torch.cat([first, continue_logits(model, cache, fed)[0]])
                # The first row is the exact prefill's own: nothing has been read from the folded cache yet.
                kl["answer"] = float(kl_divergence(reference[1:], logits[1:]).mean())
                found = bool((logits[-count - 1 : -1].argmax(-1) == number[0]).all())
                report(
                    view=view,
                    method=label,
                    keep=getattr(method, "keep", None),
                    ratio=cache.ledger().folded_ratio,
                    found=found,
                    kl=kl,
                    fold_seconds=round(seconds, 2),
                )


def table(rows: list[dict]) -> str:
    """Mean over cases, one line for each method, budget and protocol."""
    lines = [
        f"{'method':<28}{'keep':>6}{'bytes':>8}   {'unseen':>7} {'KL text':>9} {'KL answer':>10}   {'in view':>7} {'KL answer':>10}"
    ]
    keys = dict.fromkeys((row["method"], row["keep"]) for row in rows)
    for method, keep in keys:
        line = f"{method:<28}{'' if keep is None else keep:>6}"
        for view in ("unseen", "in view"):
            chosen = [
                row for row in rows if (row["method"], row["keep"], row["view"]) == (method, keep, view)
            ]
            if view == "unseen":
                line += f"{statistics.mean(row['ratio'] for row in chosen):>8.4f}"
            found = f"{sum(row['found'] for row in chosen)}/{len(chosen)}"
            line += f"   {found:>7}"
            for name in ("text", "answer") if view == "unseen" else ("answer",):
                values = [row["kl"][name] for row in chosen if name in row["kl"]]
                line += f" {statistics.mean(values) if values else 0:>{9 if name == 'text' else 10}.4f}"
        lines.append(line)
    return "\n".join(lines)


def run(model_path: str, cases_path: str, out: str, device: str, only: str, labels: list[str] | None) -> None:
    """Measure; after each case write its rows, hardware and versions."""
    cases = torch.load(cases_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(device).eval()
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result = {
        "model": Path(model_path).name,
        "tokens": TOKENS,
        "dtype": "bfloat16",
        "hardware": hardware,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvfold": kvfold.__version__,
            "python": platform.python_version(),
        },
        "rows": [],
    }
    for index in [int(number) for number in only.split(",")] if only else range(len(cases)):

        def report(index: int = index, **row) -> None:
            result["rows"].append({"case": index, "depth": cases[index]["depth"], **row})

        measure(model, cases[index], labels, report)
        Path(out).write_text(json.dumps(result, indent=1))
        print(f"case {index} done", flush=True)
    print(table(result["rows"]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True)
    first = sub.add_parser("prepare")
    first.add_argument("model")
    first.add_argument("text")
    first.add_argument("out")
    second = sub.add_parser("run")
    second.add_argument("model")
    second.add_argument("cases")
    second.add_argument("out")
    second.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    second.add_argument("--only", default="", help="case numbers, comma separated")
    second.add_argument("--methods", nargs="*", default=None)
    third = sub.add_parser("table")
    third.add_argument("results", nargs="+")
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.model, args.text, args.out)
    elif args.command == "run":
        run(args.model, args.cases, args.out, args.device, args.only, args.methods)
    else:
        print(table([row for path in args.results for row in json.loads(Path(path).read_text())["rows"]]))


if __name__ == "__main__":
    main()
