"""Budgets: exactly one term, in range, and exact bytes."""

import dataclasses

import numpy as np
import pytest

from kvfold.allocate.budget import Budget


def test_bytes():
    full = 2 * 1000 * 8 * (128 + 64)
    assert Budget(keep=1.0).bytes(1000, 8, 128, 64) == full
    assert Budget(keep=0.25).bytes(1000, 8, 128, 64) == full // 4
    assert Budget(bits_per_element=16).bytes(1000, 8, 128, 64) == full
    assert Budget(bits_per_element=2.5).bytes(1000, 8, 128, 64) == 1000 * 8 * 192 * 5 // 16
    assert Budget(tokens=256).bytes(1000, 8, 128, 64) == 256 * 8 * 192 * 2
    assert Budget(tokens=256).bytes(10, 8, 128, 64) == 256 * 8 * 192 * 2
    assert Budget(keep=0.5).bytes(0, 8, 128, 64) == 0


def test_rounds_the_written_number_down():
    assert Budget(keep=0.29).bytes(50, 1, 1, 0) == 29
    assert Budget(keep=0.1).bytes(7, 1, 1, 0) == 1
    assert Budget(keep=np.float64(0.29)).bytes(50, 1, 1, 0) == 29
    assert Budget(keep=1e-7).bytes(10**8, 1, 1, 0) == 20


def test_counts_metadata():
    assert Budget(keep=0.5).counts_metadata
    assert Budget(bits_per_element=3).counts_metadata
    assert not Budget(tokens=64).counts_metadata


def test_frozen_and_equal():
    assert Budget(keep=0.5) == Budget(keep=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(keep=0.5).keep = 0.6


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"keep": 0.5, "tokens": 3},
        {"keep": 0.5, "bits_per_element": 3},
        *[{"keep": keep} for keep in (0, -0.1, 1.01, float("nan"), float("inf"), True)],
        *[{"bits_per_element": bits} for bits in (0, -1, 16.5, float("nan"))],
        *[{"tokens": tokens} for tokens in (0, -5, 1.5, True)],
    ],
)
def test_refused(terms):
    with pytest.raises(ValueError, match=r"keep|bits_per_element|tokens"):
        Budget(**terms)


def test_negative_counts():
    with pytest.raises(ValueError, match=">= 0"):
        Budget(keep=0.5).bytes(-1, 8, 128, 128)
