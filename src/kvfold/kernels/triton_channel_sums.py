"""The Triton kernels of `channel_sums`: partial sums of each run of FINE tokens, which torch adds up.

Every sum is of one program, in one order: the result does not vary from run to run.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.position_bias import FINE, Turns, fine_rows

_FINE = tl.constexpr(FINE)
STEP = 32
"""Tokens of a run loaded at a time."""


@triton.jit
def turned(fine, crossed, coarse_cos, coarse_sin, head, token, channel, mask, dim):
    """A head's constant as RoPE turns it to some tokens: float32, in the shape of token, channel and mask together."""
    near = (head * _FINE + token % _FINE) * dim + channel
    far = token // _FINE * dim + channel
    rows = tl.load(fine + near, mask=mask, other=0.0) * tl.load(coarse_cos + far, mask=mask, other=0.0)
    return rows + tl.load(crossed + near, mask=mask, other=0.0) * tl.load(
        coarse_sin + far, mask=mask, other=0.0
    )


@triton.jit
def _sums(
    x, valid, fine, crossed, coarse_cos, coarse_sin, centre, sums, tokens, dim,
    head_stride, token_stride, valid_head, valid_token,
    STEP: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, UNTURN: tl.constexpr,
):  # fmt: skip
    run, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, DIM)
    known = channel < dim
    middle = tl.load(centre + head * dim + channel, mask=known, other=0.0)
    first, second = tl.zeros([DIM], tl.float32), tl.zeros([DIM], tl.float32)
    for start in range(0, _FINE, STEP):
        place = start + tl.arange(0, STEP)
        token = run * _FINE + place
        here = token < tokens
        mask = here[:, None] & known[None, :]
        piece = tl.load(
            x + head.to(tl.int64) * head_stride + token[:, None].to(tl.int64) * token_stride + channel[None, :],
            mask=mask, other=0.0,
        ).to(tl.float32)  # fmt: skip
        seen = tl.load(valid + head * valid_head + token * valid_token, mask=here, other=0).to(tl.float32)
        if UNTURN:
            # The fine cosines and sines stand in for the constant's rows.
            at = place[:, None] * dim + channel[None, :]
            piece = piece * seen[:, None]
            first += tl.sum(piece * tl.load(fine + at, mask=mask, other=0.0), 0)
            second += tl.sum(piece * tl.load(crossed + at, mask=mask, other=0.0), 0)
        else:
            if TURNED:
                piece -= turned(
                    fine, crossed, coarse_cos, coarse_sin, head, token[:, None], channel[None, :], mask, dim
                )
            piece = (piece - middle[None, :]) * seen[:, None]
            first += tl.sum(piece, 0)
            second += tl.sum(piece * piece, 0)
    heads, runs = tl.num_programs(1), tl.num_programs(0)
    out = sums + (head * runs + run) * dim + channel
    tl.store(out, first, mask=known)
    tl.store(out + heads * runs * dim, second, mask=known)


def _partial(x: Tensor, valid: Tensor, tables: list[Tensor], centre: Tensor, **kinds: bool) -> Tensor:
    """Sums of each run of tokens, (2, kv_heads, runs, dim)."""
    heads, tokens, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    valid = valid.view(torch.uint8)
    sums = torch.empty(2, heads, triton.cdiv(tokens, FINE), dim, dtype=torch.float32, device=x.device)
    _sums[(sums.shape[2], heads)](
        x, valid, *tables, centre, sums, tokens, dim, *x.stride()[:2], *valid.stride(),
        STEP=STEP, DIM=max(16, triton.next_power_of_2(dim)), **kinds, num_warps=4,
    )  # fmt: skip
    return sums


def channel_sums(
    x: Tensor, valid: Tensor, constant: Tensor | None, turn: Turns | None, centre: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `kvfold.kernels.channel_sums.channel_sums`."""
    taken = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float32) if centre is None else centre.float()
    tables = [x] * 4
    if constant is not None and turn is not None:
        tables = tables_of(constant, turn)
    elif constant is not None:
        taken = taken + constant.float()
    sums = _partial(x, valid, tables, taken.contiguous(), TURNED=tables[0] is not x, UNTURN=False)
    total, squares = sums.sum(2)
    return total, squares


def tables_of(constant: Tensor, turn: Turns) -> list[Tensor]:
    """What `turned` reads for a constant (kv_heads, dim)."""
    return [*(x.contiguous() for x in fine_rows(constant.float(), turn)), turn.coarse_cos, turn.coarse_sin]


def unturned_sum(x: Tensor, valid: Tensor, turn: Turns) -> Tensor:
    """As `kvfold.kernels.channel_sums.unturned_sum`: turned back by the fine turns here, by the coarse ones at the end."""
    zeros = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.float32)
    tables = [turn.fine_cos, turn.fine_sin, turn.fine_cos, turn.fine_sin]
    cosines, sines = _partial(x, valid, tables, zeros, TURNED=False, UNTURN=True)
    runs = cosines + sines[..., turn.partner]
    return ((runs * turn.coarse_cos) - runs[..., turn.partner] * turn.coarse_sin).sum(1)
