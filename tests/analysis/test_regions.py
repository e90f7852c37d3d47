"""Regions that are compiled once and called often: each call's results are its own memory, an operand handed through is not."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphoffload
from graphoffload.analysis.regions import subgraph_of, with_regions
from graphoffload.analysis.storages import fake, storage_id
from graphoffload.errors import NotOffloadedWarning
from graphoffload.passes import prepare_joint as joint
from graphoffload.passes.prepare_joint import copy_graph
from graphoffload.passes.regions import give_own_memory
from graphoffload.testing.observed import observe

WIDTH = 32
Region = Callable[..., Any]


class Layers(nn.Module):
    """The same region for every layer, with weights of its own or shared ones."""

    def __init__(self, region: Region, *, shared: bool, count: int = 3) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(1 if shared else count)]
        self.weights = nn.ParameterList(weights)
        self.region, self.count = torch.compiler.nested_compile_region(region), count

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for layer in range(self.count):
            x = self.region(x, self.weights[layer % len(self.weights)])
            x = x[0] * x[1] if isinstance(x, tuple) else x
        return x.sin().sum()


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(x @ weight).exp() * x * 0.5


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(x) * x * 0.9


def several(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    left, right = (x @ weight).tanh().chunk(2, dim=-1)
    return torch.cat([right, left], dim=-1), x.tanh() * 0.9


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    return (x.reshape(-1, 4, WIDTH).transpose(0, 1).sin() @ weight).transpose(0, 1).reshape(-1, WIDTH).cos()


REGIONS = (product, pointwise, several, transposed)


@dataclass(frozen=True)
class Results:
    """What regions return goes; everything else stays."""

    def __call__(self, tensor: Any) -> str:
        return "offload" if tensor.name.startswith("getitem") and tensor.eligible else "keep"


def _choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_CPU_OFFLOAD if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


contexts = functools.partial(create_selective_checkpoint_contexts, _choose)


def tagged(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(product, x, weight, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(region: Region, backend: Any, *, shared: bool) -> list[Tensor]:
    """Loss and gradients of two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, found = Layers(region, shared=shared), []
    model.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(16, WIDTH, requires_grad=True)
        model.zero_grad()
        loss = model(x)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [loss.detach(), *(grad.clone() for grad in (x.grad, *grads) if grad is not None)]
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("region", REGIONS, ids=lambda region: str(region.__name__))
@pytest.mark.parametrize("policy", ["offload", "recompute", Results()], ids=["offload", "recompute", "results"])
def test_gradients_are_those_of_keep_all(region: Region, policy: Any, shared: bool) -> None:
    """To the bit. Before, the results of two calls were taken for one memory, of which one copy was made."""
    expected = step(region, "aot_eager", shared=shared)
    backend = graphoffload.OffloadBackend(policy=policy, min_tensor_bytes=0, inner="aot_eager", verify="checksum")
    with observe() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotOffloadedWarning)
        found = step(region, backend, shared=shared)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    if policy == "offload":
        assert seen.copied_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "region", [product, pytest.param(several, marks=pytest.mark.long)], ids=lambda region: str(region.__name__)
)
def test_under_inductor(region: Region) -> None:
    """Beside what aot_eager computes: torch 2.13 alone has wrong gradients of `several` under Inductor (docs/safety.md)."""
    expected = step(region, "aot_eager", shared=True)
    found = step(region, graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, verify="checksum"), shared=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert graphoffload.stats()["offloads"] > 0


@pytest.mark.parametrize("goal", ["budget", "slowdown"])
def test_planned_with_the_graph_around(goal: str) -> None:
    """A goal is met once, by one plan, not by every region for itself."""
    step(product, graphoffload.OffloadBackend(policy="keep", inner="aot_eager", hardware="h200-sxm", reserve=0), shared=True)
    keep_bytes = graphoffload.last_plans()[-1].prediction.predicted_peak_bytes
    options: dict[str, Any] = {"max_slowdown": 10.0} if goal == "slowdown" else {"device_budget": int(0.97 * keep_bytes)}
    before = len(graphoffload.last_plans())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = graphoffload.OffloadConfig(inner="aot_eager", min_tensor_bytes=0, hardware="h200-sxm", reserve=0, **options)
        found = step(product, graphoffload.OffloadBackend(config), shared=True)
    assert all(map(torch.equal, found, step(product, "aot_eager", shared=True)))
    assert len(graphoffload.last_plans()) == before + 1
    assert graphoffload.last_plans()[-1].offloaded_bytes > 0


def joint_of(region: Region, *, shared: bool) -> torch.fx.GraphModule:
    """The joint graph around regions, as a partitioner gets it."""
    seen: list[torch.fx.GraphModule] = []

    class Watching(graphoffload.OffloadPartitioner):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            if joint_inputs:
                seen.append(copy_graph(gm))
            return super().__call__(gm, joint_inputs, **kwargs)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def as_it_is(gm: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(gm.forward)

    partitioner = Watching(graphoffload.OffloadConfig(policy="keep", inner="aot_eager"))
    step(region, aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partitioner), shared=shared)
    return seen[0]


def test_memory_of_results_and_operands() -> None:
    """Results of two calls share no memory; a shared weight that backward needs stays the weight, in every call."""
    graph = joint_of(product, shared=True)
    give_own_memory(graph)
    calls = [node for node in graph.graph.nodes if subgraph_of(node) is not None and "fw" in str(node.args[1])]
    assert len(calls) == 3
    inputs = {storage_id(value): node for node in graph.graph.find_nodes(op="placeholder") if (value := fake(node)) is not None}
    found: list[int] = []
    handed_through = 0
    for call in calls:
        own = {
            storage_id(value) for user in call.users if user.target is operator.getitem and (value := fake(user)) is not None
        }
        operands = {storage_id(value) for node in call.args[2:] if (value := fake(node)) is not None}
        handed_through += len(own & set(inputs))
        found += own - operands
    assert handed_through == 3, "the weight, in each call"
    assert len(found) == len(set(found)) >= 6, "every other result is memory of its own"
    graphs = with_regions([graph.graph])
    assert len(graphs) == 3, "one forward and one backward for all calls"


def test_views_of_results_follow_them() -> None:
    graph = joint_of(several, shared=False)
    give_own_memory(graph)
    for node in graph.graph.nodes:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if str(node.target) in ("aten.view.default", "aten.t.default", "aten.slice.Tensor") and fake(source) is not None:
            assert storage_id(fake(node)) == storage_id(fake(source)), node


def test_tags_inside_are_named() -> None:
    """torch partitions a region: what is tagged for the host there is saved, and a warning says so."""
    with pytest.warns(NotOffloadedWarning, match="region are tagged MUST_CPU_OFFLOAD"):
        found = step(tagged, graphoffload.OffloadBackend(policy="keep", inner="aot_eager"), shared=True)
    for a, b in zip(found, step(product, "aot_eager", shared=True), strict=True):
        torch.testing.assert_close(a, b)


def test_a_region_takes_the_time_and_memory_of_what_it_does() -> None:
    """Predicted like the same model without regions, to a tenth: its calls are not free, nor its temporaries."""

    def report(region: Callable[[Region], Region]) -> Any:
        torch._dynamo.reset()
        with torch.device("meta"):
            model = Layers(product, shared=False)
            model.region = region(product)
        x = torch.empty(2**16, WIDTH, device="meta", requires_grad=True)
        return graphoffload.explain(model, hardware="h200-sxm", reserve=0, policy="keep")(x)

    plain, nested = report(lambda region: region), report(torch.compiler.nested_compile_region)
    times = [found.plans[0].prediction.keep_time_s for found in (plain, nested)]
    peaks = [found.keep_peak_bytes for found in (plain, nested)]
    assert times[1] == pytest.approx(times[0], rel=0.1)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.25)


def test_one_fake_storage_of_two_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should another operation share fake tensors between its calls, nothing is compiled rather than a gradient wrong."""
    monkeypatch.setattr(joint, "give_own_memory", lambda module: None)
    backend = graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, inner="aot_eager")
    with pytest.raises(BackendCompilerFailed, match="have one fake storage, but neither is a view of the other"):
        step(product, backend, shared=True)
