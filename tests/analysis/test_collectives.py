"""Collectives in a graph, in a process group of one: no plan runs one again, moves one, or copies what it is still writing."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.analysis.collectives import Collectives, collectives_of, is_unwaited
from graphoffload.analysis.costs import Operation, sent_bytes
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.compiler import pipeline
from graphoffload.facts.plan import Plan
from graphoffload.facts.refusals import Refusal
from graphoffload.monitor import caveats
from graphoffload.torch_internals import partitioning, processes
from graphoffload.torch_internals.collectives import is_wait

if not dist.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

WIDTH, ROWS = 16, 8
OPTIONS: dict[str, Any] = {"inner": "aot_eager", "min_tensor_bytes": 0, "hardware": "h200-sxm", "reserve": 0}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    """Sequence parallel: a norm of the shard, gathered for a product, and scattered again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        whole = functional.all_gather_tensor_autograd(self.norm(x), 0, dist.group.WORLD)
        part = self.down(torch.nn.functional.gelu(self.up(whole)))
        return x + functional.reduce_scatter_tensor_autograd(part, "sum", 0, dist.group.WORLD)


class Stack(nn.Module):
    """Three layers; `regions`: each is a checkpoint region."""

    def __init__(self, *, regions: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.regions = regions

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.regions else layer(x)
        return x


def step(backend: Any, *, regions: bool = False) -> list[Tensor]:
    """The gradients of one step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(regions=regions)
    model.compile(backend=backend)
    model(torch.randn(ROWS, WIDTH)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def under(*, regions: bool = False, **options: Any) -> tuple[Plan, list[Tensor]]:
    """The plan of a step under these options, and its gradients."""
    graphoffload.reset_stats()
    found = step(graphoffload.OffloadBackend(**{**OPTIONS, **options}), regions=regions)
    return graphoffload.last_plans()[-1], found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphPair]:
    """The rewritten graphs of each compile, as they are verified."""
    seen: list[GraphPair] = []
    verify = pipeline.verify_graphs

    def kept(pair: GraphPair, *arguments: Any) -> None:
        seen.append(pair)
        verify(pair, *arguments)

    monkeypatch.setattr(pipeline, "verify_graphs", kept)
    return seen


def test_what_a_gather_gave_is_offloaded_after_its_wait(graphs: list[GraphPair]) -> None:
    """It is one tensor, not two: the wait returns the collective's memory. Gradients are plain torch's to the bit."""
    plan, found = under(policy="offload")
    assert all(map(torch.equal, found, step("aot_eager")))
    gathered = [tensor for tensor in plan.saved.tensors if "wait_tensor" in tensor.name]
    assert len(gathered) == 3
    assert [d.action for d in plan.decisions if "wait_tensor" in d.name] == ["offload"] * 3
    forward = graphs[-1].forward.graph
    copied = [node.args[0] for node in forward.nodes if node.target is torch.ops.graphoffload.offload.default]
    assert sum(is_wait(node.target) for node in copied) == 3
    assert not any(map(is_unwaited, copied))
    assert graphoffload.stats()["offloads"] == graphoffload.stats()["reloads"] == len(plan.transfers)


@pytest.mark.parametrize("budget_share", [0.0, 0.5])
def test_every_plan_runs_the_same_collectives(graphs: list[GraphPair], budget_share: float) -> None:
    """Each of them once, in one order, whatever is recomputed."""
    keep, _ = under(policy="keep")
    least, _ = under(policy="recompute")
    assert any(decision.action == "recompute" for decision in least.decisions)
    again = [decision.reason for decision in least.decisions if "wait_tensor" in decision.name]
    assert again
    assert all("a collective" in why for why in again), again
    low, high = least.prediction.predicted_peak_bytes, keep.prediction.predicted_peak_bytes
    assert low is not None
    assert high is not None
    under(device_budget=int(high - (1 - budget_share) * (high - low)))
    orders = {(collectives_of(pair.forward.graph), collectives_of(pair.backward.graph)) for pair in graphs}
    assert len(graphs) == 3
    assert len(orders) == 1
    forward, backward = orders.pop()
    assert len(forward) == len(backward) == 2 * 2 * 3
    assert not set(forward) & set(backward)


def test_regions_with_collectives_stay_as_written(graphs: list[GraphPair]) -> None:
    """Relaxed for one rank's budget, backward would lack collectives that the other ranks wait for."""
    _, expected = under(regions=True, policy="keep")
    plan, found = under(regions=True, device_budget="1GiB")
    assert all(map(torch.equal, found, expected))
    orders = {(collectives_of(pair.forward.graph), collectives_of(pair.backward.graph)) for pair in graphs}
    assert len(graphs) == 2
    assert len(orders) == 1
    forward, backward = orders.pop()
    assert set(forward) & set(backward), "the user's regions run collectives again"
    assert any("they hold collectives" in note for note in plan.notes)


def test_the_joint_graphs_order_is_the_rule() -> None:
    """Two independent collectives that change places are a violation, and so is one that is missing, or runs twice."""

    def graph_of(*names: str) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        for name in names:
            graph.create_node("call_function", torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"), name=name)
        graph.output(x)
        return graph

    kept = Collectives(("a", "b"), ("c", "d"), ("a", "b", "c", "d"))
    assert not list(kept.violations(graph_of("a", "b"), graph_of("c", "d")))
    assert "collective 0 of forward is b" in next(kept.violations(graph_of("b", "a"), graph_of("c", "d")))
    assert "collective 1 of backward is none" in next(kept.violations(graph_of("a", "b"), graph_of("c")))
    assert "collective 1 of backward is b" in next(kept.violations(graph_of("a", "b"), graph_of("c", "b", "d")))
    swapped = dataclasses.replace(kept, forward=("b", "a"))
    assert "another order than the joint graph" in next(swapped.violations(graph_of("b", "a"), graph_of("c", "d")))


class Read(nn.Module):
    """`y` is saved for backward, and the collective that reads it is waited for only after other work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return functional.all_reduce(y, "sum", dist.group.WORLD) + self.second(x)


def test_a_source_is_released_after_the_wait_for_the_collective_that_reads_it(graphs: list[GraphPair]) -> None:
    torch._dynamo.reset()
    model = Read()
    model.compile(backend=graphoffload.OffloadBackend(**OPTIONS, policy="offload"))
    model(torch.randn(ROWS, WIDTH)).sum()
    nodes = list(graphs[-1].forward.graph.nodes)
    wait = next(node for node in nodes if is_wait(node.target))
    source = wait.args[0].args[0]
    release = next(user for user in source.users if user.target is torch.ops.graphoffload.release.default)
    assert nodes.index(release) > nodes.index(wait)


@pytest.mark.parametrize(
    ("name", "given", "got", "sent"),
    [
        ("all_gather_into_tensor", 8, 32, 24 * 4),
        ("reduce_scatter_tensor", 32, 8, 24 * 4),
        ("all_reduce", 8, 8, 2 * 8 * 4),
        ("all_to_all_single", 8, 9, 8 * 4),
    ],
)
def test_a_collective_is_priced_by_what_it_sends(name: str, given: int, got: int, sent: int) -> None:
    target = getattr(torch.ops._c10d_functional, name).default
    assert sent_bytes(Operation(target, (torch.empty(given), 4, "no such group"), {}, torch.empty(got))) == sent


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 32), (4, 48)])
def test_an_all_reduce_sends_the_more_the_larger_its_group(ranks: int, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of n sends every part n - 1 times to add it up, and n - 1 times to tell of the sum."""
    target = torch.ops._c10d_functional.all_reduce.default
    group = types.SimpleNamespace(size=lambda: ranks)
    values = torch.empty(8)
    assert sent_bytes(Operation(target, (values, "sum", group), {}, values)) == sent
    monkeypatch.setattr("torch.distributed.distributed_c10d._resolve_process_group", {"tp": group}.__getitem__)
    assert sent_bytes(Operation(target, (values, "sum", "tp"), {}, values)) == sent


def test_an_all_reduce_whose_last_argument_is_its_result() -> None:
    """Its group is not known here, and the result that it writes to is one of its arguments."""
    values, out = torch.empty(8), torch.empty(8)
    target = torch.ops.symm_mem.one_shot_all_reduce_out.default
    assert sent_bytes(Operation(target, (values, "sum", "no such group", out), {}, out)) == 2 * 2 * 32


def test_torchs_partitioner_asks_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks cut a graph different numbers of times: a collective in there would hang."""
    asked: list[int] = []
    monkeypatch.setattr(dist, "all_gather_object", lambda *_: asked.append(1))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(caveats, "_warned_of_ranks", True)
    monkeypatch.setattr(processes, "default_group", lambda: None)  # or the compile waits for the other one
    with partitioning.config.patch(_sync_decision_cross_ranks=True):
        step(graphoffload.OffloadBackend(**OPTIONS, policy="offload"))
    assert not asked


def test_the_reason_names_the_collective() -> None:
    why = Refusal.COLLECTIVE_AGAIN.because(target="_c10d_functional.wait_tensor.default")
    assert "every other rank" in why
