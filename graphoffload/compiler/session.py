"""One graph that is being compiled, as a value that goes with it.

    backend ──makes──▶ CompileSession ──▶ partitioner ──▶ pipeline (Request) ──▶ inner compile
                             ▲                  │
                             └───── plan ◀──────┘

The backend makes it from Dynamo's graph: only there are the inputs those that the user gave, and torch asks for the key before
it traces the joint graph. A partitioner that is used without the backend makes one from the joint graph. The plan comes back in
it; it stays None where nothing was partitioned, as when torch's compile cache answered.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch.fx import GraphModule

from graphoffload.compiler.cache_key import graph_key
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.module_names import name_modules
from graphoffload.facts.goals import UNMEASURABLE, Goal, KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.facts.limits import Limits
from graphoffload.facts.plan import Plan
from graphoffload.facts.recipe import Recipe
from graphoffload.monitor.pattern_coverage import WHOLE, Fragment
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry
from graphoffload.torch_internals import partitioning

Purpose: TypeAlias = Literal["run", "explain", "partition"]
"""What a plan is made for: to run, so that host memory is taken for it while it compiles and it is stored for torch's compile
cache; to be shown; or for whoever called the partitioner."""


@dataclass(slots=True)
class CompileSession:
    """One graph that is being compiled.

    Attributes:
        config: what the user asks for. limits: what the process may use, in bytes.
        key: identity of the plan: graph, names, annotations, configuration and limits. name: of the graph in messages.
        purpose: as Purpose. fragment: what the graph is of the user's model.
        parameters: which of the graph's inputs, by position, are parameters; None: as Dynamo says. What is no parameter is the
            caller's memory, which backward reads only where torch alone would.
        activations: which inputs, by position, other graphs computed and their caller lets go: they may be offloaded here.
        recipe: the variant that is compiled, where the plan of a step says which; None: the graph is planned alone.
        slices: of the tokens, in which the graph computes its MLPs; 0: all at once.
        has_resort: a budget that is not met is tried in another way next, so that nobody searches the least one to name it.
        plan: what the partitioner made; None until then, and where it did not run.
    """

    config: OffloadConfig
    limits: Limits
    key: str
    name: str
    purpose: Purpose = "partition"
    fragment: Fragment = WHOLE
    parameters: tuple[int, ...] | None = None
    activations: tuple[int, ...] = ()
    recipe: Recipe | None = None
    slices: int = 0
    has_resort: bool = False
    plan: Plan | None = None

    @property
    def goal(self) -> Goal:
        """What is asked of the plan. A slowdown that nobody could measure counts as none: 0.0 allows that much."""
        if self.config.max_slowdown is not None:
            return WithinSlowdown(max(self.config.max_slowdown, UNMEASURABLE), asked=self.config.max_slowdown)
        if self.limits.explicit and self.limits.device_budget_bytes is not None:
            return MeetBudget(self.limits.device_budget_bytes)
        return KeepIfFits(self.limits.device_budget_bytes)

    @property
    def is_part(self) -> bool:
        """Whether the graph is only a part of what is trained."""
        return self.limits.downstream or bool(self.fragment)

    def finish(self, plan: Plan) -> None:
        """Take the plan that was made, and make it known to the ops and to last_plans()."""
        self.plan = plan
        if self.purpose == "explain":
            registry.explained(plan)
        else:
            registry.register(plan, runs=self.purpose == "run")

    def identity(self) -> tuple[object, ...]:
        """What torch's compile cache may know the session by: what decides the plan; neither the graph's name, which numbers
        the graphs of a process, nor the model's number, nor bytes that differ from run to run."""
        fragment, limits = replace(self.fragment, model=0), self.limits.quantised()
        return self.config, self.key, fragment, limits, self.parameters, self.activations, self.recipe


def session_of_joint(
    config: OffloadConfig, key: str | None, name: str, joint: GraphModule, arguments: dict[str, Any]
) -> CompileSession:
    """The session of a partitioner without a backend, which knows the joint graph and its fake inputs alone.

    Args:
        key, name: as in CompileSession, where the caller knows them. arguments: those of torch's own partitioners.
    """
    limits = resolve_limits(config, _inputs(joint), partitioning.may_be_trained(joint.graph, arguments))
    if key is None:
        name_modules(joint)  # no backend has done so
    return CompileSession(config, limits, key or graph_key(joint, config), name or f"graph{len(registry.last_plans())}")


def new_key(base: str) -> str:
    """A plan's key, from what the plan is for: no two compiles share one unless a stored plan does."""
    return f"{base}-{secrets.token_hex(4)}"


def _inputs(joint: GraphModule) -> Iterator[object]:
    """Values of the model's inputs; gradients of its outputs are placeholders as well, but nothing that lives throughout."""
    for node in joint.graph.find_nodes(op="placeholder"):
        if not str(node.target).startswith("tangents"):
            yield node.meta.get("val")
