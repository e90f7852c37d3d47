"""What a row's status says: gradients first, then whether anything was compiled at all; and how a failure is told.

    ok                          WRONG: ...              NOT COMPILED: ...
    SKIPPED: ...                not tried: no time is left, or a package is missing
    FAILED: ...                 the error's first line
    FAILED in plain torch: ...  of keep-all: what fails in other variants may have nothing to do with them
    FAILED as plain torch: ...  of graphoffload, with the error that keep-all has as well
"""

from __future__ import annotations

import traceback

import torch

from graphoffload.bench.measure import Row, Session
from graphoffload.bench.packages import NotMeasurable
from graphoffload.bench.variants import Variant
from graphoffload.errors import ConfigError


class NothingTrainsError(ConfigError):
    """Neither keep-all nor anything else that others could be compared with trains."""


IN_PLAIN, AS_PLAIN = "FAILED in plain torch: ", "FAILED as plain torch: "


def failed(row: Row, error: Exception, plain: str = "") -> None:
    """Write into a row why it has no figures; `plain` is the status of keep-all."""
    if isinstance(error, NotMeasurable):
        row.status = f"SKIPPED: {error}"
        return
    cause = getattr(error, "inner_exception", error)  # of what Dynamo says that a backend raised
    said = f"{type(cause).__name__}: {first_line(cause)}"
    same = plain.startswith(IN_PLAIN) and plain.removeprefix(IN_PLAIN).split(":")[0] == type(cause).__name__
    row.status = (AS_PLAIN if same else "FAILED: ") + said
    row.ours["traceback"] = "".join(traceback.format_exception(error))[-6000:]
    error.__traceback__ = None


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [repr(error)])[0][:300]


def judge(
    variant: Variant, row: Row, session: Session, *, noise: float | None, repeat_noise: float, tolerance: float
) -> None:
    """Set the status of a row that was measured.

    `noise` is the gradient error of eager, None where it is unknown or eager draws other random numbers; `repeat_noise` the one
    of the baseline itself. Inductor gives a graph with torch's checkpoint in it other random numbers than one without.
    """
    limit = max(tolerance, 1.5 * noise if noise is not None else 3 * repeat_noise)
    same_numbers = variant.compiled and variant.kind not in ("checkpoint", "selective")
    comparable = same_numbers or not session.workload.random
    twin, error = row.ours.get("twin_error"), row.gradient_error
    if comparable and error is not None and not error <= limit:
        row.status = f"WRONG: gradient error {error:.3g} > {limit:.3g}"
    elif twin is not None and not twin <= max(5 * repeat_noise, 5 * row.ours["twin_noise"], 1e-6):
        row.status = f"WRONG: {twin:.3g} from its synchronous twin, which repeats to {row.ours['twin_noise']:.3g}"
    elif variant.compiled and row.graphs == 0:
        row.status = "NOT COMPILED: another variant's code ran"
    elif not comparable:
        row.status = "ok (other random numbers)"


def tolerance_of(session: Session, given: float | None, compares_compiled: bool) -> float:
    """The gradient error that is still rounding, whatever eager's is: what was given, or by the precision of a session."""
    if given is not None:
        return given
    if session.parameters[0].dtype == torch.float32 and not session.workload.recipe.mixed:
        return 1e-4
    return 1e-2 if compares_compiled else 1e-1  # compiled Llamas of 8 layers are 0.05 from eager
