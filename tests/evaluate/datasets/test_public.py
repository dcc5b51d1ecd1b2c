"""Public data sets read from tiny files of the same schema."""

import json
import random
import re
import sys
import zipfile

import pytest

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks.datasets import AIME, DATASETS, MMDU, InfiniteBench, LongBench, LongBenchV2
from kvfold.evaluate.tasks.datasets.infinitebench import CHAT, COMPLETION
from kvfold.evaluate.tasks.datasets.longbench import MAX_NEW_TOKENS, PROMPTS, SCORERS
from kvfold.evaluate.tasks.datasets.longbench_v2 import PROMPT

datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra datasets)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def quick(monkeypatch):
    """Read JSON lines with json: how datasets reads them is tested once a format."""

    def load(path, data_files, split):
        with open(data_files[0], encoding="utf8") as file:
            return [json.loads(line) for line in file]

    monkeypatch.setattr(datasets, "load_dataset", load)


def count(text):
    """Words and white space: a tokenizer whose counts add up."""
    return len(re.findall(r"\s|[^\s]+", text))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf8")
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


def sample(task, index=0, tokens=100_000):
    return task.sample(index, tokens, count, random.Random(0))


def prompt(made):
    """The whole prompt, as it must be put to the model."""
    assert made.verbatim and not made.instruction
    assert made.context == made.context.strip()
    return made.context + made.turns[0].question


LONGBENCH = {
    "input": "Who?", "context": "Ada met Bob.\n", "answers": ["Ada", "Lady Ada"], "length": 4100, "dataset": "x",
    "language": "en", "all_classes": None, "_id": "0",
}  # fmt: skip


def longbench(**changed):
    return {**LONGBENCH, **changed}


def test_every_longbench_set_has_all_it_needs():
    assert len(PROMPTS) == 21 and set(PROMPTS) == set(MAX_NEW_TOKENS) == {*SCORERS, "trec", "lsht"}
    for template in PROMPTS.values():
        assert set(re.findall(r"\{(\w+)\}", template)) <= {"context", "input"} and "{context}" in template


@pytest.mark.parametrize("data", PROMPTS)
def test_longbench_prompts_are_the_published_ones(quick, tmp_path, data):
    classes = ["person", "place"]
    answers = ["Paragraph 3"] if data.endswith("_en") else ["段落3"]
    row = longbench(all_classes=classes, **({"answers": answers} if "retrieval" in data else {}))
    made = sample(LongBench(data=data, path=write(tmp_path / f"{data}.jsonl", [row])))
    assert prompt(made) == PROMPTS[data].format(**row)
    assert made.turns[0].max_new_tokens == MAX_NEW_TOKENS[data]
    assert made.turns[0].references == tuple(row["answers"])
    assert made.about["interval"] == "4-8k"


def test_longbench_spot_checks_of_the_published_words(quick, tmp_path):
    path = write(tmp_path / "hotpotqa.jsonl", [LONGBENCH])
    assert prompt(sample(LongBench(data="hotpotqa", path=path))) == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
        "The following are given passages.\nAda met Bob.\n\n\nAnswer the question based on the given passages. Only give "
        "me the answer and do not output any other words.\n\nQuestion: Who?\nAnswer:"
    )
    path = write(tmp_path / "lcc.jsonl", [longbench(context="def f():\n")])
    made = sample(LongBench(data="lcc", path=path))
    assert prompt(made) == "Please complete the code given below. \ndef f():\nNext line of code:\n"
    assert made.turns[0].question == "\nNext line of code:\n"


@pytest.mark.parametrize(
    ("data", "changed", "answer", "score"),
    [
        ("hotpotqa", {}, "It was lady Ada.", pytest.approx(2 * 2 / (4 + 2))),
        ("triviaqa", {}, "\nAda\nPassage: Bob", 1),
        ("narrativeqa", {}, "\nBob", 0),
        ("gov_report", {"answers": ["a b c"]}, "a b d", pytest.approx(2 / 3, abs=1e-6)),
        ("samsum", {"answers": ["a b c"]}, "a b c\nDialogue: d e f", pytest.approx(1, abs=1e-6)),
        ("trec", {"answers": ["a place"], "all_classes": ["a person", "a place"]}, "a place\na person", 1),
        ("passage_count", {"answers": ["12"]}, "12 of 30", 0.5),
        ("passage_retrieval_en", {"answers": ["Paragraph 7"]}, "Paragraph 7", 1),
        ("lcc", {"answers": ["return x"]}, "# so\nreturn x", 1),
    ],
)
def test_longbench_scores(quick, tmp_path, data, changed, answer, score):
    task = LongBench(data=data, path=write(tmp_path / f"{data}.jsonl", [longbench(**changed)]))
    assert task.score(answer, sample(task).turns[0]) == score


def test_longbench_chinese_scores(quick, tmp_path):
    pytest.importorskip("jieba", reason="jieba is not installed (extra datasets)")
    row = longbench(answers=["他来到北京大学"])
    for data in ("multifieldqa_zh", "dureader", "vcsum"):
        task = LongBench(data=data, path=write(tmp_path / f"{data}.jsonl", [row]))
        turn = sample(task).turns[0]
        assert task.score("他来到北京大学", turn) == pytest.approx(1, abs=1e-6)
        assert task.score("完全不同", turn) == 0
        assert 0 < task.score("他来到上海", turn) < 1


def test_chinese_sets_need_jieba_before_any_work(quick, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    task = LongBench(data="vcsum", path=write(tmp_path / "vcsum.jsonl", [LONGBENCH]))
    with pytest.raises(KvfoldError, match=r"kvfold\[datasets\]"):
        task.check()


def test_long_prompts_lose_their_middle(quick, tmp_path):
    words = [f"n{i}" for i in range(2000)]
    path = write(tmp_path / "hotpotqa.jsonl", [longbench(context=" ".join(words))])
    task = LongBench(data="hotpotqa", path=path)
    whole = prompt(sample(task))
    made = sample(task, tokens=600)
    size = count(made.context) + count(made.turns[0].question)
    assert 590 <= size <= 600
    # As published: the first and the last half of the tokens of the whole prompt.
    pieces = re.findall(r"\s|[^\s]+", whole)
    assert prompt(made).startswith("".join(pieces[:295]))
    assert prompt(made).endswith("".join(pieces[-295:]))
    assert made.turns[0].question.endswith("Question: Who?\nAnswer:")
    with pytest.raises(
        KvfoldError, match=r"longbench hotpotqa: 60 tokens are too few, this prompt takes at least \d+"
    ):
        sample(task, tokens=60)


def test_the_least_length_that_is_named_is_enough(quick, tmp_path):
    path = write(tmp_path / "qasper.jsonl", [longbench(context="word " * 3000)])
    task = LongBench(data="qasper", path=path)
    with pytest.raises(KvfoldError) as refused:
        sample(task, tokens=50)
    least = int(re.search(r"at least (\d+)", str(refused.value)).group(1))
    made = sample(task, tokens=least)
    assert count(made.context) + count(made.turns[0].question) <= least


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_local_copies(tmp_path, suffix):
    file = write(tmp_path / "data" / f"qasper{suffix}", [LONGBENCH, longbench(input="Whom?")])
    for path in (file, str(tmp_path / "data"), str(tmp_path)):
        task = LongBench(data="qasper", path=path)
        assert "Whom?" in prompt(sample(task, 1))
        with pytest.raises(IndexError):
            sample(task, 2)


def test_longbench_e_reads_its_own_file(tmp_path):
    write(tmp_path / "qasper.jsonl", [LONGBENCH])
    write(tmp_path / "qasper_e.jsonl", [longbench(input="Evenly?")])
    assert "Evenly?" in prompt(sample(LongBench(data="qasper", extended=True, path=str(tmp_path))))
    with pytest.raises(KvfoldError, match="LongBench-E has no 'vcsum'"):
        LongBench(data="vcsum", extended=True)


def test_the_published_archive_is_read_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # nothing is fetched: the archive is local
    from kvfold.evaluate.tasks.datasets.rows import Source

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(write(tmp_path / "qasper.jsonl", [LONGBENCH]), "data/qasper.jsonl")
    url = Source("THUDM/LongBench", "qasper", "test", "data.zip::data/qasper.jsonl").url
    assert url == "zip://data/qasper.jsonl::hf://datasets/THUDM/LongBench/data.zip"
    local = url.replace("hf://datasets/THUDM/LongBench", str(tmp_path))
    assert datasets.load_dataset("json", data_files=local, split="train")[0]["input"] == "Who?"


V2 = {
    "_id": "0", "domain": "Code", "sub_domain": "x", "difficulty": "hard", "length": "short", "question": " Which? ",
    "choice_A": "one", "choice_B": "two ", "choice_C": "three", "choice_D": "four", "answer": "B",
    "context": "\nA long text.\n",
}  # fmt: skip


def test_longbench_v2(tmp_path):
    easy = {**V2, "difficulty": "easy", "question": "Easy?"}
    path = write(tmp_path / "data.json", [V2, easy])
    task = LongBenchV2(path=path)
    made = sample(task)
    assert prompt(made) == (
        "Please read the following text and answer the question below.\n\n<text>\nA long text.\n</text>\n\nWhat is the"
        " correct answer to this question: Which?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    assert made.turns[0].max_new_tokens == 128
    assert made.about == {"difficulty": "hard", "length": "short", "domain": "Code"}
    assert task.score("**The correct answer is (B)**", made.turns[0]) == 1
    assert task.score("The correct answer is (A)", made.turns[0]) == 0
    assert "Easy?" in prompt(sample(LongBenchV2(difficulty="easy", path=path)))
    with pytest.raises(KvfoldError, match="no row has difficulty all and length long"):
        sample(LongBenchV2(length="long", path=path))
    assert "{context}" in PROMPT


def infinite(data, **changed):
    row = {"id": 0, "context": "Some text.", "input": "Where?", "answer": ["Here"], "options": []}
    special = {
        "code_run": {"input": "Please give me func_12(-3).", "answer": [-7]},
        "math_find": {"input": "The second largest number of the list is:", "answer": [93]},
        "math_calc": {"answer": [3, 8, 5]},
        "code_debug": {"options": ["f.a", "f.b", "f.c", "f.d"], "answer": ["f.c"]},
        "longbook_choice_eng": {"options": ["Ann", "Bea", "Cy", "Dot"], "answer": ["Bea"]},
        "passkey": {"answer": ["71432"]},
        "number_string": {"answer": ["7714"]},
        "longdialogue_qa_eng": {"answer": ["ANNA"]},
    }
    return {**row, **special.get(data, {}), **changed}


VALUES = {
    "input": "Where?", "func": "func_12", "func_call": "func_12(-3)",
    "prefix": "What is the second largest number in the following list?",
}  # fmt: skip


@pytest.mark.parametrize("data", COMPLETION)
@pytest.mark.parametrize("prompts", ["completion", "chat"])
def test_infinitebench_prompts_are_the_published_ones(quick, tmp_path, data, prompts):
    row = infinite(data)
    options = {f"OPTION_{letter}": text for letter, text in zip("ABCD", row["options"])}
    template = (COMPLETION if prompts == "completion" else CHAT)[data]
    wanted = template.format_map({**VALUES, **options, "input": row["input"], "context": "Some text."})
    task = InfiniteBench(data=data, prompts=prompts, path=write(tmp_path / f"{data}.jsonl", [row]))
    assert prompt(sample(task)) == wanted


@pytest.mark.parametrize(
    ("data", "answer", "score"),
    [
        ("passkey", " 71432. 5", 1),
        ("passkey", "5, 71432", 0),
        ("number_string", "It is 7714", 1),
        ("kv_retrieval", 'the value: "Here".', 1),
        ("kv_retrieval", "HereAndThere", 0),
        ("longbook_qa_eng", "right here", pytest.approx(2 / 3)),
        ("longbook_sum_eng", "here there", pytest.approx(2 / 3)),
        ("longbook_choice_eng", " B", 1),
        ("longbook_choice_eng", "Bea", 1),
        ("longbook_choice_eng", "A", 0),
        ("longbook_choice_eng", "the answer is: Bea", 1),
        ("longbook_choice_eng", "", 0),
        ("longdialogue_qa_eng", "anna", 1),
        ("math_find", " 93", 1),
        ("math_find", "9", 0),
        ("math_calc", "[3, 8, 6]", pytest.approx(2 / 3)),
        ("math_calc", "[4, 8, 5]", 0),
        ("code_run", "it is -7.", 1),
        ("code_run", "7", 0),
        ("code_debug", "C.", 1),
        ("code_debug", "The correct option is: f.c", 1),
        ("code_debug", "B", 0),
    ],
)
def test_infinitebench_scores(quick, tmp_path, data, answer, score):
    task = InfiniteBench(data=data, path=write(tmp_path / f"{data}.jsonl", [infinite(data)]))
    assert task.score(answer, sample(task).turns[0]) == score


def test_infinitebench_chinese_and_limits(quick, tmp_path):
    path = write(tmp_path / "longbook_qa_chn.jsonl", [infinite("longbook_qa_chn", answer=["北京", "北平"])])
    task = InfiniteBench(data="longbook_qa_chn", path=path)
    turn = sample(task).turns[0]
    assert turn.max_new_tokens == 40
    assert task.score("北京大学。", turn) == pytest.approx(2 / 3)
    longer = InfiniteBench(data="longbook_qa_chn", path=path, max_new_tokens=9)
    assert sample(longer).turns[0].max_new_tokens == 9


@pytest.mark.parametrize(
    ("year", "row"),
    [
        ("2024", {"ID": "2024-I-1", "Problem": "Find $n$.", "Solution": "...", "Answer": 33}),
        ("2025", {"problem": "Find $n$.", "answer": "033", "id": "0"}),
        ("2025", {"question": "Find $n$.", "answer": "33"}),
    ],
)
def test_aime(tmp_path, year, row):
    task = AIME(year=year, path=write(tmp_path / "any.jsonl", [row]))
    made = sample(task)
    assert (
        prompt(made) == "Find $n$.\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    turn = made.turns[0]
    assert task.score(r"... \boxed{33}", turn) == 1
    assert task.score(r"\boxed{33} no, \boxed{34}", turn) == 0
    assert task.score("33", turn) == 0
    with pytest.raises(KvfoldError, match="too few"):
        sample(task, tokens=3)


def mmdu(**changed):
    said = [
        "<ImageHere>\n<ImageHere>\nCompare them.", "They are red and blue.",
        "Which is red?", "The first one.",
        "And this <ImageHere>?", "Green.",
        "Thanks.", "Welcome.",
    ]  # fmt: skip
    turns = [{"from": ("user", "assistant")[i % 2], "value": text} for i, text in enumerate(said)]
    row = {
        "id": "d0",
        "image": ["/mmdu_pics/a.jpg", "/mmdu_pics/b.jpg", "/mmdu_pics/c.jpg"],
        "conversations": turns,
    }
    return {**row, **changed}


@pytest.mark.parametrize("packed", [False, True])
def test_mmdu(tmp_path, packed):
    path = write(tmp_path / "benchmark.json", [mmdu()])
    if packed:
        with zipfile.ZipFile(tmp_path / "mmdu_pics.zip", "w") as archive:
            for name in "abc":
                archive.writestr(f"mmdu_pics/{name}.jpg", name.encode())
    else:
        (tmp_path / "mmdu_pics").mkdir()
        for name in "abc":
            (tmp_path / "mmdu_pics" / f"{name}.jpg").write_bytes(name.encode())
    task = MMDU(path=path)
    made = sample(task)
    assert made.context == "<image>\n<image>"
    assert made.images == (b"a", b"b")
    # The third question brings an image of its own, so the dialogue ends before it.
    assert [turn.question for turn in made.turns] == ["\nCompare them.", "Which is red?"]
    assert [turn.references for turn in made.turns] == [("They are red and blue.",), ("The first one.",)]
    assert made.about == {"images": 2, "turns": 2, "all_turns": 4}
    assert "not the published judge" in task.metric
    assert task.score("The first one.", made.turns[1]) == pytest.approx(1, abs=1e-6)
    assert task.score("Neither.", made.turns[1]) == 0


BAD = [
    (LongBench, {"data": "qasper"}, [LONGBENCH, {k: v for k, v in LONGBENCH.items() if k != "answers"}], "row 1: field 'answers' is missing"),
    (LongBench, {"data": "qasper"}, [longbench(answers="Ada")], "row 0: field 'answers' must be a list of texts, at least one, not 'Ada'"),
    (LongBench, {"data": "qasper"}, [LONGBENCH, LONGBENCH, longbench(context="  ")], "row 2: field 'context' must be a text that is not empty"),
    (LongBench, {"data": "trec"}, [LONGBENCH], "row 0: field 'all_classes' is missing"),
    (LongBench, {"data": "passage_retrieval_en"}, [longbench(answers=["the third"])], "row 0: field 'answers' must name a paragraph"),
    (LongBenchV2, {}, [V2, {**V2, "answer": "E"}], "row 1: field 'answer' must be one of A, B, C, D, not 'E'"),
    (LongBenchV2, {}, [{**V2, "length": "huge"}], "row 0: field 'length' must be one of"),
    (InfiniteBench, {"data": "code_run"}, [infinite("passkey")], "row 0: field 'input' must hold a call"),
    (InfiniteBench, {"data": "math_find"}, [infinite("passkey")], "row 0: field 'input' must hold"),
    (InfiniteBench, {"data": "code_debug"}, [infinite("code_debug", answer=["f.x"])], "row 0: field 'answer' must be one of the options"),
    (InfiniteBench, {"data": "code_debug"}, [infinite("code_debug", options=["f.a"])], "row 0: field 'options' must be a list of four"),
    (AIME, {}, [{"problem": "Find n.", "answer": "33"}, {"problem": "Find m.", "answer": "1000"}], "row 1: field 'answer' must be an integer from 0 to 999"),
    (AIME, {}, [{"task": "Find n.", "answer": "33"}], "row 0: field 'problem' is missing"),
    (MMDU, {}, [mmdu(conversations=mmdu()["conversations"][:3])], "row 0: field 'conversations' must be a list of"),
    (MMDU, {}, [mmdu(image=["a.jpg"])], "row 0: field 'conversations' must begin with a question that has"),
    (MMDU, {}, [mmdu()], "row 0: field 'image' names /mmdu_pics/a.jpg, which is not beside the file"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options", "rows", "message"), BAD, ids=[case[3][:60] for case in BAD])
def test_a_wrong_row_is_named_before_any_work(quick, tmp_path, cls, options, rows, message):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(KvfoldError) as refused:
        cls(path=path, **options).check()
    assert str(refused.value).startswith(f"{path}, {message}")


def test_wrong_rows_are_named_as_datasets_reads_them(tmp_path):
    path = write(tmp_path / "qasper.jsonl", [LONGBENCH, longbench(answers="Ada"), {"input": "Who?"}])
    with pytest.raises(KvfoldError, match="row 1: field 'answers' must be a list of texts"):
        LongBench(data="qasper", path=path).check()
    path = write(tmp_path / "more" / "qasper.jsonl", [LONGBENCH, {"input": "Who?"}])
    with pytest.raises(KvfoldError, match="row 1: field 'context' is missing"):
        LongBench(data="qasper", path=path).check()


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(KvfoldError, match="there is no file or folder"):
        LongBench(path=str(tmp_path / "nosuch.jsonl")).check()
    with pytest.raises(KvfoldError, match=r"holds no narrativeqa\.jsonl"):
        LongBench(path=str(tmp_path)).check()
    (tmp_path / "narrativeqa.csv").write_text("a,b")
    with pytest.raises(KvfoldError, match=r"must be \.jsonl"):
        LongBench(path=str(tmp_path / "narrativeqa.csv")).check()
    (tmp_path / "narrativeqa.jsonl").write_text('{"context": "x", \n')
    with pytest.raises(KvfoldError, match=r"cannot read .*narrativeqa\.jsonl"):
        LongBench(path=str(tmp_path / "narrativeqa.jsonl")).check()
    for content in (b"", b"\n\n", b"{}\n"):
        (tmp_path / "narrativeqa.jsonl").write_bytes(content)
        with pytest.raises(KvfoldError, match=r"narrativeqa\.jsonl has no rows"):
            LongBench(path=str(tmp_path / "narrativeqa.jsonl")).check()
    latin = json.dumps({**LONGBENCH, "input": "\xe9?"}, ensure_ascii=False).encode("latin1")
    (tmp_path / "narrativeqa.jsonl").write_bytes(json.dumps(LONGBENCH).encode() + b"\n" + latin + b"\n")
    with pytest.raises(KvfoldError, match=r"narrativeqa\.jsonl, row 1 is not UTF-8"):
        LongBench(path=str(tmp_path / "narrativeqa.jsonl")).check()


def test_without_a_network_the_hub_is_named_and_a_local_copy_asked_for(monkeypatch):
    def offline(**arguments):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(KvfoldError, match=r"cannot read .*THUDM/LongBench.*give path= of a local copy"):
        LongBench(data="lcc").check()
    with pytest.raises(KvfoldError, match=r"cannot read math-ai/aime25 .*no network"):
        AIME().check()


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    task = LongBench(data="qmsum", path=write(tmp_path / "qmsum.jsonl", [LONGBENCH]))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(KvfoldError, match=r"pip install 'kvfold\[datasets\]'"):
        task.check()


def test_unknown_sets_list_those_there_are():
    with pytest.raises(KvfoldError, match="no set 'nosuch': choose from narrativeqa"):
        LongBench(data="nosuch")
    with pytest.raises(KvfoldError, match="no task 'nosuch': choose from"):
        InfiniteBench(data="nosuch")
    with pytest.raises(KvfoldError, match="year must be 2024 or 2025"):
        AIME(year="1983")


def test_metrics_are_those_of_the_set():
    assert LongBench(data="gov_report").metric == "ROUGE-L"
    assert LongBench(data="trec").metric == "accuracy"
    assert InfiniteBench(data="longbook_sum_eng").metric == "ROUGE-Lsum"
    assert set(DATASETS) == {"longbench", "longbench-v2", "infinitebench", "aime", "mmdu"}
