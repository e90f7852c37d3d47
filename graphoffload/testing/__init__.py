"""Modules with saved activations that are hard to handle, and exact comparisons of steps: for these tests and for yours.

zoo.ZOO        every case by name: build, inputs, loss, notes
compare        run a step; compare two bit by bit, or by the error of the whole gradient against float64
observed       the plans and copies of a run
policies       pseudo-random decisions
lazy_streams   side streams for a CPU that copy as late as they may, to show a missing wait
faults         break an operation on purpose, to show that a test would fail
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
