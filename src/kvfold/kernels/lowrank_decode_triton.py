"""The Triton kernels of `lowrank_decode`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.lowrank_rows_triton import (
    BANNED,
    BASIS,
    FACTORS,
    FIELDS,
    GROUPS,
    KEYS,
    LEVELS,
    MEAN,
    NBYTES,
    NORMS,
    OUTLIERS,
    PARTS,
    RANK,
    ROW,
    SCALES,
    START,
    TILES,
    TOKENS,
    VALUES,
    left_out,
    number,
    place,
    power_above,
)

SIDES = KEYS.value, VALUES.value

# ---- scratch ----


@triton.jit
def _token(chosen, row, first, CHUNK: tl.constexpr, GATHERED: tl.constexpr):
    """Tokens that rows of a piece are of."""
    token = first + row
    if GATHERED:
        token = tl.load(chosen + token // CHUNK) * CHUNK + token % CHUNK
    return token


@triton.jit
def _bits(codes, component, count, mask, WIDTH: tl.constexpr):
    """A plane's bits of some components of a group of any size."""
    size = (count * WIDTH + 7) // 8
    byte = tl.load(codes + (component % size)[None, :], mask=mask, other=0).to(tl.int32)
    return byte >> (component // size * WIDTH)[None, :] & ((1 << WIDTH) - 1)


@triton.jit
def _put(code, levels, rows, component, factor, mask):
    # A hint that is not so and does no harm, as what is not aligned is read one by one: without it Triton 3.6 spreads a tile over
    # threads otherwise here than in stores, and every number passes through shared memory.
    level = tl.load(tl.max_contiguous(levels + code, (1, 2)), mask=mask, other=0.0)
    x = level * factor[:, None]
    tl.store(rows + component[None, :], x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _decode(codes, levels, rows, column, count, factor, inside, WIDTH: tl.constexpr, EIGHTS: tl.constexpr):
    """Decode of a group the components column, column + count / 8, ...: eight, which lie in WIDTH bytes."""
    eighth = (count + 7) // 8
    if EIGHTS:
        mask = inside[:, None] & (column < eighth)[None, :]
        codes += column[None, :]
        # `packing.pack` cuts a width into planes, the widest first.
        twos = codes
        if WIDTH & 4:
            twos += 4 * eighth
        if WIDTH & 1:
            ones = twos
            if WIDTH & 2:
                ones += 2 * eighth
            one = tl.load(ones, mask=mask, other=0).to(tl.int32)
        for odd in tl.static_range(2):
            if WIDTH & 2:
                two = tl.load(twos + eighth * odd, mask=mask, other=0).to(tl.int32)
            for pair in tl.static_range(2):
                if WIDTH & 4:
                    four = tl.load(codes + eighth * (2 * pair + odd), mask=mask, other=0).to(tl.int32)
                for half in tl.static_range(2):
                    number = 4 * half + 2 * pair + odd
                    if WIDTH == 8:
                        code = tl.load(codes + eighth * number, mask=mask, other=0).to(tl.int32)
                    if WIDTH & 4:
                        code = four >> 4 * half & 15
                    if WIDTH & 2:
                        bits = two >> 2 * (2 * half + pair) & 3
                        code = code | bits << 4 if WIDTH & 4 else bits
                    if WIDTH & 1:
                        bits = one >> number & 1
                        code = code | bits << (WIDTH & 6) if WIDTH > 1 else bits
                    _put(code, levels, rows, column + eighth * number, factor, mask)
    else:
        for number in range(8):
            component = column + eighth * number
            mask = inside[:, None] & ((column < eighth) & (component < count))[None, :]
            code = tl.zeros(mask.shape, tl.int32)
            place = codes
            for power in tl.static_range(3, -1, -1):
                if WIDTH >> power & 1:
                    above = WIDTH >> (power + 1) << (power + 1)
                    code += _bits(place, component, count, mask, 1 << power) << above
                    place += ((count << power) + 7) // 8
            _put(code, levels, rows, component, factor, mask)


# Their values differ from window to window: a kernel for each kind of them would cost more time than it saves.
@triton.jit(
    do_not_specialize=[
        "rank", "nbytes", "groups", "side", "ahead", "sets", "length", "count", "first", "selected",
    ]
)  # fmt: skip
def unpack(
    factors, norms, tiles, levels, rows, scales, table, side, ahead, sets, rank, nbytes, groups, stride, chosen, length, count,
    first, selected,
    CODED: tl.constexpr, EIGHTS: tl.constexpr, GROUPS_UP: tl.constexpr, CHUNK: tl.constexpr, GATHERED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Decode a tile of some tokens' factors, each divided by its largest norm; padding of a row is zero."""
    tile, own = tl.program_id(1), tl.program_id(2)
    table += (ahead + own // sets) * FIELDS
    its = table + side
    # The first is known when compiling, the second is not.
    if ALIGN:  # noqa: SIM102
        if tile >= tl.load(its + PARTS):
            return
    factors, rank = place(factors, its, FACTORS, ALIGN), number(its, RANK, rank, ALIGN)
    if CODED:
        norms, groups = place(norms, its, NORMS, ALIGN), number(its, GROUPS, groups, ALIGN)
        nbytes, levels = number(its, NBYTES, nbytes, ALIGN), place(levels, its, LEVELS, ALIGN)
        tiles = place(tiles, its, TILES, ALIGN) + tile * 8
        width, group_of = tl.load(tiles), tl.load(tiles + 1)
        start, size = tl.load(tiles + 2), tl.load(tiles + 3)
        column = tl.load(tiles + 4) + tl.arange(0, STEP)
        byte = tl.load(tiles + 5)
        levels += tl.load(tiles + 6)
    if GATHERED:
        chosen += (number(table, ROW, 0, ALIGN) * sets + own % sets).to(tl.int64) * selected
    else:
        count = tl.minimum(number(table, TOKENS, count + first, ALIGN) - first, count)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line, inside = own.to(tl.int64) * length + row, row < count
    # Rows beyond the last are safe to read.
    token = _token(chosen, tl.minimum(row, count - 1), first, CHUNK, GATHERED).to(tl.int64)
    rows += line[:, None] * stride
    if CODED:
        group = tl.arange(0, GROUPS_UP)
        norm = tl.load(
            norms + token[:, None] * groups + group[None, :], mask=(group < groups)[None, :], other=0.0
        ).to(tl.float32)
        most = tl.maximum(tl.max(norm, 1), 1e-30)
        if tile == 0:
            tl.store(scales + line, most, mask=inside)
        codes = factors + token[:, None] * nbytes + byte
        factor = tl.sum(tl.where((group == group_of)[None, :], norm, 0.0), 1) / most
        if width == 0:
            tl.store(
                rows + start + column[None, :],
                tl.zeros([BLOCK, STEP], rows.dtype.element_ty),
                mask=inside[:, None] & (column < size)[None, :],
            )
        for one in tl.static_range(1, 9):
            if width == one:
                _decode(codes, levels, rows + start, column, size, factor, inside, one, EIGHTS)
    else:
        padded = (rank + 15) // 16 * 16
        column = tile * (8 * STEP) + tl.arange(0, 8 * STEP)
        x = tl.load(
            factors + token[:, None] * rank + column[None, :],
            mask=inside[:, None] & (column < rank)[None, :],
            other=0.0,
        )
        tl.store(rows + column[None, :], x, mask=inside[:, None] & (column < padded)[None, :])


@triton.jit
def unpack_basis(
    codes, scales, rotation, basis, factor, table, rank, pitch, step,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, RANK_UP: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode some rows of one head's basis, divided by the largest of their norms."""
    block, head, one = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    table += one * FIELDS + KEYS
    codes, scales = place(codes, table, BASIS, ALIGN), place(scales, table, SCALES, ALIGN)
    rank = number(table, RANK, rank, ALIGN)
    target = one * tl.num_programs(1) + head
    every, dims, inner = tl.arange(0, RANK_UP), tl.arange(0, DIM_UP), tl.arange(0, DIM_UP)
    norms = tl.load(scales + head * rank + every, mask=every < rank, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(norms, 0), 1e-30)
    row = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rank)[:, None] & (inner < DIM)[None, :]
    code = tl.load(codes + (head * rank + row[:, None]) * DIM + inner[None, :], mask=inside, other=0)
    norm = tl.load(scales + head * rank + row, mask=row < rank, other=0.0).to(tl.float32)
    x = (code.to(tl.float32) - 127.5) * (norm / most)[:, None] * 0.0078125
    x = tl.where(inside, x, 0.0).to(tl.float16)
    turn = tl.load(
        rotation + inner[:, None] * DIM + dims[None, :],
        mask=(inner[:, None] < DIM) & (dims[None, :] < DIM),
        other=0.0,
    )
    tl.store(
        basis + (target * pitch + row[:, None]) * DIM + dims[None, :],
        tl.dot(x, turn.to(tl.float16)).to(tl.float16),
        mask=(row < rank)[:, None] & (dims < DIM)[None, :],
    )
    if block == 0:
        tl.store(factor + target, most * step * 128.0)


# ---- attention ----


@triton.jit
def _lines(rows, table, start, first, stride, rank, THERE: tl.constexpr, ALIGN: tl.constexpr):
    """Where decoded factors begin, numbers from one token to the next, and how many of them are there."""
    if THERE:
        # 16-bit factors that are read in order are read where they lie.
        rows, stride, within = place(rows, table, FACTORS, ALIGN) + first.to(tl.int64) * rank, rank, rank
    else:
        rows, within = rows + start * stride, stride
        if ALIGN:
            within = (rank + 15) // 16 * 16
    return rows, stride, within


@triton.jit(do_not_specialize=["ahead"])
def logits(
    query, rows, scales, stride, basis, basis_scale, mean, partner, coarse_cos, coarse_sin, fine_cos, fine_sin,
    chosen, outliers, out, table, ahead, length, count, first, start, rank, pitch, selected, banned, scaling, turn_scale, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    CHUNK: tl.constexpr, SETS: tl.constexpr, BANNED_UP: tl.constexpr, FINE: tl.constexpr, GATHERED: tl.constexpr, SCALED: tl.constexpr,
    BASIS_SCALED: tl.constexpr, MEANS: tl.constexpr, TURNED: tl.constexpr, CAPPED: tl.constexpr, THERE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rebuild one KV head's keys of a tile of tokens; its queries' logits on them, and on the padding: minus infinity."""
    # Heads next to each other: they read the same rows.
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    one, heads = tl.program_id(2).to(tl.int64), tl.num_programs(0)
    table += (ahead + one) * FIELDS
    at, rank, own = number(table, ROW, 0, ALIGN), number(table, KEYS + RANK, rank, ALIGN), one * SETS
    if SETS > 1:
        own += head
    if GATHERED:
        chosen += (at * SETS + own - one * SETS) * selected
    else:
        count = tl.minimum(number(table, TOKENS, count + first, ALIGN) - first, count)
    rows, stride, within = _lines(rows, table + KEYS, own * length, first, stride, rank, THERE, ALIGN)
    if BASIS_SCALED:
        basis += (ahead + one) * heads * pitch * DIM
        basis_scale += (ahead + one) * heads
    else:
        basis, pitch = place(basis, table, KEYS + BASIS, ALIGN), rank
    dims, components, m = tl.arange(0, DIM_UP), tl.arange(0, STEP), tl.arange(0, ROWS)
    line = own * length + row
    inside, wide = row < count, dims < DIM
    # Asked for early: the tables' rows depend on it.
    token = _token(chosen, tl.minimum(row, count - 1), first, CHUNK, GATHERED)
    keys = tl.zeros([BLOCK, DIM_UP], tl.float32)
    for begin in range(0, rank, STEP):
        component = begin + components
        a = tl.load(
            rows + row[:, None].to(tl.int64) * stride + component[None, :],
            mask=inside[:, None] & (component < within)[None, :],
            other=0.0,
        )
        b = tl.load(
            basis + (head * pitch + component[:, None]) * DIM + dims[None, :],
            mask=(component < rank)[:, None] & wide[None, :],
            other=0.0,
        )
        keys = tl.dot(a, b, keys)
    if BASIS_SCALED:
        keys *= tl.load(basis_scale + head)
    if SCALED:
        keys *= tl.load(scales + line, mask=inside, other=0.0)[:, None]
    if MEANS:
        mean = place(mean, table, KEYS + MEAN, ALIGN)
        keys += tl.load(mean + head * DIM + dims, mask=wide, other=0.0).to(tl.float32)[None, :]
    queries = query + ((at * heads + head) * GROUP + m[None, :]) * DIM
    there = wide[:, None] & (m < GROUP)[None, :]
    q = tl.load(queries + dims[:, None], mask=there, other=0.0).to(tl.float32)
    largest = power_above(tl.max(tl.abs(q), 0))
    q = (q / largest[None, :]).to(tl.float16)
    top = power_above(tl.max(tl.abs(keys), 1))
    keys = (keys * (1.0 / top)[:, None]).to(tl.float16)
    if TURNED:
        # A key turned forth meets a query as it does a query turned back, whose planes are two products with the key.
        other = tl.load(partner + dims, mask=wide, other=0)
        crossed = tl.load(queries + other[:, None], mask=there, other=0.0).to(tl.float32)
        crossed = (crossed / largest[None, :]).to(tl.float16)
        position = token + number(table, START, start, ALIGN)
        far = (position // FINE)[:, None] * DIM + dims[None, :]
        near = (position % FINE)[:, None] * DIM + dims[None, :]
        far_cos = tl.load(coarse_cos + far, mask=wide[None, :], other=0.0).to(tl.float16)
        far_sin = tl.load(coarse_sin + far, mask=wide[None, :], other=0.0).to(tl.float16)
        near_cos = tl.load(fine_cos + near, mask=wide[None, :], other=0.0).to(tl.float16)
        near_sin = tl.load(fine_sin + near, mask=wide[None, :], other=0.0).to(tl.float16)
        found = tl.dot(keys * (far_cos * near_cos - far_sin * near_sin), q)
        found -= tl.dot(keys * (far_sin * near_cos + far_cos * near_sin), crossed)
        found *= turn_scale
    else:
        found = tl.dot(keys, q)
    found *= top[:, None] * (largest * scaling)[None, :]
    if CAPPED:
        # tanh by the logistic function, which every Triton has
        found = (2.0 * tl.sigmoid(2.0 * found / softcap) - 1.0) * softcap
    shown = inside
    if BANNED_UP:
        outliers, banned = place(outliers, table, OUTLIERS, ALIGN), number(table, BANNED, banned, ALIGN)
        shown = shown & ~left_out(token // CHUNK, outliers, head, banned, BANNED_UP)
    found = tl.where(shown[:, None], found, float("-inf"))
    tl.store(
        out + ((one * heads + head) * GROUP + m[None, :]) * length + row[:, None],
        found,
        mask=(row < (count + 15) // 16 * 16)[:, None] & (m < GROUP)[None, :],
    )


@triton.jit(do_not_specialize=["ahead"])
def mix(
    logits, rows, scales, stride, partial, partial_lse, table, ahead, sets, rank, length, count, first, each, splits, first_split,
    padded,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, GATHERED: tl.constexpr, SCALED: tl.constexpr,
    THERE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over one split of a piece, and its mixture of value factors."""
    split, part = tl.program_id(0), tl.program_id(1)
    table += (ahead + tl.program_id(2) // sets) * FIELDS
    own, rank = tl.program_id(2).to(tl.int64), number(table, VALUES + RANK, rank, ALIGN)
    if not GATHERED:
        count = tl.minimum(number(table, TOKENS, count + first, ALIGN) - first, count)
    rows, stride, within = _lines(rows, table + VALUES, own * length, first, stride, rank, THERE, ALIGN)
    m, component, block = (
        tl.arange(0, ROWS),
        part * WIDTH + tl.arange(0, WIDTH),
        tl.arange(0, BLOCK),
    )
    line = own * HEADS + m
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in range(split * each, tl.minimum((split + 1) * each, count), BLOCK):
        row = begin + block
        inside = row < count
        found = tl.load(
            logits + line[:, None] * length + row[None, :],
            mask=(m < HEADS)[:, None] & (row < (count + 15) // 16 * 16)[None, :],
            other=float("-inf"),
        )
        top = tl.maximum(peak, tl.max(found, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(found - safe[:, None])
        shrink = tl.exp(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        peak = top
        states = tl.load(
            rows + row[:, None].to(tl.int64) * stride + component[None, :],
            mask=inside[:, None] & (component < within)[None, :],
            other=0.0,
        )
        mixed *= shrink[:, None]
        if SCALED:
            scale = tl.load(scales + own * length + row, mask=inside, other=0.0)
            most = tl.maximum(tl.max(scale, 0), 1e-30)
            mixed += tl.dot((weights * (scale / most)[None, :]).to(states.dtype), states) * most
        else:
            mixed = tl.dot(weights.to(states.dtype), states, mixed)
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total)))
    target = (line + ahead * sets * HEADS) * splits + first_split + split
    tl.store(partial + target[:, None] * padded + component[None, :], mixed, mask=(m < HEADS)[:, None])
    if part == 0:
        tl.store(partial_lse + target, lse, mask=m < HEADS)


@triton.jit
def rebuild(
    partial, partial_lse, basis, scales, output, table, splits, blocks, rank, padded, step,
    GROUP: tl.constexpr, ROWS: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, SPLITS_UP: tl.constexpr,
    CODED: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merge splits of one KV head's queries by their log-sum-exp; what some components of the mixtures are in its basis."""
    own, part, one = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    table += one * FIELDS + VALUES
    basis, rank = place(basis, table, BASIS, ALIGN), number(table, RANK, rank, ALIGN)
    m, split, dims = tl.arange(0, ROWS), tl.arange(0, SPLITS_UP), tl.arange(0, VALUE_UP)
    component = part * BLOCK + tl.arange(0, BLOCK)
    real, wide = component < rank, dims < VALUE
    line, head = own * rank + component, (one * tl.num_programs(0) + own) * GROUP + m
    inside = real[:, None] & wide[None, :]
    rows = tl.load(basis + line[:, None] * VALUE + dims[None, :], mask=inside, other=0)
    logs = tl.load(
        partial_lse + head[:, None] * splits + split[None, :],
        mask=(m < GROUP)[:, None] & (split < splits)[None, :],
        other=float("-inf"),
    )
    top = tl.max(logs, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logs - top[:, None]), 1)
    mixed = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, splits, STEP):
        # Apart, so that reads are under way together.
        for after in tl.static_range(STEP):
            there = m < tl.where(begin + after < splits, GROUP, 0)
            source = head * splits + begin + after
            weight = tl.exp(tl.load(partial_lse + source, mask=there, other=float("-inf")) - top)
            states = tl.load(
                partial + source[:, None] * padded + component[None, :],
                mask=there[:, None],
                other=0.0,
            )
            mixed += states * weight[:, None]
    mixed /= tl.where(total == 0.0, 1.0, total)[:, None]
    if CODED:
        scales = place(scales, table, SCALES, ALIGN)
        mixed *= (tl.load(scales + line, mask=real, other=0.0).to(tl.float32) * step)[None, :]
        # 256 and the code, as bits
        rows = (rows.to(tl.uint16) << 2 | 0x5C00).to(tl.float16, bitcast=True) - 383.5
    # Two parts of 16 bits are nearly all of a number.
    largest = power_above(tl.max(tl.abs(mixed), 1))
    mixed /= largest[:, None]
    high = mixed.to(rows.dtype)
    found = tl.dot((mixed - high.to(tl.float32)).to(rows.dtype), rows)
    found = tl.dot(high, rows, found) * largest[:, None]
    tl.store(
        output + (head[:, None] * blocks + part) * VALUE + dims[None, :],
        found,
        mask=(m < GROUP)[:, None] & wide[None, :],
    )


@triton.jit
def finish(
    parts, partial_lse, rotation, mean, near, near_lse, output, lse, table, splits, blocks, near_splits,
    GROUP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, SPLITS_UP: tl.constexpr, BLOCKS_UP: tl.constexpr,
    NEAR_UP: tl.constexpr, CODED: tl.constexpr, MEANS: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up one head's components, turn them back, add the mean, and merge with splits of other tokens: some channels."""
    head, one = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    table += one * FIELDS
    # Of all rows, and of those that are served together.
    target = number(table, ROW, 0, ALIGN) * tl.num_programs(0) + head
    source = one * tl.num_programs(0) + head
    split, dims, part = (
        tl.arange(0, SPLITS_UP),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
        tl.arange(0, BLOCKS_UP),
    )
    wide = dims < VALUE
    # All reads are asked for first.
    logs = tl.load(partial_lse + source * splits + split, mask=split < splits, other=float("-inf"))
    inner = dims
    if CODED:
        inner = tl.arange(0, VALUE_UP)
        turn = tl.load(
            rotation + inner[:, None] * VALUE + dims[None, :],
            mask=(inner < VALUE)[:, None] & wide[None, :],
            other=0.0,
        )
    found = tl.load(
        parts + (source * blocks + part[:, None]) * VALUE + inner[None, :],
        mask=(part < blocks)[:, None] & (inner < VALUE)[None, :],
        other=0.0,
    )
    other = tl.arange(0, NEAR_UP)
    near_logs = tl.load(
        near_lse + target * near_splits + other, mask=other < near_splits, other=float("-inf")
    )
    states = tl.load(
        near + (target * near_splits + other[:, None]) * VALUE + dims[None, :],
        mask=(other < near_splits)[:, None] & wide[None, :],
        other=0.0,
    )
    top = tl.max(logs, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logs - safe), 0)
    found = tl.sum(found, 0)
    if CODED:
        found = tl.sum(turn * found[:, None], 0)
    if MEANS:
        mean = place(mean, table, VALUES + MEAN, ALIGN)
        found += tl.load(mean + head // GROUP * VALUE + dims, mask=wide, other=0.0).to(tl.float32)
    found = tl.where(total == 0.0, 0.0, found)
    all_lse = tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))
    top = tl.maximum(tl.max(near_logs, 0), all_lse)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights, far = tl.exp(near_logs - safe), tl.exp(all_lse - safe)
    total = tl.sum(weights, 0) + far
    found = tl.sum(states * weights[:, None], 0) + found * far
    found /= tl.where(total == 0.0, 1.0, total)
    all_lse = tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(output + target * VALUE + dims, found.to(output.dtype.element_ty), mask=wide)
    if tl.program_id(1) == 0:
        tl.store(lse + target, all_lse)
