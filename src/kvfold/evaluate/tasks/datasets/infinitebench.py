"""InfiniteBench: twelve tasks on contexts of a hundred thousand tokens and more."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.errors import KvfoldError
from kvfold.evaluate import scorers
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.datasets import rows
from kvfold.evaluate.tasks.datasets.prompts import halves, sample_of
from kvfold.evaluate.tasks.datasets.public import PublicTask

_OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
_MASKED = (
    'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and you'
    " should try to guess who that character is.\n\n"
)
_KEY_VALUE = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}"
)

COMPLETION = {
    "passkey": f"{_HIDDEN} and memorize it. I will quiz you about the important information.\n\n{{context}}\n\n{{input}}"
    "\n\nThe pass key is",
    "number_string": f"{_HIDDEN}. I will quiz you about the important information there.\n\n{{context}}\n\n{{input}}"
    "\n\nThe sequence of digits is",
    "kv_retrieval": _KEY_VALUE,
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
    f"{_OPTIONS}\n\nThe letter of the correct answer is",
    "longbook_qa_eng": "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
    "Question: {input}\nAnswer:",
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues:"
    " [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
    "code_run": "There is a function called {func} in the following Python code.\n\n{context}\n\nPlease compute the"
    " exact value of {func_call}. The value of {func_call} is",
    "code_debug": "Following is a Python code where exactly one of the functions/methods has a deliberate error that"
    f" makes it crash.\n\n{{context}}\n\nOptions:\n{_OPTIONS}\n\nThe correct option is:",
    "longdialogue_qa_eng": f"{_MASKED}{{context}}\n\nThe name that has been replaced with $$MASK$$ is likely",
}  # fmt: skip
"""The published prompts of open models (OpenBMB/InfiniteBench, `src/prompt.py`, `yarn_mistral_templates`)."""

CHAT = {
    "passkey": f"{_HIDDEN} and memorize them. I will quiz you about the important information there.\n\n"
    "{context}\n\n{input}",
    "number_string": f"{_HIDDEN}. I will quiz you about the important information there.\n\n{{context}}\n\n{{input}}",
    "kv_retrieval": _KEY_VALUE,
    "longbook_sum_eng": "Summarize the following book.\n\n{context}",
    "longbook_choice_eng": "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n\nOnly one of the"
    " following options is correct, tell me the answer using one single letter (A, B, C, or D). Don't say anything"
    f" else.\n{_OPTIONS}",
    "longbook_qa_eng": "Read the book below and answer a question.\n\n{context}\n\nQuestion: {input}\n\n"
    "Be very concise.",
    "longbook_qa_chn": "请根据以下书籍回答我的问题。\n\n{context}\n\n问题：{input}\n请尽量简短地回答。",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": "Compute the intermediate values in the following long expression.\n\n{context}",
    "code_run": "Following is a set of Python functions. There is a function called named {func}.\n\n{context}\n\n"
    "Please give me the exact number of the return value of {func_call}. Be concise. Your response must end with the"
    " final returned value.",
    "code_debug": "There is ONLY ONE function in the large project that is deliberately made to include an obvious"
    " error. Please find the function that contains the most obvious errors. I will give you four options to narrow"
    " your scope. You can inspect the options and think. Eventually, tell me the answer using one single letter (A, B,"
    f" C, or D).\n\n{{context}}\n\nWhich funtion has deliberate error?\n{_OPTIONS}\n\nYou should first find the"
    " functions in the options. Repeat their content, inspect through code, and at last give me your answer for the"
    " function that has the deliberate and obvious error in A, B, C, or D.",
    "longdialogue_qa_eng": f"{_MASKED}The dialogue:\n\n---\n\n{{context}}\n\n---\n\nEnd of dialogue.\n\nWhich character"
    ' is most likely "$$MASK$$"? Just say the name used by the scriptwriter (before the colon marks) of one single'
    " character and nothing else.",
}  # fmt: skip
"""The published prompts of GPT-4 (`gpt4_templates`; their own run of math_calc used a dialogue instead)."""

MAX_NEW_TOKENS = {
    "passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200, "longbook_choice_eng": 40,
    "longbook_qa_eng": 40, "longbook_qa_chn": 40, "longdialogue_qa_eng": 40, "math_find": 3, "math_calc": 30000,
    "code_run": 5, "code_debug": 5,
}  # fmt: skip
"""The published limits (`src/eval_utils.py`)."""

METRICS = {
    **dict.fromkeys(COMPLETION, "accuracy"),
    "longbook_sum_eng": "ROUGE-Lsum",
    "longbook_qa_eng": "F1",
    "longbook_qa_chn": "F1",
}
CHOICES = ("code_debug", "longbook_choice_eng")


def _answers_fit(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    flat = [part for item in items for part in (item if isinstance(item, list | tuple) else [item])]
    return bool(flat) and all(isinstance(part, str | int | float) for part in flat)


ANSWER = rows.Kind("an answer or a list of answers, texts or numbers", _answers_fit)


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(PublicTask):
    """One of InfiniteBench's tasks, with its published prompt, answer length and scorer.

    A prompt longer than asked for loses its middle, as in the published evaluation.

    Parameters
    ----------
    data : str
        The task, such as "longbook_qa_eng".
    prompts : "completion" or "chat"
        The authors' prompts for open models, which end in the answer's first words, or those for GPT-4. The answer
        lengths are those of the former: with the latter, raise `max_new_tokens` of code_run, code_debug and math_find.
    max_new_tokens : int
        0: as published.
    path : str
        See `PublicTask`; the published name is `<data>.jsonl`.
    """

    name = "infinitebench"
    source = "InfiniteBench (arXiv 2402.13718; OpenBMB/InfiniteBench)"
    metric = "as published"

    data: str = "longbook_qa_eng"
    prompts: Literal["completion", "chat"] = "completion"
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.data not in METRICS:
            raise KvfoldError(
                f"{self.name}: there is no task {self.data!r}: choose from {', '.join(METRICS)}"
            )
        object.__setattr__(self, "metric", METRICS[self.data])

    def load(self) -> Sequence[rows.Row]:
        published = rows.Source("xinrongzhang2022/InfiniteBench", self.data, self.data, f"{self.data}.jsonl")
        fields = {"context": rows.NONEMPTY, "input": rows.TEXT, "answer": ANSWER}
        if self.data in CHOICES:
            fields["options"] = rows.Kind(
                "a list of four texts", lambda value: rows.TEXTS.fits(value) and len(value) == 4
            )
        table = rows.load(published, self.path, fields)
        for index, row in enumerate(table.rows):
            if _values(self.data, row) is None:
                form = "a call such as func_7(3)" if self.data == "code_run" else '"The ... of"'
                raise table.wrong(index, "input", f"must hold {form}")
            if not _references(self.data, row):
                raise table.wrong(index, "answer", "must be one of the options")
        return table.rows

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        row = self.rows()[index]
        template = (COMPLETION if self.prompts == "completion" else CHAT)[self.data]
        before, after = halves(template, "context", _values(self.data, row) or {})
        references = _references(self.data, row)
        limit = self.max_new_tokens or MAX_NEW_TOKENS[self.data]
        return sample_of(
            before,
            row["context"],
            after,
            lambda text: Turn(text, references, max_new_tokens=limit),
            tokens,
            count,
            task=f"{self.name} {self.data}",
            about={"data": self.data},
        )

    def score(self, answer: str, turn: Turn) -> float:
        return float(_SCORERS[self.data](answer, turn.references))


def _values(data: str, row: rows.Row) -> dict[str, str] | None:
    """What the prompt is filled with, the document aside; None: the row's input lacks it."""
    values = {"input": row["input"]}
    if data in CHOICES:
        values |= {f"OPTION_{letter}": text for letter, text in zip("ABCD", row["options"], strict=True)}
    elif data == "code_run":
        call = re.search(r"func_[0-9]+\(-?[0-9]+\)", row["input"])
        if call is None:
            return None
        values |= {"func_call": call.group(), "func": call.group().partition("(")[0]}
    elif data == "math_find":
        wanted = re.search("The .+ of", row["input"])
        if wanted is None:
            return None
        values["prefix"] = f"What is {wanted.group().lower()[:-3]} in the following list?"
    return values


def _references(data: str, row: rows.Row) -> tuple[str, ...]:
    """The right answers as texts; for a choice, its text and its letter ((): it is none of the options)."""
    answer = row["answer"]
    items = answer if isinstance(answer, list | tuple) else [answer]
    if data in CHOICES:
        if len(items) == 2 and items[1] in tuple("ABCD"):
            return str(items[0]), items[1]
        options = list(row["options"])
        return (items[0], "ABCD"[options.index(items[0])]) if items[0] in options else ()
    if isinstance(items[0], list | tuple):
        items = items[0]
    return tuple(str(item) for item in items)


_MARKS = ("\n", ":", '"', "'", ".", ",", "?", "!", "{", "}")


def _number(answer: str, references: Sequence[str]) -> bool:
    return scorers.first_number(answer) == references[0]


def _value(answer: str, references: Sequence[str]) -> bool:
    return references[0] in scorers.spaced(answer, _MARKS).split()


def _name(answer: str, references: Sequence[str]) -> bool:
    return any(reference.upper() in answer.upper() for reference in references)


def _returned(answer: str, references: Sequence[str]) -> bool:
    words = scorers.spaced(answer, ("\n", ".", "`", "'", '"', ":")).split()
    try:
        return bool(words) and int(words[-1]) == int(references[0])
    except ValueError:
        return False


def _found_number(answer: str, references: Sequence[str]) -> bool:
    number = re.search(r"\d+\.\d+|\d+", answer)
    return number is not None and float(number.group()) == float(references[0])


def _values_in_a_row(answer: str, references: Sequence[str]) -> float:
    """Share of the values that are right before the first wrong one."""
    given = re.findall("[0-9]+", answer)
    right = 0
    for value, wanted in zip(given, references):
        if int(value) != int(wanted):
            break
        right += 1
    return right / len(references)


def _faulty_function(answer: str, references: Sequence[str]) -> float:
    name, letter = references
    answer = answer.strip()
    if scorers.last_letter(answer, "A-J") == letter:
        return 1.0
    answer = re.sub(" +", " ", scorers.spaced(answer, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    if answer.startswith((letter, name)):
        return 1.0
    cued = scorers.after_cue(answer, ("answer is:", "is:", "answer:", "correct option is:"), (letter, name))
    return cued or 0.0


def _choice(answer: str, references: Sequence[str]) -> float:
    answer = answer.strip()
    if not answer:
        return 0.0
    if scorers.last_letter(answer, "A-D") in references:
        return 1.0
    if answer[0] in "ABCD":
        return float(answer[0] in references)
    if answer in references:
        return 1.0
    answer = re.sub(" +", " ", scorers.spaced(answer, ("\n", '"', "'", ".", ",", "?", "!", "{", "}")))
    cued = scorers.after_cue(answer, ("answer is:", "answer:", "answer is", "option is"), references)
    if cued is not None:
        return cued
    letters = [word for word in answer.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in references)


def _best_f1(answer: str, references: Sequence[str]) -> float:
    return max(scorers.token_f1(answer, reference) for reference in references)


def _best_chinese_f1(answer: str, references: Sequence[str]) -> float:
    return max(scorers.chinese_character_f1(answer, reference) for reference in references)


def _summary(answer: str, references: Sequence[str]) -> float:
    return max(scorers.rouge_l_sum(answer, reference) for reference in references)


_SCORERS = {
    "passkey": _number,
    "number_string": _number,
    "kv_retrieval": _value,
    "longdialogue_qa_eng": _name,
    "longbook_sum_eng": _summary,
    "longbook_choice_eng": _choice,
    "longbook_qa_eng": _best_f1,
    "longbook_qa_chn": _best_chinese_f1,
    "math_find": _found_number,
    "math_calc": _values_in_a_row,
    "code_run": _returned,
    "code_debug": _faulty_function,
}
