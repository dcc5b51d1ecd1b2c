"""Work that a GPU may do beside what its stream does next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def aside(device: torch.device, number: int = 0, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """On a GPU, launch on a stream of that number, after the current stream's work so far and beside its next, until `joined`.

    With `after`, an event of the current stream, also beside what that stream has been told since then. What is allocated
    there is reused there only, and each time after the work that the stream was forked from.
    """
    if device.type != "cuda":
        yield
        return
    stream = _side(device, number)
    stream.wait_event(after or torch.cuda.current_stream(device).record_event())
    with torch.cuda.stream(stream):
        yield


def joined(device: torch.device, number: int = 0) -> None:
    """Let the current stream wait for what was launched aside."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side(device, number))


def reached(device: torch.device) -> torch.cuda.Event | None:
    """Where the current stream is, for `aside`; None without a GPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@cache
def _side(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
