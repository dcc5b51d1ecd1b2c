"""ShadowKV: low-rank keys before RoPE, landmarks to choose from, values whole (arXiv 2410.21465)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvfold.methods.base import LayerView, Method, Needs
from kvfold.stores.base import Store
from kvfold.stores.shadow import ShadowLayout, ShadowStore


@dataclass(frozen=True, kw_only=True)
class ShadowKV(Method):
    """Every token kept, few read: each query attends to the chunks that its product with their mean key recommends.

    The defaults are those of the released code for prompts up to 128K tokens. Values would lie in host memory there;
    here every byte counts, theirs under "offloadable values". Keys of fewer channels (kv_heads x head_dim) than `rank`
    are not compressed at all.

    Parameters
    ----------
    rank : int
        Of the keys of a layer, all KV heads together.
    chunk : int
        Tokens of a chunk.
    sparse_budget : int
        Tokens of the chunks that a query reads in each KV head.
    outlier_chunks : int
        Chunks of each head kept exact: those with a key least like the mean.
    local_chunks : int
        Newest chunks kept exact, with the tokens that fill none.
    """

    name = "shadowkv"
    paper = "ShadowKV, arXiv 2410.21465"

    rank: int = 160
    chunk: int = 8
    sparse_budget: int = 2048
    outlier_chunks: int = 48
    local_chunks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.rank, self.chunk, self.local_chunks) < 1 or self.outlier_chunks < 0:
            raise ValueError("rank, chunk and local_chunks must be at least 1, outlier_chunks at least 0")
        if self.sparse_budget < self.chunk:
            raise ValueError(
                f"sparse_budget must be at least one chunk of {self.chunk}, got {self.sparse_budget}"
            )

    @property
    def needs(self) -> Needs:
        return Needs(rotary=True)

    @property
    def shortest(self) -> int:
        return self.chunk * (self.local_chunks + 1)

    @property
    def refuses_latent(self) -> str:
        return (
            "shadowkv factors the keys of several heads, but latent attention (MLA) caches one latent for all: choose"
            " another method"
        )

    def fold(self, views: Sequence[LayerView]) -> list[Store]:
        self.check_views(views)
        return [self._encode(view) for view in views]

    def _encode(self, view: LayerView) -> Store:
        half = view.keys.dtype if view.keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
        buffers, firsts = {}, []
        for row, seen in enumerate(view.valid.any(1)):
            real = seen.nonzero().flatten()
            first = int(real[0]) if len(real) else view.tokens
            parts = ShadowStore.encode_row(
                view.keys[row, :, first:],
                view.values[row, :, first:],
                view.positions[row, first:],
                view.rotary,
                rank=self.rank,
                chunk=self.chunk,
                local_chunks=self.local_chunks,
                outlier_chunks=self.outlier_chunks,
                dtype=half,
            )
            buffers.update({f"{name}.{row}": tensor for name, tensor in parts.items()})
            firsts.append(first)
        layout = ShadowLayout(
            tokens=view.tokens,
            real_tokens=view.real_tokens,
            firsts=tuple(firsts),
            shifts=tuple(int(last) - view.tokens + 1 for last in view.positions[:, -1]),
            kv_heads=view.keys.shape[1],
            key_dim=view.keys.shape[-1],
            value_dim=view.values.shape[-1],
            chunk=self.chunk,
            selected=self.sparse_budget // self.chunk,
            turned=view.rotary is not None,
        )
        return ShadowStore(layout, buffers)
