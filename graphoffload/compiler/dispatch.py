"""What Dynamo calls in the place of one compiled graph: it knows which call of the step this is, and runs that call's variant.

    Dynamo's code ─▶ dispatcher ─▶ variant "light" of graph 0      call 0 to 5 of the step, by its plan
                               └─▶ variant "keep" of graph 0       call 6 and 7
                               └─▶ the first one compiled          nothing is planned yet, or another call was expected

Any variant gives the same gradient. A call that the plan does not expect costs time or memory, never correctness. Variants are
compiled when a plan first asks for them, between two steps, from the graph and the fake inputs that Dynamo left.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from graphoffload.compiler.checkpoint_regions import in_blocks
from graphoffload.compiler.compile_variant import Compiled, Graph, compile_by, in_slices, traced_only
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.model_share import share_of_its_model
from graphoffload.compiler.optimizer_state import share_of_trained
from graphoffload.compiler.override import OVERRIDE, asked_now
from graphoffload.compiler.own_plans import OwnPlans
from graphoffload.compiler.pipeline import analyse
from graphoffload.compiler.recipes import is_less, variants_of
from graphoffload.compiler.request import Request
from graphoffload.compiler.session import CompileSession, new_key
from graphoffload.compiler.slices import SLICES, held_at_once, may_pay
from graphoffload.errors import PlanError
from graphoffload.facts.recipe import FITTED, SMALLEST, Recipe
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.log import log
from graphoffload.monitor.shared_budget import may_link
from graphoffload.options.config import OffloadConfig
from graphoffload.options.policies import is_fixed
from graphoffload.planner.problem import Program
from graphoffload.planner.step.facts import Variant
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import STEPS, StepRun
from graphoffload.runtime.step.schedule import START, Room
from graphoffload.torch_internals import partitioning, storages
from graphoffload.torch_internals.autograd import autograd_time, in_checkpoint
from graphoffload.torch_internals.dynamo import Retraceable
from graphoffload.torch_internals.partitioning import CustomPartitionerFn

_MOST = 0.6  # share of all trained parameters: a graph with more is the model
_ROOM, _ROOM_OF_INPUTS = 8, 2  # what stays in an unplanned run, and what of inputs, takes at most this part of the free memory

_MOST_FITTED = 3  # each is a trace of the graph, and another one comes with another budget

_numbers = itertools.count()
GRAPHS: weakref.WeakValueDictionary[int, Dispatched] = weakref.WeakValueDictionary()
"""The graphs that Dynamo's code still calls, by number."""


def may_join(graph: Graph) -> bool:
    """Whether the calls of a graph may be planned with those of other graphs: there is a number to meet, and nothing captures
    its copies."""
    fits = graph.limits.device_budget_bytes is not None or graph.config.max_slowdown is not None
    return fits and may_link(graph.config) and not is_fixed(graph.config.policy)


def turn_to_learn(graph: Graph) -> Graph:
    """The same graph, of which it will be learnt what eager code takes between its forward and its backward (alone.py)."""
    return replace(graph, limits=replace(graph.limits, turn_bytes=None))


def is_one_of_several(graph: Graph) -> bool:
    """Whether other graphs are trained with this one, and have at least as much of the model: it runs downstream of one, a
    graph break ends it, or the modules that it is in hold far more. The last is so for the first block of a model of which all
    before the blocks is frozen. A graph that is called while the backward of another one is still to come is one as well,
    such as a GAN's critic after its generator."""
    run = STEPS.runs.get(_device(graph.inputs))
    if run is not None and not run.is_done and any(call.waits for call in run.calls):
        return True
    if share_of_trained(graph.inputs) >= _MOST:
        return False
    fragment = graph.fragment  # model 0 is whatever Dynamo knows nothing of: what broke there says nothing about this graph
    part = graph.limits.downstream or fragment.place == "part" or (bool(fragment) and fragment.model != 0)
    return part or share_of_its_model(graph.inputs) < _MOST


class Dispatched:
    """One graph of Dynamo's with its variants. family: what a plan may choose from, once it was traced for that. own: its
    plans if it is planned alone."""

    def __init__(self, graph: Graph, again: Retraceable, first: Compiled) -> None:
        self.graph = replace(graph, module=again.graph, inputs=again.inputs)  # real inputs would live on
        self.again, self.first = again, first
        self.number = next(_numbers)
        self.version = OVERRIDE.version  # what was asked for before is not news to this graph
        self.device = _device(again.inputs)
        self._compiled: dict[str, Compiled] = {}
        self._family: Family | None = None
        self._in_slices = False  # whether the family was asked for variants in slices
        self.own = OwnPlans(self.graph, again)
        GRAPHS[self.number] = self

    @property
    def is_variant(self) -> bool:
        """Whether the graph was first compiled as one of several."""
        return self.first.plan is not None and bool(self.first.plan.variant)

    @property
    def family(self) -> Family:
        """The variants that a plan may choose from."""
        if self._family is None:
            self._family, self._in_slices = family_of(self.graph, self.again), False
            if self.first.plan is not None and self.first.plan.variant == SMALLEST.in_slices(SLICES).name:
                self.widen()
        return self._family

    def widen(self) -> None:
        """Have variants in slices as well from now on, where these may pay. They are looked for once."""
        family, first = self.family, self.first.plan.variant if self.first.plan is not None else ""
        if not self._in_slices:
            self._family, self._in_slices = widened(family, self.graph, self.again, self._budget_bytes(), ran=first)

    def fit(self, recomputes: frozenset[str]) -> bool:
        """Have a variant that computes these activations again, from now on; whether there is one."""
        family = with_fitted(self.family, self.graph, self.again, recomputes)
        self._family = family or self._family
        return family is not None

    def _budget_bytes(self) -> int | None:
        """What holds where another budget was set since."""
        config = asked_now(self.graph.config)
        if config == self.graph.config:
            return self.graph.limits.device_budget_bytes
        return resolve_limits(config, self.again.inputs).device_budget_bytes

    def take_family(self, recipes: Sequence[Recipe]) -> bool:
        """Have the variants of another rank from now on; whether they are others than those of this one.

        Raises:
            PlanError: the graph cannot be compiled by these recipes.
        """
        wanted = [recipe.identity for recipe in recipes]
        if [recipe.identity for recipe in self.family.recipes] == wanted:
            return False
        found = family_of(self.graph, self.again, recipes)
        if [recipe.identity for recipe in found.recipes] != wanted:
            raise PlanError(f"{self.graph.name} cannot be compiled by the variants that another rank plans with.")
        self._family, self._in_slices = found, any(recipe.slices for recipe in recipes)
        return True

    def share_inputs(self, positions: Collection[int]) -> None:
        """These inputs are other calls' as well, so that offloading them for one call frees nothing."""
        left = tuple(at for at in self.graph.activations if at not in positions)
        if left != self.graph.activations:
            self.graph, self._family = replace(self.graph, activations=left), None

    def variant(self, recipe: Recipe) -> Compiled:
        """The graph compiled by a recipe: as it was before, or now.

        Raises:
            ShapeGuardError: it would hold for fewer sizes than the graph is called with.
        """
        compiled = self._compiled.get(recipe.identity)
        if compiled is None:
            graph = replace(self.graph, module=self.again.copy(), inputs=self.again.inputs)
            with self.again.traced():
                compiled = compile_by(graph, recipe)
            self._compiled[recipe.identity] = compiled
        return compiled

    def plan_alone(self, config: OffloadConfig, lacking_bytes: int = 0, least_bytes: int | None = None) -> None:
        """Run under a plan of its own for another configuration, from now on; arguments and errors as OwnPlans.plan."""
        self.first = self.own.plan(config, lacking_bytes, least_bytes)

    def run(self, *args: Any) -> Any:
        """One call."""
        run = STEPS.runs.get(self.device)
        if run is None or run.is_over:
            from graphoffload.compiler.step_runs import next_run

            run = next_run(self)
        call = run.begin(self.number)
        compiled = self._compiled_for(call, run)
        call.key, call.kept_bytes = compiled.key, compiled.kept_bytes
        if run.recording:
            given = args[0] if len(args) == 1 and isinstance(args[0], list) else args
            call.inputs = tuple(storages.lasting(given[at].untyped_storage()) for at in self.graph.activations)
        before, STEPS.call, since = STEPS.call, call, autograd_time()
        try:
            if call.schedule is not None:
                run.happened(call, START)
            outputs = compiled.function(*args)
        except BaseException:
            run.aborted = True  # whoever catches it begins anew
            raise
        finally:
            STEPS.call = before
        run.forward_ended(call, outputs, since)
        return outputs

    def _compiled_for(self, call: StepCall, run: StepRun) -> Compiled:
        """The variant of a call: as planned, or the first one. Under checkpointing always the first one: its backward gets what
        the same forward saves when it runs again."""
        if run.plan is not None and not run.off:
            planned = None if in_checkpoint() else run.plan.call(call)
            if planned is not None:
                compiled: Compiled
                compiled, call.schedule, call.variant = planned
                return compiled
            run.leave_plan()
        call.is_variant = self.is_variant
        return self.first

    def room(self, run: StepRun) -> Room:
        """What may stay on the device in a run that is not planned."""
        budget = self.graph.limits.device_budget_bytes
        if self.first.tight:
            return Room(0, 0)
        if budget is None or run.streams is None:
            return Room()
        free = max(0, budget - self.graph.limits.reserve_bytes - run.streams.allocated_bytes()[0])
        return Room(free // _ROOM, None if run.flies else free // _ROOM_OF_INPUTS)


def _device(inputs: Sequence[Any]) -> torch.device:
    """Where a graph runs. Its plan does not say so where nothing is saved, and its calls belong to the step all the same."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def dispatcher(graph: Graph, again: Retraceable, first: Compiled) -> Callable[..., Any]:
    """What Dynamo calls: `first` until a step is planned."""
    called = functools.partial(Dispatched(graph, again, first).run)
    functools.update_wrapper(called, first.function)  # with its attributes, such as `_boxed_call`
    return called


class Family:
    """The variants of one graph as numbers, their recipes, and keep-all with its recompute chains for the bound.

    input_bytes: of each variant, those of its saved activations that other graphs computed. hardware: that they were made for.
    """

    def __init__(
        self,
        variants: tuple[Variant, ...],
        recipes: tuple[Recipe, ...],
        bound: Program,
        input_bytes: tuple[int, ...],
        hardware: HardwareProfile,
    ) -> None:
        self.variants, self.recipes, self.bound, self.input_bytes = variants, recipes, bound, input_bytes
        self.hardware = hardware


def family_of(graph: Graph, again: Retraceable, recipes: Sequence[Recipe] | None = None) -> Family:
    """Trace a graph once more, for its family of variants: those by these recipes, or those that are found here.

    Raises:
        PlanError: torch partitioned nothing.
    """
    graph = replace(graph, module=again.copy(), inputs=again.inputs)
    with again.traced():
        found, _ = look(graph, recipes if recipes is None else [recipe for recipe in recipes if not recipe.slices])
    if found is None:
        raise PlanError(f"{graph.name} was partitioned when it was compiled, and is not when it is traced again.")
    given = [recipe for recipe in recipes or () if recipe.slices]
    return _with_slices(found, graph, again, given) if given else found


def widened(
    family: Family, graph: Graph, again: Retraceable, budget_bytes: int | None, *, ran: str = ""
) -> tuple[Family, bool]:
    """A graph's own family with variants that compute MLPs in slices, where these may pay; and whether they may.

    Args:
        ran: the variant that runs until something is planned, which is always one of them.
    """
    try:
        if not may_pay(held_at_once(again.graph), budget_bytes):
            return family, False
        return _with_slices(family, graph, again, ran=ran), True
    except Exception as error:  # the last resort of a plan
        log.info("%s has no variants in slices: %s", graph.name, error)
        return family, True


def with_fitted(family: Family, graph: Graph, again: Retraceable, recomputes: frozenset[str]) -> Family | None:
    """A graph's family with one more variant, which computes these activations again; None where it has as many as it may."""
    count = sum(recipe.name.startswith(FITTED) for recipe in family.recipes)
    known = any(recipe.recomputes == recomputes and not recipe.blocks and not recipe.slices for recipe in family.recipes)
    if known or count == _MOST_FITTED:
        return None
    try:
        found = family_of(graph, again, [Recipe(f"{FITTED} {count + 1}", recomputes=recomputes)])
    except Exception as error:  # the step has a plan without it
        log.info("%s has no variant for its step: %s", graph.name, error)
        return None
    return _joined(family, found)


def _joined(family: Family, more: Family) -> Family:
    """All variants of two families of one graph."""
    return Family(
        (*family.variants, *more.variants),
        (*family.recipes, *more.recipes),
        family.bound,
        (*family.input_bytes, *more.input_bytes),
        family.hardware,
    )


def _with_slices(
    family: Family, graph: Graph, again: Retraceable, given: Sequence[Recipe] | None = None, *, ran: str = ""
) -> Family:
    """A family with variants that compute MLPs in slices: those by these recipes, or those that are clearly smaller than all
    others."""
    slices = given[0].slices if given else SLICES
    sliced = in_slices(replace(graph, inputs=again.inputs), again.copy(), slices)
    if sliced is None:
        return family
    with again.traced():
        found, _ = look(sliced, given)
    if found is None:
        return family
    wanted = given is not None or ran in (recipe.name for recipe in found.recipes)
    least = next(one for one in reversed(family.variants) if not one.name.startswith(FITTED))
    if not wanted and not is_less(found.variants[-1], least, family.hardware):
        return family
    return _joined(family, found)


def look(graph: Graph, recipes: Sequence[Recipe] | None = None) -> tuple[Family | None, Callable[..., Any]]:
    """A graph's family of variants, None where torch partitions nothing; and the graph with everything kept, uncompiled."""
    looking = _Looking(graph.session(new_key("look"), "explain", None, of_a_step=True), recipes)
    function = traced_only(graph, looking)
    return looking.found, function


class _Looking(CustomPartitionerFn):
    """A partitioner that finds the variants of a graph, and partitions it as torch does."""

    def __init__(self, session: CompileSession, recipes: Sequence[Recipe] | None) -> None:
        self.session, self.recipes = session, recipes
        self.found: Family | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Looking:
        return self

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        if not joint_inputs and gm.graph.find_nodes(op="placeholder"):
            return partitioning.min_cut(gm, joint_inputs, kwargs)
        parameters = partitioning.must_be_parameters(gm.graph, self.session.parameters)
        analysis = analyse(Request(self.session, gm, joint_inputs, kwargs, self.session.goal, parameters))
        family = variants_of(analysis, functools.partial(in_blocks, analyse=analyse), self.recipes)
        self.found = Family(*family, analysis.hardware)
        return analysis.pair.forward, analysis.pair.backward

    def uuid(self) -> str:
        """Never the same: what it finds is not in a cache."""
        return new_key("look")


