"""Logits of a vector that RoPE turns, for tokens that do not lie in order: a bias for attention over their records.

The kernel is in records.cu, beside the one that adds them itself where tokens lie in order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.kernels.position_bias import FINE, MOST_PLANES, Circles
from kvfold.kernels.record_plan import sets_of
from kvfold.kernels.records import Problem, Records, library_of, problem

WARPS, BLOCKS, TOGETHER = 8, 2400, 4
"""Warps of a block; blocks of a launch that has work for so many; coarse turns that a warp takes at a time, of four heads."""


@dataclass(frozen=True)
class Turning:
    """Logits of vectors that RoPE turns, for queries at the positions of tokens.

    Attributes
    ----------
    circles : Circles
    factors : (rows, heads, planes, 2) float32
        `circles.factors` of the queries.
    coarse, fine : Tensor
        `position_bias.coarse_pairs` and `Turns.fine`.
    """

    circles: Circles
    factors: Tensor
    coarse: Tensor
    fine: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As the operator takes them."""
        return self.factors, self.circles.channels, self.coarse, self.fine


def turned_biases(turned: Turning, records: Records, early: bool = False) -> Tensor:
    """Logits (places, group) float32 of turned vectors at every token's position: a bias, as `attend` takes it.

    By a kernel where there is one, which turns at most `MOST_PLANES` planes and leaves places without a token as they are, else
    by plain torch. `early`: the launch ahead on the stream writes nothing of what it reads but factors.
    """
    rows, kv_heads, planes, _ = turned.circles.channels.shape
    group, (turns, dim, _) = turned.factors.shape[1] // kv_heads, turned.coarse.shape
    if planes > MOST_PLANES or problem(turned.factors.device, dim, group) is not None:
        factors = turned.factors.view(rows, kv_heads, group, planes, 2)
        logits = turned.circles.logits(factors, turned.coarse, turned.fine, FINE * turns)
        return records.placed(logits.transpose(2, 3))
    runs, begins = records.begins(turns)
    found: Tensor = torch.ops.kvfold.turned_biases(
        *turned.tensors, records.positions, runs, begins, group, sum(records.slots), early
    )
    return found


@torch.library.custom_op("kvfold::turned_biases", mutates_args=(), device_types="cuda")
def _turned_biases(
    factors: Tensor,
    channels: Tensor,
    coarse: Tensor,
    fine: Tensor,
    positions: Tensor | None,
    runs: Tensor,
    begins: Tensor,
    group: int,
    places: int,
    early: bool,
) -> Tensor:
    rows, kv_heads, planes, _ = channels.shape
    bias = factors.new_empty(places, group)
    turns, row_heads, least = coarse.shape[0], rows * kv_heads, TOGETHER // sets_of(group) * WARPS
    blocks = -(-BLOCKS // row_heads)
    a_block = max(least, -(-turns // blocks // least) * least)
    given = Problem()
    given.factors, given.channels, given.coarse, given.fine, given.lse = (
        x.data_ptr() for x in (factors, channels, coarse, fine, bias)
    )
    given.group, given.turns, given.fine_stride = group, turns, fine.shape[1]
    library = library_of(coarse.shape[1], sets_of(group), WARPS, planes)
    where = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in (positions, runs, begins)]
    with torch.cuda.device(factors.device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = library.kvfold_turned_biases(ctypes.byref(given), *where, row_heads, a_block, early, stream)
    if code:
        raise RuntimeError(f"logits of a turned vector failed: {library.kvfold_records_error(code).decode()}")
    return bias


@_turned_biases.register_fake
def _(
    factors: Tensor,
    channels: Tensor,
    coarse: Tensor,
    fine: Tensor,
    positions: Tensor | None,
    runs: Tensor,
    begins: Tensor,
    group: int,
    places: int,
    early: bool,
) -> Tensor:
    return factors.new_empty(places, group)
