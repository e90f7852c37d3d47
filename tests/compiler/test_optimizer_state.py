"""Optimizer state that is still to come is left room for: that of this model's parameters, as their optimizers will make it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import graphoffload
from graphoffload.compiler import compile_variant
from graphoffload.compiler import device_limits as limits
from graphoffload.compiler.optimizer_state import state_bytes, unmade_state_bytes
from graphoffload.compiler.partitioner import OffloadPartitioner
from graphoffload.compiler.session import CompileSession
from graphoffload.facts.limits import Limits
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import registry
from graphoffload.torch_internals import allocator, partitioning

WIDTH = 64
GIB = 2**30


class Model(nn.Module):
    """Two layers of one shape."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))).square()
        return out


def nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def state_of(*parameters: Tensor, copies: int = 2) -> int:
    """In whole blocks of the allocator, with a counter of steps a parameter."""
    return sum(512 * (copies * -(-p.nbytes // 512) + 1) for p in parameters) if copies else 0


def all_of(model: nn.Module, copies: int = 2) -> int:
    return state_of(*model.parameters(), copies=copies)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def to_come(model: nn.Module) -> int:
    return state_bytes(model.parameters())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """State is left room for, as on a GPU."""
    monkeypatch.setattr(limits, "_is_gpu", lambda _: True)


@pytest.fixture(autouse=True)
def _only_optimizers_of_this_test() -> None:
    gc.collect()


def test_an_optimizer_of_another_model_says_nothing() -> None:
    """One step of a tiny model was enough for every later model to get no room."""
    other = Model()
    optimizer = torch.optim.AdamW(other.parameters())
    trained(other, optimizer)
    model = Model()
    assert to_come(model) == all_of(model)
    assert to_come(other) == 0


def test_state_is_to_come_until_it_is_there_and_again_when_it_is_dropped() -> None:
    model = Model()
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters())
        assert to_come(model) == all_of(model)
        trained(model, optimizer)
        assert to_come(model) == 0
        saved = optimizer.state_dict()
        del optimizer
        gc.collect()
    assert to_come(model) == all_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved)
    assert to_come(model) == 0, "a run that goes on has its state before its first step"


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        pytest.param(torch.optim.AdamW, 2, id="adamw"),
        pytest.param(lambda p: torch.optim.AdamW(p, amsgrad=True), 3, id="amsgrad"),
        pytest.param(torch.optim.SGD, 0, id="sgd"),
        pytest.param(lambda p: torch.optim.SGD(p, momentum=0.9), 1, id="momentum"),
        pytest.param(torch.optim.RMSprop, 1, id="rmsprop"),
        pytest.param(lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3, id="rmsprop with all"),
        pytest.param(torch.optim.ASGD, 1, id="asgd"),
        pytest.param(torch.optim.Adadelta, 2, id="adadelta"),
        pytest.param(torch.optim.Adamax, 2, id="adamax"),
        pytest.param(torch.optim.NAdam, 2, id="nadam"),
        pytest.param(torch.optim.RAdam, 2, id="radam"),
        pytest.param(torch.optim.Rprop, 2, id="rprop"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_expected_is_what_the_optimizer_makes(
    make: Callable[[Any], torch.optim.Optimizer], copies: int, dtype: torch.dtype
) -> None:
    """In the parameters' own dtype: torch's optimizers make their state like the parameter."""
    model = Model(dtype)
    optimizer = make(model.parameters())
    expected = to_come(model)
    assert expected == all_of(model, copies)
    trained(model, optimizer)
    made = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim())
    assert made == copies * nbytes(model)
    assert to_come(model) == 0


class Container(torch.optim.Optimizer):
    """torchtitan's: an optimizer for each part of a model; the container lists all parameters and never has state."""

    def __init__(self, parts: list[nn.Module], **options: Any) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), **options) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], options)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """accelerate's: groups and state are those of the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Both(torch.optim.Optimizer):
    """Muon as it is often written: AdamW inside for some parameters, state of its own for the others."""

    def __init__(self, own: Any, others: Any) -> None:
        self.inner = {"adamw": torch.optim.AdamW(others)}
        super().__init__([*own, *others], {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.inner["adamw"].step()
        inside = {id(p) for p in self.inner["adamw"].param_groups[0]["params"]}
        for parameter in self.param_groups[0]["params"]:
            if id(parameter) not in inside:
                self.state[parameter] = {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: Container([model.first, model.second], lr=1e-3), id="container"),
        pytest.param(lambda model: Wrapper(torch.optim.AdamW(model.parameters())), id="wrapper"),
        pytest.param(lambda model: Wrapper(Wrapper(torch.optim.AdamW(model.parameters()))), id="wrapped twice"),
        pytest.param(lambda model: Both(list(model.first.parameters()), list(model.second.parameters())), id="both"),
    ],
)
def test_an_optimizer_inside_another_one_counts_once(make: Callable[[Model], torch.optim.Optimizer]) -> None:
    """Before its first step, and after it, where the outer one still has none: under torchtitan, 16.9 GiB that never came."""
    model = Model()
    optimizer = make(model)
    device = next(model.parameters()).device
    assert to_come(model) == unmade_state_bytes(device) == all_of(model)
    trained(model, optimizer)
    assert to_come(model) == unmade_state_bytes(device) == 0


@pytest.mark.usefixtures("counted")
def test_what_is_not_trained_has_no_state() -> None:
    model = Model()
    model.first.requires_grad_(False)
    x = torch.ones(2, WIDTH, requires_grad=True)
    config = OffloadConfig(hardware="h200-sxm")
    found = limits.resolve_limits(config, [x, *model.parameters(), x * 2])
    assert found.reserve_bytes == all_of(model.second), "an input that needs a gradient is nobody's parameter"
    optimizer = torch.optim.AdamW([x])
    assert limits.resolve_limits(config, [x]).reserve_bytes == state_of(x), "unless an optimizer holds it"
    del optimizer


def test_fake_parameters_stand_for_real_ones() -> None:
    """explain() of a model that is being trained: its state is on the device already."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with FakeTensorMode():
        fakes = [torch.empty(p.shape) for p in model.parameters()]
        others = [torch.empty(p.shape) for p in model.parameters()]
    trained(model, optimizer)
    assert state_bytes(fakes) == 0
    assert state_bytes([*fakes, *others]) == all_of(model), "one for one"
    assert state_bytes([p.to("meta") for p in fakes]) == all_of(model)


# On a GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of 100 GiB, as torch would describe it, with 40 GiB allocated."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 40 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 40 * GIB)
    return FakeTensorMode()


def test_on_a_gpu_only_what_does_not_exist_is_left_room_for(gpu: FakeTensorMode) -> None:
    config = OffloadConfig(hardware="h100-sxm")
    with gpu:
        large = nn.Parameter(torch.empty(GIB, dtype=torch.bfloat16, device="cuda"))
        before = limits.resolve_limits(config, [large])
        assert before.static_bytes == 40 * GIB
        assert before.reserve_bytes == 2 * 2 * GIB + 512, "two copies in the parameter's dtype"
        optimizer = torch.optim.AdamW([large])
        optimizer.state[large] = {"exp_avg": large, "exp_avg_sq": large}
        after = limits.resolve_limits(config, [large])
    assert after.reserve_bytes == 0
    assert before.device_budget_bytes is not None
    assert after.device_budget_bytes is not None
    assert after.device_budget_bytes == 98 * GIB
    pieces = after.device_budget_bytes - before.device_budget_bytes
    assert pieces == before.reserve_bytes // 16, "state lands between activations: more is left for what the allocator cuts off"


def test_a_reserve_that_is_given_is_taken(gpu: FakeTensorMode) -> None:
    with gpu:
        large = nn.Parameter(torch.empty(GIB, dtype=torch.bfloat16, device="cuda"))
        found = limits.resolve_limits(OffloadConfig(hardware="h100-sxm", reserve="3GiB", device_budget="50GiB"), [large])
    assert found.reserve_bytes == 3 * GIB
    assert found.device_budget_bytes == 50 * GIB


@pytest.mark.parametrize(
    ("budget", "by_pages", "expected"),
    [("50GiB", False, 4 * 2**20), ("41GiB", False, 2 * 2**20), ("39GiB", False, 0), ("50GiB", True, 0), ("auto", False, 0)],
)
def test_a_given_budget_has_room_for_ends_of_blocks(
    gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, budget: str, by_pages: bool, expected: int
) -> None:
    """Torch's allocator does not cut them off, and counts them; unless it maps pages. "auto" has a margin."""
    monkeypatch.setattr(allocator, "maps_by_pages", lambda: by_pages)
    config = OffloadConfig(hardware="h100-sxm", reserve=0, device_budget=budget)
    with gpu:
        found = limits.resolve_limits(config, [torch.empty(1, device="cuda")])
    assert found.static_bytes == 40 * GIB + expected


# From the backend to the plan


def backend(**fields: Any) -> graphoffload.OffloadBackend:
    return graphoffload.OffloadBackend(**{"inner": "aot_eager", "hardware": "h200-sxm", "min_tensor_bytes": 0, **fields})


@pytest.mark.usefixtures("counted")
def test_limits_are_resolved_once_on_what_the_user_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitioner asked fake tensors which of them are trained, and was told none."""
    seen: list[list[Any]] = []
    resolve = limits.resolve_limits

    def watching(config: OffloadConfig, tensors: Any, *rest: Any) -> Limits:
        seen.append(list(tensors))
        return resolve(config, seen[-1], *rest)

    for module in (compile_variant, graphoffload.compiler.session):
        monkeypatch.setattr(module, "resolve_limits", watching)
    model = Model()
    model.compile(backend=backend())
    model(torch.ones(2, WIDTH)).sum().backward()
    assert len(seen) == 1
    assert {id(p) for p in model.parameters()} <= set(map(id, seen[0]))
    plan = registry.last_plans()[-1]
    assert plan.prediction.reserve_bytes == all_of(model)


@pytest.mark.usefixtures("counted")
def test_room_is_left_on_a_whole_model_by_default() -> None:
    """A model that fits alone, and does not beside its optimizer's state, is planned to fit beside it."""
    model, x = nn.Sequential(*[Model() for _ in range(4)]), torch.ones(512, WIDTH)
    alone = graphoffload.explain(model, backend(reserve=0).config)(x)
    budget = alone.predicted_peak_bytes + nbytes(model)
    assert not graphoffload.explain(model, backend(reserve=0, device_budget=budget).config)(x).plans[0].changes_anything
    report = graphoffload.explain(model, backend(device_budget=budget).config)(x)
    assert report.plans[0].changes_anything
    assert report.reserve_bytes == all_of(model)
    assert report.predicted_peak_bytes + report.reserve_bytes <= budget


@pytest.mark.usefixtures("counted", "kernels_that_do_nothing")
@pytest.mark.parametrize("entry", ["inductor", "functorch"])
def test_a_partitioner_of_its_own_finds_what_is_trained(entry: str) -> None:
    """It sees the joint graph alone: trained is what a gradient is made of, and what lies at one address from call to call."""
    model, x = Model(), torch.ones(2, WIDTH, requires_grad=entry == "inductor")
    model.first.bias.requires_grad_(False)
    partitioner = OffloadPartitioner(OffloadConfig(hardware="h200-sxm"))
    if entry == "inductor":
        options = {"custom_partitioner_fn": partitioner, "reorder_for_peak_memory": False}
        compiled: Any = torch.compile(model, options=options)
    else:
        from functorch.compile import aot_module

        compiled = aot_module(model, fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: g, partition_fn=partitioner)
    compiled(x).sum().backward()
    plan = registry.last_plans()[-1]
    assert plan.prediction.reserve_bytes == state_of(*(p for p in model.parameters() if p is not model.first.bias))


class _Tuple(Model):
    """aot_module_simplified asks for a tuple."""

    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x),)


def test_what_must_be_a_parameter_and_what_may_be_trained() -> None:
    """A frozen parameter is one of the first alone, an input with a gradient one of the second alone; and an input by its
    position is neither."""
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    found: list[tuple[set[str], set[str], set[str]]] = []

    def look(joint: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        graph = joint.graph
        values = {id(node.meta["val"]): node.name for node in graph.find_nodes(op="placeholder")}
        trained = {values[id(value)] for value in partitioning.may_be_trained(graph, {})}
        found.append((set(partitioning.must_be_parameters(graph, ())), trained, set(partitioning.placeholders_at(graph, {0}))))
        return partitioning.min_cut(joint, joint_inputs, kwargs)

    model, x = _Tuple(), torch.ones(2, WIDTH, requires_grad=True)
    model.first.bias.requires_grad_(False)
    run: Any = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    compiled = aot_module_simplified(model, (x,), fw_compiler=run, bw_compiler=run, partition_fn=look)
    compiled(x)[0].sum().backward()
    count = len(list(model.parameters()))
    [(parameters, trained, first)] = found
    assert len(parameters) == count
    assert len(trained) == count
    assert len(parameters & trained) == count - 1, "all but the frozen one"
    assert len(first) == 1
    assert first == trained - parameters


def test_a_pickled_partitioner_has_what_decides_and_not_every_byte() -> None:
    """Its pickle is in torch's cache key."""
    first = Limits(device_budget_bytes=10 * GIB + 5, static_bytes=3, reserve_bytes=GIB, host_budget_bytes=GIB)
    twin = replace(first, device_budget_bytes=10 * GIB + 9, static_bytes=4)

    def pickled(found: Limits) -> bytes:
        return pickle.dumps(OffloadPartitioner(session=CompileSession(OffloadConfig(), found, key="k", name="graph0")))

    assert pickled(first) == pickled(twin)
    for other in (replace(first, reserve_bytes=0), replace(first, shared=True), replace(first, downstream=True)):
        assert pickled(first) != pickled(other)
    loaded = pickle.loads(pickled(first))
    assert isinstance(loaded, OffloadPartitioner)
    assert (loaded.config, loaded.key) == (OffloadConfig(), "k")
    assert copy.deepcopy(loaded) is loaded


# What is said


@pytest.mark.usefixtures("counted")
def test_what_is_reserved_is_in_the_numbers() -> None:
    model, x = Model(), torch.ones(512, WIDTH)
    state = all_of(model)
    without = graphoffload.explain(model, backend(reserve=0, policy="offload").config)(x).plans[0]
    (plan,) = graphoffload.explain(model, backend(policy="offload").config)(x).plans
    assert plan.prediction.predicted_peak_bytes == without.prediction.predicted_peak_bytes, "the graph's own"

    def shown(number: int) -> str:
        return f"{number / 1024:.1f}"

    assert f"predicted peak {shown(plan.prediction.predicted_peak_bytes + state)} KiB" in plan.summary
    assert f"(keep-all {shown(plan.prediction.keep_peak_bytes + state)} KiB)" in plan.summary
    assert plan.summary.endswith(f"; {shown(state)} KiB of the peak are reserved for optimizer state")
    assert "reserved" not in without.summary
    measured = graphoffload.report.offload_report.Measured(peak_bytes=plan.prediction.predicted_peak_bytes + state)
    report = graphoffload.OffloadReport(plans=(plan,), measured=measured)
    peak = shown(plan.prediction.predicted_peak_bytes + state)
    assert f"peak      predicted {peak} KiB ({shown(state)} KiB of it reserved, keep-all" in str(report)
    given = graphoffload.explain(model, backend(policy="offload", reserve="1KiB").config)(x).plans[0]
    assert given.summary.endswith("; 1.00 KiB of the peak are reserved")
    assert type(plan).from_json(plan.to_json()) == plan


def test_explain_says_what_it_leaves_out() -> None:
    model, x = Model(), torch.ones(2, WIDTH)
    text = " ".join(str(graphoffload.explain(model, backend().config)(x)).split())
    state = f"{all_of(model) / 1024:.1f} KiB"
    assert f'not counted: {state} of optimizer state (reserve="{state}" counts it), ' in text
    assert f"gradients that stay from one backward to the next ({nbytes(model) / 1024:.1f} KiB where several are" in text
    optimizer = torch.optim.SGD(model.parameters())
    assert "of optimizer state" not in str(graphoffload.explain(model, backend().config)(x)), "SGD keeps nothing"
    del optimizer
    assert "not counted" not in str(graphoffload.explain(model, backend(reserve=0).config)(x))
    assert "not counted" not in str(graphoffload.explain(model, backend(hardware="cpu").config)(x)), "nothing to fit"


def test_state_on_another_device_is_not_to_come_here() -> None:
    here, there = torch.nn.Parameter(torch.zeros(1024)), torch.nn.Parameter(torch.zeros(4096, device="meta"))
    optimizer = torch.optim.AdamW([here, there])
    before = unmade_state_bytes(torch.device("cpu"))
    assert before >= 2 * 4096
    assert unmade_state_bytes(torch.device("meta")) >= 2 * 4 * 4096
    here.grad = torch.ones_like(here)
    optimizer.step()
    assert before - unmade_state_bytes(torch.device("cpu")) >= 2 * 4096, "it is there now"


@pytest.mark.parametrize(("share", "budget"), [(1.0, 98 * GIB), (0.5, 49 * GIB)])
def test_a_process_that_may_allocate_a_part(
    gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, share: float, budget: int
) -> None:
    """What torch.cuda.set_per_process_memory_fraction leaves is all there is, less 2 % of it."""
    monkeypatch.setattr(limits.allocator, "allowed_share", lambda _: share)
    assert limits.device_budget_now(torch.device("cuda")) == budget


@pytest.mark.parametrize(
    ("share", "by_pages", "budget"),
    [(1.0, False, 98 * GIB - 100 * GIB // 32), (1.0, True, 98 * GIB - 100 * GIB // 64), (0.25, True, 24.5 * GIB - 0.75 * GIB)],
)
def test_a_step_leaves_room_for_memory_in_pieces(
    gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, share: float, by_pages: bool, budget: int
) -> None:
    """A 32nd, or a 64th where memory is mapped by pages of 20 MiB; as many pages on a small device as on a large one."""
    monkeypatch.setattr(limits.allocator, "allowed_share", lambda _: share)
    monkeypatch.setattr(limits.allocator, "maps_by_pages", lambda: by_pages)
    assert limits.device_budget_now(torch.device("cuda"), of_a_step=True) == budget
