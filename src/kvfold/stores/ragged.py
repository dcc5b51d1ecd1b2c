"""What stores share whose rows and heads keep different numbers of tokens: buffers cut by counts, cropping by hiding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvfold.kernels.reference import Part
from kvfold.stores.base import AttendContext, Store, attend_expanded
from kvfold.stores.tokenwise import attend_rows

if TYPE_CHECKING:
    from typing_extensions import Self


def position_dtype(tokens: int) -> torch.dtype:
    """Smallest dtype that holds a logical index below `tokens`."""
    return torch.int16 if tokens <= 1 << 15 else torch.int32


def channel_dtype(dim: int) -> torch.dtype:
    """Smallest dtype that holds the index of a channel."""
    return torch.uint8 if dim <= 256 else torch.int16


class Cursor:
    """Cuts buffers from their first element on; `at` says how far."""

    def __init__(self, buffers: Mapping[str, Tensor]):
        self.buffers, self.at = buffers, dict.fromkeys(buffers, 0)

    def take(self, name: str, count: int) -> Tensor:
        """The next elements of a buffer; raises ValueError where there are too few."""
        start = self.at[name]
        self.at[name] += count
        if self.at[name] > self.buffers[name].shape[0]:
            raise ValueError(f"buffer {name} is shorter than the counts say")
        return self.buffers[name][start : start + count]

    def finish(self) -> None:
        """Raise ValueError if anything is left."""
        for name, used in self.at.items():
            if used != self.buffers[name].shape[0]:
                raise ValueError(f"buffer {name} is longer than the counts say")


class RaggedStore(Store):
    """A store cut by counts.

    A subclass has a frozen dataclass as layout, with at least `tokens` and `real_tokens`, and sees to it that tokens at or
    after `self.tokens` stay hidden: cropping frees no bytes, since scales and codes are shared.
    """

    layout_class: ClassVar[type[Any]]
    layout: Any

    @abstractmethod
    def _again(self) -> Self:
        """A store of the same content, nothing hidden."""

    @abstractmethod
    def _attend_row(self, row: int, query: Tensor, context: AttendContext) -> Part:
        """Attention of query (heads, n, query_dim) float32 over one row."""

    def attend(self, query: Tensor, rows: Tensor | None, context: AttendContext) -> Part:
        def attend_row(row: int, q: Tensor) -> Part:
            if context.expand is not None:
                return attend_expanded(self.kept(row, 0, context.rotary), q, context)
            return self._attend_row(row, q, context)

        return attend_rows(query, rows, attend_row)

    def crop(self, tokens: int) -> Self:
        """Hide what lies at or after `tokens`; the bytes stay."""
        gone = self.tokens - tokens
        return self._again()._seen(tokens, tuple(max(count - gone, 0) for count in self.real_tokens))

    def _seen(self, tokens: int, real_tokens: tuple[int, ...]) -> Self:
        """Hide what lies at or after `tokens`, here and now."""
        self.tokens, self.real_tokens = tokens, real_tokens
        return self

    def _layout_of(self, rows: list[int], *names: str) -> Any:
        """The layout of some rows; `names` are its fields with an entry for each row."""
        return replace(
            self.layout, **{name: tuple(getattr(self.layout, name)[row] for row in rows) for name in names}
        )

    def meta(self) -> dict[str, Any]:
        return {**vars(self.layout), "visible_tokens": self.tokens, "visible_real_tokens": self.real_tokens}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Self:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta.items()
        }
        tokens, real_tokens = fields.pop("visible_tokens"), fields.pop("visible_real_tokens")
        return cls._of(cls.layout_class(**fields), tensors)._seen(tokens, real_tokens)

    @classmethod
    @abstractmethod
    def _of(cls, layout: Any, tensors: Mapping[str, Tensor]) -> Self:
        """A store from all its tensors by name."""
