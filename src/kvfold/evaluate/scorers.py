"""Scorers of public benchmarks, each in [0, 1] and to the letter of the code the benchmark was published with.

Quirks are kept where they change a score: they are part of what a published figure means. Sources: LongBench
(THUDM/LongBench, `metrics.py`), InfiniteBench (OpenBMB/InfiniteBench, `src/compute_scores.py`), the packages they
score with (rouge 1.0.1, rouge_score, fuzzywuzzy), and SQuAD's evaluation script for normalisation and F1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from kvfold.errors import KvfoldError

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟"
    "〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and extra white space (SQuAD)."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split())


def normalise_chinese(text: str) -> str:
    """Lower case, without punctuation of either script and white space."""
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if the two are equal once normalised."""
    return float(normalise(answer) == normalise(reference))


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over two bags of words."""
    same = sum((Counter(answer) & Counter(reference)).values())
    return 2 * same / (len(answer) + len(reference)) if same else 0.0


def token_f1(answer: str, reference: str) -> float:
    """F1 over normalised words (SQuAD; LongBench `qa_f1_score`)."""
    return f1(normalise(answer).split(), normalise(reference).split())


def words_of_chinese(text: str) -> list[str]:
    """Words as jieba cuts them.

    Raises
    ------
    KvfoldError
        jieba is not installed.
    """
    jieba().setLogLevel("WARNING")
    return list(jieba().cut(text))


def jieba() -> Any:
    """The package that cuts Chinese into words.

    Raises
    ------
    KvfoldError
        It is not installed; the message names the extra.
    """
    try:
        import jieba as package
    except ImportError:
        raise KvfoldError(
            "Chinese answers are scored by words that jieba cuts: pip install 'kvfold[datasets]'"
        ) from None
    return package


def chinese_word_f1(answer: str, reference: str) -> float:
    """F1 over words cut by jieba, then normalised (LongBench `qa_f1_zh_score`)."""
    cut = [[normalise_chinese(word) for word in words_of_chinese(text)] for text in (answer, reference)]
    return f1(*([word for word in words if word] for words in cut))


def chinese_character_f1(answer: str, reference: str) -> float:
    """F1 over characters (InfiniteBench `qa_f1_score_zh`)."""
    return f1(normalise_chinese(answer), normalise_chinese(reference))


def common_subsequence(a: Sequence[str], b: Sequence[str], *, late: bool) -> list[int]:
    """Positions in `a` of a longest common subsequence; of several, one that is `late` in `a` or early."""
    table = [[0] * (len(b) + 1)]
    for x in a:
        above, row = table[-1], [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
        table.append(row)
    positions = []
    i, j = len(a), len(b)
    while i and j:
        without_a, without_b = table[i - 1][j], table[i][j - 1]
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            positions.append(i)
        elif without_a > without_b or (without_a == without_b and not late):
            i -= 1
        else:
            j -= 1
    return positions[::-1]


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L F1 as the package rouge 1.0.1 computes it (LongBench): over the *sets* of words.

    Text is cut into sentences at full stops. Words that any sentence of the answer has in common with any sentence
    of the reference, in order, count once, and so do the words of both texts. (Where a sentence is longer than Python
    recurses, the package fails and LongBench counts 0; this counts it.)
    """
    answers, references = (
        [" ".join(part.split()).split(" ") for part in text.split(".") if part]
        for text in (answer, reference)
    )
    if not answers or not references:
        return 0.0
    common = {
        words[i]
        for words in references
        for other in answers
        for i in common_subsequence(words, other, late=True)
    }
    precision = len(common) / len(set().union(*answers))
    recall = len(common) / len(set().union(*references))
    return 2 * precision * recall / (precision + recall + 1e-8)


def chinese_rouge_l(answer: str, reference: str) -> float:
    """`rouge_l` over words cut by jieba (LongBench `rouge_zh_score`)."""
    return rouge_l(" ".join(words_of_chinese(answer)), " ".join(words_of_chinese(reference)))


def rouge_l_sum(answer: str, reference: str) -> float:
    """rougeLsum F1 as the package rouge_score computes it without stemming (InfiniteBench): a line is a sentence.

    For each line of the reference, the union of its longest common subsequences with the lines of the answer; a word
    counts as often as both texts have it.
    """
    answers, references = (
        [re.sub("[^a-z0-9]+", " ", line.lower()).split() for line in text.split("\n") if line]
        for text in (answer, reference)
    )
    made, wanted = (Counter(word for line in lines for word in line) for lines in (answers, references))
    if not made or not wanted:
        return 0.0
    total = made.total() + wanted.total()
    hits = 0
    for line in references:
        for position in sorted({i for other in answers for i in common_subsequence(line, other, late=False)}):
            if made[line[position]] and wanted[line[position]]:
                made[line[position]] -= 1
                wanted[line[position]] -= 1
                hits += 1
    return 2 * hits / total


def edit_similarity(a: str, b: str) -> float:
    """Share of characters that match, in whole percent (fuzzywuzzy `ratio` over `difflib`; LongBench code sets)."""
    if not a or not b:
        return float(a == b)
    return round(100 * SequenceMatcher(None, a, b).ratio()) / 100


def next_line_similarity(answer: str, reference: str) -> float:
    """`edit_similarity` of the answer's first line that is code, not comment or fence (LongBench `code_sim_score`)."""
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return edit_similarity(next(code, ""), reference)


def number_share(answer: str, number: str) -> float:
    """Of the numbers in an answer, how many are the right one (LongBench `count_score`, `retrieval_score`)."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def class_share(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that an answer names, if the right one is among them (LongBench)."""
    named = [name for name in classes if name in answer]
    # As published: a class within the right one's name does not count, but what follows a removed one is skipped.
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def first_number(answer: str) -> str:
    """The first run of digits ("": none)."""
    found = re.search("[0-9]+", answer)
    return found.group() if found else ""


def spaced(answer: str, marks: str | Sequence[str]) -> str:
    """The answer with a space for each of the marks."""
    for mark in marks:
        answer = answer.replace(mark, " ")
    return answer


def last_letter(answer: str, letters: str) -> str:
    """The last lone letter on the answer's first line that has one (`letters` such as "A-D"; "": none)."""
    found = re.search(rf"\b[{letters}]\b(?!.*\b[{letters}]\b)", answer)
    return found.group() if found else ""


def after_cue(answer: str, cues: Sequence[str], wanted: Sequence[str]) -> float | None:
    """Whether one of `wanted` stands one character after the first cue that the answer holds; None: it holds none."""
    for cue in cues:
        _, found, rest = answer.partition(cue)
        if found:
            return float(any(rest[1:].startswith(text) for text in wanted)) if rest else 0.0
    return None


def stated_choice(answer: str) -> str:
    """The letter of "The correct answer is (B)", brackets or not, bold or not (LongBench v2; "": none)."""
    answer = answer.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        found = re.search(pattern, answer)
        if found:
            return found.group(1)
    return ""


def boxed(answer: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds; None: there is none."""
    content = None
    for start in re.finditer(r"\\boxed\s*\{", answer):
        depth = 1
        for end in range(start.end(), len(answer)):
            depth += {"{": 1, "}": -1}.get(answer[end], 0)
            if not depth:
                content = answer[start.end() : end]
                break
    return content


def boxed_integer(answer: str) -> int | None:
    r"""The integer of the last `\boxed{...}`, written with or without leading zeros, commas and dollars."""
    content = boxed(answer)
    if content is None:
        return None
    found = re.fullmatch(r"[\s$]*(?:\\text\{)?\s*([+-]?\d[\d,]*?)(?:\.0*)?\s*\}?[\s$.]*", content)
    return int(found.group(1).replace(",", "")) if found else None
