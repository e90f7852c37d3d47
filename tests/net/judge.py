"""One architecture under one inner compiler: plain torch.compile first, then every way, each with its outcome.

The reference is the eager step in float64. A way is wrong where its error is above 3 x plain torch.compile's, by all
gradients together and by each tensor, plus a floor. Where float64 does not run, or takes other discrete decisions or draws
other random numbers than float32 does (its gradients are then far off), the eager float32 step is the reference; where
plain torch.compile draws other random numbers than eager does, plain's step is. In 16 and 8 bits rounding would hide much,
so under aot_eager, which runs the same kernels, a way must also equal plain torch.compile.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import graphoffload
from graphoffload.errors import BudgetError
from graphoffload.facts.plan import Plan
from graphoffload.runtime.handles import KEPT_TURNS
from graphoffload.testing.observed import Observed, observe
from net.step import Saved, Taken, missing, take, take_float64, whole_error, worse
from net.table import Architecture, Missing

WAYS = ("offload", "recompute", "slowdown", "budget")
FAR = 1e-3
"""A float64 step that is so far from the float32 one is another computation."""
COARSE = {"float16": 1e-2, "bfloat16": 5e-2, "float8": 0.2}
"""The same where products are computed in fewer bits. A tenth of it is rounding in a single tensor."""
FLOOR = 1e-6
"""Errors of all gradients together below this are rounding, whatever plain's is."""

Outcome = dict[str, Any]


@dataclass(slots=True)
class Case:
    """What all ways of one architecture are compared with."""

    architecture: Architecture
    inner: str
    device: str
    reference: Taken
    judge: str
    plain: Taken
    saved: Saved
    peaks: list[tuple[int, int]] = field(default_factory=list)
    """(keep-all's, the plan's) of each way's largest graph, above what was allocated before it."""


def fresh(architecture: Architecture, device: str) -> Any:
    """The model and its inputs; nothing of the models before is left."""
    torch._dynamo.reset()
    gc.collect()
    return architecture.fresh(device)


def reference_of(architecture: Architecture, device: str) -> tuple[Taken, Taken, str]:
    """The eager step, the step to compare with, and its name."""
    eager = take(*fresh(architecture, device))
    try:
        exact = take_float64(*fresh(architecture, device))
    except Exception as error:
        return eager, eager, f"eager float32 (float64: {brief(error)})"
    distance, far = whole_error(eager, exact), far_of(architecture)
    if distance < far and not worse(eager, exact, exact, own=far, shared=far):
        return eager, exact, "eager float64"
    return eager, eager, f"eager float32 (float64 is {distance:.1g} off: other decisions or random numbers)"


def far_of(architecture: Architecture) -> float:
    """The error at which a step is another computation than its reference."""
    return COARSE.get(architecture.precision, FAR)


def own_of(architecture: Architecture) -> float:
    """The part of a tensor's norm that is rounding, whatever plain's error is."""
    return COARSE[architecture.precision] / 10 if architecture.precision in COARSE else 1e-5


def brief(error: BaseException) -> str:
    """An error as one line."""
    inner = getattr(error, "inner_exception", None) or error
    text = " ".join(str(inner).split())
    return f"{type(inner).__name__}: {text[:200]}"


def plainly(architecture: Architecture, inner: str, device: str) -> tuple[Taken, Saved, int]:
    """A step under plain torch.compile, what it saves, and its number of graphs."""
    counted = _Counted(inner)
    model, inputs = fresh(architecture, device)
    model.compile(backend=counted)
    taken, saved = take(model, inputs), Saved()
    take(model, inputs, saved)
    return taken, saved, counted.graphs


class _Counted:
    """A backend by name that counts the graphs it is given."""

    def __init__(self, inner: str) -> None:
        self.graphs = 0
        self.backend: Callable[..., Any] = torch._dynamo.lookup_backend(inner)

    def __call__(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, inputs, **kwargs)


def begin(architecture: Architecture, inner: str, device: str) -> tuple[Case | None, Outcome]:
    """Plain torch.compile; without it there is nothing to compare with, and the outcome says why."""
    try:
        eager, reference, judge = reference_of(architecture, device)
    except Missing as error:
        return None, {"outcome": "skipped", "why": str(error)}
    except Exception as error:
        return None, {"outcome": "error", "why": f"eager: {brief(error)}"}
    model, _ = architecture.fresh(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    said: Outcome = {"parameters": parameters}
    try:
        plain, saved, graphs = plainly(architecture, inner, device)
    except Exception as error:
        return None, {**said, "outcome": "error", "why": brief(error)}
    if not graphs:
        return None, {**said, "outcome": "error", "why": "torch.compile compiled nothing"}
    error, far = whole_error(plain, reference), far_of(architecture)
    if architecture.random and inner == "inductor" and error > far:
        reference, judge, error = plain, "plain torch.compile, whose random numbers are its own", 0.0
    outcome = "ok" if error < far and not worse(plain, eager, reference, own=far, shared=far) else "off"
    said |= {"outcome": outcome, "error": error, "judge": judge, "graphs": graphs, "saved_bytes": saved.nbytes}
    if outcome == "off":
        said["why"] = f"its gradients are {error:.2g} off"
    return Case(architecture, inner, device, reference, judge, plain, saved), said


def allocated_bytes(device: str) -> int:
    """What a GPU has allocated: gradients of the ways before, which are to be compared, count in every peak there."""
    return 0 if device == "cpu" else torch.cuda.memory_allocated()


def options_of(case: Case, way: str, before: int) -> dict[str, Any]:
    """The options of a way. A budget is halfway between keep-all's peak and the least of the plans made before.

    before: bytes that are allocated now, which peaks are above.
    """
    common: dict[str, Any] = {"inner": case.inner, "min_tensor_bytes": 0, "hardware": "h200-sxm", "reserve": 0}
    if case.device != "cpu" and way in ("slowdown", "budget"):
        del common["hardware"]  # the GPU that is there, whose kernels are timed
    if way in ("offload", "recompute"):
        return {**common, "policy": way, "verify": "checksum"}
    if way == "slowdown":
        return {**common, "max_slowdown": 0.3}
    assert way == "budget", way
    keep, least = max(keep for keep, _ in case.peaks), min(least for _, least in case.peaks)
    return {**common, "device_budget": before + (keep + least) // 2}


def examine(case: Case, way: str) -> Outcome:
    """Two steps of one way: the second one counts bytes."""
    began = time.perf_counter()
    if way == "budget" and not case.peaks:
        return {"outcome": "skipped", "why": "no other way made a plan to take a budget from"}
    options: dict[str, Any] = {}
    saved = Saved()
    try:
        with observe() as seen, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs = fresh(case.architecture, case.device)
            before = allocated_bytes(case.device)
            options = options_of(case, way, before)
            model.compile(backend=graphoffload.OffloadBackend(**options))
            first = take(model, inputs)
            graphoffload.reset_stats()
            second = take(model, inputs, saved)
            counters = graphoffload.stats()
            left = graphoffload.host_memory().in_use_bytes  # which gives up what was dropped
            ran_as = {**counters, "dropped": graphoffload.stats()["dropped"]}
            if left:  # hooks hide for some steps that a forward was dropped
                for _ in range(KEPT_TURNS + 2):
                    graphoffload.host_memory()
                    graphoffload.reset_stats()
                    take(model, inputs)
                left = graphoffload.host_memory().in_use_bytes
                ran_as = graphoffload.stats()
    except BudgetError as error:
        return {"outcome": "error", "why": brief(error), "budget": options.get("device_budget")}
    except Exception as error:
        return {"outcome": "error", "why": brief(error)}
    case.peaks += [(keep - before, least - before) for keep, least in filter(None, [peaks_of(seen.plans)])]
    complaints = [
        *verdict(case, first), *verdict(case, second), *identity(case, way, saved, counters),
        *ran(way, seen, ran_as, getattr(model, "backwards", 1)),
    ]  # fmt: skip
    if left:
        complaints.append(f"{left} bytes of the host are still in use after the step")
    done = {
        "error": max(whole_error(first, case.reference), whole_error(second, case.reference)),
        "kept_bytes": saved.nbytes,
        "host_bytes": counters["d2h_bytes"],
        "offloads": counters["offloads"],
        "recomputed": sum(d.action == "recompute" for plan in seen.plans for d in plan.decisions),
        "recomputed_bytes": sum(plan.recomputed_bytes for plan in seen.plans),
        "slowdown": max((plan.prediction.predicted_slowdown for plan in seen.plans), default=0.0),
        "seconds": round(time.perf_counter() - began, 1),
    }
    why = [text for text in complaints if not text.startswith("note: ")]
    notes = [text.removeprefix("note: ") for text in complaints if text.startswith("note: ")]
    return {"outcome": "wrong" if why else "ok", **done, **({"why": "; ".join(why[:4])} if why else {}), "notes": notes}


def peaks_of(plans: tuple[Plan, ...]) -> tuple[int, int] | None:
    """Predicted peaks of keep-all and of the plans: those of the graph with the largest."""
    if not plans:
        return None
    most = max(plans, key=lambda plan: plan.prediction.keep_peak_bytes).prediction
    return most.keep_peak_bytes, most.predicted_peak_bytes


def verdict(case: Case, taken: Taken) -> list[str]:
    """What is wrong with a step's loss, gradients and buffers."""
    error, plain = whole_error(taken, case.reference), whole_error(case.plain, case.reference)
    found = [*missing(taken, case.plain), *worse(taken, case.plain, case.reference, own=own_of(case.architecture))]
    if case.inner == "aot_eager" and case.architecture.precision in COARSE and not whole_error(taken, case.plain) <= FLOOR:
        found.append(f"all gradients: {whole_error(taken, case.plain):.3g} from plain's, by the same kernels")
    if not error <= 3 * plain + FLOOR and math.isfinite(plain):
        found.insert(0, f"all gradients: error {error:.3g}, plain's {plain:.3g}")
    return found


def ran(way: str, seen: Observed, counters: dict[str, int], backwards: int = 1) -> list[str]:
    """Whether what the plans say was executed, reloads once for each backward: a way that changed nothing says why."""
    if not seen.plans:
        return ["nothing was planned"]
    found = []
    went = counters["offloads"] + counters["stays"]  # where memory is plenty, calls of a step skip copies
    if went * backwards != counters["reloads"] + counters["dropped"]:
        found.append(f"{went} offloads and {counters['reloads']} reloads")
    planned = sum(plan.offloaded_bytes for plan in seen.plans)
    if bool(planned) != bool(counters["d2h_bytes"] + counters["stayed_bytes"]):
        found.append(f"{planned} bytes were planned for the host, {counters['d2h_bytes']} went there")
    changed = any(plan.changes_anything for plan in seen.plans)
    if way in ("offload", "recompute") and not changed:
        able = [t for plan in seen.plans for t in plan.saved.tensors if (t.eligible if way == "offload" else t.recomputable)]
        reasons = {t.why_not if way == "offload" else t.why_not_recompute for p in seen.plans for t in p.saved.tensors}
        text = f"nothing to {way}: {'; '.join(sorted(reasons))[:160] or 'nothing is saved'}"
        found.append(text if able else f"note: {text}")
    if way == "offload" and changed and not counters["offloads"]:
        found.append("no offload was executed")
    if way in ("budget", "slowdown") and not changed:
        found.append("note: the plan keeps all")
    return found


def identity(case: Case, way: str, saved: Saved, counters: dict[str, int]) -> list[str]:
    """Device bytes kept and host bytes together are what plain torch keeps, where only offload is used."""
    own = saved.nbytes + 8 * (saved.tickets - counters["offloads"])
    plain = case.saved.nbytes + 8 * case.saved.tickets
    together = own + counters["d2h_bytes"] + counters["stayed_bytes"]
    if way == "offload" and together != plain:
        return [f"note: identity: {own} kept + {together - own} on the host = {together}, plain keeps {plain}"]
    if way == "recompute" and own > plain:
        return [f"note: identity: recompute keeps {own}, plain {plain}"]
    return []
