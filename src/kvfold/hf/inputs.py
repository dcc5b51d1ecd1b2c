"""What attention modules are given, for methods whose gates read it: hooks that stay as long as someone holds the watch."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from kvfold.errors import KvfoldError
from kvfold.hf.fingerprint import attention_modules

_given = threading.local()
_watches: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Watch]] = weakref.WeakKeyDictionary()


class Watch:
    """Hooks on a model's attention modules; they are gone when the last reference to this object is."""

    def __init__(self, model: torch.nn.Module):
        handles = []
        for modules in attention_modules(model).values():
            for module in modules:
                handles.append(module.register_forward_pre_hook(_remember, with_kwargs=True))
                handles.append(module.register_forward_hook(_forget, always_call=True))
        self._finalizer = weakref.finalize(self, _remove, handles)
        self._finalizer.atexit = False


def watch(model: torch.nn.Module) -> Watch:
    """The watch of a model: a new one, or that which someone holds already."""
    known = _watches.get(model)
    found = known() if known is not None else None
    if found is None:
        found = Watch(model)
        _watches[model] = weakref.ref(found)
    return found


def given_to(module: torch.nn.Module) -> torch.Tensor:
    """The input (batch, new, hidden) of the attention module that runs now on this thread.

    Raises
    ------
    KvfoldError
        Nobody watches its model.
    """
    found: tuple[torch.nn.Module, torch.Tensor] | None = getattr(_given, "last", None)
    if found is None or found[0] is not module:
        raise KvfoldError(
            "the method's gates read what attention modules are given, and this model is not watched:"
            " call cache.watch(model) first, or use kvfold.fold or kvfold.attach"
        )
    return found[1]


def _remember(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _given.last = module, args[0] if args else kwargs["hidden_states"]


def _forget(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _given.last = None


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
