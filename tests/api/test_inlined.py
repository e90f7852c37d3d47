"""What offload() was to compile, inside the graph of another compile: said by name, or offloaded by that."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphoffload
from graphoffload.errors import GraphOffloadWarning, NotOffloadedWarning
from graphoffload.monitor import not_compiled as unused
from tests.api.test_introspect import Tanhs

OPTIONS: dict[str, Any] = {"policy": "offload", "inner": "aot_eager", "min_tensor_bytes": 0}
Call = Callable[[torch.Tensor], torch.Tensor]


def of_class() -> Call:
    """An instance of a decorated class."""
    kind = graphoffload.offload(**OPTIONS)(type("Decorated", (Tanhs,), {}))
    return kind()


def of_function() -> Call:
    """A decorated function."""
    net = Tanhs()

    @graphoffload.offload(**OPTIONS)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = net(x)
        return out

    return decorated


def inside(target: Call) -> Call:
    """A function that calls it."""
    return lambda x: target(x) * 2


def steps(function: Call, *, grad: bool = True) -> tuple[int, list[str]]:
    """Offloads of two steps, and the warnings."""
    torch._dynamo.reset()
    before = graphoffload.stats()["offloads"]
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        for rows in (4, 6):
            out = function(torch.randn(rows, 8, requires_grad=True)).sum()
            if grad:
                out.backward()
    texts = [str(seen.message) for seen in caught if isinstance(seen.message, GraphOffloadWarning)]
    assert all(isinstance(seen.message, NotOffloadedWarning) for seen in caught if str(seen.message) in texts)
    return graphoffload.stats()["offloads"] - before, texts


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("made", [of_class, of_function])
@pytest.mark.parametrize("around", [inside, lambda target: target], ids=["inside", "itself"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_another_compile_around_it_is_said_once(made: Callable[[], Call], around: Callable[[Call], Call], backend: str) -> None:
    """With what was asked, who took it in, and what to do."""
    offloads, texts = steps(torch.compile(around(made()), backend=backend))
    assert offloads == 0
    (text,) = texts
    assert all(part in text for part in ("policy='offload'", "ecorated", f"backend={backend!r}", 'backend="graphoffload"'))


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("made", [of_class, of_function])
@pytest.mark.parametrize(
    "how",
    [
        {"backend": "graphoffload", "options": OPTIONS},
        {"backend": graphoffload.OffloadBackend(**OPTIONS)},
        {"backend": graphoffload.OffloadBackend(), "options": OPTIONS},
        {"options": {"custom_partitioner_fn": graphoffload.OffloadPartitioner(graphoffload.OffloadConfig(**OPTIONS))}},
    ],
    ids=["by name", "object", "object and options", "partitioner"],
)
def test_the_same_options_around_it_are_what_was_asked(made: Callable[[], Call], how: dict[str, Any]) -> None:
    """One graph with all of it."""
    with torch._inductor.config.patch(reorder_for_peak_memory=False):
        offloads, texts = steps(torch.compile(inside(made()), **how))
    assert offloads > 0
    assert not texts


@pytest.mark.parametrize("made", [of_class, of_function])
def test_other_options_around_it_are_said(made: Callable[[], Call]) -> None:
    """Those of the outer compile apply."""
    how = graphoffload.OffloadBackend(**{**OPTIONS, "policy": "keep"})
    offloads, texts = steps(torch.compile(inside(made()), backend=how))
    assert offloads == 0
    (text,) = texts
    assert "policy='keep' instead of 'offload'" in text
    assert "min_tensor_bytes" not in text.partition("with ")[2]


@pytest.mark.parametrize("made", [of_class, of_function])
def test_one_inside_the_other_and_alone(made: Callable[[], Call]) -> None:
    """Decorated inside decorated is one graph, and alone it is as ever."""
    target = made()
    for function in (target, graphoffload.offload(inside(target), **OPTIONS)):
        offloads, texts = steps(function)
        assert offloads > 0
        assert not texts


def test_where_nothing_is_to_be_offloaded_nothing_is_said() -> None:
    """Without gradients, under explain() with the same options, and in an export."""
    target = of_class()
    assert steps(torch.compile(inside(target), backend="eager"), grad=False) == (0, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphOffloadWarning)
        assert graphoffload.explain(inside(target), **OPTIONS)(torch.randn(4, 8)).plans
        assert isinstance(target, torch.nn.Module)
        torch.export.export(target, (torch.randn(4, 8),))


def test_many_functions_under_one_backend_are_all_compiled() -> None:
    """Each has its own code, of which Dynamo counts the compiles."""
    compiles = 0

    def count(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal compiles
        compiles += 1
        return gm.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotOffloadedWarning)
        for _ in range(10):
            torch.compile(of_function(), backend=count)(torch.randn(4, 8)).sum().backward()
    assert compiles == 10


def trained(module: torch.nn.Module, run: Call, count: int = 3) -> list[str]:
    """Named warnings of some steps."""
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            optimizer.zero_grad()
            run(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    found = [seen for seen in caught if isinstance(seen.message, GraphOffloadWarning)]
    assert all(seen.category is NotOffloadedWarning for seen in found)
    return [str(seen.message) for seen in found]


@pytest.mark.parametrize(
    "around",
    [
        lambda net: torch.compile(inside(net), backend="eager"),
        lambda net: net.forward,
        lambda net: lambda x: net.second(net.first(x)),
    ],
    ids=["another compile", "its forward", "its layers"],
)
def test_a_module_that_never_runs_as_compiled(around: Callable[[Tanhs], Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, with what was asked, by the second step of the optimizer."""
    monkeypatch.setattr(unused, "_taken_in", weakref.WeakSet())
    net = Tanhs()
    graphoffload.offload(net, **OPTIONS)
    run = around(net)
    assert trained(net, run, count=1) == []
    (text,) = trained(net, run)
    assert all(part in text for part in ("policy='offload'", "Tanhs", 'backend="graphoffload"', "call the module itself"))


class Recurrent(torch.nn.Module):
    """Nothing but a layer that Dynamo leaves to eager."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[None])[0]


@pytest.mark.parametrize("whole", [True, False], ids=["in a model", "alone"])
def test_a_module_that_dynamo_leaves_to_eager(whole: bool) -> None:
    """It ran as it was compiled, and no graph came of it: said once."""
    model = Recurrent()
    graphoffload.offload(model if whole else model.layer, **OPTIONS)
    (text,) = trained(model, model)
    name = "Recurrent" if whole else "GRU"
    assert all(part in text for part in ("policy='offload'", name, "eager", "allow_rnn", "graph_breaks"))
    assert trained(model, model) == []


def test_a_module_that_the_user_runs_in_eager() -> None:
    """That is no reason to complain."""
    model = Recurrent()
    graphoffload.offload(model, **OPTIONS)
    with torch.compiler.set_stance("force_eager"):
        assert trained(model, model) == []


def test_a_module_that_runs_as_compiled_is_watched_no_more() -> None:
    """In any way that calls it, and with gradients from before; nor one that is not trained."""
    net, other = Tanhs(), Tanhs()
    net(torch.randn(4, 8)).sum().backward()
    for module in (net, other):
        graphoffload.offload(module, **OPTIONS)
    compiled = net._compiled_call_impl
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    before = graphoffload.stats()["offloads"]
    assert trained(net, net) == []
    assert graphoffload.stats()["offloads"] > before
    assert net._compiled_call_impl is not compiled
    assert net not in unused._waiting
    assert other in unused._waiting
    assert trained(net, torch.compile(inside(net), backend="eager")) == []
    tied = Tanhs()
    tied.second.weight = net.second.weight
    graphoffload.offload(tied, **OPTIONS)
    assert trained(torch.nn.ModuleList([net, tied]), net) == []


def test_a_module_inside_a_compile_by_graphoffload_is_offloaded_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same options nothing is to be said, also of one that Dynamo runs by the code of the first; others are named."""
    monkeypatch.setattr(unused, "_taken_in", weakref.WeakSet())
    nets = [Tanhs(), Tanhs()]
    for net in nets:
        graphoffload.offload(net, **OPTIONS)
    before = graphoffload.stats()["offloads"]
    torch._dynamo.reset()
    for net in nets:
        run = torch.compile(inside(net), backend=graphoffload.OffloadBackend(**OPTIONS))
        assert trained(net, run) == []
    assert graphoffload.stats()["offloads"] >= before + 6
    net = Tanhs()
    graphoffload.offload(net, **OPTIONS)
    torch._dynamo.reset()
    outer = graphoffload.OffloadBackend(**{**OPTIONS, "policy": "keep"})
    (text,) = trained(net, torch.compile(inside(net), backend=outer))
    assert "policy='keep' instead of 'offload'" in text


def test_a_module_that_is_compiled_anew_is_the_new_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what was asked before: tune() does so, and a user may."""
    monkeypatch.setattr(unused, "_taken_in", weakref.WeakSet())
    for how in ({"backend": "eager"}, {"backend": graphoffload.OffloadBackend(**{**OPTIONS, "policy": "keep"})}):
        net = Tanhs()
        graphoffload.offload(net, **OPTIONS)
        net.compile(**how)
        assert trained(net, net) == []


def test_a_module_that_waits_is_held_by_nobody() -> None:
    """It may be dropped without a call; and one that cannot be a key is compiled all the same."""

    class Equal(Tanhs):
        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = None  # type: ignore[assignment]

    net = Tanhs()
    graphoffload.offload(net, **OPTIONS)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert graphoffload.offload(Equal(), **OPTIONS)._compiled_call_impl is not None


class Lightning(torch.nn.Module):
    """Trained as a LightningModule is: by its training_step, and never by a call."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.blocks, self.metric = Tanhs(), torch.nn.ModuleList([Tanhs()]), torch.nn.Linear(8, 8)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks[0](self.net(x))
        return out


def test_a_module_that_is_trained_by_another_method() -> None:
    """The warning says what to compile, and that works."""
    model = Lightning()
    graphoffload.offload(model, **OPTIONS)
    (text,) = trained(model, model.training_step)
    given = unused.given_text(OPTIONS)
    assert f"offload(module.net, {given}), offload(module.blocks.0, {given})." in text
    assert "training_step" in text
    assert "metric" not in text
    other, before = Lightning(), graphoffload.stats()["offloads"]
    graphoffload.offload(other.net, **OPTIONS)
    assert trained(other, other.training_step) == []
    assert graphoffload.stats()["offloads"] > before
