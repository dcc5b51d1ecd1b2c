"""Key-value retrieval, code completion, and continuations."""

import ast
import json
import random
import re
import sysconfig
import textwrap
from pathlib import Path

import pytest

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import make_task, text
from kvfold.evaluate.tasks.code_completion import first_line


def words(text):
    return len(text.split())


def sample(label, index=0, tokens=1500):
    return make_task(label).sample(index, tokens, words, random.Random(f"{label}{index}"))


@pytest.mark.parametrize("index", range(5))
def test_key_value_pairs_are_json(index):
    made = sample("kv_retrieval", index)
    pairs = json.loads(made.context.removeprefix("JSON data:\n"))
    (turn,) = made.turns
    key = json.loads(turn.question.removeprefix("Key: "))
    assert turn.references == (pairs[key],)
    depth = (0.5, 0, 1, 0.25, 0.75)[index]
    assert list(pairs).index(key) == round(depth * (len(pairs) - 1))
    assert made.about == {"depth": depth, "pairs": len(pairs)} and len(pairs) > 500


def test_code_is_what_python_ships():
    stdlib = Path(sysconfig.get_path("stdlib"))
    for index in range(8):
        made = sample("code_completion", index)
        (turn,) = made.turns
        source = (stdlib / made.about["file"]).read_text().splitlines()
        line = source[made.about["line"] - 1]
        assert turn.references == (line.strip(),)
        head = re.search(r"```python\n(.*)\n```", turn.question, re.DOTALL)[1].splitlines()
        start = made.about["line"] - 1 - len(head)
        while not source[start + len(head) - 1].strip():  # empty lines before the one asked for
            start -= 1
        assert source[start : start + len(head)] == head
        function = ast.parse(textwrap.dedent("\n".join([*head, line])))
        assert any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(function))
        before = "\n".join(source[:start]).rstrip("\n")
        assert made.context.endswith(before) or before.endswith(made.context)
        # A name of the line stands in the file before the function, at the distance told, and not in its beginning.
        names = set(re.findall(r"[A-Za-z_]\w{3,}", line))
        there = set(re.findall(r"[A-Za-z_]\w{3,}", source[start - made.about["distance"]]))
        assert (names & there) - set(re.findall(r"\w+", "\n".join(head)))


def test_code_of_an_own_folder(tmp_path):
    body = "\n".join(f"def helper_{n}(value):\n    return value + {n}\n" for n in range(50))
    asked = "def main(values):\n    total = 0\n    other = 1\n    return helper_7(total + other)\n"
    (tmp_path / "own.py").write_text(body + asked)
    (tmp_path / "broken.py").write_text("def (:")
    made = sample(f"code_completion:folder={tmp_path}", tokens=100)
    assert made.turns[0].references == ("return helper_7(total + other)",)
    (tmp_path / "own.py").write_text("x = 1")
    from kvfold.evaluate.tasks import code_completion

    code_completion._lines.cache_clear(), code_completion._targets.cache_clear()
    with pytest.raises(KvfoldError, match="no function"):
        sample(f"code_completion:folder={tmp_path}")
    with pytest.raises(KvfoldError, match="no Python source"):
        sample(f"code_completion:folder={tmp_path / 'none'}")


def test_the_first_line_of_code_counts():
    assert first_line("\n```python\n# why\n    x = 1  # note\ny = 2") == "x = 1  # note"
    assert first_line("```") == first_line("") == ""


@pytest.mark.parametrize(
    ("name", "most"), [("perplexity", 256), ("fidelity", 128), ("fidelity:continuation=40", 40)]
)
def test_continuations_go_on_where_the_passage_ends(name, most):
    novel = "".join(text.load().words)
    for index in range(3):
        made = sample(name, index)
        assert made.context + made.continuation in novel
        assert made.continuation[0].isspace() and not made.context[-1].isspace()
        assert 0.95 * most <= words(made.continuation) <= most


def test_a_text_too_short_to_go_on(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("One two three. " * 100)
    made = sample(f"fidelity:continuation=50,text={path}", tokens=200)
    assert words(made.context) + words(made.continuation) <= 300
    with pytest.raises(KvfoldError, match="text=PATH"):
        sample(f"fidelity:text={path}", tokens=1000)
    with pytest.raises(KvfoldError, match="at least 1"):
        make_task("perplexity:continuation=0")


def test_the_shipped_novel_is_long_enough_for_long_prompts():
    assert len(text.load().words) > 80_000
