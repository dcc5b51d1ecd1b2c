"""What holds for every generated task: chance only from the seed, the asked length, scores of right and wrong answers."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import TASKS, make_task
from kvfold.evaluate.tasks.ruler import RULER

GENERATED = [
    "needle",
    *(cls.name for cls in RULER),
    "kv_retrieval",
    "code_completion",
    "perplexity",
    "fidelity",
]
LABELS = [
    *GENERATED,
    "needle:needles=4,turns=3,depths=3",
    "vt:chains=2,hops=2,example=false",
    "cwe:example=false",
]


def words(text: str) -> int:
    return len(text.split())


def pieces(text: str) -> int:
    """Like a byte-pair tokenizer: words in pieces of three characters, digits and marks one by one."""
    return len(re.findall(r"[^\W\d_]{1,3}|\d|[^\w\s]|\n+|_", text))


def sample(label: str, tokens: int, count=words, index: int = 0, seed: int = 0):
    return make_task(label).sample(index, tokens, count, random.Random(f"{seed}/{label}/{index}"))


def size(made, count) -> int:
    """Of the whole prompt in one piece, counted here once more."""
    question = made.turns[0].question if made.turns else ""
    between = "" if made.verbatim else "\n\n"
    return count(between.join(part for part in (made.instruction, made.context, question) if part))


def test_every_generated_task_is_registered():
    assert set(GENERATED) <= set(TASKS)


@pytest.mark.parametrize("label", LABELS)
def test_same_seed_same_sample(label):
    first, again = sample(label, 2000, index=3), sample(label, 2000, index=3)
    assert first == again
    others = [sample(label, 2000, index=4), sample(label, 2000, index=3, seed=1)]
    assert all(first != other for other in others)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("count", [words, pieces])
@pytest.mark.parametrize("tokens", [1500, 4096, 12000])
def test_length_is_honoured(label, count, tokens):
    made = sample(label, tokens, count)
    assert 0.95 * tokens <= size(made, count) <= tokens


@settings(max_examples=40, deadline=None)
@given(
    label=st.sampled_from(LABELS),
    tokens=st.integers(1, 6000),
    seed=st.integers(0, 99),
    index=st.integers(0, 50),
)
def test_length_is_never_exceeded_and_the_least_is_right(label, tokens, seed, index):
    try:
        made = sample(label, tokens, pieces, index, seed)
    except KvfoldError as error:
        least = tokens + int(re.search(r"at least (\d+) tokens more$", str(error)).group(1))
        assert least > tokens
        assert size(sample(label, least, pieces, index, seed), pieces) <= least
        with pytest.raises(KvfoldError, match=r"at least 1 tokens more$"):
            sample(label, least - 1, pieces, index, seed)
    else:
        assert size(made, pieces) <= tokens


@pytest.mark.parametrize("label", LABELS)
def test_few_counts_are_needed(label):
    calls = []
    sample(label, 32_000, lambda text: calls.append(len(text)) or pieces(text))
    long = [call for call in calls if call > 30_000]
    assert len(long) <= 10


@pytest.mark.parametrize("label", [label for label in LABELS if label not in ("perplexity", "fidelity")])
def test_right_answers_score_one_and_wrong_ones_nothing(label):
    task = make_task(label)
    made = sample(label, 2000)
    assert made.turns and not made.continuation
    for turn in made.turns:
        assert task.score(" " + ", ".join(turn.references) + ".\n", turn) == pytest.approx(1, abs=0.1)
        assert task.score("\n".join(turn.references), turn) == 1
        assert task.score("", turn) == 0
        assert task.score("§", turn) == 0
        assert turn.max_new_tokens > 0


@pytest.mark.parametrize("label", ["niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"])
def test_half_of_the_answers_is_half_of_the_score(label):
    task, (turn,) = make_task(label), sample(label, 2000).turns
    given = turn.references[: len(turn.references) // 2]
    assert task.score(" ".join(given), turn) == pytest.approx(len(given) / len(turn.references))


@pytest.mark.parametrize("label", ["perplexity", "fidelity"])
def test_a_continuation_has_no_answers(label):
    task, made = make_task(label), sample(label, 1500)
    assert made.continuation and not made.turns and not task.higher_is_better
    with pytest.raises(NotImplementedError):
        task.score("", None)


@pytest.mark.parametrize("label", LABELS)
def test_documents_have_no_white_space_around_them(label):
    made = sample(label, 2000)
    document = made.instruction + made.context
    assert document == document.strip()
    assert made.verbatim == (make_task(label).source.startswith("RULER"))


@pytest.mark.parametrize(
    "label", ["needle:text=none.txt", "fidelity:text=none.txt", "niah_single_2:text=none.txt", "qa_1:data=none.json",
              "qa_2:text=none.txt", "code_completion:folder=none"]
)  # fmt: skip
def test_what_is_missing_is_said_before_work(label):
    with pytest.raises(KvfoldError, match="none"):
        make_task(label).check()


@pytest.mark.parametrize("name", GENERATED)
def test_nothing_is_missing(name):
    make_task(name).check()


@pytest.mark.parametrize("label", LABELS)
def test_options_and_facts_are_plain_data(label):
    task = make_task(label)
    assert task.to_dict()["task"] == task.name
    assert all(isinstance(value, str | int | float) for value in sample(label, 2000).about.values())


@pytest.mark.parametrize("name", GENERATED)
def test_every_task_says_what_it_is(name):
    cls = TASKS[name]
    assert cls.name == name and cls.source and cls.metric and cls.__doc__
