"""The attention bridge: how a layer's folded cache reaches the attention call.

Attention functions never receive the cache. A `FoldedLayer.update` announces itself on this thread, and the
function that the model then fetches from transformers' `AttentionInterface` finds it. Only the one lookup method
is wrapped, so every implementation (eager included) keeps its own name, mask function and dispatch checks. The
wrapper is put in place with the first live `FoldedCache` and taken out with the last.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import AttentionInterface

from kvfold.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvfold.hf.cache import FoldedCache
    from kvfold.hf.layer import FoldedLayer

_announced = threading.local()
_live: weakref.WeakKeyDictionary[FoldedCache, weakref.finalize[[], FoldedCache]] = weakref.WeakKeyDictionary()
_count = 0
_original: Callable[..., Any] | None = None
_lock = threading.RLock()


def announce(layer: FoldedLayer) -> None:
    """Say that the next attention call on this thread is for `layer`.

    Raises
    ------
    UnsupportedModelError
        The previous layer of the same cache was announced and its attention call never came: the model does not
        fetch its attention through the interface.
    """
    install(layer.cache)
    previous: FoldedLayer | None = getattr(_announced, "layer", None)
    _announced.layer = layer
    if previous is not None and previous.cache is layer.cache and previous is not layer:
        _announced.layer = None
        raise UnsupportedModelError(
            "this model updated its cache but did not fetch its attention from transformers' AttentionInterface,"
            " so it cannot read a folded cache; use kvfold.fold or kvfold.attach, which check the model first"
        )


def forget() -> None:
    """Drop an announcement whose attention call will not come (the forward pass failed)."""
    _announced.layer = None


def install(cache: FoldedCache) -> None:
    """Put the wrapper in place, if it is not, for as long as the cache lives."""
    global _original, _count
    with _lock:
        if cache in _live:
            return
        _live[cache] = weakref.finalize(cache, _release)
        _live[cache].atexit = False
        _count += 1
        if _original is None:
            _original = AttentionInterface.get_interface
            AttentionInterface.get_interface = _wrap(_original)  # type: ignore[method-assign]


def uninstall(cache: FoldedCache) -> None:
    """Take the wrapper out, if this cache was the last that needed it; its next update puts it back."""
    with _lock:
        finalizer = _live.pop(cache, None)
        if finalizer is not None:
            finalizer()


def installed() -> bool:
    """Whether the wrapper is in place."""
    return _original is not None


def _release() -> None:
    global _original, _count
    with _lock:
        _count -= 1
        if _original is not None and not _count:
            AttentionInterface.get_interface = _original  # type: ignore[method-assign]
            _original = None


def _wrap(get_interface: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_interface)
    def wrapped(
        self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        return _bridge(get_interface(self, attn_implementation, default))

    return wrapped


def _bridge(attention: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(attention)
    def bridged(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layer: FoldedLayer | None = getattr(_announced, "layer", None)
        if layer is None:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        _announced.layer = None
        if key.shape[2] != layer.tail:
            # Not the call that was announced: that one failed before its attention (an MLA expansion out of memory).
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        return layer.attention(attention, module, query, key, value, attention_mask, *args, **kwargs)

    return bridged
