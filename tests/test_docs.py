"""What the documents say of the package is there."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest

import kvfold

ROOT = Path(__file__).parent.parent
USED = sorted(
    {
        (path.name, name)
        for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for block in re.findall(
            r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        for name in re.findall(r"\bkvfold\.([\w.]*\w)", block)
    }
)


def test_there_are_names():
    assert len(USED) > 10


@pytest.mark.parametrize(("document", "name"), USED)
def test_a_name_is_reached_by_import_kvfold_alone(document, name):
    assert name.split(".")[0] in kvfold.__all__
    reduce(getattr, name.split("."), kvfold)
