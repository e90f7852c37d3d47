"""Variants of a graph are told apart by what they do."""

from __future__ import annotations

from graphoffload.facts.recipe import EVERYTHING_KEPT, FIRST, IN_BLOCKS, SMALLEST


def test_each_variant_has_a_key_of_its_own() -> None:
    """What ran first had the key of a variant that keeps everything: code of the one ran under the plan of the other."""
    recipes = (FIRST, EVERYTHING_KEPT, IN_BLOCKS, SMALLEST, SMALLEST.in_slices(8), SMALLEST.in_slices(4))
    assert len({recipe.identity for recipe in recipes}) == len(recipes)


def test_two_names_for_the_same_are_one() -> None:
    assert EVERYTHING_KEPT.identity == type(EVERYTHING_KEPT)("other").identity
