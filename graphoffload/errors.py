"""Everything graphoffload can complain about, in one place.

Every message says four things: what went wrong, which tensor, module or option it concerns, the numbers, and what to do about
it. What the user asked for and did not get is an error; what was done differently from the expectation is a warning with a
class of its own, so that it can be filtered or turned into an error by name.
"""

from __future__ import annotations

import os
import traceback
import warnings

_OURS, _STANDARD = (os.path.dirname(module) + os.sep for module in (__file__, os.__file__))
_BEGINNINGS = ("<eval_with_key", "<string>", "<frozen", _OURS, _STANDARD)
_PARTS = ("site-packages", "dist-packages", "torchinductor")
"""What the file names of code begin with, or have in them, that no user wrote. Packages may be in several places: a virtual
environment's, the system's, a user's."""


class GraphOffloadError(Exception):
    """Base of every error raised by graphoffload."""


class ConfigError(GraphOffloadError, ValueError):
    """An option has an unknown name, a wrong type or a value out of range."""


class PatternError(GraphOffloadError, ValueError):
    """A module pattern or boundary name matches nothing, or cannot be resolved."""


class TagError(GraphOffloadError, ValueError):
    """Two binding constraints contradict each other for one tensor."""


class BudgetError(GraphOffloadError, ValueError):
    """The budget cannot be met; the message names the least feasible one and what holds it up.

    least_bytes: that budget; None where there is none, or where it is not the device's that cannot be met.
    """

    least_bytes: int | None = None


class HostMemoryError(GraphOffloadError, RuntimeError):
    """Host memory for offloaded activations is missing or exhausted."""


class PlanError(GraphOffloadError, RuntimeError):
    """A plan does not belong to the graph, torch version or device it is applied to."""


class VerifyError(GraphOffloadError, RuntimeError):
    """A rewritten graph breaks a safety rule. Nothing was run."""


class RuntimeStateError(GraphOffloadError, RuntimeError):
    """An event, buffer or handle at run time is not the one the plan speaks of. The step must not be trusted."""


class ChecksumError(GraphOffloadError, RuntimeError):
    """A reloaded tensor's bits differ from what was offloaded."""


class CaptureError(GraphOffloadError, RuntimeError):
    """A CUDA graph is being captured in a way in which its replays would share a host buffer, or miss one."""


class GraphOffloadWarning(UserWarning):
    """Base of every warning."""


class UntestedTorchWarning(GraphOffloadWarning):
    """torch is newer (or older) than the versions graphoffload was tested with."""


class UntestedTrainerWarning(GraphOffloadWarning):
    """A trainer is newer than the releases that its integration was tested with."""


class LargeSlowdownWarning(GraphOffloadWarning):
    """max_slowdown allows steps of more than twice the time: percent, perhaps, where a fraction is meant."""


class PatternWarning(GraphOffloadWarning):
    """A pattern matched nothing in any part of a model with graph breaks."""


class NotOffloadedWarning(GraphOffloadWarning):
    """Something that was asked to be offloaded or recomputed was kept, and why."""


class PageableMemoryWarning(GraphOffloadWarning):
    """Page-locked memory could not be had; copies run through pageable memory and block the host."""


class NoStreamsWarning(GraphOffloadWarning):
    """The device has no side streams: copies are synchronous and overlap with nothing."""


class FallbackWarning(GraphOffloadWarning):
    """A torch setting would silently run the model without graphoffload, or against its plan."""


class CudaGraphsWarning(GraphOffloadWarning):
    """CUDA graphs were asked for, and copies, or all of a graph, are not captured."""


class PerRankPlanWarning(GraphOffloadWarning):
    """Several processes train together, and each plans for itself."""


class SharedBudgetWarning(GraphOffloadWarning):
    """Several graphs of one model were each planned for the whole budget, and together they exceed it."""


class StepNotPlannedWarning(GraphOffloadWarning):
    """The graphs of a training step could not be planned together; each runs as it was compiled first."""


class PartialPlanWarning(GraphOffloadWarning):
    """explain() planned the graphs before a place where the model asks for a value that is not known, and none after."""


class GoalMissedWarning(GraphOffloadWarning):
    """What the user decided for every activation does not meet the budget or slowdown that was given beside it."""


class BudgetExceededWarning(GraphOffloadWarning):
    """Steps took more device memory than device_budget, against the plan's prediction."""


class BackwardNeverCameWarning(GraphOffloadWarning):
    """Offloaded activations were dropped without a backward; their copies were wasted."""


class HardwareWarning(GraphOffloadWarning):
    """Planning uses datasheet or fallback numbers instead of measured ones."""


def warn(category: type[GraphOffloadWarning], message: str) -> None:
    """Issue a named warning; one place, so that all of them name the line of the user's own code that led to it."""
    warnings.warn(message, category, stacklevel=_users_level())


def _users_level() -> int:
    """The stack level of the innermost frame of a user's own file, as `warn` counts them; of the outermost frame where there is
    none, as in a thread of autograd."""
    *callers, _, _ = traceback.extract_stack()
    levels = range(2, 2 + len(callers))
    of_users = (level for level, frame in zip(levels, reversed(callers), strict=True) if not _is_of_a_library(frame.filename))
    return next(of_users, levels[-1])


def _is_of_a_library(filename: str) -> bool:
    """This package's, an installed one's, the standard library's, or what they write: torch's generated code, a dataclass."""
    return filename.startswith(_BEGINNINGS) or any(part in filename for part in _PARTS)
