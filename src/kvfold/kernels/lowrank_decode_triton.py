"""The Triton kernels of `lowrank_decode`."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BINS = 4096
"""Of a chunk's share: the logarithm of the largest that heads can give in steps of 1 / 128."""
_BINS = tl.constexpr(BINS)


@triton.jit
def _power_above(x):
    """The power of two at or above: dividing by it costs no bit."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(x, 1e-30))))


@triton.jit
def _left_out(chunk, outliers, head, banned, BANNED_UP: tl.constexpr):
    """Which of some chunks are a head's outliers."""
    one = tl.arange(0, BANNED_UP)
    them = tl.load(outliers + head * banned + one, mask=one < banned, other=0).to(tl.int32)
    them = tl.where(one < banned, them, -1)
    return tl.max((chunk[:, None] == them[None, :]).to(tl.int32), 1) != 0


# ---- choosing chunks ----


@triton.jit
def _level(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Level of a 4-bit code, an odd polynomial of (2 code - 15) / 16: reading a table takes longer than the rest."""
    x = (code.to(tl.uint16) << 1 | 0x5400).to(tl.float16, bitcast=True) - 64.9375
    square = x * x
    return (((D * square + C) * square + B) * square + A) * x


@triton.jit
def score(
    query, landmarks, scales, rotation, outliers, logits, block_lse, counts, chunks, blocks, each, banned, scaling,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr, NBYTES: tl.constexpr,
    NBYTES_UP: tl.constexpr, SETS: tl.constexpr, BANNED_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits of one KV head's queries on some blocks of landmarks, and the log-sum-exp of each; no chunk is counted yet."""
    head = tl.program_id(1).to(tl.int64)
    if (tl.program_id(0) == 0) & (head < SETS):
        bins = tl.arange(0, _BINS)
        tl.store(counts + head * _BINS + bins, tl.zeros([_BINS], tl.int32))
    rows, dims, byte = tl.arange(0, ROWS), tl.arange(0, DIM_UP), tl.arange(0, NBYTES_UP)
    q = tl.load(
        query + (head * GROUP + rows[None, :]) * DIM + dims[:, None],
        mask=(rows[None, :] < GROUP) & (dims[:, None] < DIM),
        other=0.0,
    ).to(tl.float32)
    largest = _power_above(tl.max(tl.abs(q), 0))
    q = (q / largest[None, :]).to(tl.float16)
    # A byte holds a channel of the first half and one of the second, whose padding meets a zero.
    inside = (byte < NBYTES)[:, None] & (dims < DIM)[None, :]
    turn = tl.load(rotation + byte[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    first = tl.dot(turn, q).to(tl.float16)
    inside = inside & (byte < DIM - NBYTES)[:, None]
    turn = tl.load(rotation + (NBYTES + byte[:, None]) * DIM + dims[None, :], mask=inside, other=0.0)
    second = tl.dot(turn, q).to(tl.float16)
    place = head * GROUP + rows
    for block in range(tl.program_id(0) * each, tl.minimum((tl.program_id(0) + 1) * each, blocks)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        there = index < chunks
        line = head * chunks + index
        codes = tl.load(
            landmarks + line[:, None] * NBYTES + byte[None, :],
            mask=there[:, None] & (byte < NBYTES)[None, :],
            other=0,
        )
        found = tl.dot(_level(codes & 15, A, B, C, D), first)
        found = tl.dot(_level(codes >> 4, A, B, C, D), second, found)
        scale = tl.load(scales + line, mask=there, other=0.0).to(tl.float32)
        found = found * (largest * scaling)[None, :] * scale[:, None]
        if BANNED_UP:
            there = there & ~_left_out(index, outliers, head, banned, BANNED_UP)
        found = tl.where(there[:, None], found, float("-inf"))
        top = tl.max(found, 0)
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(found - safe[None, :]), 0)
        lse = tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(block_lse + place * blocks + block, lse, mask=rows < GROUP)
        tl.store(
            logits + place[None, :] * chunks + index[:, None],
            found,
            mask=(rows < GROUP)[None, :] & (index < chunks)[:, None],
        )


@triton.jit
def share(
    logits, block_lse, shares, counts, chunks, blocks, largest,
    HEADS: tl.constexpr, HEADS_UP: tl.constexpr, BLOCKS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the query heads of a set give each chunk of a block, of the softmax over all landmarks: its bin, counted."""
    block, own = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, part = tl.arange(0, HEADS_UP), tl.arange(0, BLOCKS_UP)
    line = own * HEADS + head
    index = block * BLOCK + tl.arange(0, BLOCK)
    # All reads are asked for first.
    found = tl.load(
        logits + line[:, None] * chunks + index[None, :],
        mask=(head[:, None] < HEADS) & (index < chunks)[None, :],
        other=float("-inf"),
    )
    lse = tl.load(
        block_lse + line[:, None] * blocks + part[None, :],
        mask=(head[:, None] < HEADS) & (part[None, :] < blocks),
        other=float("-inf"),
    )
    top = tl.max(lse, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = safe + tl.log(tl.maximum(tl.sum(tl.exp(lse - safe[:, None]), 1), 1e-30))
    found -= total[:, None]
    top = tl.max(found, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    given = safe + tl.log(tl.maximum(tl.sum(tl.exp(found - safe[None, :]), 0), 1e-30))
    place = (_BINS - 1) - 128.0 * (largest - given)
    place = tl.where(top == float("-inf"), 0.0, tl.minimum(tl.maximum(place, 0.0), _BINS - 1)).to(tl.int32)
    tl.store(shares + own * chunks + index, place, mask=index < chunks)
    tl.atomic_add(counts + own * _BINS + place, 1, mask=index < chunks, sem="relaxed")


@triton.jit
def choose(shares, counts, chosen, chunks, selected, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Those of a block that are among the `selected` largest shares of a set, in order of their index."""
    own, start = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK
    bins = tl.arange(0, _BINS)
    count = tl.load(counts + own * _BINS + bins)
    here = start + tl.arange(0, BLOCK)
    mine = tl.load(shares + own * chunks + here, mask=here < chunks, other=-1)
    at_least = chunks - tl.cumsum(count, 0) + count
    least = tl.max(tl.where(at_least >= selected, bins, 0), 0)
    left = selected - tl.sum(tl.where(bins > least, count, 0), 0)
    # What earlier blocks take.
    wide = tl.arange(0, WIDE)
    above, equal = tl.zeros([WIDE], tl.int32), tl.zeros([WIDE], tl.int32)
    for begin in range(0, start, WIDE):
        index = begin + wide
        x = tl.load(shares + own * chunks + index, mask=index < start, other=-1)
        above += (x > least).to(tl.int32)
        equal += (x == least).to(tl.int32)
    equals = tl.sum(equal, 0)
    before = tl.sum(above, 0) + tl.minimum(equals, left)
    equal_here = (mine == least).to(tl.int32)
    take = (mine > least) | ((equal_here != 0) & (equals + tl.cumsum(equal_here, 0) <= left))
    place = before + tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(chosen + own * selected + place, here, mask=take)


# ---- scratch ----


@triton.jit
def _token(chosen, own, row, first, selected, CHUNK: tl.constexpr, GATHERED: tl.constexpr):
    """Tokens that rows of a piece are of."""
    token = first + row
    if GATHERED:
        token = tl.load(chosen + own * selected + token // CHUNK) * CHUNK + token % CHUNK
    return token


@triton.jit
def _bits(codes, component, count, mask, WIDTH: tl.constexpr):
    """A plane's bits of some components of a group of any size."""
    size = (count * WIDTH + 7) // 8
    byte = tl.load(codes + (component % size)[None, :], mask=mask, other=0).to(tl.int32)
    return byte >> (component // size * WIDTH)[None, :] & ((1 << WIDTH) - 1)


@triton.jit
def _put(code, levels, rows, component, factor, mask):
    x = tl.load(levels + code, mask=mask, other=0.0) * factor[:, None]
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
@triton.jit(do_not_specialize=["rank", "nbytes", "groups", "length", "count", "first", "selected"])
def unpack(
    factors, norms, tiles, levels, rows, scales, rank, nbytes, groups, stride, chosen, length, count, first, selected,
    CODED: tl.constexpr, EIGHTS: tl.constexpr, GROUPS_UP: tl.constexpr, CHUNK: tl.constexpr, GATHERED: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Decode a tile of some tokens' factors, each divided by its largest norm; padding of a row is zero."""
    tile = tl.program_id(1)
    if CODED:
        tiles += tile * 8
        width, its = tl.load(tiles), tl.load(tiles + 1)
        start, size = tl.load(tiles + 2), tl.load(tiles + 3)
        column = tl.load(tiles + 4) + tl.arange(0, STEP)
        byte = tl.load(tiles + 5)
        levels += tl.load(tiles + 6)
    own, row = tl.program_id(2).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line, inside = own * length + row, row < count
    # Rows beyond the last are safe to read.
    token = _token(chosen, own, tl.minimum(row, count - 1), first, selected, CHUNK, GATHERED).to(tl.int64)
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
        factor = tl.sum(tl.where((group == its)[None, :], norm, 0.0), 1) / most
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
        column = tile * (8 * STEP) + tl.arange(0, 8 * STEP)
        x = tl.load(
            factors + token[:, None] * rank + column[None, :],
            mask=inside[:, None] & (column < rank)[None, :],
            other=0.0,
        )
        tl.store(rows + column[None, :], x, mask=inside[:, None] & (column < stride)[None, :])


@triton.jit
def unpack_basis(
    codes, scales, rotation, basis, factor, rank, step,
    DIM: tl.constexpr, DIM_UP: tl.constexpr, RANK_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decode some rows of one head's basis, divided by the largest of their norms."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
        basis + (head * rank + row[:, None]) * DIM + dims[None, :],
        tl.dot(x, turn.to(tl.float16)).to(tl.float16),
        mask=(row < rank)[:, None] & (dims < DIM)[None, :],
    )
    if block == 0:
        tl.store(factor + head, most * step * 128.0)


# ---- attention ----


@triton.jit
def logits(
    query, rows, scales, stride, basis, basis_scale, mean, partner, coarse_cos, coarse_sin, fine_cos, fine_sin,
    chosen, outliers, out, length, count, first, start, rank, selected, banned, scaling, turn_scale, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_UP: tl.constexpr,
    CHUNK: tl.constexpr, SETS: tl.constexpr, BANNED_UP: tl.constexpr, FINE: tl.constexpr, GATHERED: tl.constexpr, SCALED: tl.constexpr,
    BASIS_SCALED: tl.constexpr, MEAN: tl.constexpr, TURNED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Rebuild one KV head's keys of a tile of tokens; its queries' logits on them."""
    # Heads next to each other: they read the same rows.
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = head
    if SETS == 1:
        own = head * 0
    dims, components, m = tl.arange(0, DIM_UP), tl.arange(0, STEP), tl.arange(0, ROWS)
    line = own * length + row
    inside, wide = row < count, dims < DIM
    # Asked for early: the tables' rows depend on it.
    token = _token(chosen, own, tl.minimum(row, count - 1), first, selected, CHUNK, GATHERED)
    keys = tl.zeros([BLOCK, DIM_UP], tl.float32)
    for begin in range(0, rank, STEP):
        component = begin + components
        a = tl.load(
            rows + line[:, None] * stride + component[None, :],
            mask=inside[:, None] & (component < stride)[None, :],
            other=0.0,
        )
        b = tl.load(
            basis + (head * rank + component[:, None]) * DIM + dims[None, :],
            mask=(component < rank)[:, None] & wide[None, :],
            other=0.0,
        )
        keys = tl.dot(a, b, keys)
    if BASIS_SCALED:
        keys *= tl.load(basis_scale + head)
    if SCALED:
        keys *= tl.load(scales + line, mask=inside, other=0.0)[:, None]
    if MEAN:
        keys += tl.load(mean + head * DIM + dims, mask=wide, other=0.0).to(tl.float32)[None, :]
    queries = query + (head * GROUP + m[None, :]) * DIM
    there = wide[:, None] & (m < GROUP)[None, :]
    q = tl.load(queries + dims[:, None], mask=there, other=0.0).to(tl.float32)
    largest = _power_above(tl.max(tl.abs(q), 0))
    q = (q / largest[None, :]).to(tl.float16)
    top = _power_above(tl.max(tl.abs(keys), 1))
    keys = (keys / top[:, None]).to(tl.float16)
    if TURNED:
        # A key turned forth meets a query as it does a query turned back, whose planes are two products with the key.
        other = tl.load(partner + dims, mask=wide, other=0)
        crossed = tl.load(queries + other[:, None], mask=there, other=0.0).to(tl.float32)
        crossed = (crossed / largest[None, :]).to(tl.float16)
        position = token + start
        far = (position // FINE)[:, None] * DIM + dims[None, :]
        near = (position % FINE)[:, None] * DIM + dims[None, :]
        far_cos = tl.load(coarse_cos + far, mask=wide[None, :], other=0.0).to(tl.float32)
        far_sin = tl.load(coarse_sin + far, mask=wide[None, :], other=0.0).to(tl.float32)
        near_cos = tl.load(fine_cos + near, mask=wide[None, :], other=0.0).to(tl.float32)
        near_sin = tl.load(fine_sin + near, mask=wide[None, :], other=0.0).to(tl.float32)
        found = tl.dot(keys * (far_cos * near_cos - far_sin * near_sin).to(tl.float16), q)
        found -= tl.dot(keys * (far_sin * near_cos + far_cos * near_sin).to(tl.float16), crossed)
        found *= turn_scale
    else:
        found = tl.dot(keys, q)
    found *= top[:, None] * (largest * scaling)[None, :]
    if CAPPED:
        # tanh by the logistic function, which every Triton has
        found = (2.0 * tl.sigmoid(2.0 * found / softcap) - 1.0) * softcap
    shown = inside
    if BANNED_UP:
        shown = shown & ~_left_out(token // CHUNK, outliers, head, banned, BANNED_UP)
    found = tl.where(shown[:, None], found, float("-inf"))
    tl.store(
        out + (head * GROUP + m[None, :]) * length + row[:, None],
        found,
        mask=inside[:, None] & (m < GROUP)[None, :],
    )


@triton.jit
def mix(
    logits, rows, scales, stride, partial, partial_lse, length, count, each, splits, first_split, padded,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over one split of a piece, and its mixture of value factors."""
    split, part, own = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
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
            mask=(m < HEADS)[:, None] & inside[None, :],
            other=float("-inf"),
        )
        top = tl.maximum(peak, tl.max(found, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(found - safe[:, None])
        shrink = tl.exp(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        peak = top
        states = tl.load(
            rows + (own * length + row[:, None]) * stride + component[None, :],
            mask=inside[:, None] & (component < stride)[None, :],
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
    place = line * splits + first_split + split
    tl.store(partial + place[:, None] * padded + component[None, :], mixed, mask=(m < HEADS)[:, None])
    if part == 0:
        tl.store(partial_lse + place, lse, mask=m < HEADS)


@triton.jit
def rebuild(
    partial, partial_lse, basis, scales, output, splits, blocks, rank, padded, step,
    GROUP: tl.constexpr, ROWS: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, SPLITS_UP: tl.constexpr,
    CODED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Merge splits of one KV head's queries by their log-sum-exp; what some components of the mixtures are in its basis."""
    own, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    m, split, dims = tl.arange(0, ROWS), tl.arange(0, SPLITS_UP), tl.arange(0, VALUE_UP)
    component = part * BLOCK + tl.arange(0, BLOCK)
    real, wide = component < rank, dims < VALUE
    line, head = own * rank + component, own * GROUP + m
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
            place = head * splits + begin + after
            weight = tl.exp(tl.load(partial_lse + place, mask=there, other=float("-inf")) - top)
            states = tl.load(
                partial + place[:, None] * padded + component[None, :],
                mask=there[:, None],
                other=0.0,
            )
            mixed += states * weight[:, None]
    mixed /= tl.where(total == 0.0, 1.0, total)[:, None]
    if CODED:
        mixed *= (tl.load(scales + line, mask=real, other=0.0).to(tl.float32) * step)[None, :]
        # 256 and the code, as bits
        rows = (rows.to(tl.uint16) << 2 | 0x5C00).to(tl.float16, bitcast=True) - 383.5
    # Two parts of 16 bits are nearly all of a number.
    largest = _power_above(tl.max(tl.abs(mixed), 1))
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
    parts, partial_lse, rotation, mean, near, near_lse, output, lse, splits, blocks, near_splits,
    GROUP: tl.constexpr, VALUE: tl.constexpr, VALUE_UP: tl.constexpr, SPLITS_UP: tl.constexpr, BLOCKS_UP: tl.constexpr,
    NEAR_UP: tl.constexpr, CODED: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up one head's components, turn them back, add the mean, and merge with splits of other tokens: some channels."""
    head = tl.program_id(0).to(tl.int64)
    split, dims, part = (
        tl.arange(0, SPLITS_UP),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK),
        tl.arange(0, BLOCKS_UP),
    )
    wide = dims < VALUE
    # All reads are asked for first.
    logs = tl.load(partial_lse + head * splits + split, mask=split < splits, other=float("-inf"))
    inner = dims
    if CODED:
        inner = tl.arange(0, VALUE_UP)
        turn = tl.load(
            rotation + inner[:, None] * VALUE + dims[None, :],
            mask=(inner < VALUE)[:, None] & wide[None, :],
            other=0.0,
        )
    found = tl.load(
        parts + (head * blocks + part[:, None]) * VALUE + inner[None, :],
        mask=(part < blocks)[:, None] & (inner < VALUE)[None, :],
        other=0.0,
    )
    if NEAR_UP:
        other = tl.arange(0, NEAR_UP)
        near_logs = tl.load(
            near_lse + head * near_splits + other, mask=other < near_splits, other=float("-inf")
        )
        states = tl.load(
            near + (head * near_splits + other[:, None]) * VALUE + dims[None, :],
            mask=(other < near_splits)[:, None] & wide[None, :],
            other=0.0,
        )
    top = tl.max(logs, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logs - safe), 0)
    found = tl.sum(found, 0)
    if CODED:
        found = tl.sum(turn * found[:, None], 0)
    if MEAN:
        found += tl.load(mean + head // GROUP * VALUE + dims, mask=wide, other=0.0).to(tl.float32)
    found = tl.where(total == 0.0, 0.0, found)
    all_lse = tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))
    if NEAR_UP:
        top = tl.maximum(tl.max(near_logs, 0), all_lse)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights, far = tl.exp(near_logs - safe), tl.exp(all_lse - safe)
        total = tl.sum(weights, 0) + far
        found = tl.sum(states * weights[:, None], 0) + found * far
        found /= tl.where(total == 0.0, 1.0, total)
        all_lse = tl.where(total == 0.0, float("-inf"), safe + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(output + head * VALUE + dims, found.to(output.dtype.element_ty), mask=wide)
    if tl.program_id(1) == 0:
        tl.store(lse + head, all_lse)
