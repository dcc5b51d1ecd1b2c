"""kvfold chat: one growing conversation with a folded document."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kvfold.cli import console
from kvfold.cli.ask import open_folded, stream
from kvfold.cli.models import DEVICES
from kvfold.cli.store import stored_path
from kvfold.errors import KvfoldError

QUIT = "/quit"


def chat(
    path: Annotated[
        str,
        typer.Argument(
            metavar="FOLDED", help="A folded document: a path or any fsspec URL; with --store, its key."
        ),
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
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 256,
    device: Annotated[str, typer.Option("--device", help="|".join(DEVICES))] = "auto",
) -> None:
    """Talk with a folded document; each question sees those before it. Reads lines from a pipe too."""
    loaded, tokenizer, cache, template = open_folded(stored_path(store, path), model, device, quiet=False)

    from kvfold.cli.conversation import Conversation

    conversation = Conversation(loaded, tokenizer, cache, template, max_new_tokens)
    for question in _questions():
        try:
            stream(conversation, question)
        except KvfoldError as error:  # the context is full: what was said stays true
            raise KvfoldError(f"{error}; start a new chat") from error


def _questions() -> Iterator[str]:
    human = sys.stdin.isatty()
    if human:
        console.note(f"ask about the document; {QUIT} or Ctrl-D ends")
    while True:
        try:
            line = input("> ") if human else sys.stdin.readline()
        except EOFError:
            return
        if not human and not line:
            return
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line.strip()
