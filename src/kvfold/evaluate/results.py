"""A results folder: what ran, and one row a measurement, appended and never rewritten.

```
results/
  runs.jsonl          one `Run` a command that measured: when, command line, hardware, versions, seed
  rows-<worker>.jsonl one `Row` a line; each worker process appends to its own file only
```

A kill can tear at most the last line of a file; `read` leaves it out and says so, and the next run measures it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from kvfold.errors import KvfoldError

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
        What the prompt takes after the fold, with what the method left exact, and in 16 bits: the ratio is what `keep`
        bounds.
    widths : list or None
        `FoldedCache.widths()` of the first sample of a group only: bits by layer and KV head.
    prefill_seconds, fold_seconds, decode_seconds : float or None
        Of the shared prefill, of this fold alone, and per token that was decoded one by one (None where the full
        cache's answer was confirmed whole, in one pass).
    about : mapping
        `Sample.about`.
    ledger : mapping of str to int
        Bytes by purpose after the fold, the exact tail included.
    note : str
        Why nothing was folded ("": it was).
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
    ledger: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Folded bytes over full bytes."""
        return self.folded_bytes / self.full_bytes if self.full_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Row:
        """The row of `to_dict`."""
        fidelity = data.get("fidelity")
        return Row(
            **{
                **data,
                "cell": Cell(**data["cell"]),
                "fidelity": None if fidelity is None else Fidelity(**fidelity),
            }
        )


@dataclass(frozen=True)
class Results:
    """What a results folder holds.

    Attributes
    ----------
    runs : list of Run
    rows : list of Row
        One a cell, sorted by cell: the newest, except that an error never hides figures.
    notes : list of str
        What was left out, for the user.
    """

    runs: list[Run]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


RUNS = "runs.jsonl"


def read(folder: str | Path) -> Results:
    """Read a results folder, also while a run still writes to it.

    Raises
    ------
    KvfoldError
        The folder holds no results or those of another schema version, or a line is damaged (file and line named).
    """
    folder = Path(folder).expanduser()
    if not (folder / RUNS).is_file():
        raise KvfoldError(f"{folder} holds no results: give the folder that `kvfold eval -o` wrote")
    check_schema(folder)
    notes: list[str] = []
    runs = [_made(Run, data, path, line) for path, line, data in _lines(folder / RUNS, notes)]
    found: dict[Cell, Row] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        for _, line, data in _lines(path, notes):
            row = _made(Row.from_dict, data, path, line)
            if row.error is None or row.cell not in found or found[row.cell].error is not None:
                found[row.cell] = row
    rows = sorted(found.values(), key=lambda row: tuple(vars(row.cell).values()))
    return Results(runs, rows, notes)


def check_schema(folder: Path) -> None:
    """Refuse a folder whose rows another version wrote; one without results is fine.

    Raises
    ------
    KvfoldError
        Another schema version, or rows without the runs that made them.
    """
    runs = folder / RUNS
    if not runs.is_file():
        if any(folder.glob("rows-*.jsonl")):
            raise KvfoldError(f"{folder} has rows but no {RUNS}: put it back, or choose another folder")
        return
    for _, line, data in _lines(runs, []):
        if data.get("schema") != SCHEMA:
            versions = data.get("versions")
            writer = versions.get("kvfold", "another") if isinstance(versions, dict) else "another"
            raise KvfoldError(
                f"{runs}, line {line}: results of schema {data.get('schema')!r}, and this kvfold knows schema {SCHEMA}:"
                f" use kvfold {writer}, which wrote them, or choose another folder"
            )


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                notes.append(f"{path.name}: the last line is torn and left out")
                return
            try:
                data = json.loads(line)
            except ValueError:
                data = None
            if not isinstance(data, dict):
                raise KvfoldError(f"{path}, line {number} is damaged: remove that line, and run again")
            yield path, number, data


def _made(kind: Any, data: dict[str, Any], path: Path, line: int) -> Any:
    try:
        return kind(**data) if isinstance(kind, type) else kind(data)
    except (TypeError, KeyError, AttributeError) as error:
        raise KvfoldError(
            f"{path}, line {line} is no {'run' if kind is Run else 'row'} of this kvfold ({error}):"
            " remove that line, or choose another folder"
        ) from error


class Appender:
    """Adds lines to a JSONL file of which this process is the only writer.

    Each line is handed to the operating system before `write` returns, so that a killed process loses at most the line
    it was writing.

    Parameters
    ----------
    path : Path
        A torn last line is cut off.

    Attributes
    ----------
    repaired : bool
        Whether one was.

    Raises
    ------
    KvfoldError
        Another process is writing to the file.
    """

    def __init__(self, path: Path):
        self._file: IO[bytes] = path.open("a+b")
        _lock(self._file, path)
        self._file.seek(0)
        whole = self._file.read()
        kept = whole.rfind(b"\n") + 1
        self.repaired = kept < len(whole)
        if self.repaired:
            self._file.truncate(kept)

    def write(self, item: Row | Run) -> None:
        """Append one line."""
        data = item.to_dict() if isinstance(item, Row) else asdict(item)
        self._file.write(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(file: IO[bytes], path: Path) -> None:
    """Held until the file is closed or the process dies; nothing where the system has no such locks."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise KvfoldError(
                f"another process is writing {path}: wait for it, or choose another folder"
            ) from error
