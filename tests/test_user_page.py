"""docs/user_loops.md is what its result file says."""

from __future__ import annotations

import json

from gpu.user_loops import CASES
from gpu.user_page import LOOPS, PAGE, RESULTS, page


def test_the_page_is_that_of_its_results() -> None:
    """To write it anew: PYTHONPATH=tests python -m gpu.user_page."""
    assert PAGE.read_text() == page(json.loads(RESULTS.read_text()))
    assert set(LOOPS) == set(CASES)


def test_what_was_not_run_or_refused_is_in_it() -> None:
    sizes = {"static_bytes": 1, "plain_bytes": 2**30, "budget_bytes": 2**29, "plain_s": 1.0, "plain_again_s": 1.0}
    found = page({"gan": {**sizes, "date": "d", "device": "D", "torch": "t", "commit": "c", "warnings": [], "wrong": ["no"]}})
    assert found.count("| not run |") == len(LOOPS) - 1
    assert "| refused |" in found
    assert found.endswith("* d, D, torch t, c\n")
