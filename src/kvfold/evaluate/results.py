"""A results folder: what ran, and one row a measurement, appended and never rewritten.

```
results/
  runs.jsonl          one `Run` a command that measured: when, command line, hardware, versions, seed
  rows-<worker>.jsonl one `Row` a line; each worker process appends to its own file only
```

A kill can tear at most the last line of a file; `read` leaves it out and says so, and the next run measures it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1
"""Version of the rows; a folder of another version is refused."""

View = Literal["unseen", "in view"]
"""Whether the question was part of the folded prompt ("in view") or asked after the fold ("unseen")."""

When = Literal["prefill", "generating"]
"""Whether generated tokens stay exact ("prefill") or are folded too, block by block ("generating")."""

Format = Literal["chat", "plain"]
"""Whether the prompt goes through the model's chat template."""


@dataclass(frozen=True)
class Run:
    """One command that measured.

    Attributes
    ----------
    id : str
        Rows name it.
    started : str
        UTC, ISO 8601.
    command : str
        The command line that repeats it.
    hardware : str
        GPU name, or processor and threads.
    versions : mapping of str to str
        python, torch, transformers, kvfold (and triton, CUDA where there).
    seed : int
    dtype : str
        Of the models.
    schema : int
    """

    id: str
    started: str
    command: str
    hardware: str
    versions: Mapping[str, str]
    seed: int
    dtype: str
    schema: int = SCHEMA


@dataclass(frozen=True)
class Fidelity:
    """Next-token distributions after the fold against the full cache's, over teacher-forced tokens.

    Attributes
    ----------
    kl : float
        Mean KL(full || folded), nats.
    top1 : float
        Share of tokens where both prefer the same one.
    logit_error : float
        Root mean square difference of centred logits over that of the full cache's centred logits.
    nll, full_nll : float
        Mean negative log-likelihood of the tokens, nats, folded and full.
    tokens : int
    """

    kl: float
    top1: float
    logit_error: float
    nll: float
    full_nll: float
    tokens: int


@dataclass(frozen=True)
class Cell:
    """What was measured: two rows with equal cells are the same measurement.

    Attributes
    ----------
    model : str
    method : str
        Label as given, such as `snapkv:bits=4,group=64` (name and options that differ from the defaults).
    budget : str
        Such as `keep=0.1`; "" for methods without one.
    task : str
        Label as given, with options.
    tokens : int
        Length asked for.
    view : View
    when : When
    format : Format
    sample : int
        Index.
    seed : int
    """

    model: str
    method: str
    budget: str
    task: str
    tokens: int
    view: View
    when: When
    format: Format
    sample: int
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes
    ----------
    cell : Cell
    run : str
        `Run.id`.
    error : str or None
        Why there are no figures ("out of memory: ..."); everything below is then empty.
    score : float or None
        Mean of the turns' scores; perplexity for a continuation.
    metric : str
    higher_is_better : bool
    fidelity : Fidelity or None
        Over the continuation, or over the full cache's own answers (the same tokens fed to both).
    answers, references : list
        One answer, and one list of references, a turn.
    prompt_tokens : int
        Tokens folded.
    folded_bytes, full_bytes : int
        The ledger's, after the fold: `folded_bytes / full_bytes` is what `keep` bounds.
    widths : list or None
        `FoldedCache.widths()` of the first sample of a group only: bits by layer and KV head.
    prefill_seconds, fold_seconds, decode_seconds : float or None
        Of the shared prefill, of this fold alone, and per generated token.
    about : mapping
        `Sample.about`.
    """

    cell: Cell
    run: str
    error: str | None = None
    score: float | None = None
    metric: str = ""
    higher_is_better: bool = True
    fidelity: Fidelity | None = None
    answers: list[str] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)
    prompt_tokens: int = 0
    folded_bytes: int = 0
    full_bytes: int = 0
    widths: list[Any] | None = None
    prefill_seconds: float | None = None
    fold_seconds: float | None = None
    decode_seconds: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Folded bytes over full bytes."""
        return self.folded_bytes / self.full_bytes if self.full_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
