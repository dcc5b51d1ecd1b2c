"""The lm-evaluation-harness on a folded cache: `--model kvfold`.

```
python -m kvfold.evaluate.lm_eval run --model kvfold --model_args pretrained=MODEL,method=rdkv,keep=0.1 --tasks TASKS
```

is `lm_eval` with this model added. Versions of lm-eval that look for plugins (entry points `lm_eval.models`, released
after 0.4.13) find it by themselves: `lm_eval run --model kvfold ...`. From Python, import this module and call
`lm_eval.simple_evaluate(model="kvfold", model_args={...})`, or hand it a `FoldedLM`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from kvfold.api import fold
from kvfold.errors import BudgetError, KvfoldError
from kvfold.evaluate.prefill import continue_logits
from kvfold.hf.cache import FoldedCache
from kvfold.hf.refuse import check_latent, check_lengths
from kvfold.hf.support import CACHE_KEYWORD, check_supported
from kvfold.methods import METHODS
from kvfold.methods.base import Method

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise KvfoldError(
        f"the model for lm-evaluation-harness needs it (pip install 'kvfold[lm-eval]'): {error}"
    ) from error

_Request = tuple[Any, list[int], list[int]]


@register_model("kvfold")
class FoldedLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf` model, every prompt folded before anything is generated or scored.

    The prompt's last tokens are held back and read after the fold, so that also the first token of an answer is
    predicted from the folded cache: a fold in one pass with the prompt would leave the scores of multiple-choice
    questions, which are all first tokens, untouched.

    `generate_until`
        The prompt is folded, then the answer is generated; `batch_size` prompts at once.
    `loglikelihood`
        The context is folded once for all its continuations; a continuation stays exact. One context at a time.
    `loglikelihood_rolling`
        A text is scored block by block, each after a fold of all that comes before it in its window (the model's
        context). The first block has nothing before it and is exact.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
    method : str or Method
        A name, whose options are given beside it (`keep=0.1`), or a method.
    unseen : int
        Tokens at the end of a prompt that the fold does not see, at least 1. (lm-eval hands over document and
        question as one text, so at 1 the question is in view.)
    block : int
        Tokens of a block in `loglikelihood_rolling`. A text of n tokens is prefilled n / (2 block) times over.
    short : "error" or "full"
        What to do with a prompt that cannot be folded within the budget because it is short: refuse, or leave it
        unfolded; the results say of how many prompts that is true.
    **options
        The method's, and those of lm-eval's `hf` model (`tokenizer`, `dtype`, `device`, `batch_size`, ...).

    Raises
    ------
    KvfoldError
        Unknown method or option, or a value that does not fit.
    UnsupportedModelError
        The model cannot read a folded cache, or the method cannot fold what it caches.
    """

    def __init__(
        self,
        pretrained: Any,
        method: str | Method = "rdkv",
        unseen: int = 1,
        block: int = 512,
        short: Literal["error", "full"] = "error",
        **options: Any,
    ):
        if unseen < 1 or block < 1:
            raise KvfoldError(f"unseen and block must be at least 1, not {unseen} and {block}")
        if short not in ("error", "full"):
            raise KvfoldError(f"short must be error or full, not {short!r}")
        self.method, options = _method(method, options)
        self.unseen, self.block, self.short = unseen, block, short
        self.folded = self.unfolded = self.folded_bytes = self.full_bytes = 0
        super().__init__(pretrained, **options)
        check_supported(self.model)
        check_latent(self.method, self.model.config)

    def _check(self, lengths: Iterable[int]) -> None:
        """Refuse, before any work, prompts of a number of tokens that the budget cannot hold."""
        if self.short == "full":
            return
        try:
            check_lengths(self.method, self.model.config, (length - self.unseen for length in lengths))
        except BudgetError as error:
            raise BudgetError(f"{error}; or short=full to leave such prompts unfolded") from error

    def _fold(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> FoldedCache | None:
        """The folded cache of prompts (batch, tokens) but their last `unseen` tokens; None: too short for that."""
        seen = ids.shape[1] - self.unseen
        if mask is not None:
            mask = mask[:, : max(seen, 0)]
        if seen > 0 and (mask is None or bool(mask.any(-1).all())):
            try:
                cache = fold(self.model, ids[:, :seen], self.method, mask)
            except BudgetError:
                if self.short == "error":
                    raise
            else:
                if any(entry["folded"] for entry in cache.report):
                    ledger = cache.ledger()
                    self.folded += len(ids)
                    self.folded_bytes += ledger.folded_bytes
                    self.full_bytes += ledger.folded_full_bytes
                else:
                    self.unfolded += len(ids)
                return cache
        self.unfolded += len(ids)
        return None

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self._check(len(self.tok_encode(request.args[0])) for request in requests)
        answers: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return answers

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cache = self._fold(context, kwargs.get("attention_mask"))
        given = {} if cache is None else {CACHE_KEYWORD: cache}
        made: torch.Tensor = super()._model_generate(context, *args, **kwargs, **given)
        return made

    def _loglikelihood_tokens(
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        pieces = [
            (tuple(context), continuation, index)
            for index, request in enumerate(requests)
            for context, continuation in self._pieces(request)
        ]
        self._check(len(context) for context, _, _ in pieces)
        # Longest first, so that running out of memory shows at once; equal contexts next to each other.
        pieces.sort(key=lambda piece: (-len(piece[0]), piece[0]))
        progress = tqdm(
            total=len(pieces), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"
        )
        for context, group in groupby(pieces, key=lambda piece: piece[0]):
            cache = self._fold(torch.tensor([context], device=self.device))
            for _, continuation, index in group:
                logprobs = self._score(cache, context, continuation)
                wanted = torch.tensor(continuation, device=logprobs.device)
                totals[index] += float(logprobs.gather(1, wanted[:, None]).sum())
                greedy[index] &= bool((logprobs.argmax(-1) == wanted).all())
                key = requests[index][0]
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, (totals[index], greedy[index]))
                progress.update()
        progress.close()
        return list(zip(totals, greedy))

    def _pieces(self, request: _Request) -> Iterator[tuple[list[int], list[int]]]:
        """Context and continuation that are scored together: all of a request, or a block of a rolling one."""
        key, context, continuation = request
        # One token more than the model's context: the last one is not fed.
        context = context[max(0, len(context) + len(continuation) - self.max_length - 1) :]
        # Rolling requests come without the texts that others are remembered by.
        step = len(continuation) if key is not None else self.block
        for start in range(0, len(continuation), step):
            yield context + continuation[:start], continuation[start : start + step]

    def _score(
        self, cache: FoldedCache | None, context: Sequence[int], continuation: Sequence[int]
    ) -> torch.Tensor:
        """Log-probabilities (tokens, vocabulary) float32 of what follows the context."""
        read = [*context, *continuation[:-1]]
        if cache is None:
            logits = self._model_call(torch.tensor([read], device=self.device)).float()
        else:
            step = torch.tensor([read[cache.get_seq_length() :]], device=self.device)
            logits = continue_logits(self.model, cache.fork(), step)
        return logits[0, -len(continuation) :].log_softmax(-1)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records of the model; here also the method, and what was folded so far."""
        return {
            **super().get_model_info(),
            "kvfold": {
                **self.method.to_dict(),
                "unseen": self.unseen,
                "prompts_folded": self.folded,
                "prompts_unfolded": self.unfolded,
                "bytes_kept": self.folded_bytes / self.full_bytes if self.full_bytes else None,
            },
        }


def _method(method: str | Method, options: dict[str, Any]) -> tuple[Method, dict[str, Any]]:
    """The method, and the options that are not its own."""
    if isinstance(method, Method):
        return method, options
    from kvfold.cli.options import build_method

    names = [field.name for field in fields(METHODS[method])] if method in METHODS else []
    own = {name: options[name] for name in options if name in names}
    rest = {name: value for name, value in options.items() if name not in own}
    theirs = inspect.signature(HFLM.__init__).parameters
    for name in rest:
        near = difflib.get_close_matches(name, names, 1)
        if name not in theirs and near:
            raise KvfoldError(f"method {method} has no option {name!r}: did you mean {near[0]}?")
    made: Method = build_method(method, {}, [f"{name}={value}" for name, value in own.items()])
    return made, rest


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
