import random

import pytest

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import make_task


def words(text):
    return len(text.split())


def sample(label, index=0, tokens=3000):
    return make_task(label).sample(index, tokens, words, random.Random(index))


def test_the_grid_runs_between_its_ends():
    found = [sample("needle:depths=3,first=0.1,last=0.9", index).about["depth"] for index in range(3)]
    assert found == pytest.approx([0.5, 0.1, 0.9])


@pytest.mark.parametrize("depths", [1, 2, 5, 11])
def test_the_grid_of_depths_is_walked_by_the_index(depths):
    walked = []
    for index in range(2 * depths):
        made = sample(f"needle:depths={depths}", index)
        asked = made.about["depth"]
        walked.append(asked)
        (turn,) = made.turns
        needle = f"{turn.answer_prefix} {turn.references[0]}."
        assert made.context.count(needle) == 1
        found = made.context.index(needle) / (len(made.context) - len(needle))
        assert found == pytest.approx(asked, abs=0.03)
    grid = [step / (depths - 1) for step in range(depths)] if depths > 1 else [0.5]
    assert sorted(walked[:depths]) == pytest.approx(grid) and walked[depths:] == walked[:depths]
    # Three samples alone see the middle and both ends.
    assert walked[0] == pytest.approx(0.5, abs=0.5 / depths) or depths == 2
    assert set(walked[1:3]) == {0, 1} or depths < 3


def test_several_needles_stand_apart_and_are_asked_one_a_turn():
    made = sample("needle:needles=5,turns=3,depths=3")
    assert made.context.count("The secret number of the ") == 5
    assert len({turn.references for turn in made.turns}) == len({turn.question for turn in made.turns}) == 3
    places = [made.context.index(turn.references[0]) / len(made.context) for turn in made.turns]
    assert places == pytest.approx([0.5, 0.7, 0.9], abs=0.03)


def test_a_needle_never_splits_a_sentence():
    for index in range(5):
        made = sample("needle:needles=3", index)
        before, *_ = made.context.split("The secret number of the ")
        assert not before or before.rstrip()[-1] in ".!?\"')" or before.endswith("\n\n")


def test_the_number_must_stand_alone():
    task, made = make_task("needle"), sample("needle")
    (turn,) = made.turns
    (code,) = turn.references
    assert task.score(f" {code}. Another is 1.", turn) == 1
    assert task.score(f"{code}7", turn) == task.score(f"1{code}", turn) == 0


def test_own_text(tmp_path):
    (tmp_path / "b.txt").write_text("Beta two. " * 300)
    (tmp_path / "a.txt").write_text("Alpha one. " * 300)
    (tmp_path / "c.md").write_text("Gamma three. " * 300)
    folder = sample(f"needle:text={tmp_path}", tokens=2500)
    assert {"Alpha", "Beta"} <= set(folder.context.split()) and "Gamma" not in folder.context
    file = sample(f"needle:text={tmp_path / 'a.txt'}", tokens=2500)
    assert "Alpha" in file.context and "Beta" not in file.context
    assert 2400 < words(file.context) <= 2500  # longer than the file: it begins again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("depths=0", "depths must be at least 1"),
        ("first=0.9,last=0.1", "first <= last"),
        ("last=1.5", "first <= last"),
        ("needles=0", "needles must be 1 to"),
        ("needles=99", "needles must be 1 to"),
        ("needles=2,turns=3", "turns must be 1 to needles=2"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(KvfoldError, match=message):
        make_task(f"needle:{options}")


def test_bad_texts(tmp_path):
    with pytest.raises(KvfoldError, match=r"cannot be read \(No such file"):
        sample(f"needle:text={tmp_path / 'none.txt'}")
    with pytest.raises(KvfoldError, match=r"no \.txt file"):
        sample(f"needle:text={tmp_path}")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(KvfoldError, match="no text"):
        sample(f"needle:text={tmp_path / 'empty.txt'}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(KvfoldError, match="UTF-8"):
        sample(f"needle:text={tmp_path / 'latin.txt'}")
