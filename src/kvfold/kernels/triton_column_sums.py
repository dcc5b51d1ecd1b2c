"""The Triton kernels of `column_sums`: each query's log-sum-exp, then the sums of each tile of keys over all queries.

Every sum is of one program, in one order: the result does not vary from run to run.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1 / math.log(2))
PROGRAMS = 256
"""Programs to aim at where queries are few: each then takes a part of the tokens."""


@triton.jit
def _logits(left, right, scaling, softcap, CAPPED: tl.constexpr):
    """Logits in base 2."""
    scores = tl.dot(left, right) * scaling
    if CAPPED:
        # tanh(t) = 2 sigmoid(2t) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 / softcap * scores) - 1.0)
    return scores * LOG2_E


@triton.jit
def _row_lse(
    query, key, valid, last, lse, scaling, softcap, heads, group, queries, tokens, dim,
    query_row, query_head, query_token, key_row, key_head, key_token,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, VALID: tl.constexpr, LAST: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    # The last queries see most: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1).to(tl.int64) % heads
    kv_head = head // group
    at, channel, token = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, TOKENS)
    inside, known = at < queries, channel < dim
    part = tl.cdiv(tokens, TOKENS * tl.num_programs(2)) * TOKENS
    begin = tl.program_id(2) * part
    stop = tl.minimum(tokens, begin + part)
    if LAST:
        final = tl.load(last + row * queries + at, mask=inside, other=-1)
        stop = tl.minimum(stop, tl.max(final, 0) + 1)
    q = tl.load(
        query + row * query_row + head * query_head + at[:, None].to(tl.int64) * query_token + channel[None, :],
        mask=inside[:, None] & known[None, :], other=0.0,
    )  # fmt: skip
    keys = key + row * key_row + kv_head * key_head
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in range(begin, stop, TOKENS):
        place = start + token
        here = place < tokens
        k = tl.load(
            keys + place[None, :].to(tl.int64) * key_token + channel[:, None],
            mask=here[None, :] & known[:, None], other=0.0,
        )  # fmt: skip
        if VALID:
            seen = tl.load(valid + (row * (heads // group) + kv_head) * tokens + place, mask=here, other=0)
            here = here & (seen != 0)
        scores = _logits(q, k, scaling, softcap, CAPPED)
        visible = here[None, :]
        if LAST:
            visible = visible & (place[None, :] <= final[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
        peak = higher
    result = peak + tl.log2(tl.where(total > 0, total, 1.0))
    line = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(lse + line * queries + at, result, mask=inside)


@triton.jit
def _columns(
    query, key, valid, last, lse, sums, firsts, scaling, softcap, heads, group, queries, tokens, dim,
    query_row, query_head, query_token, key_row, key_head, key_token,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, VALID: tl.constexpr, LAST: tl.constexpr,
    CAPPED: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    kv_heads = heads // group
    row, kv_head = tl.program_id(1).to(tl.int64) // kv_heads, tl.program_id(1).to(tl.int64) % kv_heads
    begin = tl.program_id(0) * TOKENS
    place, channel, step = begin + tl.arange(0, TOKENS), tl.arange(0, DIM), tl.arange(0, QUERIES)
    here, known = place < tokens, channel < dim
    k = tl.load(
        key + row * key_row + kv_head * key_head + place[:, None].to(tl.int64) * key_token + channel[None, :],
        mask=here[:, None] & known[None, :], other=0.0,
    )  # fmt: skip
    mass = tl.zeros([TOKENS], tl.float32)
    first = 0
    if LAST:
        first = tl.load(firsts + row * tl.num_programs(0) + tl.program_id(0)) // QUERIES * QUERIES
    for member in range(group):
        head = kv_head * group + member
        source = query + row * query_row + head * query_head
        for start in range(first, queries, QUERIES):
            at = start + step
            inside = at < queries
            q = tl.load(
                source + at[None, :].to(tl.int64) * query_token + channel[:, None],
                mask=inside[None, :] & known[:, None], other=0.0,
            )  # fmt: skip
            total = tl.load(lse + (row * heads + head) * queries + at, mask=inside, other=float("inf"))
            weights = tl.exp2(_logits(k, q, scaling, softcap, CAPPED) - total[None, :])
            if LAST:
                final = tl.load(last + row * queries + at, mask=inside, other=-1)
                weights = tl.where(place[:, None] <= final[None, :], weights, 0.0)
            if SQUARED:
                weights = weights * weights
            mass += tl.sum(weights, 1)
    if VALID:
        seen = tl.load(valid + (row * kv_heads + kv_head) * tokens + place, mask=here, other=0)
        mass = tl.where(seen != 0, mass, 0.0)
    tl.store(sums + (row * kv_heads + kv_head) * tokens + place, mass, mask=here)


@torch.library.custom_op("kvfold::column_sums", mutates_args=())
def column_sums(
    query: Tensor,
    key: Tensor,
    scaling: float,
    valid: Tensor | None,
    last: Tensor | None,
    softcap: float,
    other_lse: Tensor | None,
    squared: bool,
) -> Tensor:
    """As `kvfold.kernels.column_sums.column_sums`; softcap 0 is none."""
    batch, heads, queries, dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    sums = torch.empty(batch, kv_heads, tokens, dtype=torch.float32, device=query.device)
    if valid is not None:
        valid = valid.expand(batch, kv_heads, tokens).to(torch.uint8).contiguous()
    if last is not None:
        last = last.to(torch.int32).contiguous()
    size = max(16, triton.next_power_of_2(dim))
    rows, columns, warps = (64, 64, 8) if size > 128 else (128, 128, 8)
    strides = *query.stride()[:3], *key.stride()[:3]
    shape = heads, heads // kv_heads, queries, tokens, dim
    options = {"DIM": size, "VALID": valid is not None, "LAST": last is not None, "CAPPED": softcap > 0}
    seen = query if valid is None else valid
    final = firsts = query
    if last is not None:
        # The first query that sees any of a tile of keys.
        begins = torch.arange(0, tokens, columns, dtype=torch.int32, device=key.device).expand(batch, -1)
        final = last
        firsts = torch.searchsorted(last.cummax(1).values, begins.contiguous(), out_int32=True)
    programs = triton.cdiv(queries, rows) * batch * heads
    parts = max(1, min(PROGRAMS // programs, tokens // (4 * columns)))
    lse = torch.empty(parts, batch, heads, queries, dtype=torch.float32, device=query.device)
    _row_lse[(triton.cdiv(queries, rows), batch * heads, parts)](
        query, key, seen, final, lse, scaling, softcap, *shape, *strides,
        QUERIES=rows, TOKENS=columns // 2, **options, num_warps=warps, num_stages=3,
    )  # fmt: skip
    # In base 2, unlike torch's sum.
    lse = lse[0] if parts == 1 else torch.logsumexp(lse / LOG2_E.value, 0) * LOG2_E.value
    if other_lse is not None:
        lse = torch.logaddexp2(lse, other_lse.float() * LOG2_E.value)
    # A query that sees nothing gives nothing.
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    _columns[(triton.cdiv(tokens, columns), batch * kv_heads)](
        query, key, seen, final, lse, sums, firsts, scaling, softcap, *shape, *strides,
        QUERIES=rows // 2, TOKENS=columns, **options, SQUARED=squared, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return sums


@column_sums.register_fake
def _(query, key, scaling, valid, last, softcap, other_lse, squared):
    return query.new_empty(key.shape[:3], dtype=torch.float32)
