import json
import random
import re

import pytest

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import make_task


def words(text):
    return len(text.split())


def sample(label, index=0, tokens=1500):
    return make_task(label).sample(index, tokens, words, random.Random(f"{label}{index}"))


def documents(made):
    """By their numbers."""
    body = made.context.partition("The following are given documents.\n\n")[2]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", body)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[1::2]


@pytest.mark.parametrize("index", range(12))
def test_one_hop_answers_are_in_one_document(index):
    made = sample("qa_1", index)
    (turn,) = made.turns
    town = re.search(r"town of (\w+)", turn.question)[1]
    (document,) = [document for document in documents(made) if town in document]
    fact = re.search(
        rf"The town of {town} lies on the river (\w+); it was founded in (\d+) by (\w+ \w+), and is known for its (\w+)\.",
        document,
    )
    which = {"On which river": 1, "In which year": 2, "Who founded": 3, "What is": 4}
    (group,) = [group for start, group in which.items() if f"Question: {start}" in turn.question]
    assert turn.references == (fact[group],)
    assert all("The town of " in document for document in documents(made))


@pytest.mark.parametrize("index", range(12))
def test_two_hop_answers_need_two_documents(index):
    made = sample("qa_2", index)
    (turn,) = made.turns
    building = re.search(r"who designed the (.*? of \w+)|learn", turn.question)[1]
    (first,) = [document for document in documents(made) if f"The {building} was designed" in document]
    architect = re.search(rf"The {building} was designed by the architect (\w+ \w+) in", first)[1]
    (second,) = [document for document in documents(made) if f"{architect} was born" in document]
    assert first != second and architect not in turn.question
    born, village, teacher = re.search(
        rf"{architect} was born in (\d+) in the village of (\w+), and learned the trade from (\w+ \w+)\.",
        second,
    ).groups()
    answers = {"In which village": village, "In which year": born, "From whom": teacher}
    (answer,) = [answer for start, answer in answers.items() if f"Question: {start}" in turn.question]
    assert turn.references == (answer,)
    assert second.splitlines()[0] == architect and first.splitlines()[0].endswith(building[1:])


@pytest.fixture
def squad(tmp_path):
    def paragraph(article, number):
        context = f"Paragraph {number} of article {article}. " + f"Filling {article} {number}. " * 20
        ask = {
            "question": f"Which is {article}-{number}?",
            "answers": [{"text": f"answer {article}-{number}"}],
        }
        never = {"question": "Nothing?", "answers": [], "is_impossible": True}
        return {"context": context, "qas": [ask, never]}

    data = {"data": [{"title": "t", "paragraphs": [paragraph(a, p) for p in range(4)]} for a in range(10)]}
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(data))
    return path


def test_squad(squad):
    made = sample(f"qa_1:data={squad}", index=6, tokens=700)
    (turn,) = made.turns
    assert turn.question.endswith("Question: Which is 1-2?") and turn.references == ("answer 1-2",)
    found = [
        tuple(map(int, re.match(r"Paragraph (\d+) of article (\d+)", part).groups()))
        for part in documents(made)
    ]
    assert (2, 1) in found and len(found) == len(set(found)) < 40
    assert {(number, 1) for number in range(4)} <= set(found)  # of the same article first
    assert len(documents(sample(f"qa_1:data={squad}", tokens=100_000))) == 40  # all there are
    with pytest.raises(IndexError):
        sample(f"qa_1:data={squad}", index=40)
    with pytest.raises(KvfoldError, match="at least"):
        sample(f"qa_1:data={squad}", tokens=60)


def test_hotpotqa(tmp_path):
    def row(number):
        context = [[f"Title {number}-{k}", [f"Sentence {number}-{k}. ", "More of it."]] for k in range(3)]
        return {"question": f"Question {number}?", "answer": f"yes {number}", "context": context}

    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([row(number) for number in range(30)]))
    made = sample(f"qa_2:data={path}", index=5, tokens=200)
    assert made.turns[0].references == ("yes 5",) and made.turns[0].question.endswith("Question: Question 5?")
    assert {f"Title 5-{k}\nSentence 5-{k}. More of it." for k in range(3)} <= set(documents(made))
    assert len(documents(made)) > 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("qa_1", "{", "cannot be read as JSON"),
        ("qa_1", "[]", "the file has no field 'data'"),
        ("qa_1", '{"data": [{}]}', r"data\[0\] has no field 'paragraphs'"),
        (
            "qa_1",
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            r"data\[0\].paragraphs\[0\] has no field 'context'",
        ),
        (
            "qa_1",
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]}',
            r"qas\[0\] has no field 'answers'",
        ),
        ("qa_1", '{"data": []}', "no question in it has an answer"),
        ("qa_2", "{}", "expected a list"),
        ("qa_2", '[{"context": [["a"]]}]', r"\[0\].context must hold"),
        ("qa_2", '[{"context": [], "question": "q"}]', r"\[0\] has no field 'answer'"),
    ],
)
def test_files_of_another_form(tmp_path, name, content, message):
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(KvfoldError, match=message):
        sample(f"{name}:data={path}")
