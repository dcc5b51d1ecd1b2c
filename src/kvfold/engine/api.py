"""`kvfold.generate` and `kvfold.stream`: transformers' generation with kvfold's decode loop."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvfold.api import check_calibration
from kvfold.engine.loop import Decoding, Engine
from kvfold.errors import KvfoldError
from kvfold.hf import CACHE_KEYWORD, FoldedCache, check_supported
from kvfold.hf.modality import see_prompt
from kvfold.hf.refuse import check_latent, check_prompt
from kvfold.methods import Full
from kvfold.methods.base import Method

UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: Any,
    input_ids: Tensor,
    cache: Method | Cache | None = None,
    *,
    engine: Engine | None = None,
    **options: Any,
) -> Any:
    """Generate as `model.generate` does, each decode step being one CUDA graph where that is possible.

    The prompt is read by the model's own attention and folded as the method says. Then a step runs from embedding to the
    next token without the host: the folded history lies still, and new tokens go to reserved room behind it. Where a step
    cannot be captured (no GPU, a model that computes on the host in between) it runs as transformers runs it.

    Parameters
    ----------
    model : transformers causal language model
    input_ids : (batch, tokens) int64
        The prompt; with a cache that has read tokens already, those tokens and at least one more, or only the new ones and
        an `attention_mask` for all.
    cache : Method, FoldedCache, other transformers cache, or None
        How to fold the prompt, or what has been read before. It grows with what is read and generated. None: nothing is
        folded away. Caches of transformers' own are decoded eagerly.
    engine : Engine, optional
        How to decode.
    **options
        As for `model.generate`: `max_new_tokens`, `do_sample`, `temperature`, `attention_mask`, `streamer`,
        `logits_processor`, `stopping_criteria`, `generation_config`, ...

    Returns
    -------
    (batch, tokens) int64, prompt included; with `return_dict_in_generate` a `GenerateDecoderOnlyOutput` with the cache.

    Raises
    ------
    UnsupportedModelError, KvfoldError, BudgetError
        Before any work: a model that cannot read a folded cache; beam search and other ways of generating than greedy
        decoding and sampling; `output_scores` and the like.
    """
    decoding = stream(model, input_ids, cache, engine=engine, **options)
    sequences = decoding.run()
    if decoding.config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=decoding.cache)
    return sequences


def stream(
    model: Any,
    input_ids: Tensor,
    cache: Method | Cache | None = None,
    *,
    engine: Engine | None = None,
    **options: Any,
) -> Decoding:
    """As `generate`, but returns an iterator over tokens.

    Nothing runs before the first token is asked for. `close` ends early; the cache then holds what was read.

    Returns
    -------
    Decoding

    Examples
    --------
    >>> for token in kvfold.stream(model, ids, kvfold.RDKV(keep=0.1), max_new_tokens=100):
    ...     print(tokenizer.decode(token), end="")
    """
    check_supported(model)
    cache = _cache(model, input_ids, cache, options)
    # transformers keeps streamer and tokenizer from a decode loop that is not its own.
    loop = partial(_decoding, engine=engine or Engine(), streamer=options.get("streamer"))
    if options.get("stop_strings") is not None and options.get("tokenizer") is not None:
        stop = StopStringCriteria(options.pop("tokenizer"), options.pop("stop_strings"))
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), stop])
    decoding: Decoding = model.generate(input_ids, custom_generate=loop, **{CACHE_KEYWORD: cache}, **options)
    return decoding


def _cache(model: Any, input_ids: Tensor, cache: Any, options: dict[str, Any]) -> Cache:
    """What to decode with, checked."""
    if isinstance(cache, FoldedCache):
        if not cache.get_seq_length():
            check_prompt(cache.method, model, input_ids, options)
        see_prompt(cache, model, input_ids, options)
    if isinstance(cache, Cache):
        mask = options.get("attention_mask")
        seen, tokens = cache.get_seq_length(), max(input_ids.shape[1], 0 if mask is None else mask.shape[1])
        if tokens <= seen:
            raise KvfoldError(
                f"no new tokens: the cache holds {seen} already, so input_ids must be those tokens followed by at least"
                " one more"
            )
        return cache
    method = Full() if cache is None else cache
    if not isinstance(method, Method):
        raise KvfoldError(
            f"cache must be a kvfold Method, a FoldedCache or None, not {type(method).__name__}"
        )
    check_latent(method, model.config)
    check_calibration(model, method)
    check_prompt(method, model, input_ids, options)
    cache = FoldedCache(method, model.config, prompt_tokens=input_ids.shape[1])
    see_prompt(cache, model, input_ids, options)
    cache.watch(model)
    return cache


def _decoding(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    engine: Engine,
    streamer: Any,
    **inputs: Any,
) -> Decoding:
    """What `model.generate` calls in place of its own loop, everything being prepared."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise KvfoldError(
            f"kvfold.generate decodes greedily or by sampling, not by {mode.value.replace('_', ' ')}: use model.generate,"
            " which takes a FoldedCache too"
        )
    asked = [name for name in UNSUPPORTED if getattr(generation_config, name, None)]
    if asked and generation_config.return_dict_in_generate:
        raise KvfoldError(f"kvfold.generate does not return {', '.join(asked)}: use model.generate")
    return Decoding(
        model, input_ids, logits_processor, stopping_criteria, generation_config, engine, streamer, inputs
    )
