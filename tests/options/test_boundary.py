"""Boundary names: on the joint graph's nodes in forward and backward, and on copies of the module."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from graphoffload.errors import ConfigError, GraphOffloadError, PatternError
from graphoffload.options.boundaries import boundaries_of, mark_boundaries, mark_boundary, names_of


class Attn(nn.Module):
    """A linear and some pointwise operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(x)) * x.sin()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Attn(), Attn()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).exp())
        return out.cos()


class Broken(Attn):
    """A graph break inside."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x).tanh()
        torch._dynamo.graph_break()
        return self.q(y).sin()


class OwnReduce(Attn):
    """Pickles in a way of its own."""

    def __reduce__(self) -> Any:
        return (OwnReduce, (), self.__dict__)


def joint_nodes(module: nn.Module, graphs: list[dict[str, tuple[str, ...]]] | None = None) -> dict[str, tuple[str, ...]]:
    """Boundary names of every operation of the joint graph, after one training step equal to eager; `graphs`: one by one."""
    found: dict[str, tuple[str, ...]] = {}

    def partition(joint: Any, inputs: Any, **rest: Any) -> Any:
        names = {n.name: boundaries_of(n.meta) for n in joint.graph.nodes if n.op == "call_function"}
        found.update(names)
        if graphs is not None:
            graphs.append(names)
        return min_cut_rematerialization_partition(joint, inputs, **rest)

    torch._dynamo.reset()
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)
    got = torch.autograd.grad(torch.compile(module, backend=backend)(x).sum(), x)
    torch.testing.assert_close(got, expected)
    return found


def test_a_mark_reaches_forward_and_backward_nodes() -> None:
    """And no operation of the neighbour, nor of what is around."""
    model = Net()
    assert mark_boundary(model.a) is model.a
    nodes = joint_nodes(model)
    assert set(nodes.values()) == {(), ("core_attn",)}
    assert nodes["tanh"] == nodes["tanh_backward_1"] == ("core_attn",)
    assert nodes["tanh_1"] == nodes["tanh_backward"] == nodes["exp"] == ()


def test_nested_boundaries_are_both_known() -> None:
    """Outermost first; an inner annotation must not hide the outer one."""
    model = Net()
    mark_boundaries(model, {"outer": "a", "inner": ["*.q"]})
    mark_boundary(model.b, "twice")
    mark_boundary(model.b, "again")
    nodes = joint_nodes(model)
    assert nodes["addmm"] == nodes["mm_3"] == ("outer", "inner")
    assert nodes["tanh"] == nodes["tanh_backward_1"] == ("outer",)
    assert nodes["addmm_1"] == nodes["mm_1"] == ("twice", "again", "inner")


def test_a_graph_break_inside_is_survived() -> None:
    """The step is right; operations of both graphs inside the marked submodule are named."""
    model = nn.Sequential(Broken(), Attn())
    mark_boundary(model[0], "broken")
    mark_boundary(model[0].q, "linear")
    graphs: list[dict[str, tuple[str, ...]]] = []
    joint_nodes(model, graphs)
    inside = [graph for graph in graphs if any("broken" in names for names in graph.values())]
    assert len(inside) == 2
    assert all(graph["addmm"][-1:] == ("linear",) for graph in inside)


@pytest.mark.parametrize("kind", [Attn, OwnReduce])
@pytest.mark.parametrize(
    "how", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "copy", "pickle"]
)
def test_the_mark_follows_a_copy(kind: type[nn.Module], how: Any) -> None:
    """Same names, same weights, same type; and the copy is a module of its own."""
    module = mark_boundary(mark_boundary(kind(), "one"), "two")
    other = how(module)
    assert names_of(other) == ("one", "two")
    assert type(other) is type(module)
    torch.testing.assert_close(other.state_dict(), module.state_dict())
    mark_boundary(other, "three")
    assert names_of(module) == ("one", "two")
    wrapped = nn.Sequential(other)
    assert {names for names in joint_nodes(wrapped).values() if "three" in names} == {("one", "two", "three")}


def test_marking_changes_nothing_else() -> None:
    """state_dict keys, class name, isinstance, hooks and the type of two marked modules."""
    model = Net()
    before = list(model.state_dict())
    called: list[int] = []
    model.a.register_forward_hook(lambda *_: called.append(1))
    mark_boundaries(model, {"attn": ["a", "b"]})
    assert list(model.state_dict()) == before
    assert isinstance(model.a, Attn)
    assert type(model.a) is type(model.b)
    assert type(model.a).__name__ == "Attn"
    model(torch.randn(2, 8))
    assert called == [1]


def test_marking_twice_with_the_same_name_is_once() -> None:
    """Names are a set in order."""
    module = mark_boundary(mark_boundary(Attn(), "x"), "x")
    assert names_of(module) == ("x",)


def test_boundaries_of_other_annotations() -> None:
    """Other users of annotate are not boundaries."""
    assert boundaries_of({}) == boundaries_of({"custom": None}) == boundaries_of({"custom": {"stage": 1, 3: 4}}) == ()
    assert boundaries_of({"custom": {"stage": 1, "graphoffload_boundary.x": True}}) == ("x",)


def test_a_pattern_without_a_module_marks_nothing() -> None:
    """Near misses are named, and an earlier name of the same call is not half applied."""
    model = Net()
    with pytest.raises(PatternError, match=r"mark_boundaries for 'core'.*'\*\.qq'.*Near: '\*\.q'"):
        mark_boundaries(model, {"good": "a", "core": "*.qq"})
    assert names_of(model.a) == ()


@pytest.mark.parametrize("name", ["", "a b", "*.x", 3, "a/b"])
def test_a_name_is_a_word(name: Any) -> None:
    """A name with a star could not be told from a pattern."""
    with pytest.raises(ConfigError, match=r"a boundary's name is a word such as"):
        mark_boundary(Attn(), name)


def test_bad_modules() -> None:
    """No module, and a forward that would hide the mark."""
    with pytest.raises(ConfigError, match=r"mark_boundary got a str; give an nn.Module"):
        mark_boundary("model.layers.0")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"mark_boundaries got a dict"):
        mark_boundaries({}, {})  # type: ignore[type-var]
    module = Attn()
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=r"mark_boundary\(Attn, 'x'\): forward was replaced on this instance.*Mark the module first"
    ):
        mark_boundary(module, "x")


@pytest.mark.parametrize("module", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_a_module_that_nobody_can_call(module: nn.Module) -> None:
    """Its mark would be on nothing. Patterns find what it holds, and not it."""
    what = type(module).__name__
    with pytest.raises(ConfigError, match=rf"mark_boundary\({what}, 'x'\): it has no forward.*Mark what it holds"):
        mark_boundary(module, "x")
    model = nn.Module()
    model.layers = module
    with pytest.raises(PatternError, match=r"layers\.(0|a)"):
        mark_boundaries(model, {"x": "layers"})
    mark_boundaries(model, {"x": "*"})


def test_a_torch_without_annotate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which torch, and what works without."""
    monkeypatch.delattr(torch.fx.traceback, "annotate")
    with pytest.raises(
        GraphOffloadError, match=r"torch .* has no torch.fx.traceback.annotate.*Install torch>=2.11.*offload_modules"
    ):
        mark_boundary(Attn())


@pytest.mark.parametrize("boundaries", [["core_attn"], {"core_attn": 3}, "core_attn"])
def test_boundaries_are_names_with_patterns(boundaries: Any) -> None:
    """Anything else says how they are written."""
    with pytest.raises(ConfigError, match="self_attn"):
        mark_boundaries(nn.Sequential(nn.Linear(2, 2)), boundaries)
