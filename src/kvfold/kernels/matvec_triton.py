"""The Triton kernel of `matvec`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matvec(
    x, first, second, third, up, bias, output, first_end, second_end, outputs, inputs,
    COUNT: tl.constexpr, COUNT_UP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Some rows of the matrix by all vectors, summed lane by lane and across lanes once, at the end."""
    start_row = tl.program_id(0) * ROWS
    rows = start_row + tl.arange(0, ROWS)
    columns, vectors = tl.arange(0, COLUMNS), tl.arange(0, COUNT_UP)
    known = rows < outputs
    # Matrices one below the other; a program's rows are all of one.
    weight, above = first, start_row * 0
    if start_row >= second_end:
        weight, above = third, second_end
    elif start_row >= first_end:
        weight, above = second, first_end
    place = (rows - above)[:, None].to(tl.int64) * inputs + columns[None, :]
    total = tl.zeros([COUNT_UP, ROWS, COLUMNS], tl.float32)
    if GATED:
        other = tl.zeros([COUNT_UP, ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
        inside = columns + start < inputs
        mask = known[:, None] & inside[None, :]
        # Read once a step: the cache is for what is read again.
        w = tl.load(weight + place + start, mask=mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(
            x + vectors[:, None] * inputs + start + columns[None, :],
            mask=(vectors[:, None] < COUNT) & inside[None, :],
            other=0.0,
        )
        v = v.to(tl.float32)[:, None, :]
        total += w.to(tl.float32)[None] * v
        if GATED:
            u = tl.load(up + place + start, mask=mask, other=0.0, eviction_policy="evict_first")
            other += u.to(tl.float32)[None] * v
    result = tl.sum(total, 2)
    if BIAS:
        result += tl.load(bias + rows, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if ACTIVATION == 0:
            result = result * tl.sigmoid(result)
        else:
            # tanh(t) = 2 sigmoid(2t) - 1
            inner = 0.7978845608028654 * (result + 0.044715 * result * result * result)
            result = result * tl.sigmoid(2.0 * inner)
        result *= tl.sum(other, 2)
    tl.store(
        output + vectors[:, None] * outputs + rows[None, :],
        result.to(output.dtype.element_ty),
        mask=(vectors[:, None] < COUNT) & known[None, :],
    )
