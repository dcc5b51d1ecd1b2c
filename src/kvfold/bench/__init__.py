"""What a folded cache costs and saves on this machine: time, memory and bytes, beside the full cache in the same run."""

from __future__ import annotations

from kvfold.bench.attention import attention
from kvfold.bench.decode import decode
from kvfold.bench.fold import fold
from kvfold.bench.memory import memory
from kvfold.bench.setup import Candidate, Setup
from kvfold.bench.throughput import throughput

BENCHES = {
    "attention": attention,
    "decode": decode,
    "memory": memory,
    "throughput": throughput,
    "fold": fold,
}
"""Each yields rows, plain data, as they are measured."""

__all__ = ["BENCHES", "Candidate", "Setup", "attention", "decode", "fold", "memory", "throughput"]
