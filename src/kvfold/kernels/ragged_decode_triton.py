"""The Triton kernels of `ragged_decode`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softmax_step(
    q, peak, total, mixed, keys, values, extra, dims, value_dims, tokens, start, stop, key_stride, value_stride,
    scaling, softcap,
    DIM: tl.constexpr, VALUE: tl.constexpr, CAPPED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of tokens: online softmax in base 2."""
    index = start + tokens
    seen = index < stop
    place = index.to(tl.int64)
    key = tl.load(
        keys + place[None, :] * key_stride + dims[:, None],
        mask=(dims[:, None] < DIM) & seen[None, :],
        other=0.0,
    )
    scores = tl.dot(q, key, input_precision=PRECISION) * scaling
    if CAPPED:
        # tanh by the logistic function, which every Triton has
        scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
    if BIAS:
        scores += extra.to(tl.float32)[None, :]
    scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(peak - safe)
    value = tl.load(
        values + place[:, None] * value_stride + value_dims[None, :],
        mask=seen[:, None] & (value_dims[None, :] < VALUE),
        other=0.0,
    )
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return top, total, mixed


@triton.jit
def _count(counts, slots, SLOTS_UP: tl.constexpr):
    """Tokens of every head."""
    every = tl.arange(0, SLOTS_UP)
    return every, tl.load(counts + every, mask=every < slots, other=0)


@triton.jit
def partials(
    query, partial, partial_lse, keys, values, bias, counts, tail_keys, tail_values, length,
    tail_key_row, tail_key_head, tail_key_token, tail_value_row, tail_value_head, tail_value_token, tail_tokens,
    slots, splits, ends, chunk, scaling, softcap,
    KV_HEADS: tl.constexpr, SLOTS_UP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_UP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    BIAS: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head's queries over one split of what it keeps, or of its tail."""
    number = tl.program_id(0)
    rows, dims, value_dims = tl.arange(0, ROWS), tl.arange(0, DIM_UP), tl.arange(0, VALUE_UP)
    block = tl.arange(0, BLOCK)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_UP], tl.float32)
    if number < splits:
        every, count = _count(counts, slots, SLOTS_UP)
        parts = tl.cdiv(count, chunk)
        slot = tl.sum((tl.cumsum(parts, 0) <= number).to(tl.int32), 0)
        first = (number - tl.sum(tl.where(every < slot, parts, 0), 0)) * chunk
        offset = tl.sum(tl.where(every < slot, count, 0), 0).to(tl.int64)
        stop = tl.minimum(first + chunk, tl.sum(tl.where(every == slot, count, 0), 0))
    else:
        slot = (number - splits) // tl.maximum(ends, 1)
        first = (number - splits) % tl.maximum(ends, 1) * chunk
        offset = tl.full([], 0, tl.int64)
        stop = tl.minimum(first + chunk, tail_tokens)
    q = tl.load(
        query + (slot.to(tl.int64) * GROUP + rows[:, None]) * DIM + dims[None, :],
        mask=(rows[:, None] < GROUP) & (dims[None, :] < DIM),
        other=0.0,
    )
    # Two loops, so that the compiler knows how each side's rows are aligned.
    if number < splits:
        extra = block
        if BIAS:
            # A block ahead by hand: elements of two bytes are too narrow for the compiler to load asynchronously.
            extra = tl.load(bias + offset + first + block, mask=first + block < stop, other=0.0)
        for start in range(first, stop, BLOCK):
            now = extra
            if BIAS:
                ahead = start + BLOCK + block
                extra = tl.load(bias + offset + ahead, mask=ahead < stop, other=0.0)
            peak, total, mixed = _softmax_step(
                q, peak, total, mixed, keys + offset * DIM, values + offset * VALUE, now, dims, value_dims, block,
                start, stop, DIM, VALUE, scaling, softcap, DIM, VALUE, CAPPED, BIAS, PRECISION,
            )  # fmt: skip
    elif TAIL:
        if LENGTH:
            stop = tl.minimum(stop, tl.load(length).to(tl.int32))
        row, head = (slot // KV_HEADS).to(tl.int64), (slot % KV_HEADS).to(tl.int64)
        key_base = tail_keys + row * tail_key_row + head * tail_key_head
        value_base = tail_values + row * tail_value_row + head * tail_value_head
        for start in range(first, stop, BLOCK):
            peak, total, mixed = _softmax_step(
                q, peak, total, mixed, key_base, value_base, block, dims, value_dims, block, start, stop,
                tail_key_token, tail_value_token, scaling, softcap, DIM, VALUE, CAPPED, False, PRECISION,
            )  # fmt: skip
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    place = number.to(tl.int64) * GROUP + rows
    tl.store(
        partial + place[:, None] * VALUE + value_dims[None, :],
        mixed,
        mask=(rows[:, None] < GROUP) & (value_dims[None, :] < VALUE),
    )
    tl.store(partial_lse + place, lse, mask=rows < GROUP)


@triton.jit
def _add(
    mixed, total, top, partial, partial_lse, first, number, member, dims,
    GROUP: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add a head's parts, from `first` on, to a sum of outputs weighed by exp(log-sum-exp - top)."""
    rows = tl.arange(0, ROWS)
    for start in range(0, number, ROWS):
        place = ((first + start + rows).to(tl.int64)) * GROUP + member
        there = start + rows < number
        weights = tl.exp(tl.load(partial_lse + place, mask=there, other=float("-inf")) - top)
        states = tl.load(
            partial + place[:, None] * VALUE + dims[None, :],
            mask=there[:, None] & (dims[None, :] < VALUE),
            other=0.0,
        )
        total += tl.sum(weights, 0)
        mixed += tl.sum(states * weights[:, None], 0)
    return mixed, total


@triton.jit
def finish(
    partial, partial_lse, counts, before, before_lse, output, lse, slots, splits, ends, chunk,
    SLOTS_UP: tl.constexpr, GROUP: tl.constexpr, PARTS_UP: tl.constexpr, VALUE: tl.constexpr,
    VALUE_UP: tl.constexpr, TAIL: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Merge one query's splits, its tail's, and what came before, by their log-sum-exp."""
    head = tl.program_id(0)
    slot, member = head // GROUP, head % GROUP
    index, dims = tl.arange(0, PARTS_UP), tl.arange(0, VALUE_UP)
    every, count = _count(counts, slots, SLOTS_UP)
    parts = tl.cdiv(count, chunk)
    first = tl.sum(tl.where(every < slot, parts, 0), 0)
    number = tl.sum(tl.where(every == slot, parts, 0), 0)
    logs = tl.load(partial_lse + (first + index) * GROUP + member, mask=index < number, other=float("-inf"))
    top = tl.max(logs, 0)
    if TAIL:
        after = splits + slot * ends
        logs = tl.load(partial_lse + (after + index) * GROUP + member, mask=index < ends, other=float("-inf"))
        top = tl.maximum(top, tl.max(logs, 0))
    if BEFORE:
        earlier = tl.load(before_lse + head)
        top = tl.maximum(top, earlier)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([VALUE_UP], tl.float32)
    ROWS: tl.constexpr = 16
    mixed, total = _add(
        mixed, total, safe, partial, partial_lse, first, number, member, dims, GROUP, VALUE, ROWS
    )
    if TAIL:
        mixed, total = _add(
            mixed, total, safe, partial, partial_lse, after, ends, member, dims, GROUP, VALUE, ROWS
        )
    place = head.to(tl.int64)
    if BEFORE:
        weight = tl.exp(earlier - safe)
        total += weight
        mixed += weight * tl.load(before + place * VALUE + dims, mask=dims < VALUE, other=0.0).to(tl.float32)
    known = tl.where(total == 0.0, 1.0, total)
    tl.store(output + place * VALUE + dims, (mixed / known).to(output.dtype.element_ty), mask=dims < VALUE)
    tl.store(lse + place, tl.where(total == 0.0, float("-inf"), safe + tl.log(known)))
