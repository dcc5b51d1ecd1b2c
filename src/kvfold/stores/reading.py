"""What stores share whose codes a GPU reads as records: the launches around them, and when those serve."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvfold.codecs.fragments import TILE
from kvfold.kernels import around_records, dense_decode
from kvfold.kernels.around_records import Basis, Turned
from kvfold.kernels.dense_decode import Exact
from kvfold.kernels.position_bias import Circles
from kvfold.kernels.records import Records
from kvfold.kernels.reference import Part
from kvfold.stores.base import AttendContext, Rotary, Store

if TYPE_CHECKING:
    from kvfold.methods.base import LayerView


def reads_records(view: LayerView) -> bool:
    """Whether a kernel could decode a layer's fold from records, on its device."""
    dim = view.keys.shape[-1]
    ordinary = (
        dim == view.values.shape[-1] and dim % TILE == 0 and view.softcap is None and view.expand is None
    )
    return ordinary and around_records.problem(view.keys.device, dim, 1) is None


class ReadsRecords(Store):
    """Named before the class of the plain form, whose own attention serves where the kernels do not."""

    _circles: Circles | None = None

    @property
    @abstractmethod
    def _records(self) -> Records: ...

    @property
    @abstractmethod
    def _basis(self) -> Basis: ...

    @abstractmethod
    def _around(self, context: AttendContext) -> dict[str, Any]:
        """What else `kernels.around_records.attend` attends to, by its names."""

    @property
    def derived(self) -> list[Tensor]:
        circles = [] if self._circles is None else self._circles.tensors
        # To ask is not to make: `_records` is found at the first attention.
        return circles + (self._records.derived if "_records" in vars(self) else [])

    def _turned_by(self, rotary: Rotary, vector: Tensor, tokens: int, shifts: tuple[int, ...]) -> Turned:
        """What RoPE turns; its planes are found at the first attention."""
        if self._circles is None:
            self._circles = Circles.of(vector, rotary)
        return Turned(vector, self._circles, rotary, tokens, shifts)

    def _attend(self, query: Tensor, context: AttendContext, **more: Any) -> Part:
        around = self._around(context) | more
        return around_records.attend(query, self._records, self._basis, context.scaling, **around)

    def attend_with_tail(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: AttendContext,
        before: Part | None,
        length: Tensor | None = None,
    ) -> Part | None:
        if not self._served(query, context) or not dense_decode.fits(query, key, value):
            return None
        tail = Exact(key, value, length)
        return self._attend(query, context, tail=tail, before=before, dtype=query.dtype)

    def _served(self, query: Tensor, context: AttendContext) -> bool:
        """Whether the kernels serve: every row its own queries, no cap, at most 16 queries a KV head."""
        ordinary = context.expand is None and context.softcap is None and query.shape[0] == self.rows
        together = query.shape[1] // self.kv_heads * query.shape[2]
        return ordinary and around_records.problem(query.device, self.key_dim, together) is None
