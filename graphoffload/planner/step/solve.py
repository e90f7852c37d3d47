from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any
from graphoffload.planner.step.facts import StepFacts
from graphoffload.planner.step.join import join, Joined
from graphoffload.planner.simulator import simulate, Timeline
from graphoffload.errors import BudgetError

@dataclass(frozen=True)
class CallSchedule:
    offloads: tuple
    settle: dict
    prefetch: dict

@dataclass(frozen=True)
class StepSolution:
    chosen: tuple
    actions: tuple
    joined: Joined
    timeline: Timeline
    keep_timeline: Timeline
    lower_bound_s: Any = None
    lower_bound_peak_bytes: Any = None
    max_inflight_bytes: Any = None
    solver: str = "stub"
    calls: tuple = ()
    reload_steps: dict = field(default_factory=dict)

def plan_step(facts, hardware, goal, *, reserve_bytes=0, host_budget_bytes=None, patience=None):
    n = len(facts.calls)
    def sim(chosen, offload):
        j = join(facts, chosen)
        acts = ["offload" if (c.can_offload and offload and c.nbytes) else "keep" for c in j.program.candidates]
        return j, acts, simulate(j.program, acts, hardware)
    kj, ka, kt = sim([0]*n, False)
    limit = (goal.device_budget_bytes or 1 << 60) - reserve_bytes
    best = None
    for chosen in ([0]*n, [1 % len(facts.graphs[0])]*n, [len(facts.graphs[c.graph])-1 for c in facts.calls]):
        for off in (False, True):
            j, a, t = sim(chosen, off)
            if best is None or (max(0, t.peak_bytes-limit), t.time_s) < (max(0, best[3].peak_bytes-limit), best[3].time_s):
                best = (chosen, j, a, t)
    chosen, j, a, t = best
    if t.peak_bytes > limit:
        e = BudgetError(f"least {t.peak_bytes}"); e.least_bytes = t.peak_bytes; raise e
    acts = [[] for _ in range(n)]
    offs = [[] for _ in range(n)]
    for (c, k), act in zip(j.of, a):
        acts[c].append(act)
        if act == "offload": offs[c].append(facts.variant(c, chosen[c]).program.candidates[k].name)
    calls = []
    count = 0
    for c in range(n):
        calls.append(CallSchedule(tuple(offs[c]), {("start",""): count}, {("start",""): tuple((c-1, x) for x in offs[c-1])} if c else {}))
        count += len(offs[c])
    return StepSolution(tuple(chosen), tuple(map(tuple, acts)), j, t, kt, calls=tuple(calls))
