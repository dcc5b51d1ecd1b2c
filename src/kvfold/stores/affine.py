"""Every token in plain affine codes: channels of one key or value share a scale and a minimum in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvfold.codecs.affine import dequantise, narrow_dtype, quantise
from kvfold.codecs.packing import pack, unpack
from kvfold.stores.base import Rotary
from kvfold.stores.tokenwise import TokenwiseLayout, TokenwiseStore


@dataclass(frozen=True)
class AffineLayout(TokenwiseLayout):
    """What is not a tensor.

    Attributes
    ----------
    bits : int
        Width of keys and values.
    group : int or None
        Channels that share a scale and minimum; None: all of a key or value.
    """

    bits: int = 8
    group: int | None = None


class AffineStore(TokenwiseStore):
    """Keys and values quantised per token.

    Parameters
    ----------
    layout : AffineLayout
    buffers : mapping of str to Tensor
        "key_codes" and "value_codes" (rows, tokens, kv_heads, bytes) uint8, and of each "..._scale" and "..._minimum"
        (rows, tokens, kv_heads, groups) float16 or bfloat16.
    """

    kind = "affine"
    purposes = {
        "key_codes": "codes",
        "key_scale": "scales",
        "key_minimum": "minima",
        "value_codes": "codes",
        "value_scale": "scales",
        "value_minimum": "minima",
        "valid": "positions",
    }
    per_token = frozenset(purposes) - {"valid"}

    @classmethod
    def encode(
        cls, keys: Tensor, values: Tensor, layout: AffineLayout, extra: Mapping[str, Tensor]
    ) -> AffineStore:
        """Quantise and pack.

        Parameters
        ----------
        keys, values : (rows, kv_heads, tokens, key_dim | value_dim)
        layout : AffineLayout
        extra : mapping of str to Tensor
            "valid", where some tokens are padding.
        """
        meta = narrow_dtype(layout.bits, keys, values)
        buffers = dict(extra)
        for name, x in (("key", keys), ("value", values)):
            x = x.transpose(1, 2).float()
            coded = quantise(x, layout.bits, layout.group, meta)
            buffers[f"{name}_codes"] = pack(coded.codes, layout.bits)
            buffers[f"{name}_scale"], buffers[f"{name}_minimum"] = coded.scale, coded.minimum
        return cls(layout, buffers)

    def _decode(self, name: str, row: int, span: slice, dim: int) -> Tensor:
        codes, scale, minimum = (
            self.buffers[f"{name}_{part}"][row, span] for part in ("codes", "scale", "minimum")
        )
        codes = unpack(codes, self.layout.bits, dim)
        return dequantise(codes, scale, minimum, self.layout.group).transpose(0, 1)

    def coded_keys(self, row: int, span: slice) -> Tensor:
        return self._decode("key", row, span, self.key_dim)

    def coded_values(self, row: int, span: slice) -> Tensor:
        return self._decode("value", row, span, self.value_dim)

    def decode(self, row: int, span: slice, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        return self.coded_keys(row, span), self.coded_values(row, span)

    def widths(self) -> list[dict[str, dict[int, int]]]:
        bits = self.layout.bits
        each = {"values": {bits: sum(self.real_tokens)}, "keys": {bits: self.key_dim * self.rows}}
        return [each for _ in range(self.kv_heads)]

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> AffineStore:
        return cls(AffineLayout(**_tuples(meta)), tensors)


def _tuples(meta: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()}
