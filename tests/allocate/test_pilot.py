"""Damped budgets against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.allocate.pilot import damped_counts


def test_square_root_rule_by_hand():
    # Roots 1, 2, 3, 4 of 10: shares of 100.
    assert damped_counts(torch.tensor([1.0, 4.0, 9.0, 16.0]), 100, 0.5, 1, 100).tolist() == [10, 20, 30, 40]
    # The cap of 30 takes 10 from the last, shared out as 1 : 2 : 3, and the third meets it as well.
    assert damped_counts(torch.tensor([1.0, 4.0, 9.0, 16.0]), 90, 0.5, 1, 30).tolist() == [10, 20, 30, 30]
    # The floor of 20 is taken from those above it.
    assert damped_counts(torch.tensor([1.0, 4.0, 9.0, 16.0]), 100, 0.5, 20, 100).tolist() == [20, 20, 26, 34]
    assert damped_counts(torch.tensor([1.0, 4.0, 9.0]), 31, 0.0, 1, 100).tolist() == [11, 10, 10]


def test_limits_and_bases_of_each_unit():
    # With the 10 that each has, 20, 40, 60 in proportion to roots.
    assert damped_counts(torch.tensor([1.0, 4.0, 9.0]), 90, 0.5, 1, 100, base=10.0).tolist() == [10, 30, 50]
    low, high = torch.tensor([30, 1, 1]), torch.tensor([100, 25, 100])
    assert damped_counts(torch.tensor([1.0, 4.0, 9.0]), 90, 0.5, low, high).tolist() == [30, 24, 36]
    assert damped_counts(torch.tensor([1.0, 4.0, 1.0]), 90, 0.5, low, high).tolist() == [33, 25, 32]


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    st.floats(0, 1),
    st.integers(0, 50),
    st.integers(0, 200),
    st.floats(0, 1),
)
def test_totals_are_exact_limits_hold_and_more_error_never_gets_less(errors, damping, low, room, share):
    error, high = torch.tensor(errors), low + room
    total = low * len(errors) + int(share * room * len(errors))
    counts = damped_counts(error, total, damping, low, high)
    assert int(counts.sum()) == total
    assert int(counts.min()) >= low and int(counts.max()) <= high
    ordered = counts[error.argsort(stable=True)]
    assert bool((ordered[1:] >= ordered[:-1] - 1).all())


def test_refusals():
    with pytest.raises(ValueError, match="cannot have 100"):
        damped_counts(torch.ones(3), 100, 0.5, 1, 30)
    with pytest.raises(ValueError, match="finite"):
        damped_counts(torch.tensor([1.0, torch.nan]), 10, 0.5, 1, 30)
