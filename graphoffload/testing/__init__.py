"""Modules whose saved activations are awkward, and comparisons that no wrong bit survives: for our tests and for yours.

zoo.ZOO        every case by name: build, inputs, loss, notes
compare        run a step, compare two to the bit, or by the whole gradient's error against float64
observed       what a run really did: plans and copies
policies       scattered decisions
faults         break an operation on purpose: a test that still passes then is no test
"""

from __future__ import annotations

from graphoffload.testing.case import Case, draw, draw_ints, weighted_loss
from graphoffload.testing.compare import (
    Result,
    assert_equal_bits,
    case_steps,
    compile_case,
    compiled,
    differences,
    float64_step,
    keep_all,
    run_case,
    run_step,
    whole_gradient_error,
)
from graphoffload.testing.observed import Observed, observe
from graphoffload.testing.policies import OffloadNonContiguous, Scattered
from graphoffload.testing.zoo import ZOO

__all__ = [
    "ZOO", "Case", "Observed", "OffloadNonContiguous", "Result", "Scattered", "assert_equal_bits", "case_steps",
    "compile_case", "compiled", "differences", "draw", "draw_ints", "float64_step", "keep_all", "observe", "run_case",
    "run_step", "weighted_loss", "whole_gradient_error",
]  # fmt: skip
