"""One call of a model that is explained: its graphs planned one by one, or as a step where several run in it.

    model(x) with fake tensors ─▶ one graph                        ─▶ planned by itself, as compiling would
                               ─▶ blocks compiled one by one       ─▶ forward and backward, then one plan (explained_step.py)
                               ─▶ a graph that is only a part      ─▶ the same
"""

from __future__ import annotations

import functools
import gc
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphoffload.api.eager_work import EagerWork
from graphoffload.api.explained_step import SEVERAL, NotOneStepError, Sharding, StepLook, plan_look
from graphoffload.api.values import Values
from graphoffload.compiler.backend import plan_graph
from graphoffload.compiler.compile_variant import Graph
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.compiler.dispatch import may_join
from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.optimizer_state import state_bytes
from graphoffload.errors import ConfigError, PartialPlanWarning, warn
from graphoffload.facts.plan import Plan
from graphoffload.log import say
from graphoffload.monitor.shared_budget import judge
from graphoffload.options.config import OffloadConfig
from graphoffload.report.ledger import Ledger
from graphoffload.report.offload_report import OffloadReport
from graphoffload.torch_internals import dynamo, modules
from graphoffload.torch_internals.fake_tensors import UNKNOWN, FakeTensor
from graphoffload.torch_internals.pytrees import tree_flatten, tree_map_only
from graphoffload.units import format_bytes

_NOTHING = "nothing is saved for backward: no input or parameter needs a gradient, or torch.no_grad() is on"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One call of a model that is explained. parameters: the trained ones. state: bytes of the optimizer; None: not known.
    sharding: None: this process has all parameters."""

    model: Any
    config: OffloadConfig
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: Sequence[nn.Parameter]
    state: int | None
    sharding: Sharding | None = None

    def report(self) -> OffloadReport:
        """Of the step where several graphs run in it, else of the graph."""
        if not compiled_parts(self.model):
            try:
                return self._alone(stops=True)
            except SeveralGraphsError:
                pass
        found = self.recorded()
        if isinstance(found, RecordedStep):
            return found.planned(self.config)
        report = self._alone(stops=False)
        return replace(report, notes=(*report.notes, f"planned graph by graph, not as a step: {found}")) if found else report

    def _alone(self, *, stops: bool) -> OffloadReport:
        """Each graph planned by itself.

        Raises:
            SeveralGraphsError: `stops`, and there are others that a step would be planned with.
        """
        model, args, kwargs, chosen = self.model, self.args, self.kwargs, self.config
        if self.state is not None and chosen.reserve == "auto":
            chosen = chosen.with_options(reserve=self.state)
        graphs, unknown = _look(model, chosen, Values(), args, kwargs, stops)
        notes = []
        where = _places_of(model, args, kwargs)
        if unknown is not None and where == {"cpu"}:
            notes.append(_runs_once(unknown))
            graphs, unknown = _look(model, chosen, Values(everything=True), args, kwargs, stops)
        if unknown is not None:
            notes.append(_ends_at(unknown, graphs, where))
            warn(PartialPlanWarning, f"explain() planned a part of the model. {notes[-1]}")
        elif not graphs.plans:
            notes.append(_NOTHING)
        graphs.judge(model)
        calls = tuple(graphs.calls[plan.key] for plan in graphs.plans)
        if graphs.plans:
            notes.extend(self.left_out())
        breaks = max(0, graphs.count - 1)
        report = OffloadReport(plans=tuple(graphs.plans), graph_breaks=breaks, calls=calls, notes=tuple(notes))
        return report if self.state is None or len(graphs.plans) != 1 else self._with_ledgers(report, chosen)

    def _with_ledgers(self, report: OffloadReport, config: OffloadConfig) -> OffloadReport:
        """The report with the ledgers of the model's only plan, whose reserve is the optimizer's state or what was given."""
        assert self.state is not None
        model = self.model if isinstance(self.model, nn.Module) else nn.Module()
        parameters = _nbytes_of(model.parameters())
        outside = _nbytes_of((*model.buffers(), *tree_flatten((self.args, self.kwargs))[0]))
        reserve = report.reserve_bytes - self.state if self.config.reserve == "auto" else report.reserve_bytes

        def ledger(peak_bytes: int) -> Ledger:
            rest = peak_bytes - parameters - outside
            return Ledger(
                parameters_bytes=parameters,
                gradients_bytes=None,
                optimizer_bytes=self.state,
                activations_bytes=rest,
                outside_bytes=outside,
                reserve_bytes=max(0, reserve),
            )

        budget = resolve_limits(config, [*model.parameters(), *model.buffers()]).device_budget_bytes
        return replace(
            report,
            ledger=ledger(report.predicted_peak_bytes),
            keep_ledger=ledger(report.keep_peak_bytes),
            budget_bytes=budget,
        )

    def recorded(self) -> RecordedStep | str:
        """One step of all graphs that run; or why none is planned, "" where it is one call of one graph."""
        parts, notes = compiled_parts(self.model), list[str]()
        try:
            try:
                look = self.looked(parts)
            except UNKNOWN as unknown:
                if _places_of(self.model, self.args, self.kwargs) != {"cpu"}:
                    return ""  # the report of the single graphs says where it ends
                notes.append(_runs_once(unknown))
                look = self.looked(parts, everything=True)
        except NotOneStepError as error:
            return str(error)
        except UNKNOWN:
            return ""
        if len(look.sequence) < SEVERAL:
            return ""
        return RecordedStep(self, look, max(0, look.count - max(1, len(parts))), tuple(notes))

    def looked(self, parts: Sequence[nn.Module], *, everything: bool = False) -> StepLook:
        """A forward and backward of the model with fake tensors; `everything`: also on the CPU, for the values that it reads.

        Raises:
            NotOneStepError: the graphs are not planned as a step. One of UNKNOWN: the model reads a value that is not known.
        """
        eager = EagerWork()
        values = Values(everything=everything, eager=eager)
        look = StepLook(self.config, values.live, eager, self.sharding)
        try:
            with torch.random.fork_rng(devices=[]), _fake_world(self.model, values), _garbage_stays_young():
                inputs, named = tree_map_only(torch.Tensor, values.fake, (self.args, self.kwargs))
                look.parameters = tuple(self.model.parameters()) if isinstance(self.model, nn.Module) else ()
                target = self.model if parts else dynamo.compile_isolated(_target(self.model), look)
                with calls_replaced(parts, look):
                    look.backward(target(*inputs, **named))
        except dynamo.BackendCompilerFailed as error:
            raise error.inner_exception from None
        return look

    def left_out(self) -> tuple[str, ...]:
        """Memory that the optimizer and the loop will take on the GPU that is planned for, and that no plan counts."""
        parameters, config = self.parameters, self.config
        if not parameters or (config.reserve != "auto" and self.state is None):
            return ()
        device = str(parameters[0].device)
        if hardware_of(config.hardware, device).source == "cpu":
            return ()
        state = 0 if device.startswith("cuda") or self.state is not None else state_bytes(parameters)
        counted = [f'{format_bytes(state)} of optimizer state (reserve="{format_bytes(state)}" counts it)'] * bool(state)
        gradients = format_bytes(sum(p.numel() * p.element_size() for p in parameters))
        counted.append(f"gradients that stay from one backward to the next ({gradients} where several are accumulated)")
        counted.append("fp32 copies of parameters that a mixed-precision wrapper keeps")
        named = '; optimizer="adamw", another name or the optimizer counts its state' if state else ""
        return (f"not counted: {', '.join(counted)}{named}",)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that was followed once with fake tensors, to be planned for any hardware: graphs, calls and memory outside are the
    same on each."""

    explanation: Explanation
    look: StepLook
    breaks: int
    notes: tuple[str, ...]

    def planned(self, config: OffloadConfig) -> OffloadReport:
        """The step's plan. config: the explanation's, or the same for other hardware.

        Raises:
            BudgetError: no plan of the step meets the budget.
        """
        explained = replace(self.explanation, config=config)
        on_gpu = any(parameter.device.type == "cuda" for parameter in explained.parameters)
        reserve = 0 if explained.state is not None or not on_gpu else state_bytes(explained.parameters)
        found = plan_look(self.look, config, explained.state, reserve if config.reserve == "auto" else None)
        return OffloadReport(
            plans=found.plans,
            graph_breaks=self.breaks,
            calls=found.calls,
            notes=(*self.notes, *explained.left_out()),
            step=found.step,
            ledger=found.ledger,
            keep_ledger=found.keep_ledger,
            budget_bytes=found.step.budget_bytes,
        )


@contextmanager
def _garbage_stays_young() -> Iterator[None]:
    """Collect no garbage at times that depend on what else the process does.

    Dynamo's tracing leaves cycles that hold tensors, and Dynamo collects the young ones after each compile. A collection in
    between makes them old: they would count as memory of the step.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _runs_once(unknown: BaseException) -> str:
    """A note that the forward is run, which is also said now."""
    again = f"{_place(unknown)} reads a value that depends on parameters: the forward was run once on the CPU"
    say(f"explain: {again.replace('was run', 'is run')}")
    return again


class SeveralGraphsError(Exception):
    """A graph is not all that is trained: the step is planned."""


def _stop_at_part(graph: Graph) -> None:
    if may_join(graph) and (graph.limits.downstream or graph.fragment):
        raise SeveralGraphsError


def _nbytes_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors among these, each once."""
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _target(model: Any) -> Any:
    return model.forward if isinstance(model, nn.Module) else model


def compiled_parts(model: Any) -> list[nn.Module]:
    """Modules inside a model that are compiled, and in no other compiled one."""
    found: list[nn.Module] = []

    def visit(module: nn.Module, seen: set[int]) -> None:
        for child in module.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            if compiled_call_of(child):
                found.append(child)
            else:
                visit(child, seen)

    if isinstance(model, nn.Module) and not compiled_call_of(model):
        visit(model, {id(model)})
    return found


def compiled_call_of(module: nn.Module) -> bool:
    """Whether a call of this module runs what torch compiled."""
    return isinstance(module, dynamo.OptimizedModule) or modules.compiled_call(module) is not None


@contextmanager
def calls_replaced(parts: Sequence[nn.Module], backend: Any) -> Iterator[None]:
    """Have compiled modules be compiled by another backend for a while, each call by itself; None: by none, as what calls them
    is compiled."""

    def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
        return call if backend is None else dynamo.compile_isolated(call, backend)

    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(modules.compiled_as(part, compiled))
        yield


def _look(
    model: Any, config: OffloadConfig, values: Values, args: tuple[Any, ...], kwargs: dict[str, Any], stops: bool
) -> tuple[_Graphs, BaseException | None]:
    """The graphs that a forward runs, and the error at which it stops if it needs an unknown value."""
    graphs = _Graphs(config, stops)
    with torch.random.fork_rng(devices=[]), _fake_world(model, values), calls_replaced(compiled_parts(model), None):
        inputs, named = tree_map_only(torch.Tensor, values.fake, (args, kwargs))
        try:
            dynamo.compile_isolated(_target(model), graphs)(*inputs, **named)
        except dynamo.BackendCompilerFailed as error:
            raise error.inner_exception from None
        except UNKNOWN as error:
            return graphs, error
    return graphs, None


def _places_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """The device types of the tensors of the model and of its inputs, and "fake"."""
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    tensors += [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    return {"fake" if isinstance(tensor, FakeTensor) else tensor.device.type for tensor in tensors} or {"cpu"}


def _place(error: BaseException) -> str:
    """The last line of code outside the package that an error passed, such as "model.py:12 in forward"."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*inside, "<"))]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else "the model"


def _ends_at(error: BaseException, graphs: _Graphs, where: set[str]) -> str:
    """A note that says what is not planned, which value is missing, and the remedy.

    Raises:
        ConfigError: nothing was planned before.
    """
    asks = f"{_place(error)} asks for a value ({error}) that is not known"
    why = "an operation before it has no value on a CPU" if where == {"cpu"} else f"tensors are on: {', '.join(sorted(where))}"
    remedy = (
        "Give inputs with values on the CPU (parameters too, where the value depends on them), explain the parts before and "
        "after it, or compile the model and look at graphoffload.last_plans() after a step."
    )
    if not graphs.plans:
        nothing = f"explain() plans nothing: {asks} ({why}), and no graph before it saves anything."
        raise ConfigError(f"{nothing} {remedy}") from error
    planned = f"{len(graphs.plans)} graph{'s' * (len(graphs.plans) != 1)} before it"
    return f"{asks} ({why}): planned are the {planned}, and nothing after. {remedy}"


class _Graphs:
    """A backend that plans every graph by itself and runs it with fake tensors. stops: at the first one that is a part."""

    def __init__(self, config: OffloadConfig, stops: bool) -> None:
        self.config, self.stops = config, stops
        self.plans: list[Plan] = []
        self.calls: Counter[str] = Counter()
        self.count = 0
        self.__name__ = "graphoffload_explain"

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.count += 1
        plan, compiled = plan_graph(gm, example_inputs, self.config, _stop_at_part if self.stops else None)
        if plan is None:
            return compiled
        self.plans.append(plan)

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            self.calls[plan.key] += 1
            return compiled(*args)

        return run

    def judge(self, model: Any) -> None:
        """The warnings of the first backward, from the model's own tensors and the bytes that all calls keep."""
        if not self.config.has_budget:
            return
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        judge(self.calls, resolve_limits(self.config, tensors))


@contextmanager
def _fake_world(model: Any, values: Values) -> Iterator[None]:
    """The fake-tensor mode of `values`, with the model's parameters and buffers replaced by fakes for its duration."""
    if not isinstance(model, nn.Module):
        with values.readable():
            yield
        return
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(value) not in seen:
            seen[id(value)] = values.fake(value)
        tensors[name] = seen[id(value)]
    with modules.with_tensors(model, tensors), values.readable():
        yield
