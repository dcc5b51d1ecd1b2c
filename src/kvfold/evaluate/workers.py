"""Several processes that share a grid: started here, or by `accelerate launch`."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from kvfold.errors import KvfoldError
from kvfold.evaluate.grid import Grid
from kvfold.evaluate.measure import why
from kvfold.evaluate.plan import Plan, Tick


def need_accelerate() -> None:
    """Raise KvfoldError if several processes cannot work together."""
    if importlib.util.find_spec("accelerate") is None:
        raise KvfoldError("several workers need accelerate: pip install 'kvfold[eval]'")


def share(plan: Plan, run_id: str, tick: Tick) -> None:
    """Measure the share of one process among those that accelerate started."""
    from accelerate import PartialState

    cpu = plan.grid.device == "cpu" or not torch.cuda.is_available()
    # Nothing is ever exchanged, so that a process that dies takes no other with it.
    state = PartialState(cpu=cpu, backend="gloo", timeout=timedelta(minutes=2))
    try:
        plan.measure(run_id, state.process_index, state.num_processes, str(state.device), tick)
    finally:
        state.destroy_process_group()


def _worker(grid: Grid, folder: Path, retry: bool, chats: Mapping[str, bool], run_id: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        share(Plan(grid, folder, retry, chats), run_id, lambda done: None)
    except Exception as error:
        rank = os.environ.get("RANK", "?")
        sys.stderr.write(f"worker {rank}: {why(error)}\n")
        sys.exit(1)


def _end_with_parent() -> None:
    """A worker whose parent was killed would measure on, unseen, beside the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started here leave Ctrl-C to their parent, which ends them without a traceback from each."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def launch(plan: Plan, run_id: str, workers: int, tick: Tick) -> list[str]:
    """Measure in processes of their own; notes on those that failed."""
    from accelerate.utils import patch_environment

    context = multiprocessing.get_context("spawn")
    processes = []
    shared = {
        "world_size": workers,
        "local_world_size": workers,
        "master_addr": "127.0.0.1",
        "master_port": _free_port(),
        "omp_num_threads": max(1, torch.get_num_threads() // workers),
    }
    before = _rows(plan.folder)
    try:
        for rank in range(workers):
            process = context.Process(
                target=_worker,
                args=(plan.grid, plan.folder, plan.retry, plan.chats, run_id),
                name=f"kvfold-eval-{rank}",
            )
            with patch_environment(**shared, **_placed(rank)), _deaf_to_interrupts():
                process.start()
            processes.append(process)
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.join(0.2)
            tick(_rows(plan.folder) - before)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
    failed = [(rank, process.exitcode) for rank, process in enumerate(processes) if process.exitcode]
    return [
        f"worker {rank} ended with exit code {code}: run again to measure what it left"
        for rank, code in failed
    ]


def _placed(rank: int) -> dict[str, str | int]:
    """A worker's place: every worker sees one GPU, which several may share, since much of folding is no GPU work."""
    place: dict[str, str | int] = {"rank": rank, "local_rank": 0 if torch.cuda.is_available() else rank}
    if torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
        place["cuda_visible_devices"] = devices[rank % len(devices)]
    return place


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _rows(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("rows-*.jsonl"))
