"""Work that a GPU may do beside what its stream does next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def aside(device: torch.device, number: int = 0) -> Iterator[None]:
    """On a GPU, launch on a stream of that number, after the current stream's work so far and beside its next, until `joined`.

    What is allocated there is reused there only, and each time after the work that the stream was forked from.
    """
    if device.type != "cuda":
        yield
        return
    stream = _side(device, number)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def joined(device: torch.device, number: int = 0) -> None:
    """Let the current stream wait for what was launched aside."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side(device, number))


@cache
def _side(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
