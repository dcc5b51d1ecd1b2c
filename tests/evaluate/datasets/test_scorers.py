"""Published scorers against values worked out by hand, and slow definitions."""

import itertools
import math
import random
from collections import Counter

import pytest

from kvfold.evaluate import scorers


def test_normalised_exact_match():
    assert scorers.exact_match("The  Cat!", "a cat") == 1
    assert scorers.exact_match("cats", "cat") == 0


def test_token_f1():
    # answer: big cat sat; reference: cat sat down -> two in common, precision 2/3, recall 2/3
    assert scorers.token_f1("The big cat sat.", "a cat sat down") == pytest.approx(2 / 3)
    assert scorers.token_f1("dog", "cat") == 0
    assert scorers.token_f1("", "cat") == 0
    # repeated words count as often as both have them: precision 1/3, recall 1
    assert scorers.token_f1("cat cat cat", "cat") == pytest.approx(0.5)


def test_common_subsequence_is_a_longest_one():
    rng = random.Random(0)
    for _ in range(60):
        a, b = (rng.choices("abc", k=rng.randint(0, 6)) for _ in range(2))
        longest = next(
            size
            for size in range(len(a), -1, -1)
            if any(
                [a[i] for i in chosen] == [b[j] for j in other]
                for chosen in itertools.combinations(range(len(a)), size)
                for other in itertools.combinations(range(len(b)), size)
            )
        )
        for late in (True, False):
            found = scorers.common_subsequence(a, b, late=late)
            assert len(found) == longest and found == sorted(found)
            rest = iter(b)
            assert all(a[i] in rest for i in found)  # in order in b


def test_rouge_l_counts_words_once():
    # Sets: the answer has {the, cat, sat}, the reference {the, cat, ran}; in common, in order: the, cat.
    assert scorers.rouge_l("the cat the cat sat", "the cat ran") == pytest.approx(2 / 3, abs=1e-6)
    # Sentences end at full stops, and any sentence may match any other.
    assert scorers.rouge_l("it ran. the cat sat", "the cat sat. it ran") == pytest.approx(1, abs=1e-6)
    assert scorers.rouge_l("ran it", "it ran") == pytest.approx(0.5, abs=1e-6)
    assert scorers.rouge_l("", "it ran") == 0


def test_rouge_l_sum_takes_the_union_over_lines():
    # "w1 w2 w3 w4 w5" against lines "w1 w2 w6 w7 w8" and "w1 w3 w8 w9 w5" (Lin 2004): union w1 w2 w3 w5, 4 of 5;
    # precision 4 of 10.
    answer, reference = "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"
    assert scorers.rouge_l_sum(answer, reference) == pytest.approx(2 * 0.8 * 0.4 / 1.2)
    assert scorers.rouge_l_sum("W1, w2!", "w1 w2") == 1
    assert scorers.rouge_l_sum("...", "w1") == 0


def test_edit_similarity_is_in_whole_percent():
    # "abcd" and "abxd": three of four characters match
    assert scorers.edit_similarity("abcd", "abxd") == 0.75
    assert scorers.edit_similarity("abc", "abd") == 0.67
    assert scorers.edit_similarity("", "") == 1
    assert scorers.edit_similarity("", "a") == 0


def test_next_line_similarity_skips_comments_and_fences():
    answer = "\n```python\n# a comment\nreturn x\nreturn y"
    assert scorers.next_line_similarity(answer, "return x") == 1
    assert scorers.next_line_similarity("# only", "return x") == 0


def test_number_share():
    assert scorers.number_share("12, or 7 or 12", "12") == pytest.approx(2 / 3)
    assert scorers.number_share("none", "12") == 0


def test_class_share():
    classes = ["city", "city state", "state", "number"]
    assert scorers.class_share("a number", "number", classes) == 1
    assert scorers.class_share("number or state", "number", classes) == 0.5
    # "city" within "city state" is no answer of its own (and, as published, "state" after it is then looked at).
    assert scorers.class_share("city state", "city state", classes) == pytest.approx(1)
    assert scorers.class_share("state", "number", classes) == 0


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is C**", "C"),
        ("The correct answer is (insert answer here)", ""),
        ("I think B", ""),
        ("The correct answer is D. The correct answer is (A)", "A"),
    ],
)
def test_stated_choice(answer, letter):
    assert scorers.stated_choice(answer) == letter


@pytest.mark.parametrize(
    ("answer", "integer"),
    [
        (r"so \boxed{042}", 42),
        (r"\boxed{1} no: \boxed{\text{113}}.", 113),
        (r"\boxed{$70$}", 70),
        (r"\boxed{1,024}", 1024),
        (r"\boxed{7.0}", 7),
        (r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{12", None),
        ("the answer is 12", None),
        (r"\boxed {5} \boxed{12", 5),
    ],
)
def test_boxed_integer(answer, integer):
    assert scorers.boxed_integer(answer) == integer


def test_last_letter():
    assert scorers.last_letter("A or B. So: C\nD", "A-D") == "C"
    assert scorers.last_letter("BAD", "A-D") == ""


def test_after_cue():
    cues = ("answer is:", "answer:")
    assert scorers.after_cue("my answer: B", cues, ("B",)) == 1
    assert scorers.after_cue("my answer: C", cues, ("B",)) == 0
    assert scorers.after_cue("my answer:", cues, ("B",)) == 0
    assert scorers.after_cue("B", cues, ("B",)) is None


def test_chinese_characters():
    # 北京大学 and 北京: two of four and two of two
    assert scorers.chinese_character_f1("北京大学。", "北京") == pytest.approx(2 / 3)


def test_chinese_words():
    jieba = pytest.importorskip("jieba", reason="jieba is not installed (extra datasets)")
    answer, reference = "我来到北京清华大学。", "他来到了北京大学"
    bags = [Counter(w for w in jieba.cut(text) if w != "。") for text in (answer, reference)]
    same = sum(min(count, bags[1][word]) for word, count in bags[0].items())
    precision, recall = (same / sum(bag.values()) for bag in bags)
    assert scorers.chinese_word_f1(answer, reference) == pytest.approx(
        2 * precision * recall / (precision + recall)
    )
    assert math.isclose(scorers.chinese_rouge_l(answer, answer), 1, abs_tol=1e-6)
