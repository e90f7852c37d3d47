"""explain() of a model that is compiled in several graphs: one step is planned, as training plans it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphoffload
from graphoffload.api import explanation
from graphoffload.compiler import step_plan, step_planning, step_runs
from graphoffload.compiler.optimizer_state import NAMES, named_state_bytes
from graphoffload.errors import BudgetError, ConfigError
from graphoffload.options.config import OffloadConfig
from graphoffload.planner.step.facts import StepFacts
from graphoffload.report.offload_report import OffloadReport
from graphoffload.runtime import registry
from graphoffload.torch_internals.fake_tensors import FakeTensorMode
from graphoffload.units import format_bytes

WIDTH, TOKENS, WORDS, BLOCKS = 64, 1024, 100, 6
MIB = 2**20
HIDDEN = TOKENS * WIDTH * 4  # bytes of hidden states


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + down


class Model(nn.Module):
    """An eager embedding, blocks, and an eager head with its loss."""

    def __init__(self, blocks: int = BLOCKS, breaks: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.breaks = breaks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return functional.cross_entropy(self.head(x), ids)


def options(budget: Any = "8MiB", **more: Any) -> dict[str, Any]:
    given = {"inner": "aot_eager", "device_budget": budget, "hardware": "h200-sxm", "min_tensor_bytes": 1, "reserve": "auto"}
    return {**given, **more}


def ids() -> Tensor:
    return torch.randint(0, WORDS, (TOKENS,), generator=torch.Generator().manual_seed(0))


def by_compile(model: Model) -> Model:
    for layer in model.layers:
        layer.compile(backend="graphoffload", options=options())
    return model


def by_offload(model: Model) -> Model:
    for layer in model.layers:
        graphoffload.offload(layer, **options())
    return model


def by_torch_compile(model: Model) -> Model:
    for place, layer in enumerate(model.layers):
        model.layers[place] = torch.compile(layer, backend="graphoffload", options=options())  # type: ignore[assignment]
    return model


WAYS: dict[str, Callable[[Model], Model]] = {
    "compile": by_compile, "offload": by_offload, "torch.compile": by_torch_compile
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    registry.forget()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
def test_blocks_compiled_one_by_one_are_one_step(way: str) -> None:
    model = WAYS[way](Model())
    calls = [module._compiled_call_impl for module in model.modules()]
    report = graphoffload.explain(model, options(), optimizer="adamw")(ids())
    step = report.step
    assert step is not None
    assert len(step.calls) == BLOCKS
    assert len({graph for graph, _ in step.calls}) == 1, "equal blocks are one graph"
    assert sum(report.calls) == BLOCKS
    assert {plan.variant for plan in report.plans} == {variant for _, variant in step.calls}
    assert report.predicted_peak_bytes == step.predicted_peak_bytes <= 8 * MIB < report.keep_peak_bytes
    assert report.predicted_slowdown == pytest.approx(step.predicted_time_s / step.keep_time_s - 1.0)
    assert report.lower_bound_slowdown is not None
    assert 0.0 <= report.lower_bound_slowdown <= report.predicted_slowdown
    assert (report.offloaded_bytes, report.kept_bytes) == (step.offloaded_bytes, step.kept_bytes)
    assert report.graph_breaks == 0
    assert calls == [module._compiled_call_impl for module in model.modules()], "the model runs as it was compiled"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert OffloadReport.from_json(report.to_json()) == report


def test_a_graph_break_makes_a_step() -> None:
    report = graphoffload.explain(Model(breaks=True), options())(ids())
    assert report.step is not None
    assert len(report.step.calls) >= BLOCKS
    assert report.predicted_peak_bytes <= 8 * MIB
    text = str(report)
    assert text.count("step of ") == 1, "the line is said once"
    assert "was planned for each of" not in text


def test_one_graph_is_planned_as_before() -> None:
    report = graphoffload.explain(Model(), options())(ids())
    assert report.step is None
    assert [plan.variant for plan in report.plans] == [""]
    part = graphoffload.explain(by_compile(Model(1)), options())(ids())
    assert part.step is None, "one call of one graph is no step"


def facts_of(model: Any, *args: Any) -> StepFacts:
    config = OffloadConfig.from_options(options())
    look = explanation.Explanation(model, config, args, {}, list(model.parameters()), 0).looked(
        explanation.compiled_parts(model)
    )
    return look.facts(look.at(config), 0)


def looked(model: Model) -> StepFacts:
    return facts_of(model, ids())


def test_memory_outside_is_counted() -> None:
    """By hand: parameters and ids; the input of the block that runs, since later ones are activations; gradients as they
    appear."""
    model = by_compile(Model())
    facts = looked(model)
    static = sum(-(-p.nbytes // 512) * 512 for p in model.parameters()) + TOKENS * 8
    forward = [call.forward_outside_bytes for call in facts.calls]
    assert forward == [static + HIDDEN] * BLOCKS
    backward = [call.backward_outside_bytes for call in facts.calls]
    block = sum(-(-p.nbytes // 512) * 512 for p in model.layers[0].parameters())
    head = sum(-(-p.nbytes // 512) * 512 for p in model.head.parameters())
    for index, outside in enumerate(backward):
        after = BLOCKS - 1 - index  # blocks whose backward is done: their gradients are there
        fewest = static + head + block * after
        assert fewest <= outside <= fewest + 3 * HIDDEN, index
    logits = TOKENS * WORDS * 4
    assert facts.calls[-1].before_backward.outside_peak_bytes >= backward[-1] + logits, "the loss, in eager code"


def test_what_torch_makes_to_find_shapes_does_not_count() -> None:
    """A fake operation that torch knows no shapes of is taken apart the first time: the parts were counted, once."""
    model = by_compile(Model())
    FakeTensorMode.cache_clear()
    first = looked(model)
    assert [call.before_backward for call in first.calls] == [call.before_backward for call in looked(model).calls]
    logits = TOKENS * WORDS * 4
    assert first.calls[-1].before_backward.outside_peak_bytes <= first.calls[-1].backward_outside_bytes + 4 * logits


def test_training_makes_the_same_plan_of_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device would measure is given to the training process: its plan is the one that was explained."""
    model = by_compile(Model())
    report = graphoffload.explain(model, options(), optimizer="sgd")(ids())
    facts = looked(model)
    monkeypatch.setattr(step_planning, "facts_of", lambda runs, graphs, limits: facts)
    monkeypatch.setattr(step_plan, "_prepare_host", lambda *_: None)
    registry.forget()
    for _ in range(3):
        model(ids()).backward()
    trained = OffloadReport(plans=tuple(graphoffload.last_plans()))
    assert report.step is not None
    lines = [line.replace(report.step.calls[0][0], "graph") for line in report.step.summary.splitlines()]
    ran = {plan.graph for plan in trained.plans}
    assert [plan.summary.replace(ran.copy().pop(), "graph") for plan in trained._running][:1] == lines
    for name in ("predicted_peak_bytes", "keep_peak_bytes", "predicted_slowdown", "lower_bound_slowdown"):
        assert getattr(trained, name) == getattr(report, name), name
    assert len(trained.plans) > 1, "a step's numbers are said once, whatever number of variants have them"
    assert str(trained).count("step of ") == 1


def test_the_optimizers_state_counts() -> None:
    model = by_compile(Model())
    without = graphoffload.explain(model, options("auto"))(ids())
    report = graphoffload.explain(model, options("auto"), optimizer="adamw")(ids())
    assert report.ledger is not None
    assert report.keep_ledger is not None
    assert report.ledger.optimizer_bytes == named_state_bytes("adamw", model.parameters()) > 0
    assert report.predicted_peak_bytes == without.predicted_peak_bytes + report.ledger.optimizer_bytes
    assert report.ledger.total_bytes == report.predicted_peak_bytes
    assert report.keep_ledger.total_bytes == report.keep_peak_bytes
    assert min(report.ledger.activations_bytes, report.ledger.outside_bytes, report.ledger.gradients_bytes or 0) >= 0
    assert "of optimizer state (reserve=" in str(without)
    assert "of optimizer state (reserve=" not in str(report)
    assert without.ledger is not None
    assert without.ledger.optimizer_bytes is None
    assert any(line.startswith("optimizer state") and "not counted" in line for line in str(without).splitlines())


def test_what_does_not_fit_is_said_with_numbers() -> None:
    model = by_compile(Model())
    report = graphoffload.explain(model, options("9MiB"), optimizer="adamw")(ids())
    keep, plan = report.keep_peak_bytes, report.predicted_peak_bytes
    assert (
        f"keep-all does not fit: it needs {format_bytes(keep)}, {format_bytes(keep - 9 * MIB)} more than the 9.00 MiB that "
        f"there are; the plan fits with {format_bytes(plan)}"
    ) in str(report)
    assert "does not fit" not in str(graphoffload.explain(model, options("1GiB"), optimizer="adamw")(ids()))
    with pytest.raises(BudgetError, match="no plan of the training step was found"):
        graphoffload.explain(model, options("1MiB"), optimizer="adamw")(ids())


def test_the_ledger_of_one_graph() -> None:
    model = Model()
    report = graphoffload.explain(model, options("16MiB"), optimizer=torch.optim.AdamW(model.parameters()))(ids())
    assert report.step is None
    assert report.ledger is not None
    assert report.ledger.optimizer_bytes == report.reserve_bytes == named_state_bytes("adamw", model.parameters())
    assert report.ledger.gradients_bytes is None
    assert report.ledger.total_bytes == report.predicted_peak_bytes + report.reserve_bytes <= 16 * MIB
    assert "keep-all does not fit: it needs" in str(report)
    assert OffloadReport.from_json(report.to_json()) == report


def test_optimizers_by_name_keep_what_torchs_make() -> None:
    """The bytes of a name are those that the optimizer has made after a step."""
    model = Model(1)
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "sgd with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adafactor": torch.optim.Adafactor,
    }  # fmt: skip
    assert {*made, "muon"} == set(NAMES)
    for name, make in made.items():
        optimizer = make(list(model.parameters()))
        expected = named_state_bytes(name, model.parameters())
        assert named_state_bytes(optimizer, ()) == expected, f"{name} before its first step"
        model(ids()).backward()
        optimizer.step()
        real = sum(
            -(-value.nbytes // 512) * 512 for state in optimizer.state.values() for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        )  # fmt: skip
        slack = 512 * 3 * len(list(model.parameters()))  # step counters, and blocks of small tensors
        assert real <= expected + slack, name
        assert expected <= real + slack, name
        assert abs(named_state_bytes(optimizer, ()) - real) <= slack
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    assert matrices < named_state_bytes("muon", model.parameters()) < named_state_bytes("adamw", model.parameters())


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer='lion' is not known. Give a torch.optim.Optimizer, or one of: adam, "):
        graphoffload.explain(Model(), options(), optimizer="lion")
    with pytest.raises(ConfigError, match="optimizer=a dict is not known"):
        graphoffload.explain(Model(), options(), optimizer={})


def test_what_stays_eager_does_not_matter() -> None:
    """Two graphs of different blocks, and a block that is called twice."""

    class Twice(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in (*self.layers, self.layers[0]):
                x = layer(x)
            return functional.cross_entropy(self.head(x), ids)

    model = by_compile(Twice(2))
    report = graphoffload.explain(model, options())(ids())
    assert report.step is not None
    assert len(report.step.calls) == 3


def test_a_backward_that_cannot_be_followed_is_planned_graph_by_graph() -> None:
    class Dropped(Model):
        """The second block's output is not used."""

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            y = self.layers[0](x)
            self.layers[1](x)
            return functional.cross_entropy(self.head(y), ids)

    report = graphoffload.explain(by_compile(Dropped(2)), options("1GiB"))(ids())
    assert report.step is None
    assert report.plans
    assert "planned graph by graph, not as a step: the backwards of its graphs do not run once each" in str(report)


def test_one_compiled_module_is_no_step() -> None:
    model = Model(2)
    graphoffload.offload(model.layers[0], **options())
    report = graphoffload.explain(model, options())(ids())
    assert report.step is None
    assert "planned graph by graph" not in str(report), "there is one call, so nothing is missed"


def test_what_the_blocks_are_compiled_with_never_runs() -> None:
    """Where the step cannot be followed and the forward breaks, their own compiled code ran with fake tensors, and crashed."""

    class Breaks(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            y = self.layers[0](x)
            torch._dynamo.graph_break()
            self.layers[1](x)
            return functional.cross_entropy(self.head(y), ids)

    def refuse(*_: Any) -> Any:
        raise AssertionError("the block's own backend ran")

    model = Breaks(2)
    for layer in model.layers:
        layer.compile(backend=refuse)
    report = graphoffload.explain(model, options("1GiB"))(ids())
    assert report.step is None
    assert report.plans


def test_a_value_that_depends_on_parameters_is_computed_once() -> None:
    class Reads(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
                x = x * 2 if x.sum().item() > 1e9 else x
            return functional.cross_entropy(self.head(x), ids)

    report = graphoffload.explain(by_compile(Reads(3)), options())(ids())
    assert report.step is not None
    assert len(report.step.calls) == 3
    assert "reads a value that depends on parameters: the forward was run once on the CPU" in str(report)


def test_a_step_that_is_planned_again_is_reported_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants of the plan before stay compiled; their figures were added to the new ones."""
    model = by_compile(Model())
    facts = looked(model)
    monkeypatch.setattr(step_planning, "facts_of", lambda runs, graphs, limits: facts)
    registry.forget()
    lines = []
    try:
        for budget in ("", "1GiB"):
            if budget:
                graphoffload.set_budget(budget)
            for _ in range(4):
                model(ids()).backward()
            trained = OffloadReport(plans=tuple(graphoffload.last_plans()))
            lines.append([line for line in str(trained).splitlines() if line.startswith("step of ")])
    finally:
        step_runs.OVERRIDE.options.clear()
    assert [len(found) for found in lines] == [1, 1]
    assert "kept all" in lines[1][0]
    assert trained.predicted_peak_bytes == trained.keep_peak_bytes


class Whole(nn.Module):
    """The last part gives the loss and the logits, and only the loss has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Headed()])

    def forward(self, x: Tensor) -> Tensor:
        loss, _ = self.layers[1](self.layers[0](x))
        return loss


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return logits.square().mean(), logits


def test_zeros_for_logits_without_a_gradient_are_counted() -> None:
    """Autograd makes them before the backward of the part that returned the logits. It saves these too: they are its own."""
    model: Any = by_compile(Whole())  # type: ignore[arg-type]
    x = torch.ones(TOKENS, WIDTH)
    first, last = facts_of(model, x).calls
    logits = TOKENS * WORDS * 4
    before = first.forward_outside_bytes  # the hidden states between the two parts are an activation of the second
    assert before + logits <= last.backward_outside_bytes <= before + logits + 1024
