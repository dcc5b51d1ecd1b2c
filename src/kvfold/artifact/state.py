"""Between a live FoldedCache and the manifest and tensors of a file."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import kvfold
from kvfold.artifact import container
from kvfold.errors import ArtifactError, CacheMismatchError
from kvfold.stores.base import Store, store_from_state

if TYPE_CHECKING:
    from kvfold.hf.cache import FoldedCache
    from kvfold.hf.layer import FoldedLayer


def save(cache: FoldedCache, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
    """Write a folded cache to one safetensors file, in one step: complete, or not at all.

    Parameters
    ----------
    cache : FoldedCache
        Unchanged by this. Its prompt must be complete.
    path : str or PathLike
        Local path or fsspec URL. A file that is there already is replaced, once the new one is whole.
    extra : dict, optional
        Plain JSON data to keep with it; `read_manifest(path)["extra"]` gives it back.

    Raises
    ------
    ArtifactError
        The cache is empty or in the middle of a prompt, extra is not JSON, or the file cannot be written.

    Examples
    --------
    >>> cache = kvfold.fold(model, input_ids, kvfold.RDKV(keep=0.1))
    >>> kvfold.artifact.save(cache, "contract.kvf", extra={"title": "Contract"})
    """
    _check_complete(cache)
    tensors: dict[str, torch.Tensor] = {}
    layers = [_layer_state(layer, index, tensors) for index, layer in enumerate(cache.layers)]
    manifest = {
        "format": "kvfold",
        "version": container.VERSION,
        "kvfold": kvfold.__version__,
        "method": cache.method.to_dict(),
        "model": _model_facts(cache),
        "tokens": cache.get_seq_length(),
        "prompt_hash": cache.prompt_hash,
        "prompt_end": cache.prompt_end,
        "recording": cache._recording,
        "report": cache.report,
        "ledger": cache.ledger().saved.to_dict(),
        "layers": layers,
        "extra": extra or {},
    }
    container.write(os.fspath(path), manifest, tensors)


def load(path: str | os.PathLike[str], model: Any) -> FoldedCache:
    """Read a folded cache back, for the model it was made with; generation continues as it would have.

    Parameters
    ----------
    path : str or PathLike
        Local path or fsspec URL.
    model : transformers causal language model
        The same weights in the same dtype; any device, or several.

    Returns
    -------
    FoldedCache
        Each layer on the device of the model's own layer.

    Raises
    ------
    ArtifactError
        Missing, no kvfold file, newer format, truncated or altered, or made with another model.
    UnsupportedModelError
        The model cannot read folded caches at all.
    """
    from kvfold.hf.support import check_supported

    name = os.fspath(path)
    manifest, tensors = container.read(name)
    check_supported(model)
    try:
        modules = _check_model(manifest["model"], model, name)
        return _rebuild(manifest, tensors, model, modules)
    except ArtifactError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ArtifactError(
            f"{name} cannot be rebuilt: {error}; it was written by kvfold {manifest.get('kvfold')}, this is"
            f" {kvfold.__version__}: upgrade kvfold, or fold the prompt again"
        ) from error


def load_stores(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[list[Store]]]:
    """Manifest and folded segments of a saved cache, without a model.

    Parameters
    ----------
    path : str or PathLike
        Local path or fsspec URL.

    Returns
    -------
    manifest : dict
        See `read_manifest`.
    stores : list over layers of list of Store
        On the CPU; empty for layers that do not fold.

    Raises
    ------
    ArtifactError
        As for `read_manifest`, or a store that this kvfold does not know.
    """
    name = os.fspath(path)
    manifest, tensors = container.read(name)
    try:
        stores = [
            [_store(segment, tensors, None) for segment in layer.get("segments", [])]
            for layer in manifest["layers"]
        ]
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        raise ArtifactError(
            f"{name} holds a store that cannot be rebuilt: {error}; upgrade kvfold"
        ) from error
    return manifest, stores


# ---- cache to manifest ----


def _check_complete(cache: FoldedCache) -> None:
    """Refuse a cache whose state is not all in its stores, tails and stock layers."""
    folding = cache.folded_layers
    counted = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    lengths = {layer.get_seq_length() for layer in counted} - {0}
    if not lengths or not any(layer.is_initialized for layer in folding):
        raise ArtifactError("the cache is empty: fold a prompt before saving")
    length = max(lengths)
    if cache.prompt_end is not None and length < cache.prompt_end:
        raise ArtifactError(
            f"the prompt is incomplete: {length} of {cache.prompt_end} tokens are in the cache; run the rest through"
            f" the model, or call cache.expect({length}) if this is all of it, before saving"
        )
    if len(lengths) > 1:
        raise ArtifactError(
            "a forward pass stopped midway, so layers hold different numbers of tokens; fold the prompt again"
        )
    if cache._views or any(layer.prompt_observer is not None for layer in folding):
        raise ArtifactError(
            "the cache is in the middle of a prompt: finish the call that folds it before saving"
        )


def _model_facts(cache: FoldedCache) -> dict[str, Any]:
    from kvfold.hf.fingerprint import facts, fingerprint_of, rope_facts
    from kvfold.hf.support import cache_shape

    model_facts, rope = facts(cache.config), rope_facts(cache.config)
    identities = {
        layer.layer_idx: layer.identity for layer in cache.folded_layers if layer.identity is not None
    }
    digests = {str(index): identity.digest for index, identity in sorted(identities.items())}
    modules = [layer.module() for layer in cache.folded_layers if layer.module is not None]
    architectures = getattr(cache.config, "architectures", None)
    return {
        "fingerprint": fingerprint_of(model_facts, rope, list(digests.values())),
        "name": getattr(cache.config, "name_or_path", None) or None,
        "class": architectures[0] if architectures else next((type(m).__name__ for m in modules if m), None),
        "layers": cache.num_layers,
        "kv_heads": cache_shape(cache.config).kv_heads,
        "head_dim": cache_shape(cache.config).key_dim,
        "dtype": next(iter(identities.values())).dtype,
        "rope": rope,
        "facts": model_facts,
        "weights": digests,
    }


def _layer_state(layer: Any, index: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    from kvfold.hf.layer import FoldedLayer

    known = {id(tensor): name for name, tensor in tensors.items()}

    def put(name: str, tensor: torch.Tensor) -> str:
        # A tensor that several stores share is written once.
        name = known.setdefault(id(tensor), f"layers.{index}.{name}")
        tensors[name] = tensor
        return name

    if not isinstance(layer, FoldedLayer):
        state = {
            name: _encode(value, f"stock.{name}", put, f"layer {index} ({type(layer).__name__}.{name})")
            for name, value in sorted(vars(layer).items())
        }
        return {"kind": "stock", "class": type(layer).__name__, "state": state}
    segments = []
    for number, segment in enumerate(layer.segments):
        named = {
            name: put(f"segments.{number}.store.{name}", tensor)
            for name, tensor in segment.store.tensors().items()
        }
        rows = None if segment.rows is None else put(f"segments.{number}.rows", segment.rows)
        segments.append(
            {
                "store": segment.store.kind,
                "tokens": segment.store.tokens,
                "real_tokens": list(segment.store.real_tokens),
                "meta": segment.store.meta(),
                "tensors": named,
                "rows": rows,
            }
        )
    observer = layer.block_observer
    block: dict[str, Any] = {"count": observer.count}
    for name, tensor in (
        ("mass", observer.mass),
        ("squares", observer.squares),
        ("energy", observer.energy),
    ):
        block[name] = None if tensor is None else put(f"block.{name}", tensor)
    started = layer.keys is not None and layer.values is not None
    return {
        "kind": "folded",
        "tokens": layer.get_seq_length(),
        "segments": segments,
        "tail": None
        if not started
        else {
            "tokens": layer.tail,
            "dtype": str(layer.dtype).removeprefix("torch."),
            "keys": put("tail.keys", layer.keys),  # type: ignore[arg-type]
            "values": put("tail.values", layer.values),  # type: ignore[arg-type]
            "gates": None if layer.gates is None else put("tail.gates", layer.gates),
        },
        "block": block,
        "recording": layer.recording,
        "reopen": layer.reopen,
    }


def _encode(value: Any, name: str, put: Any, where: str) -> Any:
    """An attribute of a stock layer: scalars as they are, everything else as {kind: content}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": put(name, value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, dict) and all(isinstance(key, int) for key in value):
        return {"dict": [[key, _encode(entry, f"{name}.{key}", put, where)] for key, entry in value.items()]}
    raise ArtifactError(f"{where} cannot be saved: kvfold cannot write a {type(value).__name__}")


# ---- manifest to cache ----


def _check_model(saved: Mapping[str, Any], model: Any, path: str) -> dict[int, torch.nn.Module]:
    """Refuse another model, saying in what it differs; the attention module of each layer of this one."""
    from kvfold.hf.fingerprint import attention_modules, facts, identity_of, rope_facts

    fold_again = "load the model it was folded with, or fold the prompt again with this one"
    name = f" ({saved['name']})" if saved.get("name") else ""
    found = facts(model.config)
    differing = [
        key for key in sorted({*saved["facts"], *found}) if saved["facts"].get(key) != found.get(key)
    ]
    if differing:
        details = "; ".join(
            f"{key} {saved['facts'].get(key)} there, {found.get(key)} here" for key in differing
        )
        raise ArtifactError(f"{path} belongs to another model{name}: {details}; {fold_again}")
    rope = rope_facts(model.config)
    if rope != saved["rope"]:
        raise ArtifactError(
            f"{path} was folded with other RoPE parameters: {saved['rope']} there, {rope} here; {fold_again}"
        )
    modules = attention_modules(model)
    try:
        identities = {index: [identity_of(module) for module in there] for index, there in modules.items()}
    except CacheMismatchError as error:
        raise ArtifactError(f"{path} cannot be checked against this model: {error}") from error
    missing = sorted({int(index) for index in saved["weights"]} - set(identities))
    if missing:
        raise ArtifactError(
            f"{path} belongs to another model{name}: no attention layer {missing[0]} here; {fold_again}"
        )
    dtypes = {identity.dtype for index in saved["weights"] for identity in identities[int(index)]}
    if saved["dtype"] not in dtypes:
        raise ArtifactError(
            f"{path} was folded with a {saved['dtype']} model, this one is {', '.join(sorted(dtypes))}: load it with"
            f" dtype=torch.{saved['dtype']}, or fold the prompt again"
        )
    result = {index: there[0] for index, there in modules.items()}
    for key, digest in saved["weights"].items():
        index = int(key)
        same = [
            m
            for m, identity in zip(modules[index], identities[index], strict=True)
            if identity.digest == digest
        ]
        if not same:
            raise ArtifactError(
                f"{path} belongs to a model with other weights{name}, of the same shape: those of attention layer"
                f" {index} differ; {fold_again}"
            )
        result[index] = same[0]
    return result


def _rebuild(
    manifest: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    model: Any,
    modules: Mapping[int, torch.nn.Module],
) -> FoldedCache:
    from kvfold.hf import bridge
    from kvfold.hf.cache import FoldedCache
    from kvfold.hf.fingerprint import device_of, identity_of
    from kvfold.hf.layer import FoldedLayer
    from kvfold.methods import make_method

    options = {name: _tuples(value) for name, value in manifest["method"].items()}
    method = make_method(options.pop("method"), **options)
    cache = FoldedCache(method, model.config, prompt_tokens=manifest["prompt_end"])
    cache.watch(model)
    try:
        cache.prompt_hash, cache.report = manifest["prompt_hash"], list(manifest["report"])
        cache._recording = bool(manifest["recording"])
        saved = manifest["layers"]
        if len(saved) != len(cache.layers) and any(
            state["kind"] != "stock" for state in saved[len(cache.layers) :]
        ):
            raise ValueError(f"it has {len(saved)} layers, the model {len(cache.layers)}")
        devices = {index: device_of(module) for index, module in modules.items()}
        fallback = next((device for device in devices.values() if device is not None), torch.device("cpu"))
        for index, (layer, state) in enumerate(zip(cache.layers, saved, strict=False)):
            device = devices.get(index) or fallback
            if isinstance(layer, FoldedLayer):
                _restore_folded(layer, state, tensors, device)
                if str(index) in manifest["model"]["weights"]:
                    layer.module, layer.identity = weakref.ref(modules[index]), identity_of(modules[index])
                    layer.rotary_of(modules[index])  # in memory from now on, as it was
            else:
                _restore_stock(layer, state, tensors, device)
        if cache.get_seq_length() != manifest["tokens"]:
            raise ValueError(f"{cache.get_seq_length()} tokens where the manifest says {manifest['tokens']}")
    except BaseException:
        bridge.uninstall(cache)
        raise
    return cache


def _restore_folded(
    layer: FoldedLayer, state: Mapping[str, Any], tensors: dict[str, torch.Tensor], device: torch.device
) -> None:
    from kvfold.hf.segment import Segment

    index = layer.layer_idx
    if state["kind"] != "folded":
        raise ValueError(f"layer {index} is {state['kind']} where the model folds")
    tail = state["tail"]
    if tail is None:
        return
    keys, values = tensors[tail["keys"]].to(device), tensors[tail["values"]].to(device)
    if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        raise ValueError(f"layer {index}: keys and values of the tail do not fit together")
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if tail.get("gates") is not None:
        layer.gates = tensors[tail["gates"]].to(device)
        if layer.gates.dim() != 4 or layer.gates.shape[:3] != keys.shape[:3]:
            raise ValueError(f"layer {index}: the tail's gates do not fit its keys")
    for saved in state["segments"]:
        store = layer.cache.placed(_store(saved, tensors, device))
        rows = None if saved["rows"] is None else tensors[saved["rows"]].to(device)
        batch = store.rows if rows is None else len(rows)
        readable = rows is None or (
            rows.dtype == torch.int64 and set(rows.tolist()) <= set(range(store.rows))
        )
        if batch != keys.shape[0] or not readable:
            raise ValueError(f"layer {index}: a segment's rows do not fit the batch of {keys.shape[0]}")
        layer.segments.append(Segment(store, rows))
    layer.folded_tokens = sum(segment.store.tokens for segment in layer.segments)
    if layer.get_seq_length() != state["tokens"]:
        raise ValueError(
            f"layer {index}: {layer.get_seq_length()} tokens where the manifest says {state['tokens']}"
        )
    block = state["block"]
    layer.block_observer.count = block["count"]
    for name in ("mass", "squares", "energy"):
        setattr(layer.block_observer, name, None if block[name] is None else tensors[block[name]].to(device))
    layer.recording, layer.reopen = bool(state["recording"]), bool(state["reopen"])


def _store(saved: Mapping[str, Any], tensors: dict[str, torch.Tensor], device: torch.device | None) -> Store:
    if device is not None:
        # In the table, so that stores that share a tensor go on sharing it.
        tensors.update({entry: tensors[entry].to(device) for entry in saved["tensors"].values()})
    named = {name: tensors[entry] for name, entry in saved["tensors"].items()}
    store = store_from_state(saved["store"], named, saved["meta"])
    if store.tokens != saved["tokens"] or list(store.real_tokens) != saved["real_tokens"]:
        raise ValueError(f"a {saved['store']} store holds other tokens than the manifest says")
    return store


def _restore_stock(
    layer: Any, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    if state["kind"] != "stock" or state["class"] != type(layer).__name__:
        raise ValueError(
            f"a layer is {state.get('class', state['kind'])} where the model has {type(layer).__name__}"
        )
    fresh = vars(layer)
    for name, value in state["state"].items():
        if name not in fresh and hasattr(type(layer), name):
            raise ValueError(f"{type(layer).__name__}.{name} is no state")
        setattr(layer, name, _decode(value, tensors, device))


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensors[content].to(device)
    if kind == "dtype":
        dtype = getattr(torch, content)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{content} is no dtype")
        return dtype
    if kind == "device":
        return device
    return {int(key): _decode(entry, tensors, device) for key, entry in content}


def _tuples(value: Any) -> Any:
    """JSON has no tuples, and methods, being hashable, have no lists."""
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list) else value
