"""Reports for tests of the page: a plan of a small graph with copies, stalls and recomputation, and one with awkward names."""

from __future__ import annotations

from dataclasses import replace

from graphoffload.facts.plan import Action, Decision, Plan, Transfer
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.memory_layers import layers_of
from graphoffload.planner.predicted import Predicted, in_plan_order, prediction_of
from graphoffload.planner.problem import Candidate, Program, Step, StepIndex
from graphoffload.planner.simulator import simulate
from graphoffload.report import predictions
from graphoffload.report.offload_report import OffloadReport
from graphoffload.report.table import summary_line

MIB = 2**20
LINK = HardwareProfile(
    name="toy", source="datasheet", memory_bytes=100 * MIB, d2h_bytes_per_s=1000 * MIB, h2d_bytes_per_s=1000 * MIB,
    copy_latency_s=0.0, compute_slowdown_while_copying=0.0,
)  # fmt: skip
HOSTILE = (
    "layers.0.<script>window.hacked=1</script>", "layers.1.</script><img src=x onerror='window.hacked=1'>",
    'layers.2.<a href="javascript:window.hacked=1">%{x}<b>', "layers.3.\u2028\ud800&lt;<!--<script>",
)  # fmt: skip


def saved(index: int, module: str, nbytes: int | None = 3 * MIB) -> SavedTensor:
    return SavedTensor(
        name=f"x{index}", views=(), nbytes=nbytes, dtype="uint8", shape=(3 * MIB,) if nbytes else ("s0", "s0*s1"), strides=(1,),
        op="aten.mm", module=module, example_bytes=0 if nbytes else 3 * MIB * (index % 2),
    )  # fmt: skip


def planned(
    layers: int = 8, offloads: int = 3, modules: tuple[str, ...] = (), key: str = "toy", budget: int = 30 * MIB
) -> tuple[Plan, Predicted]:
    """The first tensors go to the host, the one after them is computed again, the others stay; a step of the program takes a
    millisecond, and a copy three."""
    names = modules or tuple(f"layers.{index}.mlp" for index in range(layers))
    again = offloads
    forward = tuple(Step(f"x{i}", 1e-3) for i in range(layers))
    backward = tuple(Step(f"b{i}", 1e-3) for i in range(layers - again))
    backward += (Step(f"x{again}", 1e-3), *(Step(f"b{i}", 1e-3) for i in range(layers - again, layers)))
    kept = [i for i in range(layers) if i != again]

    def use(index: int) -> StepIndex:
        return StepIndex(layers - 1 - index + (index < again))

    candidates = tuple(Candidate(f"x{i}", 3 * MIB, StepIndex(i), StepIndex(i), (use(i),)) for i in kept)
    program = Program(forward, backward, candidates=candidates, static_bytes=10 * MIB)
    actions: list[Action] = ["offload" if i < offloads else "keep" for i in kept]
    full = tuple(Candidate(f"x{i}", 3 * MIB, StepIndex(i), StepIndex(i), (StepIndex(layers - 1 - i),)) for i in range(layers))
    without = tuple(step for step in backward if not step.name.startswith("x"))
    keep = simulate(Program(forward, without, candidates=full, static_bytes=10 * MIB), ["keep"] * layers, LINK)
    timeline = simulate(program, actions, LINK)
    table = tuple(saved(i, names[i % len(names)]) for i in range(layers))
    plan = Plan(
        key=key, graph="graph0", saved=SavedTable(table), notes=("a note with <b>tags</b>",),
        decisions=tuple(
            Decision(f"x{i}", "offload" if i < offloads else "recompute" if i == again else "keep", f"reason <{i}>")
            for i in range(layers)
        ),
        transfers=tuple(
            Transfer(id=n, tensor=f"x{kept[item.candidate]}", nbytes=3 * MIB, offload_after=f"x{kept[item.candidate]}",
                     release_after=None, reload_before="b", wait_before="b", module=names[kept[item.candidate] % len(names)])
            for n, item in enumerate(in_plan_order(timeline))
        ),
        prediction=prediction_of(timeline, keep, reserve_bytes=0, lower_bound_s=keep.time_s, lower_bound_peak_bytes=None),
    )  # fmt: skip
    parts = layers_of(arrays_of(program, LINK), actions, timeline)
    named = {candidate.name: candidate for candidate in candidates}
    plan = replace(plan, summary=summary_line(plan, device_bytes=100 * MIB, budget_bytes=budget))
    return plan, Predicted(timeline, keep, budget, "toy", named, parts)


def report(layers: int = 8, offloads: int = 3, modules: tuple[str, ...] = (), budget: int = 30 * MIB) -> OffloadReport:
    """A report whose timeline this process remembers."""
    key = f"page-{layers}-{offloads}-{budget}-{hash(modules)}"
    plan, predicted = planned(layers, offloads, modules, key, budget)
    predictions.remember(key, predicted)
    return OffloadReport(plans=(plan,))
