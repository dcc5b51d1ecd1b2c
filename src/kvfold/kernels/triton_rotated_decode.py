"""Attention of few queries over rotated codes on a GPU, straight from their packed bytes: flash decoding in Triton.

The portable path: any widths, groups and head sizes, on whatever GPU Triton compiles for. `stores.tokenwise` is its plain
twin.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.codecs.logarithm import STEPS
from kvfold.kernels.dense_decode_triton import finish
from kvfold.kernels.triton_rotated_table import CHANNELS, GROUP, LEVELS, PLANE, ROWS, table

if TYPE_CHECKING:
    from kvfold.codecs.rotated import RotatedCode
    from kvfold.kernels.reference import Part

SHAPES = {16: (32, 4, 1), 32: (32, 4, 1), 64: (32, 4, 1), 128: (32, 4, 1), 256: (16, 4, 1)}
"""By padded channels: tokens at a time, warps, stages. 128: fastest on an H200; the others spill no registers."""

_STEPS = tl.constexpr(float(STEPS))
_GROUP, _CHANNELS, _LEVELS, _PLANE, _ROWS = map(tl.constexpr, (GROUP, CHANNELS, LEVELS, PLANE, ROWS))


@triton.jit
def _levels(codes, levels, facts, SIZE: tl.constexpr, PLANES: tl.constexpr):
    """float16 levels (SIZE, tokens) of a tile; `codes` (tokens,) points to where the head's codes of each token begin.

    Channels run along the first axis: where addresses do not tell, Triton gives its neighbours to neighbouring threads.
    """
    channel = tl.arange(0, SIZE)
    index_of = tl.load(facts + _LEVELS * SIZE + channel)[:, None]
    for index in tl.static_range(4):
        if PLANES >> index & 1:
            place = tl.load(facts + (_PLANE + index) * SIZE + channel)
            byte = tl.load(codes[None, :] + (place >> 8)[:, None]).to(tl.int32)
            index_of += (byte >> (place >> 4 & 15)[:, None] & ((1 << (1 << index)) - 1)) << (place & 15)[
                :, None
            ]
    return tl.load(levels + index_of).to(tl.float16)


@triton.jit
def _share(shares, facts, group, dim, SIZE: tl.constexpr, GIVEN: tl.constexpr):
    """Each channel's group's share of the one norm of a vector: as given, or by its number of channels."""
    if GIVEN:
        share = tl.load(shares + group, mask=group >= 0, other=0.0).to(tl.float32)
    else:
        wide = tl.load(facts + _CHANNELS * SIZE + tl.arange(0, SIZE))
        share = tl.sqrt(wide.to(tl.float32) / dim)
    return share


@triton.jit
def _norms(norms, units, index, LOGARITHMS: tl.constexpr):
    """Norms of a tile of tokens; `norms` (tokens,) and `units` point to where those of the head begin."""
    norm = tl.load(norms + index).to(tl.float32)
    if LOGARITHMS:
        norm = tl.exp2((norm - 128.0) / _STEPS) * tl.load(units + index)
    return norm


@triton.jit
def _partials(
    query, partial, partial_lse, key_codes, key_norms, value_codes, value_norms, key_facts, key_levels, key_heads,
    value_facts, value_levels, value_heads, key_shares, value_shares, key_units, value_units, more, valid,
    lengths, sources,
    kv_heads, queries, tokens, dim, value_dim, key_bytes, key_scales, value_bytes, value_scales, key_groups, value_groups,
    chunk, splits, softcap,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_PLANES: tl.constexpr,
    VALUE_PLANES: tl.constexpr, BY_GROUP: tl.constexpr, VALUE_BY_GROUP: tl.constexpr, KEY_SHARES: tl.constexpr,
    VALUE_SHARES: tl.constexpr, MORE: tl.constexpr, VALID: tl.constexpr, LENGTHS: tl.constexpr, SOURCES: tl.constexpr,
    CAPPED: tl.constexpr, KEY_LOGARITHMS: tl.constexpr, VALUE_LOGARITHMS: tl.constexpr,
):  # fmt: skip
    """Attention of one KV head's queries over one split of the tokens."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    source = row
    if SOURCES:
        source = tl.load(sources + row).to(tl.int64)
    channel, value_channel = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    m, block = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    facts, value_facts = key_facts + head * _ROWS * SIZE, value_facts + head * _ROWS * VALUE_SIZE
    group = tl.load(facts + _GROUP * SIZE + channel)
    value_group = tl.load(value_facts + _GROUP * VALUE_SIZE + value_channel)
    first = (row * kv_heads + head) * queries

    q = tl.load(
        query + (first + m[:, None]) * dim + channel[None, :],
        mask=(m[:, None] < queries) & (channel[None, :] < dim),
        other=0.0,
    )
    if not BY_GROUP:
        q *= _share(
            key_shares + (source * kv_heads + head) * key_groups, facts, group, dim, SIZE, KEY_SHARES
        )[None, :]
    # float16 has the precision but not the range: queries, and below the values' norms, are taken relative to the largest.
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    q = (q / largest[:, None]).to(tl.float16)

    stop = tl.minimum((split + 1) * chunk, tokens)
    if LENGTHS:
        stop = tl.minimum(stop, tl.load(lengths + row).to(tl.int32))
    key_scale, value_scale = (
        tl.load(key_heads + 2 * kv_heads + head),
        tl.load(value_heads + 2 * kv_heads + head),
    )
    key_codes += source * tokens * key_bytes + tl.load(key_heads + kv_heads + head)
    key_norms += source * tokens * key_scales + key_scale
    key_units += source * key_scales + key_scale
    value_codes += source * tokens * value_bytes + tl.load(value_heads + kv_heads + head)
    value_norms += source * tokens * value_scales + value_scale
    value_units += source * value_scales + value_scale
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_SIZE], tl.float32)
    for begin in range(split * chunk, stop, BLOCK):
        token = begin + block
        seen = token < stop
        # Hidden tokens, and channels of padding, get no weight: they need only be safe to read.
        line = tl.minimum(token, stop - 1).to(tl.int64)
        keys = _levels(key_codes + line * key_bytes, key_levels, facts, SIZE, KEY_PLANES)
        if BY_GROUP:
            scores = tl.zeros([ROWS, BLOCK], tl.float32)
            for one in range(tl.load(key_heads + head)):
                norm = _norms(key_norms + line * key_scales, key_units, one, KEY_LOGARITHMS)
                own = tl.where((group == one)[None, :], q, 0.0)
                scores += tl.dot(own, keys) * norm[None, :]
        else:
            norm = _norms(key_norms + line * key_scales, key_units, 0, KEY_LOGARITHMS)
            scores = tl.dot(q, keys) * norm[None, :]
        scores *= largest[:, None]
        if MORE:
            scores += tl.load(
                more + (first + m[:, None]) * tokens + token[None, :],
                mask=(m[:, None] < queries) & seen[None, :],
                other=0.0,
            )
        if CAPPED:
            # tanh by the logistic function, which every Triton has
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        shown = seen
        if VALID:
            shown = shown & (tl.load(valid + source * tokens + line) != 0)
        scores = tl.where(shown[None, :], scores * 1.4426950408889634, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        mixed *= shrink[:, None]
        peak = top
        values = tl.trans(
            _levels(value_codes + line * value_bytes, value_levels, value_facts, VALUE_SIZE, VALUE_PLANES)
        )
        if VALUE_BY_GROUP:
            for one in range(tl.load(value_heads + head)):
                norm = _norms(value_norms + line * value_scales, value_units, one, VALUE_LOGARITHMS)
                most = tl.maximum(tl.max(norm, 0), 1e-30)
                own = tl.where((value_group == one)[None, :], values, 0.0)
                mixed += tl.dot((weights * (norm / most)[None, :]).to(tl.float16), own) * most
        else:
            norm = _norms(value_norms + line * value_scales, value_units, 0, VALUE_LOGARITHMS)
            most = tl.maximum(tl.max(norm, 0), 1e-30)
            mixed += tl.dot((weights * (norm / most)[None, :]).to(tl.float16), values) * most
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    if not VALUE_BY_GROUP:
        given = value_shares + (source * kv_heads + head) * value_groups
        mixed *= _share(given, value_facts, value_group, value_dim, VALUE_SIZE, VALUE_SHARES)[None, :]
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
    at = (first + m) * splits + split
    mask = (m[:, None] < queries) & (value_channel[None, :] < value_dim)
    tl.store(partial + at[:, None] * value_dim + value_channel[None, :], mixed, mask=mask)
    tl.store(partial_lse + at, lse, mask=m < queries)


def attend(
    query: Tensor,
    keys: tuple[RotatedCode, ...],
    values: tuple[RotatedCode, ...],
    buffers: Mapping[str, Tensor],
    *,
    more: Tensor | None = None,
    lengths: Tensor | None = None,
    sources: Tensor | None = None,
    softcap: float | None = None,
) -> Part:
    """Attention over the codes of a `RotatedStore`, in its basis.

    Parameters
    ----------
    query : (batch, kv_heads, n, key_dim) float32
        As `RotatedStore.query_to_basis` gives them, scaled; n is the queries of a KV head.
    keys, values : tuple of RotatedCode
        One for each KV head, without a sketch.
    buffers : mapping of str to Tensor
        A `RotatedStore`'s: codes and norms, and what it has of units, shares and "valid".
    more : (batch, kv_heads, n, tokens) float32, optional
        Added to the logits.
    lengths : (batch,) int32 or int64 on the device, optional
        Only so many tokens are seen.
    sources : (batch,) int64, optional
        The row that each batch row reads; the same one if not given.
    softcap : float, optional

    Returns
    -------
    (output (batch, kv_heads, n, value_dim) in the basis of the values, log-sum-exp (batch, kv_heads, n)), float32; 0 and
    -inf where a query sees nothing.
    """
    batch, heads, queries, dim = query.shape
    tokens, value_dim = buffers["key_codes"].shape[1], values[0].dim
    key_facts, value_facts = table(keys, query.device), table(values, query.device)
    size, value_size = key_facts.channels.shape[-1], value_facts.channels.shape[-1]
    block, warps, stages = SHAPES[max(size, value_size)]
    splits, chunk = _splits(tokens, block, batch * heads, query.device)
    partial = query.new_empty(batch, heads, queries, splits, value_dim)
    partial_lse = query.new_empty(batch, heads, queries, splits)
    options = {"more": more, "lengths": lengths, "sources": sources}
    for name in ("key_shares", "value_shares", "key_units", "value_units", "valid"):
        options[name] = buffers.get(name)
    there = {name: query if tensor is None else tensor.contiguous() for name, tensor in options.items()}
    most = {
        name: 0 if options[name] is None else there[name].shape[-1] for name in ("key_shares", "value_shares")
    }
    stored = [buffers[name].contiguous() for name in ("key_codes", "key_norms", "value_codes", "value_norms")]
    _partials[(splits, heads, batch)](
        query.contiguous(), partial, partial_lse, *stored, key_facts.channels, key_facts.levels, key_facts.heads,
        value_facts.channels, value_facts.levels, value_facts.heads, there["key_shares"], there["value_shares"],
        there["key_units"], there["value_units"], there["more"], there["valid"], there["lengths"], there["sources"],
        heads, queries, tokens, dim, value_dim, key_facts.code_bytes, key_facts.scales, value_facts.code_bytes,
        value_facts.scales, most["key_shares"], most["value_shares"], chunk, splits, softcap or 0.0,
        ROWS=max(16, triton.next_power_of_2(queries)), BLOCK=block, SIZE=size, VALUE_SIZE=value_size,
        KEY_PLANES=key_facts.planes, VALUE_PLANES=value_facts.planes, BY_GROUP=keys[0].norms == "group",
        VALUE_BY_GROUP=values[0].norms == "group", KEY_SHARES=options["key_shares"] is not None,
        VALUE_SHARES=options["value_shares"] is not None, MORE=more is not None, VALID=options["valid"] is not None,
        LENGTHS=lengths is not None, SOURCES=sources is not None, CAPPED=softcap is not None,
        KEY_LOGARITHMS=options["key_units"] is not None, VALUE_LOGARITHMS=options["value_units"] is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    output, lse = query.new_empty(batch, heads, queries, value_dim), query.new_empty(batch, heads, queries)
    finish[(batch * heads * queries,)](
        partial, partial_lse, partial, partial_lse, output, lse, splits, SPLITS_UP=triton.next_power_of_2(splits),
        VALUE=value_dim, VALUE_UP=value_size, BEFORE=False, num_warps=4,
    )  # fmt: skip
    return output, lse


def _splits(tokens: int, block: int, heads: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts the tokens are split, and tokens in a part."""
    programs = 4
    if device.type == "cuda":
        programs *= torch.cuda.get_device_properties(device).multi_processor_count
    blocks = max(1, triton.cdiv(tokens, block))
    a_part = triton.cdiv(blocks, min(blocks, max(1, programs // heads)))
    return triton.cdiv(blocks, a_part), a_part * block
