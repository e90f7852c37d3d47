"""Backward never decides again on floats that it computes again: their last bits may be others, and so the decision.

A compiler that computes a value in other bits the second time is stood in for by an interpreter: it moves every float that
backward computes again by one unit in the last place. On a CPU two kernels for one reduction are rare; here they are certain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.passes.prepare_joint import copy_graph
from graphoffload.testing.policies import Scattered

WIDTH, EXPERTS = 16, 4
COMPUTING = ("mm", "bmm", "tanh", "exp", "sin", "cos", "mul", "div", "gelu", "_softmax")


class Elsewhere(Interpreter):
    """A backward graph whose recomputed floats come out one unit in the last place higher or lower, by turns."""

    def __init__(self, module: GraphModule, forward_names: set[str]) -> None:
        super().__init__(module)
        self.again = {node.name for node in module.graph.nodes if node.op == "call_function"} & forward_names

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name not in self.again or not computes(n) or not result.is_floating_point():
            return result
        signs = torch.ones(result.numel(), dtype=result.dtype)
        signs[::2] = -1
        return torch.nextafter(result, signs.view(result.shape) * torch.inf)


def computes(node: Node) -> bool:
    """Whether an operation does more than move floats."""
    return str(node.target).split(".")[1:2] in ([name] for name in COMPUTING)


def step(function: Callable[..., Tensor], leaves: list[Tensor], **options: Any) -> tuple[list[Tensor], GraphModule]:
    """Gradients of the leaves, with other bits in backward, and the backward graph."""
    torch._dynamo.reset()
    for leaf in leaves:
        leaf.grad = None
    config = graphoffload.OffloadConfig(min_tensor_bytes=0, inner="aot_eager", **options)
    partitioner = graphoffload.OffloadPartitioner(config)
    graphs: dict[str, GraphModule] = {}

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = partitioner(joint, inputs, **kwargs)
        graphs["backward"] = copy_graph(backward)
        graphs["forward"] = forward
        return forward, backward

    def backward_compiler(module: GraphModule, _inputs: Any) -> Any:
        names = {node.name for node in graphs["forward"].graph.nodes}
        run = Elsewhere(module, names)
        return make_boxed_func(run.run)

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward_compiler, partition_fn=partition)
    torch.compile(function, backend=backend)(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None], graphs["backward"]


def eager(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    function(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator) / 2) for shape in shapes]


def mixture(x: Tensor, before: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """Two of four experts a token. Two rows of the router are equal: every token is at a tie."""
    h = torch.tanh(x @ before)
    weights, chosen = torch.topk(torch.softmax(h @ router, -1), 2)
    sent = nn.functional.one_hot(chosen, EXPERTS).to(h.dtype) * weights.unsqueeze(-1)
    return torch.einsum("tke,td,edo->to", sent, h, experts).sin()


def routed() -> list[Tensor]:
    leaves = drawn((32, WIDTH), (WIDTH, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, WIDTH))
    with torch.no_grad():
        leaves[2][:, 1:] = leaves[2][:, :1]
    return leaves


def steep(x: Tensor, weight: Tensor) -> Tensor:
    """Torch itself recomputes the mask from what it saves before it."""
    h = x @ weight
    return torch.where(h.sin() > 0.5, 3.0 * h, h.cos()) @ weight


def rounded(x: Tensor, weight: Tensor) -> Tensor:
    h = (x @ weight) * 2
    scale = h.abs().amax() / 7
    return (torch.round(h / scale) * scale * h) @ weight


def largest_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    h = torch.tanh(x @ weight).exp()
    return torch.nn.functional.one_hot(h.argmax(-1), WIDTH) * h.sin() @ weight


def shrunk(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.hardshrink(torch.tanh(x @ weight), 0.25).sin() @ weight


def tied(x: Tensor, weight: Tensor) -> Tensor:
    """Torch saves where both are equal in place of what is compared, which a chain to the maximum could run again."""
    h = nn.functional.gelu(x)
    return torch.tanh(torch.maximum(h, h) @ weight)


def tied_after_a_mask(x: Tensor, weight: Tensor) -> Tensor:
    """Backward masks with gt, lt and eq. Computing gt again brings there what eq compares, and min-cut takes eq along."""
    h = nn.functional.layer_norm(x, (WIDTH,))
    return torch.tanh(torch.maximum(torch.tanh(torch.tanh(h)), h) @ weight)


NEAR = {
    tied: 0.25,
    tied_after_a_mask: 0.25,
    steep: 0.5235987755982989,
    rounded: 1.25,
    shrunk: 0.25541281188299536,
    largest_of_rows: 0.3,
}


def on_a_step(function: Callable[..., Tensor]) -> list[Tensor]:
    """Leaves at which forward decides on values as near to a step as floats can be."""
    x, weight = drawn((32, WIDTH), (WIDTH, WIDTH))
    with torch.no_grad():
        weight.copy_(torch.eye(WIDTH))
        x.fill_(NEAR[function])
        x[:, 0] = 3.5 if function is rounded else NEAR[function]
    return [x, weight]


OPTIONS: list[dict[str, Any]] = [{"policy": "recompute"}, {"policy": "keep"}, {"max_slowdown": 1.0, "hardware": "h200-sxm"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_experts_at_a_tie_are_not_chosen_again(options: dict[str, Any]) -> None:
    """Backward went to other experts than forward did: gradients of experts were off by more than half."""
    leaves = routed()
    expected = [grad.clone() for grad in eager(mixture, leaves)]
    got, backward = step(mixture, leaves, **options)
    assert not backward.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("function", [steep, rounded, largest_of_rows, shrunk, tied, tied_after_a_mask])
def test_decisions_are_taken_once(function: Callable[..., Tensor], policy: str) -> None:
    """Masks, rounding, argmax, a threshold inside a kernel: where torch recomputes them by itself, too."""
    leaves = on_a_step(function)
    expected = [grad.clone() for grad in eager(function, leaves)]
    got, _ = step(function, leaves, policy=policy)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_chains_that_together_would_decide_again_are_kept(seed: int) -> None:
    """Each tensor its own constraint: what one chain brings into backward, another one compares there."""
    leaves = on_a_step(tied_after_a_mask)
    expected = [grad.clone() for grad in eager(tied_after_a_mask, leaves)]
    got, _ = step(tied_after_a_mask, leaves, policy=Scattered(seed=seed))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_what_a_decision_was_made_from_is_named() -> None:
    """The table says why the experts' numbers are saved."""
    step(mixture, routed(), policy="recompute")
    (plan,) = graphoffload.last_plans()[-1:]
    reasons = {decision.name: decision.reason for decision in plan.decisions}
    assert any("decides again (aten.topk" in reason for reason in reasons.values()), reasons


def causal(x: Tensor, weight: Tensor) -> Tensor:
    h = torch.tanh(x @ weight)
    at = torch.arange(32)
    scores = (h @ h.t()).masked_fill(at[:, None] < at[None, :], -torch.inf)
    return torch.softmax(scores, -1) @ h


def test_masks_made_of_positions_stay_free() -> None:
    """Integers repeat to the bit: nothing is saved in their place."""
    got, _ = step(causal, drawn((32, WIDTH), (WIDTH, WIDTH)), policy="recompute")
    assert not [t for t in graphoffload.last_plans()[-1].saved.tensors if t.dtype == "bool"]
    assert got


def relu_net(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(torch.tanh(x @ weight) * 2) @ weight


def test_functions_without_a_jump_are_recomputed() -> None:
    """relu's gradient compares with 0, and either side of it is right."""
    step(relu_net, drawn((32, WIDTH), (WIDTH, WIDTH)), policy="recompute")
    plan = graphoffload.last_plans()[-1]
    assert plan.recomputed_bytes == plan.saved.saved_bytes


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "_cdist_backward": lambda x, w: torch.cdist(torch.tanh(x @ w), w, p=torch.inf).sin(),
    "_segment_reduce_backward": lambda x, w: (
        torch.segment_reduce(torch.tanh(x @ w), "max", lengths=torch.full((4,), 8), axis=0).sin() @ w
    ),
    "eq.Tensor": lambda x, w: torch.tanh(x @ w).amax(-1, keepdim=True).sin() * w[:1],
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_compare_inside_read_what_forward_computed(kernel: str) -> None:
    """They look for the elements that equal a maximum or a distance: one bit off, and there are none."""
    leaves = drawn((32, WIDTH), (WIDTH, WIDTH))
    expected = [grad.clone() for grad in eager(KERNELS[kernel], leaves)]
    got, _ = step(KERNELS[kernel], leaves, policy="recompute")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    why = [tensor.why_not_recompute for tensor in graphoffload.last_plans()[-1].saved.tensors]
    assert any(kernel in text for text in why), why


def test_a_checkpoint_region_of_the_users_routes_again() -> None:
    """Theirs: torch's behaviour, with the risk that it has. Under a number the region is planned, and the rule holds."""
    leaves = routed()

    def region(*values: Tensor) -> Tensor:
        out: Tensor = checkpoint(mixture, *values, use_reentrant=False)
        return out * 2

    topk = torch.ops.aten.topk.default
    _, backward = step(region, leaves)
    assert backward.graph.find_nodes(op="call_function", target=topk)
    _, backward = step(region, leaves, max_slowdown=1.0, hardware="h200-sxm")
    assert not backward.graph.find_nodes(op="call_function", target=topk)
