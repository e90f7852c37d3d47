"""The caller's own memory: it is never offloaded, and backward reads of it what plain torch.compile reads, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.analysis.callers import CallersMemory
from graphoffload.passes import prepare_joint as joint
from graphoffload.runtime.offloaded_tensors import OffloadedTensor
from graphoffload.torch_internals import checkpoint_tags

WEIGHT = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))


def copies_an_input(x: Tensor) -> Tensor:
    return (x.clone() @ WEIGHT).sin()


def copies_and_writes(x: Tensor) -> Tensor:
    c = x.clone()
    x.mul_(2.0)
    return (c @ WEIGHT).sin()


def copies_an_output(x: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ WEIGHT).relu()
    return h.clone(), h @ WEIGHT


def copies_of_views(x: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ WEIGHT).sin()
    return h, (h.t().clone().reshape(32, 128).clone().view(64, 64) @ WEIGHT).cos()


@pytest.fixture
def sources() -> Iterator[list[Tensor]]:
    """Everything that is offloaded, held: an address that a release has freed may soon be an output's, and that is right."""
    found: list[Tensor] = []
    original = OffloadedTensor.__init__

    def noting(entry: OffloadedTensor, source: Tensor, *arguments: Any) -> None:
        found.append(source)
        original(entry, source, *arguments)

    with mock.patch.object(OffloadedTensor, "__init__", noting):
        yield found


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [copies_an_input, copies_and_writes, copies_an_output, copies_of_views])
def test_sources_are_the_graphs_own(sources: list[Tensor], function: Callable[..., Any], inner: str) -> None:
    """Nor is anything in their place wrong: operation by operation, gradients do not see what the caller writes to its input.

    (Inductor saves the input itself in its copy's place, with graphoffload or without.)
    """
    torch._dynamo.reset()
    backend = graphoffload.OffloadBackend(policy="offload", min_tensor_bytes=0, inner=inner)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    ours, theirs = x.clone(), x.clone()
    outputs = torch.compile(function, backend=backend)(ours)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    callers = {ours.data_ptr(), WEIGHT.data_ptr(), *(output.data_ptr() for output in outputs)}
    assert sources or (function is copies_an_output and inner == "inductor")  # Inductor computes that one again
    assert not callers & {source.data_ptr() for source in sources}
    if inner == "inductor" or function not in (copies_an_input, copies_and_writes):
        return
    ours.zero_()
    (found,) = torch.autograd.grad(outputs[0].square().sum(), [WEIGHT])
    (expected,) = torch.autograd.grad(function(theirs).square().sum(), [WEIGHT])
    torch.testing.assert_close(found, expected)


def towers(x: Tensor) -> Tensor:
    """Plain torch saves the first product's input, and never reads x again."""
    h = (x.exp().sin() + x.cos()) * 2
    for _ in range(3):
        h = torch.tanh(h @ WEIGHT / 8)
    return h


def towers_of_a_view(x: Tensor) -> Tensor:
    return towers(x.view(2, 32, 64)[1]) + towers(x[:32])


def towers_of_parts(x: Tensor) -> Tensor:
    """One half of x is saved by torch itself, the other half is not."""
    left, right = x.split(32)
    return towers(left) * (right @ WEIGHT).tanh()


def by_numpy(x: Tensor) -> None:
    x.numpy()[:] = 0


def by_data(x: Tensor) -> None:
    x.data.zero_()


def by_a_view_of_data(x: Tensor) -> None:
    x.data.view(-1)[:2048].fill_(3.0)


def gradient(function: Callable[..., Any], backend: Any, x: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    """That of WEIGHT, where the caller writes to x between forward and backward."""
    torch._dynamo.reset()
    run = function if backend is None else torch.compile(function, backend=backend)
    output = run(x)
    write(x)
    (found,) = torch.autograd.grad(output.square().sum(), [WEIGHT])
    return found


PLANS: list[dict[str, Any]] = [
    {"policy": "recompute"},
    {"max_slowdown": 0.3, "hardware": "h200-sxm"},
    {"max_slowdown": 2.0, "hardware": "h200-sxm", "policy": {"op:*mm*": "keep"}},
]


@pytest.mark.filterwarnings("ignore::graphoffload.errors.LargeSlowdownWarning")
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("write", [by_numpy, by_data, by_a_view_of_data])
@pytest.mark.parametrize(
    ("function", "inner"),
    [
        (towers, "aot_eager"), (towers_of_a_view, "aot_eager"), (towers, "inductor"),
        pytest.param(towers_of_a_view, "inductor", marks=pytest.mark.long),  # twice the kernels of towers
    ],
)  # fmt: skip
def test_what_the_caller_writes_is_not_read(
    function: Callable[..., Any], write: Callable[[Tensor], None], plan: dict[str, Any], inner: str
) -> None:
    """No version counter sees these writes. Chains that started at x gave gradients that were twice too large."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    expected = gradient(function, None, values.clone(), lambda x: None)
    backend = graphoffload.OffloadBackend(min_tensor_bytes=0, inner=inner, **plan)  # type: ignore[arg-type]
    torch.testing.assert_close(gradient(function, backend, values.clone(), write), expected, rtol=1e-4, atol=1e-4)


def test_what_the_planner_chooses_to_recompute_is_not_read() -> None:
    """At these sizes the planner computed the first product's input again: the gradient was off by 40 %."""
    values = torch.randn(8192, 512, generator=torch.Generator().manual_seed(1))
    weights = [nn.Parameter(torch.randn(512, 512, generator=torch.Generator().manual_seed(n)) / 512**0.5) for n in range(3)]

    def tower(x: Tensor) -> Tensor:
        h = (x.exp().sin() + x.cos()) * 2
        for weight in weights:
            h = torch.tanh(h @ weight)
        return h.sum()

    grads = []
    for slowdown in (None, 0.3):
        torch._dynamo.reset()
        x = values.clone()
        config = graphoffload.OffloadConfig(
            max_slowdown=slowdown,
            hardware="h200-sxm",
            min_tensor_bytes=0,
            inner="aot_eager",
            policy="auto" if slowdown else "keep",
        )
        loss = torch.compile(tower, backend=graphoffload.OffloadBackend(config))(x)
        if slowdown:
            x.numpy()[:] = 0
        grads.append(torch.autograd.grad(loss, weights))
    torch.testing.assert_close(grads[1], grads[0])


def test_the_half_that_torch_saves_may_be_read() -> None:
    """Half of x is in torch's own hands; what is made of the other half is saved."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def write(x: Tensor) -> None:
        x.data[:32] = 0

    expected = gradient(towers_of_parts, None, values.clone(), write)
    backend = graphoffload.OffloadBackend(min_tensor_bytes=0, inner="aot_eager", policy="recompute")
    torch.testing.assert_close(gradient(towers_of_parts, backend, values.clone(), write), expected)
    plan = graphoffload.last_plans()[-1]
    assert plan.recomputed_bytes > 0
    assert any("an input that the caller may write to" in tensor.why_not_recompute for tensor in plan.saved.tensors)


class Scaled(nn.Module):
    """A buffer and parameters, of which plain torch reads only the parameters' products again."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 16)
        self.first = nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(0.1, 1.0, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).detach() + (self.table.exp().sin() + self.table.cos())
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))) * 2).sin() @ self.last(h)
        return out


@pytest.mark.parametrize("door", ["backend", "option"])
def test_buffers_are_not_read_and_parameters_are(door: str) -> None:
    """Another forward may write to a buffer before this one's backward; only an optimizer writes to a parameter."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    grads = []
    config = graphoffload.OffloadConfig(policy="recompute", min_tensor_bytes=0, inner="aot_eager")
    for backend in (None, graphoffload.OffloadBackend(config) if door == "backend" else bare(config)):
        torch._dynamo.reset()
        model = Scaled()
        output = (model if backend is None else torch.compile(model, backend=backend))(x)
        model.table.data.zero_()
        output.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0])
    plan = graphoffload.last_plans()[-1]
    again = {tensor.op for tensor in plan.saved.tensors if plan.action(tensor.name) == "recompute"}
    assert "aten.addmm.default" in again, "the bias is no caller's memory"
    assert any("reads primals" in tensor.why_not_recompute for tensor in plan.saved.tensors)


def bare(config: graphoffload.OffloadConfig) -> Any:
    """The partitioner without the backend, as where it is an option of Inductor's."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(fw_compiler=boxed_nop, partition_fn=graphoffload.OffloadPartitioner(config))


def returns_what_it_detaches(x: Tensor) -> tuple[Tensor, Tensor]:
    """Backward needs a part of the first output, and what was made of all of it."""
    out = (x @ WEIGHT).tanh() * 2
    made = out.detach().exp().sin() @ WEIGHT
    return out, made + out[:, :1].exp() * out[:, :1].sin()


def test_outputs_that_torch_does_not_read_are_not_read() -> None:
    """An output is the caller's: zeroed before backward, what was made of it would be another value."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    grads = []
    for backend in ("aot_eager", graphoffload.OffloadBackend(min_tensor_bytes=0, inner="aot_eager", policy="recompute")):
        torch._dynamo.reset()
        out, made = torch.compile(returns_what_it_detaches, backend=backend)(values)
        out.data[:, 1:].zero_()
        grads.append(torch.autograd.grad(made.square().sum(), [WEIGHT])[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_outputs_that_keep_all_computes_again_are_tagged_so() -> None:
    """Torch may read one instead, once what it is computed from is recomputed."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.output((sine,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    bound = joint.bind(module, joint.Binding(callers=CallersMemory(again=frozenset([sine.name]))))
    (tag,) = (checkpoint_tags.tag_of(node.meta) for node in bound.graph.nodes if node.name == sine.name)
    assert tag == "must_recompute"


def test_a_region_of_the_users_reads_what_it_reads() -> None:
    """torch.utils.checkpoint keeps x by the user's own word, with a number as well as without."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def region(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(towers, x, use_reentrant=False)
        return out

    for options in ({}, {"max_slowdown": 0.5, "hardware": "h200-sxm"}):
        config = graphoffload.OffloadConfig(min_tensor_bytes=0, inner="aot_eager", **options)  # type: ignore[arg-type]
        got = gradient(region, graphoffload.OffloadBackend(config), x.clone(), lambda x: None)
        torch.testing.assert_close(got, gradient(region, None, x.clone(), lambda x: None))
        assert not [t for t in graphoffload.last_plans()[-1].saved.tensors if "primals" in t.why_not_recompute]
