"""Which tokens of a prompt are text, and which stand for an image, a video or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.errors import KvfoldError

if TYPE_CHECKING:
    from kvfold.hf.cache import FoldedCache

MODALITIES = ("text", "image", "video", "audio")


def modalities_of(config: Any, input_ids: Tensor) -> Tensor:
    """What each token stands for, by the placeholders that a model's config names.

    Parameters
    ----------
    config : PretrainedConfig
        Of the whole model, not of its decoder.
    input_ids : (batch, tokens) int64

    Returns
    -------
    (batch, tokens) int8
        Index into `MODALITIES`: all 0 for a model that reads text only.
    """
    found = torch.zeros_like(input_ids, dtype=torch.int8)
    for number, name in enumerate(MODALITIES):
        for option in (f"{name}_token_id", f"{name}_token_index"):
            placeholder = getattr(config, option, None)
            if number and isinstance(placeholder, int):
                found[input_ids == placeholder] = number
    return found


def see_prompt(cache: FoldedCache, model: Any, input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Check that a prompt's images are there, and tell the cache which of its tokens are text.

    Parameters
    ----------
    cache : FoldedCache
    model : transformers model
    input_ids : (batch, tokens) int64
        The prompt, with what the cache has read before or, where a mask is longer, without.
    inputs : mapping of str to Any
        What else the model is given.

    Raises
    ------
    KvfoldError
        Placeholders without anything to put in their place; the method tells text from images, and there are none.
    """
    found, seen = modalities_of(model.config, input_ids), cache.get_seq_length()
    mask = inputs.get("attention_mask")
    before = 0 if mask is None else max(mask.shape[-1] - found.shape[1], 0)
    new = found[:, max(seen - before, 0) :]
    given = [tensor for value in inputs.values() for tensor in _tensors(value)]
    if bool(new.any()) and not any(tensor.is_floating_point() for tensor in given):
        name = MODALITIES[int(new.max())]
        raise KvfoldError(
            f"the prompt has {int((new > 0).sum())} {name} tokens and no {name}s: give what the processor returned beside"
            " input_ids (pixel_values, image_grid_thw, ...)"
        )
    if not cache.method.needs.text:
        return
    if not seen and not bool(found.any()):
        raise KvfoldError(
            f"{cache.method.name} was told to keep all text and to choose among images, and the prompt has no image tokens:"
            " give images, or leave the option text out"
        )
    cache.text = pad(found == 0, (before, 0))


def _attention(model: Any, layer_idx: int) -> torch.nn.Module | None:
    """The attention module of a layer that has read nothing yet (a loaded cache's)."""
    own = (module for module in model.modules() if getattr(module, "layer_idx", None) == layer_idx)
    return next((module for module in own if type(module).__name__.endswith("Attention")), None)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def kept_shares(model: Any, cache: FoldedCache, input_ids: Tensor) -> dict[str, float]:
    """Share of each modality's entries that a cache still holds, over all layers that fold, KV heads and rows.

    Parameters
    ----------
    model : transformers model
    cache : FoldedCache
        Of a method that evicts.
    input_ids : (batch, tokens) int64
        All tokens that the cache has read.

    Returns
    -------
    dict of str to float
        By name in `MODALITIES`, of those that the tokens have. Padding counts as text that was not kept.

    Raises
    ------
    KvfoldError
        There are not as many tokens as the cache has read.

    Examples
    --------
    >>> kvfold.kept_shares(model, cache, inputs["input_ids"])
    {'text': 0.31, 'image': 0.04}
    """
    layers, tokens = cache.folded_layers, cache.get_seq_length()
    if not layers or layers[0].keys is None or input_ids.shape != (len(layers[0].keys), tokens):
        raise KvfoldError(
            f"input_ids must be the {tokens} tokens of each row that the cache has read, not {tuple(input_ids.shape)}"
        )
    found = modalities_of(model.config, input_ids).cpu().long()
    kept = torch.zeros(len(MODALITIES), dtype=torch.long)
    heads = 0
    for layer in layers:
        heads += layer.kv_heads
        module = layer.attending_module or _attention(model, layer.layer_idx)
        rotary = None if module is None else layer.rotary_of(module)
        for row, kinds in enumerate(found):
            kept += layer.kv_heads * kinds[layer.folded_tokens :].bincount(minlength=len(MODALITIES))
            start = 0
            for segment in layer.segments:
                source = row if segment.rows is None else int(segment.rows[row])
                for head in range(segment.store.kv_heads):
                    index = start + segment.store.kept(source, head, rotary).positions.cpu()
                    kept += kinds[index].bincount(minlength=len(MODALITIES))
                start += segment.store.tokens
    read = heads * found.flatten().bincount(minlength=len(MODALITIES))
    return {name: float(kept[i] / read[i]) for i, name in enumerate(MODALITIES) if read[i]}
