"""LongBench: 21 sets of questions, summaries, few-shot examples and code, in English and Chinese."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.errors import KvfoldError
from kvfold.evaluate import scorers
from kvfold.evaluate.tasks.base import Count, Sample, Turn
from kvfold.evaluate.tasks.datasets import rows
from kvfold.evaluate.tasks.datasets.prompts import halves, sample_of
from kvfold.evaluate.tasks.datasets.public import PublicTask

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_STORY = "as you can, using a single phrase if possible. Do not provide any explanation."
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based"
    ' on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes",'
    ' "no", or "unanswerable". Do not provide any explanation.'
)

PROMPTS = {
    # "asconcisely" is the benchmark's own spelling in the version that published figures were made with.
    "narrativeqa": "You are given a story, which can be either a novel or a movie script, and a question. Answer the"
    f" question asconcisely {_STORY}\n\nStory: {{context}}\n\nNow, answer the question based on the story asconcisely"
    f" {_STORY}\n\nQuestion: {{input}}\n\nAnswer:",
    "qasper": f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\nArticle:"
    f" {{context}}\n\n Answer the question based on the above article {_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:",
    "multifieldqa_en": "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question"
    " based on the above text, only give me the answer and do not output any other words.\n\nQuestion:"
    " {input}\nAnswer:",
    "multifieldqa_zh": "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，"
    "只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
    "问题：{input}\n回答：",
    "gov_report": "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    "qmsum": "You are given a meeting transcript and a query containing a question or instruction. Answer the query in"
    " one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript"
    " in one or more sentences.\n\nQuery: {input}\nAnswer:",
    "multi_news": "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
    "Now, write a one-page summary of all the news.\n\nSummary:",
    "vcsum": "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    "trec": "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{input}",
    "triviaqa": "Answer the question based on the given passage. Only give me the answer and do not output any other"
    " words. The following are some examples.\n\n{context}\n\n{input}",
    "samsum": "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
    "{context}\n\n{input}",
    "lsht": "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    "passage_count": "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please"
    " carefully read these paragraphs and determine how many unique paragraphs there are after removing duplicates."
    " In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final"
    " count of unique paragraphs after removing duplicates. The output format should only contain the number, such as"
    " 1, 2, 3, and so on.\n\nThe final answer is: ",
    "passage_retrieval_en": "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which"
    " paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the"
    ' number of the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2",'
    " etc.\n\nThe answer is: ",
    "passage_retrieval_zh": "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}"
    "\n\n下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"
    '"段落1"，"段落2"等格式\n\n答案是：',
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}  # fmt: skip
"""The published prompts (THUDM/LongBench, `config/dataset2prompt.json`)."""

MAX_NEW_TOKENS = {
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
    **dict.fromkeys(("narrativeqa", "qasper", "dureader", "samsum"), 128),
    **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), 32),
    **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), 32),
}
"""The published limits (`config/dataset2maxlen.json`)."""

_Score = Callable[[str, str], float]
_F1: tuple[str, _Score] = ("F1", scorers.token_f1)
_ROUGE: tuple[str, _Score] = ("ROUGE-L", scorers.rouge_l)
_CHINESE_ROUGE: tuple[str, _Score] = ("ROUGE-L", scorers.chinese_rouge_l)
_EDIT: tuple[str, _Score] = ("edit similarity", scorers.next_line_similarity)


def _count(answer: str, reference: str) -> float:
    return scorers.number_share(answer, reference)


def _paragraph(answer: str, reference: str) -> float:
    return scorers.number_share(answer, scorers.first_number(reference))


SCORERS: dict[str, tuple[str, _Score]] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), _F1
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), _ROUGE),
    **dict.fromkeys(("dureader", "vcsum"), _CHINESE_ROUGE),
    "multifieldqa_zh": ("F1", scorers.chinese_word_f1),
    "passage_count": ("accuracy", _count),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), ("accuracy", _paragraph)),
    **dict.fromkeys(("lcc", "repobench-p"), _EDIT),
}
"""Metric and scorer of each set (`eval.py`); the classifications `CLASSIFICATIONS` have classes too."""

CLASSIFICATIONS = ("trec", "lsht")
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")
"""Only the first line of an answer counts: a model goes on with examples of its own."""
EXTENDED = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
"""The sets of LongBench-E."""
CHINESE = ("multifieldqa_zh", "dureader", "vcsum")
"""Scored by words that jieba cuts."""
PARAGRAPH = {"passage_retrieval_en": r"Paragraph \d+", "passage_retrieval_zh": r"段落\d+"}


@dataclass(frozen=True, kw_only=True)
class LongBench(PublicTask):
    """One of LongBench's sets, with its published prompt, answer length and scorer.

    A prompt longer than asked for loses its middle, as in the published evaluation, which puts six of the sets (trec,
    triviaqa, samsum, lsht, lcc, repobench-p) to chat models without their chat template: run those as plain text.

    Parameters
    ----------
    data : str
        The set, such as "qasper".
    extended : bool
        LongBench-E: the same task, lengths spread evenly (13 of the sets).
    path : str
        See `PublicTask`; the published name is `<data>.jsonl`.
    """

    name = "longbench"
    source = "LongBench (arXiv 2308.14508; THUDM/LongBench)"
    metric = "as published"

    data: str = "narrativeqa"
    extended: bool = False

    def __post_init__(self) -> None:
        if self.data not in PROMPTS:
            raise KvfoldError(f"{self.name}: there is no set {self.data!r}: choose from {', '.join(PROMPTS)}")
        if self.extended and self.data not in EXTENDED:
            raise KvfoldError(
                f"{self.name}: LongBench-E has no {self.data!r}: choose from {', '.join(EXTENDED)}"
            )
        metric = "accuracy" if self.data in CLASSIFICATIONS else SCORERS[self.data][0]
        object.__setattr__(self, "metric", metric)

    def load(self) -> Sequence[rows.Row]:
        stem = self.data + ("_e" if self.extended else "")
        published = rows.Source("THUDM/LongBench", stem, "test", f"data.zip::data/{stem}.jsonl")
        fields = {"context": rows.NONEMPTY, "input": rows.TEXT, "answers": rows.TEXTS}
        if self.data in CLASSIFICATIONS:
            fields["all_classes"] = rows.TEXTS
        table = rows.load(published, self.path, fields)
        if self.data in PARAGRAPH:
            for index, row in enumerate(table.rows):
                if not all(re.search(PARAGRAPH[self.data], answer) for answer in row["answers"]):
                    raise table.wrong(index, "answers", "must name a paragraph by its number")
        if self.data in CHINESE:
            scorers.jieba()
        return table.rows

    def sample(self, index: int, tokens: int, count: Count, rng: random.Random) -> Sample:
        row = self.rows()[index]
        before, after = halves(PROMPTS[self.data], "context", {"input": row["input"]})
        return sample_of(
            before,
            row["context"],
            after,
            lambda text: Turn(text, tuple(row["answers"]), max_new_tokens=MAX_NEW_TOKENS[self.data]),
            tokens,
            count,
            task=f"{self.name} {self.data}",
            about={"data": self.data, **_length(row)},
        )

    def score(self, answer: str, turn: Turn) -> float:
        if self.data in FEW_SHOT:
            answer = answer.lstrip("\n").split("\n")[0]
        if self.data in CLASSIFICATIONS:
            classes = self.rows()[0]["all_classes"]
            return max(scorers.class_share(answer, reference, classes) for reference in turn.references)
        score = SCORERS[self.data][1]
        return max(score(answer, reference) for reference in turn.references)


def _length(row: rows.Row) -> dict[str, int | str]:
    """The set's own length (words, or characters of Chinese), in the intervals of LongBench-E."""
    length = row.get("length")
    if not isinstance(length, int):
        return {}
    return {"length": length, "interval": "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"}
