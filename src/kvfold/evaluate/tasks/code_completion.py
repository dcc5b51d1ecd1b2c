"""Code completion: the next line of a function of Python's own standard library."""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import matching
from kvfold.evaluate.tasks.base import Count, Sample, Task, Turn
from kvfold.evaluate.tasks.fit import fit

_IDENTIFIER = re.compile(r"[A-Za-z_]\w{3,}")
_COMMON = {*keyword.kwlist, *dir(builtins), "self"}


@dataclass(frozen=True)
class Target:
    """A line to be completed.

    Attributes
    ----------
    start, line : int
        Lines of its file, from 0: where the function begins, and which is asked for.
    distance : int
        Lines from the function back to where a name that the line needs, and the function has not used yet, last stood.
    """

    start: int
    line: int
    distance: int


@dataclass(frozen=True, kw_only=True)
class CodeCompletion(Task):
    """The document is the source before a function; the question shows the function up to a line, which is asked for.

    Lines are chosen that use a name which stands in the document and not in the function so far. Before the file's own
    beginning come the files before it, in the order of their names.

    Parameters
    ----------
    folder : str
        Of .py files ("": the standard library of the Python that runs, which differs between versions of Python).
    """

    name = "code_completion"
    source = "Next line with cross-file context as in RepoBench-P, arXiv 2306.03091, on the standard library"
    metric = "edit similarity"

    folder: str = ""

    def check(self) -> None:
        _files(self.folder)

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        files = _files(self.folder)
        order = rng.sample(range(len(files)), len(files))
        place = next((number for number in order if _targets(files[number])), None)
        if place is None:
            raise KvfoldError(f"folder={self.folder}: no function in it has a line that fits the task")
        lines = _lines(files[place])
        target = rng.choice(_targets(files[place]))
        about: dict[str, str | int | float] = {
            "file": files[place].name,
            "line": target.line + 1,
            "distance": target.distance,
        }
        head = "\n".join(lines[target.start : target.line]).rstrip()
        turn = Turn(
            question=f"The code goes on with this function:\n\n```python\n{head}\n```\n\nWrite the next line of it.",
            references=(lines[target.line].strip(),),
            answer_prefix="```python\n",
            max_new_tokens=48,
        )
        # The files before it, the last after the first, as far as tokens may reach.
        parts = [_headed(files[place])[: target.start + 1]]
        for step in range(1, len(files)):
            if sum(map(len, parts)) >= tokens:
                break
            parts.append(_headed(files[place - step]))
        before = [line for part in reversed(parts) for line in part]

        def build(units: int) -> Sample:
            return Sample(
                context="\n".join(before[-units:]).lstrip("\n").rstrip(),
                turns=(turn,),
                instruction="Read this code.",
                about=about,
            )

        return fit(build, tokens, count, task=self.name, least=1, most=len(before))

    def score(self, answer: str, turn: Turn) -> float:
        return matching.edit_similarity(first_line(answer), turn.references[0])


def first_line(answer: str) -> str:
    """The first line of code in an answer: not empty, not a comment, not a fence."""
    lines = (line.strip() for line in answer.splitlines())
    return next((line for line in lines if line and not line.startswith(("#", "```"))), "")


@lru_cache(maxsize=8)
def _files(folder: str) -> tuple[Path, ...]:
    root = Path(folder).expanduser() if folder else Path(sysconfig.get_path("stdlib"))
    files = tuple(sorted(path for path in root.glob("*.py") if not path.name.startswith("__")))
    if not files:
        raise KvfoldError(f"no Python source in {root}: name a folder of .py files with folder=PATH")
    return files


@lru_cache(maxsize=256)
def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise KvfoldError(f"{path} cannot be read as UTF-8 text ({error})") from error


def _headed(path: Path) -> tuple[str, ...]:
    return (f"# {path.name}", *_lines(path))


@lru_cache(maxsize=256)
def _targets(path: Path) -> tuple[Target, ...]:
    """Lines of a file's functions that may be asked for."""
    lines = _lines(path)
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            # A docstring and two statements say what the function is about; a long beginning is no question.
            for statement in node.body[2:]:
                line = statement.lineno - 1
                if statement.lineno == statement.end_lineno and line - start <= 30:
                    distance = _distance(lines, start, line)
                    if distance:
                        found.append(Target(start, line, distance))
    return tuple(found)


def _distance(lines: tuple[str, ...], start: int, line: int) -> int:
    """How far back the nearest name stands that a line needs and its function has not used yet; 0: there is none."""
    if "#" in lines[line] or not 12 <= len(lines[line].strip()) <= 100:
        return 0
    names = set(_IDENTIFIER.findall(lines[line])) - _COMMON
    names -= set(_IDENTIFIER.findall("\n".join(lines[start:line])))
    for back in range(start - 1, -1, -1):
        if names & set(_IDENTIFIER.findall(lines[back])):
            return start - back
    return 0
