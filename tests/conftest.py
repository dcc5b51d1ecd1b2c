"""Shared fixtures: torch must not oversubscribe the machine, and nothing may stay patched."""

import gc

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def the_same_chance():
    """A test draws the same numbers in any order and company."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    """After each test the attention interface is as transformers made it."""
    yield
    from kvfold.hf import bridge

    if bridge.installed():
        gc.collect()
    assert not bridge.installed(), "a test left the attention bridge in place (a FoldedCache is still alive)"
