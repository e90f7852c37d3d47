"""How a Runner measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from graphoffload.bench.recipe import PLAIN, Recipe

WARM_UP = 13
"""Steps before the measured ones: two are recorded, the third has a plan, and the 7th and 11th others if copies are slow."""
BASELINES = ("keep", "checkpoint", "eager")
"""What others are compared with: the first that trains."""


@dataclass(slots=True)
class Options:
    """How to measure.

    Attributes:
        solo: one model at a time; the baseline runs before and after instead of in between, and is not resident.
        limit_s: seconds after which remaining variants are skipped. variant_limit_s: one variant may take this long.
        tolerance: whole-gradient error above which (and above 1.5 x eager's) a variant is WRONG; None: by dtype.
        trace: profile one step of each variant of graphoffload.
        recipe: the optimizer and the precision. baselines: the first of these that trains is what others are compared with.
        commit, command: what the files say of this run; found out where not given.
    """

    steps: int = 10
    block: int = 5
    warm_up: int = WARM_UP
    solo: bool = False
    limit_s: float = 540.0
    variant_limit_s: float = 200.0
    tolerance: float | None = None
    trace: bool = False
    tiny: bool = False
    sizes: dict[str, int] | None = None
    dtype: torch.dtype | None = None
    recipe: Recipe = PLAIN
    baselines: tuple[str, ...] = BASELINES
    out: Path | None = None
    quiet: bool = False
    commit: str = ""
    command: str = ""


def baseline_row(name: str) -> str:
    """How the row of a variant is named that others are compared with."""
    return "keep-all" if name == "keep" else name
