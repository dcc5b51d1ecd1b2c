"""Decode attention over records of coded tokens: one launch a layer on a Hopper GPU, and its plain-torch twin.

For token t and channel c, with a group of tiles each its norm n, a value magnitude s and whole-number levels of the codes,

    logit[t] = scaling * sum over groups g of n[t, g] * sum over channels c of g of query[c] * level(key code[t, c]) + bias[t]
    output[c] = sum over t of softmax(logit)[t] * s[t] * level(value code[t, c])

Scales of channels belong in the query and in what the output is multiplied with, as do rotations: both are the caller's, once a head
instead of once a token. Levels are whole numbers of eight bits (`book`), those of 8-bit codes are the code less 127.5.

The kernel is records.cu; the order of the codes is told in codecs/fragments.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.codecs.fragments import TOKENS, RecordFormat, numbers, unpack
from kvfold.kernels.cuda_library import built, no_compiler
from kvfold.kernels.position_bias import FINE
from kvfold.kernels.record_plan import BOOK, MOST_GROUP, Plan, make_plan, sets_of
from kvfold.kernels.reference import Part, softmax_part

if TYPE_CHECKING:
    from kvfold.kernels.turned_biases import Turning

HEAD_DIMS = (64, 80, 96, 112, 128, 256)


@dataclass(frozen=True)
class Run:
    """Records of one format that follow each other.

    Attributes
    ----------
    layout : RecordFormat
    tokens : int
        At least 1.
    first : int
        Tokens before this one are not seen.
    """

    layout: RecordFormat
    tokens: int
    first: int = 0

    @property
    def records(self) -> int:
        """Records of 64 tokens; the last one may be partial."""
        return -(-self.tokens // TOKENS)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.records * self.layout.nbytes


def book(levels: Mapping[int, Sequence[int]], group: int = 0) -> Tensor:
    """What the kernel looks levels up in, for one tile of keys or for values.

    Parameters
    ----------
    levels : mapping of width to whole numbers
        2 ** width of them from -128 to 127, for the widths 1 to 4 in use. Of width 4 the first eight must be negative and none
        of the others below -1, as those of any ascending symmetric codebook are.
    group : int
        Index of the group of tiles that shares norms; grows along the tiles.

    Returns
    -------
    (32,) uint8, on the CPU

    Raises
    ------
    ValueError
        Levels out of range, or not as many as codes.
    """
    result = torch.zeros(BOOK, dtype=torch.uint8)
    for width, own in levels.items():
        if width not in _PLACES or len(own) != 2**width or not all(-128 <= level <= 127 for level in own):
            raise ValueError(
                f"2 ** width levels from -128 to 127 are wanted, got {list(own)} for width {width}"
            )
        stored = list(own)
        if width == 4:
            if max(own[:8]) >= 0 or min(own[8:]) < -1 or max(own) > 126:
                raise ValueError(
                    f"16 levels must be eight below 0, then eight from -1 to 126, got {list(own)}"
                )
            stored[8:] = [level + 1 for level in own[8:]]  # see `levels` in records.cu
        result[_PLACES[width]] = torch.tensor(stored, dtype=torch.int8).view(torch.uint8)
    result[30] = group
    return result


_PLACES = {4: slice(0, 16), 3: slice(16, 24), 2: slice(24, 28), 1: slice(28, 30)}


def levels_of(book: Tensor, width: int) -> Tensor:
    """Levels (2 ** width,) float32 of a book (32,), of any width."""
    if width == 8:
        return torch.arange(256, device=book.device).float() - 127.5
    stored = book[_PLACES[width]].view(torch.int8).float()
    return stored - (torch.arange(16, device=book.device) >= 8).float() if width == 4 else stored


class Records:
    """All records of a layer, and how a GPU's blocks share them.

    Parameters
    ----------
    data : (bytes,) uint8
        The runs of row 0's first KV head, then of its second, and so on.
    books : (rows, kv_heads, tiles + 1, 32) uint8
        Of each tile of keys, then of values.
    runs : sequence over rows and KV heads of tuples of Run
        Every format with the same number of tiles, and as many norms as the books tell groups, or none.
    positions : (places,) int32, optional
        Of the tokens, in the order of `data`, whole records; ascending in each run. Any number where a record has no token.
        Without them, a token's is its place in its head.
    table : (records,) int32, optional
        A block table: where in `data` each record of the runs begins, in units of 16 bytes. `data` may then be a pool with
        others' records and gaps between them.

    Raises
    ------
    ValueError
        Sizes disagree, or a table names what lies outside `data`.
    """

    def __init__(
        self,
        data: Tensor,
        books: Tensor,
        runs: Sequence[tuple[Run, ...]],
        positions: Tensor | None = None,
        table: Tensor | None = None,
    ):
        self.data, self.books, self.runs = data, books, list(runs)
        self.positions, self.table = positions, table
        self._plans: dict[tuple[int, int], Plan] = {}
        self._begins: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows, self.kv_heads, tiles = books.shape[0], books.shape[1], books.shape[2] - 1
        self.dim = 16 * tiles
        if len(self.runs) != self.rows * self.kv_heads or books.shape[3] != BOOK:
            raise ValueError(f"{len(self.runs)} lists of runs do not fit books {tuple(books.shape)}")
        every = {run.layout for own in self.runs for run in own}
        if any(layout.dim != self.dim for layout in every):
            raise ValueError(f"runs and books disagree on the number of tiles ({tiles})")
        expected = sum(run.nbytes for own in self.runs for run in own)
        if (table is None and data.numel() != expected) or data.dtype != torch.uint8:
            raise ValueError(f"the runs are {expected} bytes, got {data.numel()} of {data.dtype}")
        count = sum(self.slots) // TOKENS
        if table is not None and (table.numel() != count or table.dtype != torch.int32):
            raise ValueError(f"a table must be {count} int32, got {table.numel()} of {table.dtype}")
        if table is not None and count:
            # A kernel would read whatever memory a wrong one names.
            sizes = [run.layout.nbytes for own in self.runs for run in own for _ in range(run.records)]
            first, last = table.min(), (16 * table.long() + torch.tensor(sizes, device=table.device)).max()
            if int(first) < 0 or int(last) > data.numel():
                raise ValueError(f"a table must name records within the pool of {data.numel()} bytes")
        if positions is not None and (positions.numel() != sum(self.slots) or positions.dtype != torch.int32):
            raise ValueError(
                f"positions must be {sum(self.slots)} int32, got {positions.numel()} of {positions.dtype}"
            )

    @cached_property
    def slots(self) -> list[int]:
        """Places for tokens, of each row and head: those of whole records."""
        return [TOKENS * sum(run.records for run in own) for own in self.runs]

    def plan(self, group: int, planes: int = 0) -> Plan:
        """How blocks share the records for so many query heads a KV head; made on the first attention."""
        found = self._plans.get((group, planes))
        if found is None:
            found = self._plans[group, planes] = make_plan(self, group, planes)
        return found

    def begins(self, turns: int) -> tuple[Tensor, Tensor]:
        """Where the tokens of every coarse turn of positions begin; made on the first attention.

        Returns
        -------
        ((rows * kv_heads + 1,) int32, the first run of each head; (runs, turns + 1) int32, of each run the first place whose
        token is as far as 64 positions, 128, ...)
        A head without positions is one run.
        """
        if turns not in self._begins:
            self._begins[turns] = _begins(self, turns)
        return self._begins[turns]

    @property
    def derived(self) -> list[Tensor]:
        """What those two have made, as far as it is in memory of its own."""
        plans = [table for plan in self._plans.values() for table in (plan.work, plan.arrived)]
        begins = [table for pair in self._begins.values() for table in pair]
        return [table for table in plans + begins if table is not None]

    def placed(self, bias: Tensor) -> Tensor:
        """What a bias (rows, kv_heads, positions, group) says of each token, at its place: (places, group)."""
        heads = torch.arange(len(self.runs)).repeat_interleave(torch.tensor(self.slots)).to(bias.device)
        where = self.positions
        if where is None:
            where = torch.cat([torch.arange(count) for count in self.slots]).to(bias.device)
        return bias.flatten(0, 1)[heads, where.long().clamp(max=bias.shape[2] - 1)]


def _begins(records: Records, turns: int) -> tuple[Tensor, Tensor]:
    device, far = records.data.device, FINE * torch.arange(turns + 1)
    if records.positions is None:
        ends = torch.tensor([*accumulate(records.slots, initial=0)])
        begins = torch.minimum(ends[:-1, None] + far, ends[1:, None])
        return torch.arange(len(records.runs) + 1).int().to(device), begins.int().to(device)
    runs = [run for own in records.runs for run in own]
    places = torch.tensor([TOKENS * run.records for run in runs], dtype=torch.int64)
    which = torch.arange(len(runs)).repeat_interleave(places)
    index = torch.arange(len(which)) - (places.cumsum(0) - places)[which]
    real = (index < torch.tensor([run.tokens for run in runs], dtype=torch.int64)[which]).to(device)
    # Ascending over all runs; places without a token are beyond their run's last turn.
    beyond = FINE * (turns + 1)
    keys = torch.where(real, records.positions, beyond - 1) + beyond * which.to(device)
    wanted = (beyond * torch.arange(len(runs))[:, None] + far).to(device)
    firsts = torch.tensor([*accumulate(map(len, records.runs), initial=0)], dtype=torch.int32)
    return firsts.to(device), torch.searchsorted(keys, wanted).int()


# ---- plain torch ----


def attend_plain(
    query: Tensor,
    records: Records,
    scaling: float,
    bias: Tensor | None = None,
) -> Part:
    """As `attend`, by plain torch on any device, in the query's precision.

    Parameters
    ----------
    query : (rows, heads, dim) float32 or float64
    records : Records
    scaling : float
    bias : optional
    """
    rows, heads, dim = query.shape
    group = heads // records.kv_heads
    grouped = query.view(rows * records.kv_heads, group, dim)
    outputs, lses, begin, slot = [], [], 0, 0
    slots: list[int]
    hidden: list[bool]
    for index, (own, q) in enumerate(zip(records.runs, grouped, strict=True)):
        row, head = divmod(index, records.kv_heads)
        books = records.books[row, head]
        keys, values, slots, hidden = [q[:0]], [q[:0]], [], []
        for run in own:
            part = _lying(records, run, begin, slot // TOKENS)
            one, other = _decoded(part, run, books, q.dtype)
            keys.append(one)
            values.append(other)
            slots += range(slot, slot + run.tokens)
            hidden += [index < run.first for index in range(run.tokens)]
            begin, slot = begin + run.nbytes, slot + run.records * TOKENS
        logits = q @ torch.cat(keys).t() * scaling
        if bias is not None:
            logits += bias[slots].t()
        logits = logits.masked_fill(torch.tensor(hidden, dtype=torch.bool, device=logits.device), -torch.inf)
        output, lse = softmax_part(logits, torch.cat(values))
        outputs.append(output)
        lses.append(lse)
    return torch.stack(outputs).view(rows, heads, dim), torch.stack(lses).view(rows, heads)


def _lying(records: Records, run: Run, begin: int, record: int) -> Tensor:
    """A run's records, (records, bytes)."""
    size = run.layout.nbytes
    if records.table is None:
        return records.data[begin : begin + run.nbytes].view(run.records, size)
    first = 16 * records.table[record : record + run.records].long()
    return records.data[first[:, None] + torch.arange(size, device=first.device)]


def _decoded(data: Tensor, run: Run, books: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (tokens, dim) of one run, norms and magnitudes in."""
    coded = unpack(data, run.layout, run.tokens)
    widths = [*run.layout.key_widths, run.layout.value_width]
    tables = [levels_of(book, width).to(dtype) if width else None for book, width in zip(books, widths)]
    tiles = [
        codes.new_zeros(codes.shape, dtype=dtype) if table is None else table[codes.int()]
        for codes, table in zip(coded.keys.split(16, -1), tables)
    ]
    if coded.key_norms is not None:
        norms = numbers(coded.key_norms).to(dtype)
        tiles = [tile * norms[:, group : group + 1] for tile, group in zip(tiles, books[:, 30].tolist())]
    values = tables[-1][coded.values.int()]  # type: ignore[index]
    if coded.magnitudes is not None:
        values = values * numbers(coded.magnitudes).to(dtype)[:, None]
    return torch.cat(tiles, -1), values


# ---- the kernel ----


def problem(device: torch.device, dim: int = 128, group: int = 1) -> str | None:
    """Why the kernel cannot be used, or None.

    Parameters
    ----------
    device : torch.device
    dim : int
        Channels of a head.
    group : int
        Query heads of a KV head.
    """
    if dim not in HEAD_DIMS:
        return f"head_dim {dim} is not one of {HEAD_DIMS}"
    if not 1 <= group <= MOST_GROUP:
        return f"{group} query heads a KV head are more than {MOST_GROUP}"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"the GPU's compute capability is {major}.{minor}: bulk copies need 9.0 (Hopper) or newer"
    return no_compiler()


def attend(
    query: Tensor,
    records: Records,
    scaling: float,
    bias: Tensor | None = None,
    turned: Turning | None = None,
    early: bool = False,
) -> Part:
    """Attention of one query a head over records, by the kernel where it can be used, else by plain torch.

    Parameters
    ----------
    query : (rows, heads, dim) float32
        In the basis of the codes, scales of channels multiplied in.
    records : Records
    scaling : float
    bias : (places, group) float32, optional
        Added to logits of a KV head's queries; a token's place is 64 times its record's index among those of all heads plus its
        index there. -inf hides it.
    turned : Turning, optional
        Instead of a bias, that of vectors that RoPE turns to each token's place in its head, whose records are one run in
        order.
    early : bool
        The launch ahead of this one on the stream writes nothing but queries, bias and factors: records may be read before it has
        ended.

    Returns
    -------
    (output (rows, heads, dim) float32, in the basis of the codes, log-sum-exp (rows, heads) float32); 0 and -inf where a head
    has no token.

    Raises
    ------
    ValueError
        Shapes disagree.
    """
    rows, heads, dim = query.shape
    if rows != records.rows or heads % records.kv_heads or dim != records.dim:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit {records.rows} rows of {records.kv_heads} KV heads of {records.dim}"
        )
    group, places = heads // records.kv_heads, sum(records.slots)
    if bias is not None and bias.shape != (places, group):
        raise ValueError(f"bias {tuple(bias.shape)} must be {(places, group)}")
    if turned is not None and (bias is not None or any(len(own) > 1 for own in records.runs)):
        raise ValueError("a turned vector's logits want one run a head and no other bias")
    if problem(query.device, dim, group) is not None:
        if turned is not None:
            factors = turned.factors.view(rows, records.kv_heads, group, -1, 2)
            logits = turned.circles.logits(factors, turned.coarse, turned.fine, max(records.slots))
            bias = records.placed(logits.transpose(2, 3))
        return attend_plain(query, records, scaling, bias)
    plan = records.plan(group, 0 if turned is None else turned.circles.count)
    output, lse = torch.ops.kvfold.attend_records(
        query.contiguous(),
        records.data,
        records.books,
        plan.work,
        records.table,
        None if bias is None else bias.contiguous(),
        *((None,) * 4 if turned is None else turned.tensors),
        plan.arrived,
        plan.numbers,
        scaling,
        early,
    )
    return output, lse


@torch.library.custom_op("kvfold::attend_records", mutates_args=("arrived",), device_types="cuda")
def _attend_records(
    query: Tensor,
    data: Tensor,
    books: Tensor,
    work: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    factors: Tensor | None,
    channels: Tensor | None,
    coarse: Tensor | None,
    fine: Tensor | None,
    arrived: Tensor,
    plan: list[int],
    scaling: float,
    early: bool,
) -> tuple[Tensor, Tensor]:
    blocks, warps, ring_bytes, *common = plan
    rows, heads, dim = query.shape
    row_heads = books.shape[0] * books.shape[1]
    group = rows * heads // row_heads
    kind = int(bias is not None) if channels is None else channels.shape[-2]
    library = library_of(dim, sets_of(group), warps, kind)
    output, lse = torch.empty_like(query), query.new_empty(rows, heads)
    partial = query.new_empty(blocks * group * (dim + 2))
    sums = partial[blocks * group * dim :]

    def at(x: Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    given = Problem(
        *(at(x) for x in (query, data, books, work, bias, table)),
        *(at(x) for x in (factors, channels, coarse, fine)),
        *(at(x) for x in (partial, sums, arrived, output, lse)),
        *(group, ring_bytes, 0, 0 if fine is None else fine.shape[1], scaling / math.log(2)),
        (ctypes.c_int32 * 16)(*common),
    )
    with torch.cuda.device(query.device):
        stream = torch.cuda.current_stream().cuda_stream
        code = library.kvfold_records(ctypes.byref(given), blocks, early, stream)
    if code:
        raise RuntimeError(f"attention over records failed: {library.kvfold_records_error(code).decode()}")
    return output, lse


@_attend_records.register_fake
def _(
    query: Tensor,
    data: Tensor,
    books: Tensor,
    work: Tensor | None,
    table: Tensor | None,
    bias: Tensor | None,
    factors: Tensor | None,
    channels: Tensor | None,
    coarse: Tensor | None,
    fine: Tensor | None,
    arrived: Tensor,
    plan: list[int],
    scaling: float,
    early: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2])


class Problem(ctypes.Structure):
    """The kernels' arguments, as records.cu has them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "records", "books", "work", "bias", "table")),
        *((name, ctypes.c_void_p) for name in ("factors", "channels", "coarse", "fine")),
        *((name, ctypes.c_void_p) for name in ("partial", "partial_sums", "arrived", "output", "lse")),
        *((name, ctypes.c_int32) for name in ("group", "ring_bytes", "turns", "fine_stride")),
        ("scaling", ctypes.c_float),
        ("common", ctypes.c_int32 * 16),
    ]


@cache
def library_of(dim: int, sets: int, warps: int, bias: int) -> ctypes.CDLL:
    """The kernels for one shape."""
    macros = {"HEAD_DIM": dim, "SETS": sets, "WARPS": warps, "BIAS": bias}
    library = built("records.cu", macros)
    library.kvfold_records.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    library.kvfold_records_error.restype = ctypes.c_char_p
    return library
