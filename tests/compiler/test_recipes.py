"""Which recomputation the variants of a graph have: where the cuts of the order are, cheapest first."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from graphoffload.compiler.recipes import _BEND, _cuts, _given_share
from graphoffload.errors import PlanError
from graphoffload.facts.recipe import IN_BLOCKS

SIZES = [134, 134, 470, 470, 470, 134, 33, 134, 33]
PRICES = [0.009, 0.009, 0.026, 0.216, 0.216, 0.216, 0.219, 0.235, 0.236]
"""A Llama block with 16,384 tokens of 4096: megabytes of two norms, a gated product, its inputs, projections and sums; and
the time of each again, of that of its copy at 35 GB/s. The first three take next to nothing."""
FREE = 3


@pytest.mark.parametrize("gigabytes_per_s", [12, 20, 25, 28, 30, 31, 32, 33, 34, 35, 36, 40, 55, 100, 400])
def test_what_costs_next_to_nothing_has_a_variant_at_any_rate(gigabytes_per_s: int) -> None:
    """A slow link makes products cheap as well, one after another. Calls that compute only the rest again stay possible."""
    cuts = _cuts([price * gigabytes_per_s / 35 for price in PRICES], SIZES)
    counts = [count for _, count in cuts]
    assert FREE in counts, cuts
    assert counts == sorted(counts)
    assert len(cuts) <= 4


@pytest.mark.parametrize("gigabytes_per_s", range(10, 60))
def test_calls_of_two_variants_cost_little_more_than_the_prices(gigabytes_per_s: int) -> None:
    """Up to all that is cheap: between two neighbours of the family, mixed in any proportion."""
    prices = [price * gigabytes_per_s / 35 for price in PRICES]
    cuts = _cuts(prices, SIZES)
    light = dict(cuts)["light"]
    sums = list(accumulate(SIZES, initial=0))
    costs = list(accumulate((price * size for price, size in zip(prices, SIZES, strict=True)), initial=0.0))
    ends = sorted({0, light, *(count for _, count in cuts if count < light)})
    for first, last in pairwise(ends):
        for count in range(first, last):
            share = (sums[count] - sums[first]) / (sums[last] - sums[first])
            above = costs[first] + share * (costs[last] - costs[first]) - costs[count]
            assert above <= _BEND * sums[light], (first, count, last)


def test_what_is_equally_cheap_has_no_variant_of_its_own() -> None:
    assert [name for name, _ in _cuts([0.01] * 4, [100] * 4)] == ["third of light", "two thirds of light", "light"]
    assert [name for name, _ in _cuts([0.01, 0.02, 0.5, 0.6], [100] * 4)] == ["light", "third", "two thirds"]
    assert {count for _, count in _cuts([], [])} == {0}, "of nothing"


def test_one_part_that_costs_more_than_the_rest() -> None:
    """Half of what is cheap costs nothing, the other half a fifth of its copy; more than half of all is not cheap."""
    cuts = _cuts([0.0, 0.19, 0.5, 0.6], [100, 100, 200, 200])
    assert cuts == [("lightest", 1), ("light", 2), ("third", 3), ("two thirds", 3)]


def test_blocks_that_only_another_rank_finds_are_an_error() -> None:
    analysis: Any = SimpleNamespace(request=SimpleNamespace(session=SimpleNamespace(name="graph3")))
    with pytest.raises(PlanError, match="Another rank computes blocks of graph3 again, and this rank finds none in it"):
        _given_share(analysis, lambda *_, **__: None, IN_BLOCKS, False)
