from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.evaluate.tasks.fit import Supply, largest


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=100), st.integers(1, 3000))
def test_largest_fits_and_could_not_be_much_larger(steps, limit):
    """The measure grows by any steps, and by nothing in places."""
    sizes = [0]
    for step in steps:
        sizes.append(sizes[-1] + step)
    found = largest(lambda n: sizes[n], limit, 0, len(steps), 0)
    assert sizes[found] <= limit
    if limit - sizes[found] > limit // 200:
        assert found == len(steps) or sizes[found + 1] > limit


def test_few_measurements_for_a_line():
    calls = []
    assert 99_000 <= largest(lambda n: calls.append(n) or 3 * n + 7, 300_000, 1, 10**6, 10) <= 99_998
    assert len(calls) <= 4


def test_a_supply_gives_the_same_again():
    numbers = iter(range(100))
    supply = Supply(lambda: next(numbers))
    assert supply.first(3) == [0, 1, 2] and supply.first(5) == [0, 1, 2, 3, 4] and supply.first(2) == [0, 1]
