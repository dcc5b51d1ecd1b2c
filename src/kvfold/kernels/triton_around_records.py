"""The Triton kernels of `around_records`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def prepare(
    query, coded, factors, order, scale, matrices, which, vector, planes, shift_cos, shift_sin, scaling, turn_scale,
    ORDER: tl.constexpr, ROTATED: tl.constexpr, PLANES: tl.constexpr, REAL: tl.constexpr, SHIFTED: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GROUP_UP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
):  # fmt: skip
    """Queries of one KV head in the basis of its codes, and their factors for the turned vector (see `position_bias`)."""
    if EARLY:
        gdc_launch_dependents()
    head, row = tl.program_id(1), tl.program_id(2)
    own = row * tl.num_programs(1) + head
    chosen, channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM_UP)
    inside = chosen < DIM
    factor = tl.load(scale + own * DIM + chosen, mask=inside, other=0.0) * scaling
    place = channels if ROTATED else chosen
    there = place < DIM
    if ORDER:
        place = tl.load(order + own * DIM + place, mask=there, other=0).to(tl.int32)
    if ROTATED:
        matrix = (
            matrices
            + tl.load(which + head).to(tl.int64) * DIM * DIM
            + chosen[:, None] * DIM
            + channels[None, :]
        )
        matrix = tl.load(matrix, mask=inside[:, None] & there[None, :], other=0.0)
    for index in tl.static_range(GROUP):
        line = (own * GROUP + index) * DIM
        x = tl.load(query + line + place, mask=there, other=0.0).to(tl.float32)
        if ROTATED:
            x = tl.sum(matrix * x[None, :], 1)
        tl.store(coded + line + chosen, x * factor, mask=inside)
    if PLANES > 0 and tl.program_id(0) * BLOCK < PLANES:
        queries = tl.arange(0, GROUP_UP)
        lines = query + (own * GROUP + queries)[:, None] * DIM
        first = tl.load(planes + (own * PLANES + chosen) * 2)
        second = tl.load(planes + (own * PLANES + chosen) * 2 + 1)
        some = (queries < GROUP)[:, None] & (chosen < REAL)[None, :]
        a = tl.load(vector + own * DIM + first).to(tl.float32) * (turn_scale * scaling)
        b = tl.load(vector + own * DIM + second).to(tl.float32) * (turn_scale * scaling)
        q_first = tl.load(lines + first[None, :], mask=some, other=0.0).to(tl.float32)
        q_second = tl.load(lines + second[None, :], mask=some, other=0.0).to(tl.float32)
        cosine = q_first * a[None, :] + q_second * b[None, :]
        sine = q_second * a[None, :] - q_first * b[None, :]
        if SHIFTED:
            cos, sin = tl.load(shift_cos + row * DIM + first), tl.load(shift_sin + row * DIM + second)
            turned = cosine * cos[None, :] + sine * sin[None, :]
            sine = sine * cos[None, :] - cosine * sin[None, :]
            cosine = turned
        to = factors + ((own * GROUP + queries)[:, None] * PLANES + chosen[None, :]) * 2
        real = (queries < GROUP)[:, None] & (chosen < PLANES)[None, :]
        tl.store(to, cosine, mask=real)
        tl.store(to + 1, sine, mask=real)


@triton.jit
def finish(
    mixed, sums, partial, partial_lse, before, before_lse, query, output, lse, value_scale, matrices, which, key_mean,
    value_mean, splits, scaling,
    ROTATED: tl.constexpr, KEY_MEAN: tl.constexpr, VALUE_MEAN: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, GROUP_UP: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
):  # fmt: skip
    """Turn one KV head's output over records back, and merge it with exact tokens and what came before."""
    head, row = tl.program_id(1), tl.program_id(2)
    own = row * tl.num_programs(1) + head
    chosen = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    queries, channels = tl.arange(0, GROUP_UP), tl.arange(0, DIM_UP)
    line, known = own * GROUP + queries, queries < GROUP
    some = known[:, None] & (chosen < DIM)[None, :]
    all_of = known[:, None] & (channels < DIM)[None, :]
    place = line[:, None] * DIM + chosen[None, :]
    if ROTATED:
        matrix = (
            matrices
            + tl.load(which + head).to(tl.int64) * DIM * DIM
            + chosen[:, None] * DIM
            + channels[None, :]
        )
        matrix = tl.load(matrix, mask=(chosen < DIM)[:, None] & (channels < DIM)[None, :], other=0.0)
        state = tl.zeros([GROUP_UP, BLOCK], tl.float32)
        for index in tl.static_range(GROUP):
            x = tl.load(mixed + (own * GROUP + index) * DIM + channels, mask=channels < DIM, other=0.0)
            state += tl.where((queries == index)[:, None], tl.sum(matrix * x[None, :], 1)[None, :], 0.0)
    else:
        state = tl.load(mixed + place, mask=some, other=0.0)
    state = state * tl.load(value_scale + own)
    if VALUE_MEAN:
        state += tl.load(value_mean + own * DIM + chosen, mask=chosen < DIM, other=0.0).to(tl.float32)[
            None, :
        ]
    peak = tl.load(sums + line, mask=known, other=float("-inf"))
    if KEY_MEAN:
        q = tl.load(query + line[:, None] * DIM + channels[None, :], mask=all_of, other=0.0).to(tl.float32)
        mean = tl.load(key_mean + own * DIM + channels, mask=channels < DIM, other=0.0).to(tl.float32)
        peak += tl.sum(q * mean[None, :], 1) * scaling
    empty = peak == float("-inf")
    total = tl.where(empty, 0.0, 1.0)
    state = tl.where(empty[:, None], 0.0, state)
    for split in range(splits):
        there = (line * splits + split).to(tl.int64)
        own_lse = tl.load(partial_lse + there, mask=known, other=float("-inf"))
        own_state = tl.load(partial + there[:, None] * DIM + chosen[None, :], mask=some, other=0.0).to(
            tl.float32
        )
        peak, total, state = _joined(peak, total, state, own_lse, own_state)
    if BEFORE:
        own_lse = tl.load(before_lse + line, mask=known, other=float("-inf"))
        own_state = tl.load(before + place, mask=some, other=0.0).to(tl.float32)
        peak, total, state = _joined(peak, total, state, own_lse, own_state)
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(output + place, (state / safe[:, None]).to(output.dtype.element_ty), mask=some)
    if tl.program_id(0) == 0:
        tl.store(lse + line, tl.where(total == 0.0, float("-inf"), peak + tl.log(safe)), mask=known)


@triton.jit
def _joined(peak, total, state, own_lse, own_state):
    """A sum of states weighted relative to `peak`, with one more."""
    top = tl.maximum(peak, own_lse)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp(peak - safe), tl.exp(own_lse - safe)
    return top, total * old + new, state * old[:, None] + own_state * new[:, None]
