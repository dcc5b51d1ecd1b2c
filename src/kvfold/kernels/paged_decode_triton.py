"""The Triton kernels of `paged_decode`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partials(
    query, keys, values, table, starts, counts, pieces, piece_slots, partial, partial_lse, slots, first_slot, scaling, softcap,
    GROUP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_UP: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over each piece of the layer, one after the other, programs taking turns."""
    rows, dims, value_dims, tokens = (
        tl.arange(0, ROWS),
        tl.arange(0, DIM_UP),
        tl.arange(0, VALUE_UP),
        tl.arange(0, BLOCK),
    )
    first, last = tl.load(pieces), tl.load(pieces + slots)
    for piece in range(first + tl.program_id(0), last, tl.num_programs(0)):
        slot = tl.load(piece_slots + piece) - first_slot
        chunk = piece - tl.load(pieces + slot)
        page_of = table + tl.load(starts + slot) + chunk * SPAN
        stop = tl.minimum(tl.load(counts + slot) - chunk * SPAN * PAGE, SPAN * PAGE)
        q = tl.load(
            query + (slot * GROUP + rows[:, None]) * DIM + dims[None, :],
            mask=(rows[:, None] < GROUP) & (dims[None, :] < DIM),
            other=0.0,
        )
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, VALUE_UP], tl.float32)
        for start in range(0, stop, BLOCK):
            index = start + tokens
            seen = index < stop
            page = tl.load(page_of + index // PAGE, mask=seen, other=0)
            place = page.to(tl.int64) * PAGE + index % PAGE
            key = tl.load(
                keys + place[None, :] * DIM + dims[:, None],
                mask=(dims[:, None] < DIM) & seen[None, :],
                other=0.0,
            )
            value = tl.load(
                values + place[:, None] * VALUE + value_dims[None, :],
                mask=seen[:, None] & (value_dims[None, :] < VALUE),
                other=0.0,
            )
            scores = tl.dot(q, key, input_precision=PRECISION) * scaling
            if CAPPED:
                # tanh by the logistic function, which every Triton has
                scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
            scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
            # A block has at least one token, so that its peak is finite.
            top = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - top[:, None])
            shrink = tl.exp2(peak - top)
            total = total * shrink + tl.sum(weights, 1)
            mixed = mixed * shrink[:, None] + tl.dot(
                weights.to(value.dtype), value, input_precision=PRECISION
            )
            peak = top
        empty = total == 0.0
        known = tl.where(empty, 1.0, total)
        lse = tl.where(empty, float("-inf"), (peak + tl.log2(known)) * 0.6931471805599453)
        place = (piece - first) * GROUP + rows
        tl.store(
            partial + place[:, None] * VALUE + value_dims[None, :],
            mixed / known[:, None],
            mask=(rows[:, None] < GROUP) & (value_dims[None, :] < VALUE),
        )
        tl.store(partial_lse + place, lse, mask=rows < GROUP)


@triton.jit
def finish(
    partial, partial_lse, pieces, output, lse,
    GROUP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, LOTS: tl.constexpr,
):  # fmt: skip
    """Merge one head's pieces by their log-sum-exp, `LOTS` at a time."""
    head = tl.program_id(0).to(tl.int64)
    slot, query = head // GROUP, head % GROUP
    lots, dims = tl.arange(0, LOTS), tl.arange(0, VALUE_UP)
    first = tl.load(pieces)
    begin, end = tl.load(pieces + slot) - first, tl.load(pieces + slot + 1) - first
    peak, total = float("-inf"), 0.0
    mixed = tl.zeros([VALUE_UP], tl.float32)
    for start in range(begin, end, LOTS):
        piece = start + lots
        place = piece * GROUP + query
        logs = tl.load(partial_lse + place, mask=piece < end, other=float("-inf"))
        states = tl.load(
            partial + place[:, None] * VALUE + dims[None, :],
            mask=(piece < end)[:, None] & (dims[None, :] < VALUE),
            other=0.0,
        )
        top = tl.maximum(peak, tl.max(logs, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(logs - safe)
        shrink = tl.exp(peak - safe)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(states * weights[:, None], 0)
        peak = top
    known = tl.where(total == 0.0, 1.0, total)
    tl.store(output + head * VALUE + dims, (mixed / known).to(output.dtype.element_ty), mask=dims < VALUE)
    tl.store(lse + head, tl.where(total == 0.0, float("-inf"), peak + tl.log(known)))


@triton.jit
def append(
    key, value, keys, values, positions, table, starts, counts, step, start,
    key_batch, key_head, value_batch, value_head,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Put one token behind the last of one slot."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = row * tl.num_programs(0) + head
    count = tl.load(counts + slot)
    page = tl.load(table + tl.load(starts + slot) + count // PAGE).to(tl.int64)
    place = page * PAGE + count % PAGE
    dims, value_dims = tl.arange(0, DIM_UP), tl.arange(0, VALUE_UP)
    state = tl.load(key + row * key_batch + head * key_head + dims, mask=dims < DIM)
    tl.store(keys + place * DIM + dims, state, mask=dims < DIM)
    state = tl.load(value + row * value_batch + head * value_head + value_dims, mask=value_dims < VALUE)
    tl.store(values + place * VALUE + value_dims, state, mask=value_dims < VALUE)
    tl.store(positions + place, (tl.load(step) + start).to(tl.int32))
    tl.store(counts + slot, count + 1)


@triton.jit
def move(
    keys, values, positions, log_beta, gaps, sources, number,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr,
):  # fmt: skip
    """Copy tokens into gaps, programs taking turns."""
    dims, value_dims = tl.arange(0, DIM_UP), tl.arange(0, VALUE_UP)
    for index in range(tl.program_id(0), tl.load(number).to(tl.int32), tl.num_programs(0)):
        gap, source = tl.load(gaps + index), tl.load(sources + index)
        state = tl.load(keys + source * DIM + dims, mask=dims < DIM)
        tl.store(keys + gap * DIM + dims, state, mask=dims < DIM)
        state = tl.load(values + source * VALUE + value_dims, mask=value_dims < VALUE)
        tl.store(values + gap * VALUE + value_dims, state, mask=value_dims < VALUE)
        tl.store(positions + gap, tl.load(positions + source))
        tl.store(log_beta + gap, tl.load(log_beta + source))
