import pytest

from kvfold.errors import KvfoldError
from kvfold.evaluate.tasks import GROUPS, expand, make_task


def test_options_are_read_by_their_types():
    task = make_task("needle:depths=9, needles=3,turns=2,text=/a,b.txt")
    assert (task.depths, task.needles, task.turns, task.text) == (9, 3, 2, "/a,b.txt")
    assert make_task("vt:example=false").example is False
    assert make_task("fwe:alpha=1.5").alpha == 1.5
    assert make_task("niah_single_1:haystack=essay,max-new-tokens=16").max_new_tokens == 16


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("neddle", r"unknown task 'neddle' \(did you mean needle\?\)"),
        ("niah_single", "niah_single_"),
        ("qqqq", "choose from needle, niah_single_1"),
        ("", "choose from"),
        ("rulr", "did you mean ruler"),
        ("ruler", "group"),
        (
            "needle:depth=3",
            r"no option 'depth' \(did you mean depths\?\): it has depths, first, last, needles, turns, text",
        ),
        ("needle:depths", "name:option=value"),
        ("needle:depths=many", "needle:depths=many: expected int"),
        ("vt:example=2", r"expected bool"),
        ("niah_single_1:haystack=hay", r"expected noise\|essay\|needle"),
    ],
)
def test_wrong_labels(label, message):
    with pytest.raises(KvfoldError, match=message):
        make_task(label)


def test_groups():
    assert len(GROUPS["ruler"]) == 13
    assert expand("needle:depths=3") == ["needle:depths=3"]
    assert expand("ruler") == list(GROUPS["ruler"])
    labels = expand("ruler:text=/x,max_new_tokens=8")
    assert "niah_single_1:text=/x,max_new_tokens=8" in labels and "vt:max_new_tokens=8" in labels
    with pytest.raises(KvfoldError, match="did you mean text"):
        expand("ruler:txt=/x")
    with pytest.raises(KvfoldError, match="unknown task"):
        expand("nothing")
