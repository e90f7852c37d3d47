"""Each safety rule refuses the graph that breaks it, and names itself. The graphs are real ones, broken behind the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Node

import graphoffload
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.analysis.verify import RULES
from graphoffload.compiler import pipeline
from graphoffload.errors import VerifyError
from graphoffload.facts.plan import Plan
from graphoffload.torch_internals.collectives import is_wait

OPS = torch.ops.graphoffload


class Net(nn.Module):
    """Two products with an activation between: enough saved activations to break each rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return torch.tanh(y) + torch.exp(y)


def op(graphs: GraphPair, name: str, number: int = 0) -> Node:
    """The op of the transfer with this id."""
    module = graphs.forward if name in ("offload", "release") else graphs.backward
    found = [node for node in module.graph.nodes if node.target is getattr(OPS, name).default and number in node.args]
    return found[0]


def output(graphs: GraphPair) -> Node:
    """The forward's output node."""
    return next(iter(reversed(graphs.forward.graph.nodes)))


def drop_release(graphs: GraphPair) -> None:
    node = op(graphs, "release")
    node.graph.erase_node(node)


def release_another(graphs: GraphPair) -> None:
    op(graphs, "release").args = (op(graphs, "offload", 1).args[0], *op(graphs, "release").args[1:])


def release_too_early(graphs: GraphPair) -> None:
    release, offload = op(graphs, "release"), op(graphs, "offload")
    offload.append(release)


def save_the_source_too(graphs: GraphPair) -> None:
    node, source = output(graphs), op(graphs, "offload").args[0]
    values = [source if value is op(graphs, "offload") else value for value in node.args[0]]
    node.args = (tuple(values),)


def read_before_the_wait(graphs: GraphPair) -> None:
    wait = op(graphs, "wait")
    reader = next(user for user in op(graphs, "reload").users if user is not wait)
    reader.append(wait)


def change_an_output(graphs: GraphPair) -> None:
    node = output(graphs)
    values = list(node.args[0])
    values[0] = values[0].args[0]
    node.args = (tuple(values),)


def lose_a_saved_value(graphs: GraphPair) -> None:
    node = output(graphs)
    node.args = (tuple(node.args[0])[:-1],)


def share_a_fake_storage(graphs: GraphPair) -> None:
    handles = [op(graphs, "offload", 0), op(graphs, "offload", 1)]
    handles[1].meta["val"] = handles[0].meta["val"]


def save_a_handle_twice(graphs: GraphPair) -> None:
    node = output(graphs)
    first, second = op(graphs, "offload", 0), op(graphs, "offload", 1)
    node.args = (tuple(first if value is second else value for value in node.args[0]),)


def read_an_output(graphs: GraphPair) -> None:
    """The model's result, which keep-all does not read again, becomes one more saved value."""
    node = output(graphs)
    result = node.args[0][0]
    node.args = ((*node.args[0], result),)
    first = graphs.backward.graph.find_nodes(op="placeholder")[0]
    with graphs.backward.graph.inserting_before(first):
        graphs.backward.graph.placeholder(result.name).meta.update(result.meta)


def decide_again(graphs: GraphPair) -> None:
    """Forward's tanh becomes a rounding, and so does a copy of it in backward, of a product that is computed anew."""
    forward, backward = graphs.forward.graph, graphs.backward.graph
    rounded = forward.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[-1]
    rounded.target = torch.ops.aten.round.default
    last = next(iter(reversed(backward.nodes)))
    product = next(n for n in backward.nodes if n.op == "call_function" and n.target is torch.ops.aten.mm.default)
    with backward.inserting_before(last):
        again = backward.create_node("call_function", torch.ops.aten.round.default, (product,), name=rounded.name)
    again.meta["val"] = rounded.meta["val"]


class Gathered(Net):
    """The same with a collective in forward, whose result is saved, and another one in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.all_gather_tensor_autograd(x + self.first.bias, 0, dist.group.WORLD))


def gather_again(graphs: GraphPair) -> None:
    """Backward runs forward's collective once more, as a partitioner would that recomputes it."""
    gathered, backward = gather(graphs), graphs.backward.graph
    last = next(iter(reversed(backward.nodes)))
    tangent = next(n for n in backward.nodes if n.op == "call_function" and n.target is torch.ops.aten.mm.default)
    with backward.inserting_before(last):
        again = backward.create_node("call_function", gathered.target, (tangent, *gathered.args[1:]), name=gathered.name)
    again.meta["val"] = gathered.meta["val"]


def copy_before_the_wait(graphs: GraphPair) -> None:
    """What is offloaded is the collective's result as it stands when the collective has only begun."""
    gathered = gather(graphs)
    offload = next(n for n in graphs.forward.graph.nodes if n.target is OPS.offload.default and is_wait(n.args[0].target))
    release = next(user for user in offload.users if user.target is OPS.release.default)
    for node in (offload, release):
        node.args = (gathered, *node.args[1:])


def gather(graphs: GraphPair) -> Node:
    """The forward's collective."""
    return next(n for n in graphs.forward.graph.nodes if "all_gather" in str(n.target))


BREAKS: dict[str, Callable[[GraphPair], None]] = {
    "once": drop_release,
    "same_source": release_another,
    "last_use": release_too_early,
    "saved": save_the_source_too,
    "readers": read_before_the_wait,
    "outputs": change_an_output,
    "counterpart": lose_a_saved_value,
    "donated": save_a_handle_twice,
    "fresh": share_a_fake_storage,
    "callers": read_an_output,
    "decisions": decide_again,
    "collectives": gather_again,
    "waited": copy_before_the_wait,
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(net_class: type[Net] = Net, **options: object) -> torch.Tensor:
    """Loss of one step of the net through the backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = net_class()
    config = graphoffload.OffloadConfig(policy="offload", min_tensor_bytes=0, inner="aot_eager", **options)  # type: ignore[arg-type]
    net.compile(backend=graphoffload.OffloadBackend(config))
    loss = net(torch.randn(4, 8)).sum()
    loss.backward()
    return loss.detach()


def test_every_rule_has_a_break() -> None:
    """A rule without a graph that it refuses is a rule nobody has seen work."""
    assert set(BREAKS) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_graph_is_refused(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the rule, and nothing runs."""
    original = pipeline.insert_reloads

    def broken(graphs: GraphPair, plan: Plan) -> GraphPair:
        graphs = original(graphs, plan)
        BREAKS[rule](graphs)
        return graphs

    monkeypatch.setattr(pipeline, "insert_reloads", broken)
    graphoffload.reset_stats()
    with pytest.raises(BackendCompilerFailed) as info:
        step(Gathered if rule in ("collectives", "waited") else Net)
    assert isinstance(info.value.inner_exception, VerifyError)
    assert f"{rule}: " in str(info.value.inner_exception)
    assert graphoffload.stats()["offloads"] == 0


def test_unbroken_graphs_pass() -> None:
    """The same net, untouched: the rules refuse nothing that is right."""
    assert torch.isfinite(step())
    assert torch.isfinite(step(Gathered))
