"""kvfold demo: fold a text with planted facts and ask for them, from the full and from the folded cache."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.fold import check_choice, document_prompt, fold_ids
from kvfold.cli.models import DEMO, DEMO_NAME, DEVICES, DTYPES


def demo(
    keep: Annotated[
        float, typer.Option("--keep", help="Budget: folded bytes over those of the 16-bit cache.")
    ] = 0.1,
    method: Annotated[str, typer.Option("--method", help="How to fold: see `kvfold methods`.")] = "rdkv",
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="A method option; repeatable.")
    ] = None,
    document: Annotated[
        Path | None, typer.Option("--document", help="Plant the facts in this text file instead.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model folder, hub id, or 'demo' (SmolLM2-135M).")
    ] = DEMO,
    dtype: Annotated[str, typer.Option("--dtype", help="|".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 24,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Fold a text and compare answers from the full and the folded cache."""
    started = time.perf_counter()
    check_choice("--dtype", dtype, DTYPES)
    check_choice("--device", device, DEVICES)

    from kvfold import demo as data
    from kvfold.cli.models import load_model
    from kvfold.cli.options import build_method

    budget = {"keep": None if method == "full" else keep}
    chosen = build_method(method, budget, option or [])
    original = data.text() if document is None else document.read_text(encoding="utf-8-sig")
    title = data.TITLE if document is None else document.name
    facts = data.facts()
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, quiet=json_)
    out = console.out()
    if not json_:
        name = DEMO_NAME if model == DEMO else model
        out.print(f"Text:    {title}, {len(original):,} characters", soft_wrap=True)
        out.print("Planted: these sentences are not in it; the demo put each between two of its paragraphs:")
        for fact in facts:
            out.print(f"         at {fact.depth:4.0%}: {fact.sentence}", soft_wrap=True)
        out.print(
            f"Model:   {name}, {str(loaded.dtype).removeprefix('torch.')} on {loaded.device}\n",
            soft_wrap=True,
        )

    text = data.planted(original, facts)
    ids, template = document_prompt(loaded, tokenizer, text)
    cache, fold_seconds = fold_ids(loaded, ids, chosen, quiet=json_)
    with console.working("reading the same text into a full cache", quiet=json_):
        full, full_seconds = _full_cache(loaded, tokenizer, text)
    rows = []
    for fact in facts:
        with console.working(fact.question, quiet=json_):
            rows.append(_compare(loaded, tokenizer, template, fact, full, cache.fork(), max_new_tokens))
    ledger = cache.ledger().to_dict()
    result = {
        "document": title,
        "method": chosen.to_dict(),
        "tokens": ledger["tokens"],
        "folded": all(entry["folded"] for entry in cache.report),
        "facts": rows,
        "right": {kind: sum(row[kind]["right"] for row in rows) for kind in ("full", "folded")},
        "ledger": ledger,
        "seconds": {
            "prefill full": round(full_seconds, 2),
            "prefill and fold": round(fold_seconds, 2),
            "all": round(time.perf_counter() - started, 2),
        },
    }
    if json_:
        console.print_json(result)
    else:
        _show(result)


def _full_cache(model: Any, tokenizer: Any, text: str) -> tuple[Any, float]:
    """The model's own cache of the same prompt, for comparison: (cache, seconds)."""
    import torch
    from transformers import DynamicCache

    from kvfold.hf import CACHE_KEYWORD
    from kvfold.prompt import PLAIN, document_tokens, prompt_of

    prefix, template = prompt_of(tokenizer, text)
    ids = document_tokens(tokenizer, prefix, model.config, templated=template != PLAIN, truncate=False)
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    with torch.no_grad():
        step = torch.tensor([ids], device=model.device)
        model(input_ids=step, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
    return cache, time.perf_counter() - start


def _compare(
    model: Any, tokenizer: Any, template: Any, fact: Any, full: Any, folded: Any, max_new_tokens: int
) -> dict[str, Any]:
    """Ask for one fact from both caches."""
    from kvfold.cli.ask import rounded
    from kvfold.cli.conversation import Conversation

    row: dict[str, Any] = {"planted": fact.sentence, "question": fact.question, "expected": fact.answer}
    for kind, cache in (("full", copy.deepcopy(full)), ("folded", folded)):
        answer = Conversation(model, tokenizer, cache, template, max_new_tokens).say(fact.question)
        row[kind] = {
            "answer": answer.text,
            "right": fact.in_answer(answer.text),
            "tokens_per_second": rounded(answer.tokens_per_second),
        }
    return row


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvfold.cli.options import changed_options

    out = console.out()
    table = Table(title="The same questions, two caches", title_justify="left", show_lines=True)
    for column in ("question", "full cache", "folded cache"):
        table.add_column(column, overflow="fold")
    for row in result["facts"]:
        cells = []
        for kind in ("full", "folded"):
            answer = row[kind]
            mark = ("✓ ", "green") if answer["right"] else ("✗ ", "red")
            speed = answer["tokens_per_second"]
            cells.append(
                Text.assemble(
                    mark, answer["answer"], ("" if speed is None else f"\n{speed:.1f} tokens/s", "dim")
                )
            )
        table.add_row(Text(f"{row['question']}\n({row['expected']})"), *cells)
    out.print(table)
    out.print()
    ledger = result["ledger"]
    out.print(console.ledger_table(ledger, f"Bytes of the folded cache, {ledger['tokens']} tokens"))
    if not result["folded"]:
        console.note("not folded: the prompt is too short for this method")
    right, count, seconds = result["right"], len(result["facts"]), result["seconds"]
    options = ", ".join(f"{key}={value}" for key, value in changed_options(result["method"]).items())
    out.print(
        f"\n{result['method']['method']} ({options or 'defaults'}): right answers {right['folded']} of {count} from the folded cache,"
        f" {right['full']} of {count} from the full one, in {ledger['ratio']:.1%} of its bytes.",
    )
    out.print(
        f"Reading the text took {seconds['prefill full']:.1f} s, reading and folding it {seconds['prefill and fold']:.1f} s;"
        f" the whole demo {seconds['all']:.0f} s.",
    )
