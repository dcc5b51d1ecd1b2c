"""MMDU: dialogues of many turns about many images."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.evaluate import scorers
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.datasets import rows
from kvfold.evaluate.tasks.datasets.public import PublicTask

SOURCE = rows.Source("laolao77/MMDU", "benchmark", file="benchmark.json")
PICTURES = "mmdu_pics"
PLACEHOLDER = "<ImageHere>"


def _dialogue(value: Any) -> bool:
    """User and assistant take turns, the user first and the assistant last."""
    return (
        isinstance(value, Sequence)
        and len(value) >= 2
        and len(value) % 2 == 0
        and all(
            isinstance(said, dict)
            and said.get("from") == ("assistant" if number % 2 else "user")
            and isinstance(said.get("value"), str)
            for number, said in enumerate(value)
        )
    )


FIELDS = {
    "image": rows.TEXTS,
    "conversations": rows.Kind("a list of {from, value}, user and assistant in turn", _dialogue),
}


@dataclass(frozen=True, kw_only=True)
class MMDU(PublicTask):
    """Answer a dialogue's questions about its images, each after the model's own answers to those before.

    **The score is not the published one.** MMDU has GPT-4o grade answers from 1 to 10, which cannot be done offline.
    What can: ROUGE-L against the reference answers (all of them hundreds of words long), useful to compare a folded
    cache with the full one of the same model, and no measure of a model. Answers and references are kept in the
    results, for a judge to read later.

    A dialogue's document is its first question up to its last image. A dialogue that brings new images later ends
    before it does (`about` has `turns` and `all_turns`). `tokens` limits the text; images come on top.

    Parameters
    ----------
    max_new_tokens : int
    path : str
        See `PublicTask`; the published name is `benchmark.json`, and its images lie beside it, as `image` names them
        or in a folder or archive `mmdu_pics`.
    """

    name = "mmdu"
    source = "MMDU (arXiv 2406.11833; Liuziyu77/MMDU)"
    metric = "ROUGE-L, not the published judge"

    max_new_tokens: int = 1024

    def load(self) -> Sequence[rows.Row]:
        table = rows.load(SOURCE, self.path, FIELDS)
        for index, row in enumerate(table.rows):
            asked = row["conversations"][0]["value"].count(PLACEHOLDER)
            if not 0 < asked <= len(row["image"]):
                raise table.wrong(
                    index,
                    "conversations",
                    f"must begin with a question that has {PLACEHOLDER} for 1 to {len(row['image'])} images, not {asked}",
                )
            if self.path:
                for name in row["image"][:asked]:
                    if self._picture(name) is None:
                        raise table.wrong(index, "image", f"names {name}, which is not beside the file")
        return table.rows

    def _folder(self) -> Path:
        if not self.path:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(SOURCE.hub, f"{PICTURES}.zip", repo_type="dataset")).parent
        path = Path(self.path).expanduser()
        return path if path.is_dir() else path.parent

    def _picture(self, name: str) -> Path | zipfile.Path | None:
        """Where an image is."""
        folder, file = self._folder(), PurePosixPath(name).name
        for place in (folder / name.lstrip("/"), folder / PICTURES / file):
            if place.is_file():
                return place
        archive = folder / f"{PICTURES}.zip"
        if archive.is_file():
            root = zipfile.Path(archive)
            for member in (root / file, root / PICTURES / file):
                if member.is_file():
                    return member
        return None

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        row = self.rows()[index]
        said = [part["value"] for part in row["conversations"]]
        questions, references = said[::2], said[1::2]
        end = questions[0].rindex(PLACEHOLDER) + len(PLACEHOLDER)
        context, first = questions[0][:end].lstrip(), questions[0][end:]
        late = [number for number, question in enumerate(questions) if number and PLACEHOLDER in question]
        turns = min(late, default=len(questions))
        needed = count(context.replace(PLACEHOLDER, "")) + count(first)
        if needed > tokens:
            raise KvfoldError(
                f"{self.name}: {tokens} tokens are too few, the text of dialogue {index} takes {needed}"
            )
        images = []
        for name in row["image"][: context.count(PLACEHOLDER)]:
            picture = self._picture(name)
            if picture is None:
                raise KvfoldError(
                    f"{self.name}: {PICTURES}.zip of {SOURCE.hub} has no image {name} (dialogue {index})"
                )
            images.append(picture.read_bytes())
        return Sample(
            context=context.replace(PLACEHOLDER, "<image>"),
            turns=tuple(
                Turn(question, (reference,), max_new_tokens=self.max_new_tokens)
                for question, reference in zip([first, *questions[1:turns]], references[:turns], strict=True)
            ),
            images=tuple(images),
            verbatim=True,
            about={"images": len(images), "turns": turns, "all_turns": len(questions)},
        )

    def score(self, answer: str, turn: Turn) -> float:
        return scorers.rouge_l(answer, turn.references[0])
