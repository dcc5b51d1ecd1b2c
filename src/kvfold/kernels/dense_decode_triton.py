"""The Triton kernels of `dense_decode`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softmax_step(
    q, peak, total, mixed, keys, values, dims, value_dims, tokens, start, stop,
    key_stride, value_stride, valid, scaling, softcap,
    DIM: tl.constexpr, VALUE: tl.constexpr, CAPPED: tl.constexpr, VALID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of tokens: online softmax in base 2."""
    index = start + tokens
    seen = index < stop
    if VALID:
        seen = seen & (tl.load(valid + index, mask=seen, other=0) != 0)
    place = index.to(tl.int64)
    key = tl.load(
        keys + place[None, :] * key_stride + dims[:, None],
        mask=(dims[:, None] < DIM) & (index < stop)[None, :],
        other=0.0,
    )
    scores = tl.dot(q, key, input_precision=PRECISION) * scaling
    if CAPPED:
        # tanh by the logistic function, which every Triton has
        scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
    scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(peak - safe)
    value = tl.load(
        values + place[:, None] * value_stride + value_dims[None, :],
        mask=(index < stop)[:, None] & (value_dims[None, :] < VALUE),
        other=0.0,
    )
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return top, total, mixed


@triton.jit
def partials(
    query, partial, partial_lse,
    keys, values, length, valid, key_batch, key_head, key_token, value_batch, value_head, value_token, valid_batch, tokens,
    tail_keys, tail_values, tail_length, tail_valid, tail_key_batch, tail_key_head, tail_key_token, tail_value_batch,
    tail_value_head, tail_value_token, tail_valid_batch, tail_tokens, places,
    splits, chunk, tail_chunk, scaling, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, VALUE: tl.constexpr,
    VALUE_UP: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, HISTORY: tl.constexpr, LENGTH: tl.constexpr,
    VALID: tl.constexpr, PLACED: tl.constexpr, TAIL: tl.constexpr, TAIL_LENGTH: tl.constexpr, TAIL_VALID: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head's queries over one split of history and tail."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    rows, dims, value_dims, block = (
        tl.arange(0, ROWS),
        tl.arange(0, DIM_UP),
        tl.arange(0, VALUE_UP),
        tl.arange(0, BLOCK),
    )
    first = row * heads + head * GROUP
    q = tl.load(
        query + (first + rows[:, None]) * DIM + dims[None, :],
        mask=(rows[:, None] < GROUP) & (dims[None, :] < DIM),
        other=0.0,
    )
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_UP], tl.float32)
    # Each split takes its share of the history, then of the tail: all are about as long, and run at once.
    if HISTORY:
        if PLACED:
            keys += tl.multiple_of(tl.load(places + row * 3), PLACED)
            values += tl.multiple_of(tl.load(places + row * 3 + 1), PLACED)
            tokens = tl.load(places + row * 3 + 2).to(tl.int32)
            key_batch, key_head, key_token = 0, tokens * DIM, DIM
            value_batch, value_head, value_token = 0, tokens * VALUE, VALUE
        stop = tl.minimum((split + 1) * chunk, tokens)
        if LENGTH:
            stop = tl.minimum(stop, tl.load(length).to(tl.int32))
        key_base = keys + row * key_batch + head * key_head
        value_base = values + row * value_batch + head * value_head
        for start in range(split * chunk, stop, BLOCK):
            peak, total, mixed = _softmax_step(
                q, peak, total, mixed, key_base, value_base, dims, value_dims, block, start, stop,
                key_token, value_token, valid + row * valid_batch, scaling, softcap,
                DIM, VALUE, CAPPED, VALID, PRECISION,
            )  # fmt: skip
    if TAIL:
        stop = tl.minimum((split + 1) * tail_chunk, tail_tokens)
        if TAIL_LENGTH:
            stop = tl.minimum(stop, tl.load(tail_length).to(tl.int32))
        key_base = tail_keys + row * tail_key_batch + head * tail_key_head
        value_base = tail_values + row * tail_value_batch + head * tail_value_head
        for start in range(split * tail_chunk, stop, BLOCK):
            peak, total, mixed = _softmax_step(
                q, peak, total, mixed, key_base, value_base, dims, value_dims, block, start, stop,
                tail_key_token, tail_value_token, tail_valid + row * tail_valid_batch, scaling, softcap,
                DIM, VALUE, CAPPED, TAIL_VALID, PRECISION,
            )  # fmt: skip
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    place = (first + rows) * splits + split
    tl.store(
        partial + place[:, None] * VALUE + value_dims[None, :],
        mixed,
        mask=(rows[:, None] < GROUP) & (value_dims[None, :] < VALUE),
    )
    tl.store(partial_lse + place, lse, mask=rows < GROUP)


@triton.jit
def finish(
    partial, partial_lse, before, before_lse, output, lse, splits,
    SPLITS_UP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Merge one head's splits, and what came before, by their log-sum-exp."""
    head = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, SPLITS_UP), tl.arange(0, VALUE_UP)
    logs = tl.load(partial_lse + head * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    if BEFORE:
        earlier = tl.load(before_lse + head)
        top = tl.maximum(top, earlier)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(logs - safe)
    states = tl.load(
        partial + (head * splits + split[:, None]) * VALUE + dims[None, :],
        mask=(split[:, None] < splits) & (dims[None, :] < VALUE),
        other=0.0,
    )
    total = tl.sum(weights, 0)
    mixed = tl.sum(states * weights[:, None], 0)
    if BEFORE:
        weight = tl.exp(earlier - safe)
        total += weight
        mixed += weight * tl.load(before + head * VALUE + dims, mask=dims < VALUE, other=0.0).to(tl.float32)
    known = tl.where(total == 0.0, 1.0, total)
    tl.store(output + head * VALUE + dims, (mixed / known).to(output.dtype.element_ty), mask=dims < VALUE)
    tl.store(lse + head, tl.where(total == 0.0, float("-inf"), safe + tl.log(known)))


@triton.jit
def append(
    key, value, keys, values, index, key_batch, key_head, value_batch, value_head,
    keys_batch, keys_head, keys_token, values_batch, values_head, values_token,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr,
):  # fmt: skip
    """Write one token's states of one KV head to their slot."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(index)
    dims, value_dims = tl.arange(0, DIM_UP), tl.arange(0, VALUE_UP)
    state = tl.load(key + row * key_batch + head * key_head + dims, mask=dims < DIM)
    tl.store(keys + row * keys_batch + head * keys_head + slot * keys_token + dims, state, mask=dims < DIM)
    state = tl.load(value + row * value_batch + head * value_head + value_dims, mask=value_dims < VALUE)
    target = values + row * values_batch + head * values_head + slot * values_token
    tl.store(target + value_dims, state, mask=value_dims < VALUE)
