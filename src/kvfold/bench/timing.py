"""Milliseconds of a call that others like it follow: medians, from memory that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
ENOUGH = 300 << 20
"""Bytes which no L2 cache holds."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call.

    Attributes
    ----------
    single : float
        By itself; on a GPU by events, its L2 cache flushed before.
    graph : float or None
        One of many in a CUDA graph; None on a CPU, and where it cannot be captured.
    reason : str or None
        Why it cannot.
    """

    single: float
    graph: float | None = None
    reason: str | None = None

    @property
    def best(self) -> float:
        """As a decode loop would run it."""
        return self.single if self.graph is None else self.graph


def timed(calls: Sequence[Call], device: torch.device) -> Times:
    """Time calls that do the same to different memory."""
    if device.type != "cuda":
        return Times(by_clock(calls))
    single = by_events(calls)
    try:
        return Times(single, in_graph(calls))
    except RuntimeError as error:
        torch.cuda.synchronize()
        why = error.__context__ or error  # what stopped the capture, not its end
        return Times(single, reason=f"not captured: {str(why).strip().splitlines()[0][:120]}")


def copies(nbytes: int, device: torch.device) -> int:
    """How many buffers of this size exceed the L2 cache several times, 24 at most; 1 on a CPU."""
    return 1 if device.type != "cuda" else max(2, min(24, -(-ENOUGH // max(nbytes, 1))))


def by_kernel(call: Call) -> dict[str, float]:
    """Milliseconds of each kernel of one call on a GPU, the slowest first; those of one name together."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / 1e3 for event in found.key_averages()}
    return dict(sorted(((name, ms) for name, ms in times.items() if ms), key=lambda each: -each[1]))


def by_clock(calls: Sequence[Call], seconds: float = 0.5) -> float:
    """On a CPU: the median of as many calls as half a second holds, 5 to 50."""
    calls[0]()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 1e3 * seconds and len(times) < 50):
        begin = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


@cache
def _flushed() -> torch.Tensor:
    return torch.empty(64 << 20, dtype=torch.int32, device="cuda")


def by_events(calls: Sequence[Call], repeats: int = 50, flushes: int = 4) -> float:
    """On a GPU: the median by events, the L2 cache flushed before each call."""
    for call in calls[:8]:
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for index, (start, stop) in enumerate(pairs):
        for _ in range(flushes):
            _flushed().zero_()
        start.record()
        calls[index % len(calls)]()
        stop.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(stop) for start, stop in pairs)


def in_graph(calls: Sequence[Call], count: int = 24, repeats: int = 11) -> float:
    """On a GPU: one of `count` calls in a CUDA graph, the median over replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    return replayed(graph, repeats) / count


def replayed(graph: torch.cuda.CUDAGraph, repeats: int = 20) -> float:
    """Median milliseconds of a replay."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times)


def seconds(call: Call, device: torch.device) -> float:
    """Of one call, the device's work included."""
    _settle(device)
    begin = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
