"""Device work as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CaptureError(Exception):
    """The work cannot be captured; the message says why."""


def captured(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture what `run` does on the device. Nothing is done yet, and what it builds once must have been built.

    Raises
    ------
    CaptureError
        It waits for the device, or allocates where that is not possible.
    """
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index]
    state = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        # A capture that ends in an error leaves the generator waiting for the graph.
        generator.graphsafe_set_state(state)
        first = error.__context__ or error
        raise CaptureError(str(first).splitlines()[0]) from error
    return graph
