"""The verbs: fold a prompt, attach folding to `generate`, load a folded cache."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from kvfold.errors import KvfoldError
from kvfold.hf import bridge
from kvfold.hf.again import Again
from kvfold.hf.cache import FoldedCache
from kvfold.hf.fingerprint import fingerprint
from kvfold.hf.modality import see_prompt
from kvfold.hf.refuse import check_latent, check_lengths, check_prompt
from kvfold.hf.support import CACHE_KEYWORD, check_supported
from kvfold.methods.base import Method, check_method
from kvfold.methods.work import Work

_OWN_ARGUMENTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache",
    "use_cache",
    "logits_to_keep",
    "labels",
}


def fold(
    model: Any,
    input_ids: torch.Tensor,
    method: Method,
    attention_mask: torch.Tensor | None = None,
    *,
    chunk_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    work: Work | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> FoldedCache:
    """Run a prompt through the model and fold its cache.

    Parameters
    ----------
    model : transformers causal language model
    input_ids : (batch, tokens) int64
    method : Method
    attention_mask : (batch, tokens), optional
        1 for real tokens, 0 for left padding.
    chunk_size : int, optional
        Prefill this many tokens at a time. The result is the same; the peak then holds every layer's exact prompt.
    progress : callable, optional
        Called with (layer index, number of layers) as layers are folded.
    work : Work, optional
        What methods that take long tell and keep while they work: with a `kvfold.artifact.SavedWork` a fold that was
        stopped goes on from where it was.
    inputs : mapping of str to Any, optional
        What else the model takes for this prompt: of a processor's output pixel_values, image_grid_thw and the like.

    Returns
    -------
    FoldedCache
        Pass it to `model.generate` with the same tokens plus at least one new one.

    Raises
    ------
    UnsupportedModelError, BudgetError, NonFiniteError, KvfoldError
        Before any work where that is possible; the model is never changed.
    """
    check_method(method)
    check_supported(model)
    check_latent(method, model.config)
    check_calibration(model, method)
    _check_prompt(input_ids, attention_mask, chunk_size)
    inputs = dict(inputs or {})
    known = _OWN_ARGUMENTS & {*inputs}
    if known:
        raise KvfoldError(
            f"inputs are what the model takes beside the prompt: leave {', '.join(sorted(known))} out"
            " (input_ids and attention_mask are arguments of fold)"
        )
    try:
        model._validate_model_kwargs(dict(inputs))  # as generate does
    except ValueError as error:
        raise KvfoldError(f"{type(model).__name__} does not take these inputs: {error}") from None
    if inputs and chunk_size is not None:
        raise KvfoldError("a prompt with further inputs (images) is read whole: leave chunk_size out")
    if inputs and method.needs.again:
        raise KvfoldError(
            f"{method.name} with these options reads the prompt a second time, which images do not allow"
        )
    tokens = input_ids.shape[1]
    real = [tokens] if attention_mask is None else attention_mask.sum(-1).tolist()
    check_lengths(method, model.config, (int(count) for count in real))
    cache = FoldedCache(method, model.config, prompt_tokens=tokens, progress=progress)
    see_prompt(cache, model, input_ids, inputs)
    cache.watch(model)
    cache.prompt_hash = token_hash(input_ids)
    cache.work = work or cache.work
    cache.again = Again(model, input_ids) if method.needs.again else None
    prefill(model, cache, input_ids, attention_mask, chunk_size, inputs)
    cache.work, cache.again = Work(), None  # a later turn is other work
    return cache


def prefill(
    model: Any,
    cache: FoldedCache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    chunk_size: int | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Run a checked prompt into a cache that knows its length.

    Returns
    -------
    (batch, vocabulary)
        Logits of the token after the prompt.
    """
    positions = None
    if attention_mask is not None and not inputs:  # with images, the model works positions out
        positions = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    tokens = input_ids.shape[1]
    step = chunk_size or tokens
    try:
        with torch.no_grad():
            for start in range(0, tokens, step):
                stop = min(start + step, tokens)
                output = model(
                    input_ids=input_ids[:, start:stop],
                    attention_mask=None if attention_mask is None else attention_mask[:, :stop],
                    position_ids=None if positions is None else positions[:, start:stop],
                    use_cache=True,
                    logits_to_keep=1,
                    **(inputs or {}),
                    **{CACHE_KEYWORD: cache},
                )
    except BaseException:
        bridge.forget()
        bridge.uninstall(cache)
        raise
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def check_calibration(model: Any, method: Method) -> None:
    """Refuse a method whose calibration is another model's, or cannot be read (KvfoldError)."""
    for part in method.parts:
        wanted = part.calibrated_for
        if wanted is not None and wanted != fingerprint(model):
            raise KvfoldError(
                f"the calibration of {part.name} was measured on another model than this {type(model).__name__}: run"
                f" {part.calibrated_by} on this one"
            )


def _check_prompt(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, chunk_size: int | None
) -> None:
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        found = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise KvfoldError(f"input_ids must be an int64 tensor (batch, tokens), not {found}")
    if chunk_size is not None and chunk_size < 1:
        raise KvfoldError(f"chunk_size must be at least 1 token, not {chunk_size}")
    if input_ids.dim() != 2:
        raise KvfoldError(f"input_ids must be (batch, tokens), not {tuple(input_ids.shape)}")
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise KvfoldError("the prompt is empty: give at least one token")
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise KvfoldError(
                f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)},"
                f" not {tuple(attention_mask.shape)}"
            )
        if not bool(attention_mask.any(-1).all()):
            raise KvfoldError(
                "a row of attention_mask is all zeros: every prompt needs at least one real token"
            )


def token_hash(input_ids: torch.Tensor) -> str:
    """SHA-256 of token ids, so that a saved cache can say which prompt it holds."""
    return hashlib.sha256(input_ids.cpu().long().contiguous().numpy().tobytes()).hexdigest()


@dataclass
class Folding:
    """What `attach` yields: `cache` is the cache of the newest `generate` call."""

    cache: FoldedCache | None = None


@dataclass(eq=False)
class _Block:
    """An open block of `attach`."""

    method: Method
    thread: int
    folding: Folding


@dataclass
class _Attached:
    """A model's open blocks, oldest first, and the `generate` that it had as an attribute of its own."""

    own: Any
    blocks: list[_Block]


_attached: weakref.WeakKeyDictionary[Any, _Attached] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def attach(model: Any, method: Method) -> Iterator[Folding]:
    """Fold every prompt that `model.generate` gets inside the block.

    Parameters
    ----------
    model : transformers causal language model
    method : Method

    Yields
    ------
    Folding
        Its `cache` attribute holds the newest call's cache.

    Raises
    ------
    UnsupportedModelError, KvfoldError
        At once: of `fold`'s errors those that do not depend on a prompt. The others `model.generate` raises, before any work
        where that is possible.

    Notes
    -----
    Where several blocks are open on a model, a call is for the newest that its thread has opened, else for the newest.

    Examples
    --------
    >>> with kvfold.attach(model, kvfold.RDKV(keep=0.1)):
    ...     model.generate(**inputs)
    """
    check_method(method)
    check_supported(model)
    check_latent(method, model.config)
    check_calibration(model, method)
    block = _Block(method, threading.get_ident(), Folding())
    with _lock:
        if model not in _attached:
            _attached[model] = _Attached(vars(model).get("generate"), [])
            model.generate = _folding(model, model.generate)
        _attached[model].blocks.append(block)
    try:
        yield block.folding
    finally:
        with _lock:
            attached = _attached[model]
            attached.blocks.remove(block)
            if not attached.blocks:
                del _attached[model], model.generate
                if attached.own is not None:
                    model.generate = attached.own


def _folding(model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `generate` of a model that blocks of `attach` are open on."""

    @wraps(original)
    def generate(inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        prompt = next(
            (p for p in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if p is not None), None
        )
        names = [name for name in ("past_key_values", "cache") if kwargs.get(name) is not None]
        with _lock:
            blocks = list(_attached[model].blocks) if model in _attached else []
        if not blocks or prompt is None or (names and not isinstance(kwargs[names[0]], FoldedCache)):
            return original(inputs, *args, **kwargs)
        here = threading.get_ident()
        block = next((block for block in reversed(blocks) if block.thread == here), blocks[-1])
        block.folding.cache = None
        given: FoldedCache | None = kwargs[names[0]] if names else None
        if given is None or not given.get_seq_length():
            check_prompt(block.method if given is None else given.method, model, prompt, kwargs)
        cache = FoldedCache(block.method, model.config) if given is None else given
        mask = kwargs.get("attention_mask")
        if prompt.dim() == 2:
            see_prompt(cache, model, prompt, kwargs)
        cache.watch(model)
        cache.expect(max(prompt.shape[1], 0 if mask is None else mask.shape[1]))
        if not names:
            kwargs[CACHE_KEYWORD] = cache
        block.folding.cache = cache
        try:
            return original(inputs, *args, **kwargs)
        except BaseException:
            bridge.forget()
            bridge.uninstall(cache)
            block.folding.cache = None
            raise

    return generate


def load(path: str | os.PathLike[str], model: Any) -> FoldedCache:
    """Load a folded cache that `FoldedCache.save` wrote, for the same model.

    Raises
    ------
    ArtifactError
        Missing, truncated or altered file, newer format, or another model.
    """
    from kvfold.artifact import load as load_artifact

    return load_artifact(path, model)
