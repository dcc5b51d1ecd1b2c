"""Kept tokens of each head in rotated codes: what one method chose, merged or made, coded by another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.codecs import logarithm
from kvfold.codecs.rotated import RotatedCode
from kvfold.kernels.position_bias import position_logits, turned_rows
from kvfold.kernels.reference import Part, merge, soft_cap, softmax_part
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.ragged import RaggedStore, position_dtype
from kvfold.stores.tokenwise import rotary_for


@dataclass(frozen=True)
class CodedLayout:
    """What is not a tensor.

    Attributes
    ----------
    tokens : int
        Logical length of the segment.
    real_tokens : tuple of int
    shifts : tuple of int
        RoPE position minus logical index, for each row.
    keys, values : tuple of RotatedCode
        One for each KV head.
    turned : bool
        RoPE turns "key_mean" to each token's position.
    """

    tokens: int
    real_tokens: tuple[int, ...]
    shifts: tuple[int, ...]
    keys: tuple[RotatedCode, ...]
    values: tuple[RotatedCode, ...]
    turned: bool = False


class CodedStore(RaggedStore):
    """Codes and norms of the tokens that each row and KV head keeps.

    Parameters
    ----------
    layout : CodedLayout
    buffers : mapping of str to Tensor
        "counts" (rows, kv_heads) int32; "positions" (kept,) int16 or int32, logical indices; "key_codes" and "value_codes"
        (bytes,) and "key_norms" and "value_norms" (norms,) uint8, logarithms of which "key_units" and "value_units" (rows,
        norms of all heads) float32 tell the unit. All by row, then head. Optional: "bias" (kept,), added to logits after
        scaling and capping; "key_mean" (rows, kv_heads, key_dim), which was taken from keys before coding; "key_order"
        (rows, kv_heads, key_dim) uint8, channels as `layout.keys` groups them; "key_shares" (rows, kv_heads, groups).

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "coded"
    layout_class = CodedLayout
    purposes = {
        "counts": "order",
        "positions": "positions",
        "key_codes": "codes",
        "value_codes": "codes",
        "key_norms": "norms",
        "value_norms": "norms",
        "key_units": "norms",
        "value_units": "norms",
        "key_shares": "norms",
        "key_mean": "means",
        "key_order": "order",
        "bias": "biases",
    }
    block = 4096
    """Tokens decoded at a time."""

    def __init__(self, layout: CodedLayout, buffers: Mapping[str, Tensor]):
        self.layout, self.buffers = layout, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.kv_heads = len(layout.keys)
        self.key_dim, self.value_dim = layout.keys[0].dim, layout.values[0].dim
        counts = self.buffers["counts"]
        if counts.shape != (self.rows, self.kv_heads):
            raise ValueError(
                f"counts are {tuple(counts.shape)}, the layout says {(self.rows, self.kv_heads)}"
            )
        self._counts: list[list[int]] = counts.tolist()
        self._heads = self._cut()

    def _per_token(self, head: int) -> dict[str, int]:
        """Elements of each ragged buffer that one token of a head takes."""
        keys, values = self.layout.keys[head], self.layout.values[head]
        sizes = {"positions": 1, "key_codes": keys.nbytes, "value_codes": values.nbytes}
        sizes.update(key_norms=keys.scales, value_norms=values.scales)
        if "bias" in self.buffers:
            sizes["bias"] = 1
        return sizes

    def _cut(self) -> list[dict[str, Tensor]]:
        """Each row's and head's piece of the ragged buffers, as (tokens, elements) but for positions and bias."""
        heads, at = [], dict.fromkeys(self._per_token(0), 0)
        for row in self._counts:
            for head, count in enumerate(row):
                pieces = {}
                for name, size in self._per_token(head).items():
                    piece = self.buffers[name][at[name] : at[name] + count * size]
                    if len(piece) != count * size:
                        raise ValueError(f"buffer {name} is shorter than the counts say")
                    at[name] += count * size
                    pieces[name] = piece if name in ("positions", "bias") else piece.view(count, size)
                heads.append(pieces)
        for name, used in at.items():
            if used != len(self.buffers[name]):
                raise ValueError(f"buffer {name} is longer than the counts say")
        return heads

    @classmethod
    def encode(
        cls,
        heads: Sequence[Sequence[Kept]],
        layout: CodedLayout,
        constants: Mapping[str, Tensor],
        rotary: Rotary | None = None,
    ) -> CodedStore:
        """Code the content of each row and KV head.

        Parameters
        ----------
        heads : (rows, kv_heads) of Kept
            All with a bias, or none.
        layout : CodedLayout
        constants : mapping of str to Tensor
            "key_mean", "key_order" and "key_shares", where they are wanted.
        rotary : Rotary or None
            Needed if the mean is turned.
        """
        device = heads[0][0].keys.device
        counts = torch.tensor([[len(kept.positions) for kept in row] for row in heads], dtype=torch.int32)
        buffers = {**constants, "counts": counts.to(device)}
        ragged: dict[str, list[Tensor]] = {}
        units: dict[str, list[Tensor]] = {"key": [], "value": []}
        for row, kepts in enumerate(heads):
            for head, kept in enumerate(kepts):
                keys = kept.keys.float()
                if "key_mean" in constants:
                    keys = keys - cls._constant(constants, layout, rotary, row, head)[kept.positions]
                if "key_order" in constants:
                    keys = keys[:, constants["key_order"][row, head].long()]
                shares = constants["key_shares"][row, head] if "key_shares" in constants else None
                ragged.setdefault("positions", []).append(kept.positions.to(position_dtype(layout.tokens)))
                for name, code, x, share in (
                    ("key", layout.keys[head], keys, shares),
                    ("value", layout.values[head], kept.values, None),
                ):
                    codes, norms = code.encode(x, share)
                    unit = logarithm.unit_of(norms.float()[None])[0]
                    units[name].append(unit)
                    ragged.setdefault(f"{name}_codes", []).append(codes.flatten())
                    ragged.setdefault(f"{name}_norms", []).append(
                        logarithm.encode(norms.float(), unit).flatten()
                    )
                if kept.bias is not None:
                    ragged.setdefault("bias", []).append(kept.bias.half())
        for name, found in units.items():
            buffers[f"{name}_units"] = torch.cat(found).view(len(heads), -1)
        return cls(layout, {**buffers, **{name: torch.cat(parts) for name, parts in ragged.items()}})

    @classmethod
    def of(
        cls,
        store: Store,
        shifts: tuple[int, ...],
        keys: tuple[RotatedCode, ...],
        values: tuple[RotatedCode, ...],
        constants: Mapping[str, Tensor],
        rotary: Rotary | None = None,
    ) -> CodedStore:
        """What another store holds, coded; `shifts` are RoPE position minus logical index of each row."""
        heads = [
            [store.kept(row, head, rotary) for head in range(store.kv_heads)] for row in range(store.rows)
        ]
        turned = "key_mean" in constants and rotary is not None
        layout = CodedLayout(store.tokens, tuple(store.real_tokens), shifts, keys, values, turned)
        return cls.encode(heads, layout, constants, rotary)

    @staticmethod
    def _constant(
        constants: Mapping[str, Tensor], layout: CodedLayout, rotary: Rotary | None, row: int, head: int
    ) -> Tensor:
        """What was taken from keys at each logical index, (tokens, key_dim)."""
        mean, rotary = constants["key_mean"][row, head, None].float(), rotary_for(layout.turned, rotary)
        if rotary is None:
            return mean.expand(layout.tokens, -1)
        return turned_rows(mean, rotary, layout.tokens, layout.shifts[row])[0]

    # ---- attention ----

    def _norms(self, name: str, row: int, head: int) -> Tensor:
        codes = getattr(self.layout, f"{name}s")
        start = sum(code.scales for code in codes[:head])
        unit = self.buffers[f"{name}_units"][row, start : start + codes[head].scales]
        return logarithm.decode(self._head(row, head)[f"{name}_norms"], unit)

    def _head(self, row: int, head: int) -> dict[str, Tensor]:
        return self._heads[row * self.kv_heads + head]

    def _shares(self, row: int, head: int) -> Tensor | None:
        return self.buffers["key_shares"][row, head] if "key_shares" in self.buffers else None

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        heads, count, dim = query.shape
        done = [
            self._attend_head(row, head, q, context)
            for head, q in enumerate(query.reshape(self.kv_heads, -1, dim) * context.scaling)
        ]
        output, lse = (torch.stack(parts) for parts in zip(*done, strict=True))
        return output.view(heads, count, -1), lse.view(heads, count)

    def _attend_head(self, row: int, head: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of query (n, key_dim), scaled, in the coded basis; the output is turned back once."""
        key_code, value_code, segment = (
            self.layout.keys[head],
            self.layout.values[head],
            self._head(row, head),
        )
        positions = segment["positions"].long()
        more: Tensor | None = None
        if "key_mean" in self.buffers:
            mean, rotary = self.buffers["key_mean"][row, head, None].float(), None
            if self.layout.turned:
                rotary = rotary_for(True, context.rotary)
                assert rotary is not None
                shift = self.layout.shifts[row]
                more = position_logits(query[None], mean, rotary, self.layout.tokens, shift)[0][:, positions]
            else:
                more = query @ mean.t()
        if "key_order" in self.buffers:
            query = query[:, self.buffers["key_order"][row, head].long()]
        turned = key_code.query(query)
        key_norms, value_norms = self._norms("key", row, head), self._norms("value", row, head)
        parts = []
        for start in range(0, max(len(positions), 1), self.block):
            span = slice(start, start + self.block)
            keys = key_code.decode(segment["key_codes"][span], key_norms[span], self._shares(row, head))
            scores = turned @ keys.t()
            if more is not None:
                scores = scores + (more[:, span] if self.layout.turned else more)
            scores = soft_cap(scores, context.softcap)
            if "bias" in segment:
                scores = scores + segment["bias"][span].float()
            if self.tokens < self.layout.tokens:
                scores = scores.masked_fill(positions[span] >= self.tokens, -torch.inf)
            values = value_code.decode(segment["value_codes"][span], value_norms[span])
            parts.append(softmax_part(scores, values))
        output, lse = merge(parts)
        return value_code.restore(output), lse

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        key_code, value_code, segment = (
            self.layout.keys[head],
            self.layout.values[head],
            self._head(row, head),
        )
        positions = segment["positions"].long()
        keys = key_code.restore(
            key_code.decode(segment["key_codes"], self._norms("key", row, head), self._shares(row, head))
        )
        if "key_order" in self.buffers:
            keys = torch.empty_like(keys).index_copy_(1, self.buffers["key_order"][row, head].long(), keys)
        if "key_mean" in self.buffers:
            keys = keys + self._constant(self.buffers, self.layout, rotary, row, head)[positions]
        values = value_code.restore(
            value_code.decode(segment["value_codes"], self._norms("value", row, head))
        )
        seen = positions < self.tokens
        bias = segment["bias"].float()[seen] if "bias" in segment else None
        return Kept(positions[seen], keys[seen], values[seen], bias)

    def select(self, rows: Tensor) -> CodedStore:
        chosen = rows.tolist()
        buffers = {
            name: tensor[rows] for name, tensor in self.buffers.items() if name not in self._per_token(0)
        }
        for name in self._per_token(0):
            pieces = [self._head(row, head)[name] for row in chosen for head in range(self.kv_heads)]
            buffers[name] = torch.cat([piece.flatten() for piece in pieces])
        real = tuple(self.real_tokens[row] for row in chosen)
        store = CodedStore(self._layout_of(chosen, "real_tokens", "shifts"), buffers)
        return store._seen(self.tokens, real)

    def widths(self) -> list[dict[str, dict[int, int]]]:
        result = []
        for head, (keys, values) in enumerate(zip(self.layout.keys, self.layout.values, strict=True)):
            by_width: dict[int, int] = {}
            for width, channels in keys.groups:
                by_width[width] = by_width.get(width, 0) + channels * self.rows
            held = sum(len(self.kept_positions(row, head)) for row in range(self.rows))
            result.append({"values": {values.groups[0][0]: held}, "keys": by_width})
        return result

    def kept_positions(self, row: int, head: int) -> Tensor:
        """Logical indices of what a head still holds."""
        positions = self._head(row, head)["positions"].long()
        return positions[positions < self.tokens]

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    def meta(self) -> dict[str, Any]:
        codes = {name: [asdict(code) for code in getattr(self.layout, name)] for name in ("keys", "values")}
        return {**super().meta(), **codes}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> CodedStore:
        codes = {name: [RotatedCode.from_dict(code) for code in meta[name]] for name in ("keys", "values")}
        return super().from_state(tensors, {**meta, **codes})

    def _again(self) -> CodedStore:
        return CodedStore(self.layout, self.buffers)

    @classmethod
    def _of(cls, layout: Any, tensors: Mapping[str, Tensor]) -> CodedStore:
        return cls(layout, tensors)
