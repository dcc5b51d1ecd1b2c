"""kvfold ask: questions to a folded document, each on its own."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvfold.cli import console
from kvfold.cli.fold import check_choice
from kvfold.cli.models import DEVICES
from kvfold.cli.store import stored_path
from kvfold.errors import KvfoldError


def ask(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FOLDED", help="A folded document: a path or any fsspec URL; with --store, its key."
        ),
    ],
    questions: Annotated[
        list[str],
        typer.Argument(metavar="QUESTION...", help="Each is asked by itself; none sees the others."),
    ],
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="URL", help="Where `kvfold fold --store` put it; its key may be cut short."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model, if it is elsewhere than when folding.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 64,
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
    json_: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of answers with their speed.")
    ] = False,
) -> None:
    """Ask a folded document questions."""
    if not all(question.strip() for question in questions):
        raise KvfoldError("the question is empty")
    loaded, tokenizer, cache, template = open_folded(stored_path(store, path), model, device, quiet=json_)

    from kvfold.cli.conversation import Conversation

    answers: list[dict[str, Any]] = []
    for question in questions:
        conversation = Conversation(loaded, tokenizer, cache.fork(), template, max_new_tokens)
        if json_:
            conversation.say(question)
        else:
            if len(questions) > 1:
                console.out().print(f"> {question}", style="bold", soft_wrap=True)
            stream(conversation, question)
        answer = conversation.answer
        assert answer is not None
        answers.append(
            {
                "question": question,
                "answer": answer.text,
                "tokens": answer.tokens,
                "tokens_per_second": rounded(answer.tokens_per_second),
                "first_token_seconds": round(answer.first_token_seconds, 4),
            }
        )
    if json_:
        console.print_json(answers)


def stream(conversation: Any, question: str) -> None:
    """Write an answer as it comes, without leading space, ending in a newline."""
    begun = False
    for piece in conversation.ask(question):
        shown = piece if begun else piece.lstrip()
        begun = begun or bool(shown)
        sys.stdout.write(shown)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def rounded(value: float | None) -> float | None:
    """Two decimals, for JSON."""
    return None if value is None else round(value, 2)


def open_folded(path: str, model: str | None, device: str, *, quiet: bool) -> tuple[Any, Any, Any, Any]:
    """Load a folded document and its model: (model, tokenizer, cache, template of questions)."""
    check_choice("--device", device, DEVICES)

    from kvfold.api import load
    from kvfold.artifact import read_manifest
    from kvfold.cli.models import load_model
    from kvfold.prompt import Template

    extra = read_manifest(path).get("extra") or {}
    spec = model or extra.get("model")
    if not spec:
        raise KvfoldError(f"{path} does not say which model it belongs to: give --model")
    loaded, tokenizer = load_model(spec, dtype=extra.get("dtype", "auto"), device=device, quiet=quiet)
    with console.working(f"loading {path}", quiet=quiet):
        cache = load(path, loaded)
    return loaded, tokenizer, cache, Template.from_dict(extra.get("prompt"))
