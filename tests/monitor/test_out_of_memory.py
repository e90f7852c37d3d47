"""An out-of-memory error in a compiled step keeps its type and gains a note; nothing else changes on the way."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

import graphoffload
from graphoffload.facts.plan import Plan, Prediction
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.monitor.out_of_memory import next_budget_bytes, note, with_note
from graphoffload.runtime import host_memory, registry
from graphoffload.testing import assert_equal_bits, compiled, draw, keep_all, run_step
from graphoffload.units import parse_size

GIB = 2**30
WIDTH = 16
ARMED: set[str] = set()
WATCHED: list[Any] = []


def _full(where: str) -> None:
    if where in ARMED:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@torch.library.custom_op("graphoffload_tests::hungry", mutates_args=())
def hungry(x: Tensor) -> Tensor:
    """Copies; runs out of memory when armed for "forward"."""
    _full("forward")
    out = x.clone()
    WATCHED.append(StorageWeakRef(out.untyped_storage()))
    return out


@torch.library.custom_op("graphoffload_tests::hungry_backward", mutates_args=())
def hungry_backward(grad: Tensor) -> Tensor:
    """Copies; runs out of memory when armed for "backward"."""
    _full("backward")
    WATCHED.append(WATCHED[-1].expired())
    return grad.clone()


hungry.register_fake(torch.empty_like)
hungry_backward.register_fake(torch.empty_like)
torch.library.register_autograd("graphoffload_tests::hungry", lambda _ctx, grad: hungry_backward(grad))


@contextlib.contextmanager
def armed(where: str) -> Iterator[None]:
    ARMED.add(where)
    try:
        yield
    finally:
        ARMED.discard(where)


class Model(nn.Module):
    """Two layers; `viewed`: the output is a view that AOTAutograd takes outside of the compiled function."""

    def __init__(self, *, viewed: bool = False, broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.viewed, self.broken = viewed, broken

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.first(x))
        if self.broken:
            torch._dynamo.graph_break()
        y = self.second(hungry(torch.sigmoid(y)))
        return (y, y.view(-1)) if self.viewed else y


def example() -> tuple[Tensor]:
    return (draw(4, WIDTH, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)


def offloading(inner: str) -> graphoffload.OffloadBackend:
    return graphoffload.OffloadBackend(inner=inner, policy="offload", min_tensor_bytes=0, verify="checksum")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("shape", ["plain", "viewed", "broken"])
def test_the_note(inner: str, shape: str) -> None:
    """In forward and in backward: the type stays, one note comes, and the next step is right again."""
    model = compiled(Model(viewed=shape == "viewed", broken=shape == "broken"), offloading(inner))
    fresh = run_step(compiled(Model(viewed=shape == "viewed", broken=shape == "broken"), keep_all(inner)), example())
    registry.forget()
    in_use: set[int] = set()
    for where in ("backward", "forward", "backward"):
        run_step(model, example())
        with armed(where), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB") as caught:
            run_step(model, example())
        plan = registry.last_plans()[-1]
        (text,) = caught.value.__notes__  # on Python 3.10 there are none
        assert text.startswith(f"graphoffload: out of memory in {where} of {plan.graph} (plan {plan.key})")
        del caught
        assert_equal_bits(run_step(model, example()), fresh)
        in_use.add(host_memory().in_use_bytes)
    assert len(in_use) == 1  # the buffers of the steps that failed came back


def test_other_errors_and_eager_steps_are_left_alone() -> None:
    """Only torch.OutOfMemoryError, only with a plan."""

    def broken(*_: Any) -> None:
        raise ValueError("no")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(ValueError, match="no") as value:
        with_note(broken, "no such plan")()
    with pytest.raises(torch.OutOfMemoryError) as memory:
        with_note(full, "no such plan")()
    assert not hasattr(value.value, "__notes__")
    assert not hasattr(memory.value, "__notes__")


def test_inputs_are_freed_as_early_as_without_the_note() -> None:
    """A list goes through as the list it is, so that the callee can empty it; attributes of the callable stay."""
    freed: list[bool] = []

    def boxed(arguments: list[Tensor]) -> list[Tensor]:
        alive = weakref.ref(arguments[0])
        arguments.clear()
        freed.append(alive() is None)
        return []

    boxed._boxed_call = True  # type: ignore[attr-defined]
    run = with_note(boxed, "k")
    assert run._boxed_call  # type: ignore[attr-defined]
    assert run([torch.ones(3)]) == []
    assert freed == [True]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_backward_frees_what_it_has_read(inner: str) -> None:
    """The activation that the second layer saved is gone when backward reaches the operation before it, as without us."""
    expired: list[list[bool]] = []
    for backend in (keep_all(inner), graphoffload.OffloadBackend(inner=inner, policy="keep")):
        model, gone = compiled(Model(), backend), []
        for _ in range(3):  # the first step wraps the backward, the others run it
            WATCHED.clear()
            out = model(*example())
            assert hasattr(type(out.grad_fn)._forward_cls._backward_impl, "__wrapped__") == (backend != inner)
            out.sum().backward()
            gone.append(WATCHED[-1] is True)
        expired.append(gone)
    assert expired == [[True] * 3, [True] * 3]


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.slow
def test_the_note_after_a_cache_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper neither keeps torch's compile cache from storing nor is lost when the cache answers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path / "plans"))
    seen = []
    for _ in range(2):
        counters.clear()
        registry.forget()
        model = compiled(Model(), offloading("inductor"))
        with armed("backward"), pytest.raises(torch.OutOfMemoryError) as error:
            model(*example()).sum().backward()
        seen.append(("in backward of" in error.value.__notes__[0], counters["aot_autograd"]["autograd_cache_hit"]))
    assert seen == [(True, 0), (True, 1)]


def planned(predicted: int, keep: int) -> Plan:
    return Plan(key="k", graph="graph0", prediction=Prediction(predicted_peak_bytes=predicted, keep_peak_bytes=keep))


@pytest.mark.parametrize(
    ("allocated", "budget"),
    [(None, 0.95 * 40), (44 * GIB, 0.95 * 36), (30 * GIB, 0.95 * 30), (40 * GIB, 0.95 * 40)],
)
def test_the_budget_to_try_next(allocated: int | None, budget: float) -> None:
    """Less by what the prediction was short of, or what there was when less than predicted could be had."""
    plan = planned(40 * GIB, 60 * GIB)
    assert next_budget_bytes(plan, allocated) == int(budget * GIB)
    text = note(plan, "backward", allocated)
    assert "in backward of graph0 (plan k): predicted peak 40.0 GiB, allocated peak" in text
    assert "with everything kept 60.0 GiB" in text
    quoted = text.split('"device_budget": "')[1].split('"')[0]
    assert parse_size(quoted, field="device_budget") == pytest.approx(budget * GIB, abs=0.05 * GIB)


def test_no_budget_is_offered_where_none_would_help() -> None:
    """As much is missing as was predicted, or all that is saved would not be enough: "0 B" was offered."""
    assert next_budget_bytes(planned(40 * GIB, 60 * GIB), 90 * GIB) is None
    text = note(planned(40 * GIB, 60 * GIB), "forward", 90 * GIB)
    assert "More is missing than any plan of this graph frees: no device_budget would help. Make the batch" in text
    assert 'device_budget"' not in text
    saved = SavedTable((SavedTensor(name="a", views=(), nbytes=30 * GIB, dtype="", shape=(), strides=(), op=""),))
    with_table = replace(planned(40 * GIB, 60 * GIB), saved=saved)
    assert next_budget_bytes(with_table, 44 * GIB) == int(0.95 * 36 * GIB)
    assert next_budget_bytes(with_table, 46 * GIB) == int(0.95 * 34 * GIB)
    assert next_budget_bytes(with_table, 50 * GIB) is None, "30 GiB are not saved for backward"


def test_the_note_counts_what_is_reserved() -> None:
    plan = planned(40 * GIB, 60 * GIB)
    plan = replace(plan, prediction=replace(plan.prediction, reserve_bytes=4 * GIB))
    text = note(plan, "backward", 48 * GIB)
    assert "predicted peak 44.0 GiB (4.00 GiB of it reserved), allocated peak 48.0 GiB, with everything kept 64.0 GiB" in text
    assert next_budget_bytes(plan, 48 * GIB) == int(0.95 * 40 * GIB)


def test_the_note_of_a_part_says_that_it_is_one() -> None:
    """A block of many, alone far from full."""
    text = note(replace(planned(20 * GIB, 20 * GIB), part=True), "forward", 135 * GIB)
    assert "These figures speak of this graph alone, and it is one of several: no device_budget would help." in text
    assert "compile the whole model as one graph" in text
