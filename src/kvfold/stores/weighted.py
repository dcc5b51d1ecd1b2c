"""Some tokens of each head in 16 bits, with values of any origin and a bias on each token's logit.

What selection with fitted values needs, and with free keys what distillation does: a token here may stand for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvfold.kernels import ragged_decode
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.ragged_decode import Ragged
from kvfold.kernels.reference import Part, attend, merge, soft_cap, softmax_part
from kvfold.stores.base import AttendContext, Kept, Rotary, Store
from kvfold.stores.sixteen import half
from kvfold.stores.tokenwise import attend_rows
from kvfold.stores.trizone import position_dtype

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class WeightedLayout:
    """What is not a tensor.

    Attributes
    ----------
    tokens : int
    real_tokens : tuple of int
    """

    tokens: int
    real_tokens: tuple[int, ...]

    def of_rows(self, rows: Sequence[int]) -> Self:
        """The layout of a store of these rows."""
        return replace(self, real_tokens=tuple(self.real_tokens[row] for row in rows))


class WeightedStore(Store):
    """Kept tokens, one ragged segment for each row and KV head.

    Parameters
    ----------
    layout : WeightedLayout
    buffers : mapping of str to Tensor
        "counts" (rows, kv_heads) int32; "keys" and "values" (kept, dim) of a 16-bit dtype; "positions" (kept,) int16 or
        int32, the logical index that a token is cropped by; optionally "bias" (kept,), added to logits after scaling
        and capping. All by row, then head.

    Raises
    ------
    ValueError
        Buffers and counts disagree.
    """

    kind = "weighted"
    purposes = {
        "counts": "order",
        "positions": "positions",
        "keys": "fp16 rows",
        "values": "fp16 rows",
        "bias": "biases",
    }
    block = 4096
    """Tokens read at a time."""

    def __init__(self, layout: WeightedLayout, buffers: Mapping[str, Tensor]):
        self.layout, self.buffers = layout, dict(buffers)
        self.tokens, self.real_tokens = layout.tokens, layout.real_tokens
        self.key_dim, self.value_dim = buffers["keys"].shape[1], buffers["values"].shape[1]
        counts: list[list[int]] = buffers["counts"].tolist()
        self.kv_heads = buffers["counts"].shape[1]
        if len(counts) != self.rows:
            raise ValueError("counts and real_tokens disagree on the number of rows")
        sizes = [count for row in counts for count in row]
        self._sizes = tuple(sizes)
        pieces = {}
        for name, tensor in self._named():
            if len(tensor) != sum(sizes):
                raise ValueError(f"buffer {name} has {len(tensor)} tokens where the counts say {sum(sizes)}")
            pieces[name] = tensor.split(sizes)
        self._heads = [{name: piece[index] for name, piece in pieces.items()} for index in range(len(sizes))]

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self.buffers.items() if name != "counts"]

    def _head(self, row: int, head: int) -> dict[str, Tensor]:
        return self._heads[row * self.kv_heads + head]

    @classmethod
    def build(
        cls, layout: WeightedLayout, heads: Sequence[Sequence[Kept]], dtype: torch.dtype
    ) -> WeightedStore:
        """Store the content of each row and KV head.

        Parameters
        ----------
        layout : WeightedLayout
        heads : (rows, kv_heads) of Kept
            All with a bias, or none.
        dtype : torch.dtype
            Of the model; float32 states are stored as float16, and what that cannot hold as bfloat16.
        """
        flat = [kept for row in heads for kept in row]
        counts = [[len(kept.positions) for kept in row] for row in heads]
        keys, values = (torch.cat([getattr(kept, name) for kept in flat]) for name in ("keys", "values"))
        wide = half(dtype, keys, values)
        buffers = {
            "counts": torch.tensor(counts, dtype=torch.int32, device=flat[0].keys.device),
            "positions": torch.cat([kept.positions for kept in flat]).to(position_dtype(layout.tokens)),
            "keys": keys.to(wide),
            "values": values.to(wide),
        }
        biases = [kept.bias for kept in flat if kept.bias is not None]
        if biases:
            buffers["bias"] = torch.cat(biases).to(wide)
        return cls(layout, buffers)

    @staticmethod
    def token_bytes(key_dim: int, value_dim: int, tokens: int, bias: bool) -> int:
        """Bytes of one kept token of a segment of `tokens`."""
        return 2 * (key_dim + value_dim) + position_dtype(tokens).itemsize + 2 * bias

    # ---- attention ----

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        if rows is None and self._fused(query, context):
            return ragged_decode.attend(query, self.ragged, None, context.scaling, context.softcap)
        return self.attend_plain(query, rows, context)

    def attend_plain(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        """`attend` in plain torch."""
        return attend_rows(query, rows, lambda row, q: self._attend_row(row, q, context))

    def attend_with_tail(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttendContext,
        before: Part | None,
        length: Tensor | None = None,
    ) -> Part | None:
        alike = key.dtype == value.dtype == query.dtype and key.stride(3) == value.stride(3) == 1
        if not (alike and self._fused(query, context)):
            return None
        tail = Exact(key, value, length)
        return ragged_decode.attend(query, self.ragged, tail, context.scaling, context.softcap, before)

    @property
    def ragged(self) -> Ragged:
        """The heads as the kernel reads them."""
        buffers = self.buffers
        return Ragged(buffers["keys"], buffers["values"], buffers.get("bias"), buffers["counts"], self._sizes)

    def _fused(self, query: Tensor, context: AttendContext) -> bool:
        """Whether the kernel serves: a decode step on a GPU."""
        return (
            query.is_cuda
            and context.expand is None
            and ragged_decode.fits(query, self.ragged)
            and ragged_decode.problem(query.device) is None
        )

    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        heads, count, dim = query.shape
        if context.expand is not None:
            return self._attend_expanded(row, query, context)
        outputs, lses = [], []
        for head, q in enumerate(query.reshape(self.kv_heads, -1, dim) * context.scaling):
            segment, parts = self._head(row, head), []
            for start in range(0, max(len(segment["keys"]), 1), self.block):
                span = slice(start, start + self.block)
                scores = soft_cap(q @ segment["keys"][span].float().t(), context.softcap)
                if "bias" in segment:
                    scores = scores + segment["bias"][span].float()
                parts.append(softmax_part(scores, segment["values"][span].float()))
            output, lse = merge(parts)
            outputs.append(output)
            lses.append(lse)
        return torch.stack(outputs).view(heads, count, -1), torch.stack(lses).view(heads, count)

    def _attend_expanded(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Latent attention: blocks of latents become per-head keys and values."""
        assert context.expand is not None
        segment, parts = self._head(row, 0), []
        for start in range(0, max(len(segment["keys"]), 1), self.block):
            span = slice(start, start + self.block)
            states = context.expand(segment["keys"][None, None, span], segment["values"][None, None, span])
            bias = (
                segment["bias"][span].float().expand(1, 1, query.shape[1], -1) if "bias" in segment else None
            )
            parts.append(attend(query[None], *states, context.scaling, bias, context.softcap))
        output, lse = merge(parts)
        return output[0], lse[0]

    # ---- content ----

    def kept(self, row: int, head: int, rotary: Rotary | None = None) -> Kept:
        segment = self._head(row, head)
        bias = segment["bias"].float() if "bias" in segment else None
        return Kept(segment["positions"].long(), segment["keys"].float(), segment["values"].float(), bias)

    def _pick(self, layout: WeightedLayout, rows: Sequence[int], before: int | None = None) -> Self:
        """A store of some rows' tokens, of those at positions below `before` only."""
        chosen = [self._head(row, head) for row in rows for head in range(self.kv_heads)]
        if before is not None:
            alive = [segment["positions"] < before for segment in chosen]
            chosen = [{name: x[mask] for name, x in one.items()} for one, mask in zip(chosen, alive)]
        counts = [len(segment["keys"]) for segment in chosen]
        buffers = {name: torch.cat([segment[name] for segment in chosen]) for name, _ in self._named()}
        device = self.buffers["counts"].device
        buffers["counts"] = torch.tensor(counts, dtype=torch.int32, device=device).view(len(rows), -1)
        return type(self)(layout, buffers)

    def crop(self, tokens: int) -> Self:
        gone = self.tokens - tokens
        real = tuple(max(count - gone, 0) for count in self.real_tokens)
        return self._pick(
            replace(self.layout, tokens=tokens, real_tokens=real), range(self.rows), before=tokens
        )

    def select(self, rows: Tensor) -> Self:
        chosen = rows.tolist()
        return self._pick(self.layout.of_rows(chosen), chosen)

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.buffers)

    def meta(self) -> dict[str, Any]:
        return dict(vars(self.layout))

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        return cls(WeightedLayout(meta["tokens"], tuple(meta["real_tokens"])), tensors)
