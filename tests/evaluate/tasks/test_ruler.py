"""Each answer is worked out once more from the document alone; the configuration is the published one."""

import random
import re
from collections import Counter, defaultdict

import pytest

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import make_task
from kvfold.evaluate.tasks.ruler import RULER
from kvfold.evaluate.tasks.ruler.fwe import zeta

# haystack, keys planted, values a key, keys asked for, pattern of keys and of values (synthetic.yaml)
WORD, NUMBER, UUID = (
    r"[A-Za-z][\w .'-]*",
    r"\d{7}",
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
)
NIAH = {
    "niah_single_1": ("noise", 1, 1, 1, WORD, NUMBER),
    "niah_single_2": ("essay", 1, 1, 1, WORD, NUMBER),
    "niah_single_3": ("essay", 1, 1, 1, WORD, UUID),
    "niah_multikey_1": ("essay", 4, 1, 1, WORD, NUMBER),
    "niah_multikey_2": ("needle", None, 1, 1, WORD, NUMBER),
    "niah_multikey_3": ("needle", None, 1, 1, UUID, UUID),
    "niah_multivalue": ("essay", 1, 4, 1, WORD, NUMBER),
    "niah_multiquery": ("essay", 4, 1, 4, WORD, NUMBER),
}
NEW_TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


def words(text):
    return len(text.split())


def sample(label, index=0, tokens=3000):
    return make_task(label).sample(index, tokens, words, random.Random(f"{label}{index}"))


def test_the_thirteen_published_names():
    assert [cls.name for cls in RULER] == [*NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2"]


@pytest.mark.parametrize("name", NEW_TOKENS)
def test_published_new_tokens(name):
    assert sample(name).turns[0].max_new_tokens == NEW_TOKENS[name]


@pytest.mark.parametrize("name", NIAH)
@pytest.mark.parametrize("index", range(3))
def test_needles(name, index):
    haystack, keys, values, queries, key_kind, value_kind = NIAH[name]
    made = sample(name, index)
    (turn,) = made.turns
    planted = defaultdict(list)
    kind = "uuids" if value_kind == UUID else "numbers"
    for key, value in re.findall(rf"One of the special magic {kind} for (.*?) is: (\S+)\.", made.context):
        planted[key].append(value)
        assert re.fullmatch(key_kind, key) and re.fullmatch(value_kind, value)
    assert all(len(found) == values for found in planted.values())
    assert len(planted) == keys if keys else len(planted) > 100
    asked = re.search(rf"special magic {kind}?s? for (.*) mentioned in the provided text\?$", turn.question)[
        1
    ]
    asked = asked.replace(", and ", ", ").split(", ")
    assert len(asked) == queries
    assert sorted(turn.references) == sorted(value for key in asked for value in planted[key])
    one = queries * values == 1
    subject = f"{'is' if one else 'are all'} the special magic {kind[:-1] if one else kind}"
    assert turn.question.startswith(f"\nWhat {subject} for ")
    assert turn.answer_prefix.endswith(f"mentioned in the provided text {'is' if one else 'are'}")
    assert made.context.startswith(f"{'A' if one else 'Some'} special magic {kind[:-1] if one else kind} ")
    lines = made.context.splitlines()[1:]
    if haystack == "noise":
        noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        assert Counter(lines)[noise] == len(lines) - 1
    elif haystack == "needle":
        assert all(line.startswith("One of the special magic") for line in lines)
    else:
        assert len(lines) == 1


def test_needles_go_anywhere():
    depths = [sample("niah_single_2", index).about["depth"] for index in range(40)]
    assert min(depths) < 0.15 and max(depths) > 0.85 and 0.3 < sum(depths) / 40 < 0.7


@pytest.mark.parametrize("label", ["vt", "vt:chains=3,hops=6"])
@pytest.mark.parametrize("index", range(3))
def test_variables(label, index):
    made = sample(label, index)
    (turn,) = made.turns
    body = made.context.rpartition("hidden in the following text.")[2]
    holds = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body):
        holds[name] = holds.get(value, value)  # each is assigned after what it is assigned from
    wanted = re.search(r"assigned the value (\d{5}) in", turn.question)[1]
    assert set(turn.references) == {name for name, value in holds.items() if value == wanted}
    hops = make_task(label).hops
    assert len(turn.references) == hops + 1
    assert len(holds) == make_task(label).chains * (hops + 1)
    assert f"{hops + 1} variables are assgined the value {wanted}" in turn.answer_prefix


def test_worked_examples_are_right_and_can_be_left_out():
    made = sample("vt")
    example = made.context[: made.context.rindex("Memorize and track")]
    answer = example.rsplit("they are: ", 1)[1].split()
    assert answer == re.findall(r"VAR (\w{3}) =", example)
    assert len(answer) == 5
    made = sample("cwe", tokens=6000)
    example, answer = made.context[: made.context.rindex("Below is")].split(" list are:")
    listed = Counter(re.findall(r"\d+\. (.*?)(?= \d+\. |\n)", example))
    assert {word for word, _ in listed.most_common(10)} == set(
        re.findall(r"\d+\. (.*?)(?= \d+\. |\n)", answer)
    )
    for name in ("vt", "cwe"):
        assert sample(f"{name}:example=false").context.count("Question:") == 0


@pytest.mark.parametrize(("tokens", "often", "seldom"), [(3000, 6, 1), (4096, 30, 3)])
def test_common_words(tokens, often, seldom):
    made = sample("cwe", tokens=tokens)
    body = made.context.rpartition("most often.\n")[2]
    listed = Counter(re.split(r"(?:^| )\d+\. ", body)[1:])
    assert {word for word, times in listed.items() if times == often} == set(made.turns[0].references)
    assert set(listed.values()) == {often, seldom} and len(made.turns[0].references) == 10


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("label", ["fwe", "fwe:alpha=1.5"])
def test_frequent_words(label, index):
    made = sample(label, index)
    coded = Counter(made.context.partition("coded words. ")[2].split())
    (dots, _), *most = coded.most_common(5)
    assert dots == "..."
    assert [word for word, _ in most[:3]] == list(made.turns[0].references)
    assert most[2][1] > most[3][1]  # no tie
    assert all(re.fullmatch("[a-z]{6}", word) for word in coded if word != "...")


def test_zeta():
    assert zeta(2) == pytest.approx(1.6449340668482264, rel=1e-9)
    assert zeta(1.5) == pytest.approx(2.612375348685488, rel=1e-7)
    assert zeta(4) == pytest.approx(1.0823232337111382, rel=1e-9)


@pytest.mark.parametrize(
    "label",
    ["niah_single_1:keys=0", "niah_single_2:keys=41", "vt:hops=0", "fwe:alpha=1", "cwe:example=maybe"],
)
def test_impossible_options(label):
    with pytest.raises(KvfoldError):
        make_task(label)


def test_without_the_word_lists_the_error_says_what_to_install(monkeypatch):
    from kvfold.evaluate.tasks.ruler import common

    common.words.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "wonderwords", None)
    with pytest.raises(KvfoldError, match=r"pip install 'kvfold\[eval\]'"):
        sample("niah_single_1")
    common.words.cache_clear()
