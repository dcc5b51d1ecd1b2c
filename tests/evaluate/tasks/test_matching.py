from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.evaluate.tasks.matching import all_of, any_of, edit_similarity, says


def test_all_and_any():
    assert all_of("Alpha, and BETA.", ("alpha", "beta", "gamma", "delta")) == 0.5
    assert any_of("it is BETA", ("alpha", "beta")) == 1
    assert any_of("it is gamma", ("alpha", "beta")) == 0
    assert all_of("", ("a",)) == any_of("", ("a",)) == 0


def test_words_of_their_own():
    assert says("It is 4831.", "4831") == says("4831", "4831") == says("A Saffron!", "saffron") == 1
    assert says("48312", "4831") == says("x4831", "4831") == says("", "4831") == 0


@pytest.mark.parametrize(
    ("a", "b", "expected"), [("abcd", "abcd", 1), ("abcd", "wxyz", 0), ("ab", "abab", 2 / 3), ("", "", 1)]
)
def test_edit_similarity_by_hand(a, b, expected):
    assert edit_similarity(a, b) == pytest.approx(expected)


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_edit_similarity_is_insertions_and_deletions(a, b):
    @cache
    def edits(i, j):
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        return edits(i + 1, j + 1) if a[i] == b[j] else 1 + min(edits(i + 1, j), edits(i, j + 1))

    whole = len(a) + len(b)
    assert edit_similarity(a, b) == pytest.approx(1 - edits(0, 0) / whole if whole else 1)
