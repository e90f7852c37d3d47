"""What training loops really do between a forward and its backward: nothing is lost, nothing leaks, no gradient changes."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphoffload
from graphoffload.runtime import ops
from graphoffload.runtime.handles import ENTRIES, KEPT_TURNS
from graphoffload.runtime.pinned import slabs
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.testing import ZOO, Result, assert_equal_bits, compiled, keep_all, observe, run_step, weighted_loss
from graphoffload.testing.faults import Fails

CASE = ZOO["attention"]


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def inner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def backend(inner: str = "aot_eager") -> Any:
    config = graphoffload.OffloadConfig(policy="offload", inner=inner, min_tensor_bytes=0, verify="checksum")
    return graphoffload.OffloadBackend(config)


def offloading(inner: str = "aot_eager") -> nn.Module:
    return compiled(CASE.fresh("cpu"), backend(inner))


def in_use() -> int:
    gc.collect()
    return graphoffload.host_memory().in_use_bytes


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Each test starts and ends without host memory in use."""
    assert in_use() == 0
    yield
    torch._dynamo.reset()
    assert in_use() == 0


def arguments(seed: int = 0) -> tuple[Tensor, ...]:
    return CASE.example("cpu", seed=seed)


def grads(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def step(module: nn.Module, seed: int = 0) -> Result:
    return run_step(module, arguments(seed), CASE.loss, seed)


def test_host_memory_is_held_until_backward() -> None:
    """In use between forward and backward, free after it, and the same buffers serve the next step."""
    module = offloading()
    loss = CASE.loss(module(*arguments()))
    held = graphoffload.host_memory()
    assert held.in_use_bytes > 0
    loss.backward()
    del loss
    assert in_use() == 0
    step(module, 1)
    assert graphoffload.host_memory().held_bytes == held.held_bytes


def test_outputs_dropped_without_backward() -> None:
    """The handles die with the outputs, and the buffers return."""
    module = offloading()
    output = module(*arguments())
    assert graphoffload.host_memory().in_use_bytes > 0
    del output
    assert in_use() == 0


@torch._functorch.config.patch("donated_buffer", False)
def test_retain_graph_twice(inner: str) -> None:
    """Three backwards from one forward: each adds the same gradients."""
    module, plain = offloading(inner), compiled(CASE.fresh("cpu"), keep_all(inner))
    found = []
    for each in (module, plain):
        loss = CASE.loss(each(*arguments()))
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
            found.append(grads(each))
    for position in range(3):
        for a, b in zip(found[position], found[3 + position], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    if inner == "aot_eager":
        assert_same(found[2], found[5])
    assert_same([3 * g for g in found[0]], [((g + g) + g) for g in found[0]])
    torch.testing.assert_close(found[2], [3 * g for g in found[0]])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_microbatches_in_flight(order: tuple[int, ...]) -> None:
    """Three forwards, then their backwards in any order: buffers in flight are distinct."""
    module = offloading()
    alone = {seed: step(module, seed) for seed in range(3)}
    module.zero_grad()
    losses = [CASE.loss(module(*arguments(seed))) for seed in range(3)]
    for seed in order:
        module.zero_grad()
        losses[seed].backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        for name, expected in alone[seed].grads.items():
            if not name.startswith("input"):
                assert torch.equal(found[name], expected), name
    del losses


def test_interleaved_microbatches_of_a_pipeline() -> None:
    """One forward ahead of each backward, as 1F1B schedules do; gradients accumulate."""
    module, plain = offloading(), compiled(CASE.fresh("cpu"), keep_all())
    found = []
    for each in (module, plain):
        waiting = CASE.loss(each(*arguments(0)))
        for seed in range(1, 4):
            following = CASE.loss(each(*arguments(seed)))
            waiting.backward()
            waiting = following
        waiting.backward()
        found.append(grads(each))
        del waiting, following
    assert_same(*found)


def test_forward_without_backward_then_training_goes_on(inner: str) -> None:
    """A skipped loss (NaN guard, early exit) costs nothing later."""
    module = offloading(inner)
    expected = step(module, 0)
    for seed in range(1, 4):
        module(*arguments(seed))
    assert_equal_bits(step(module, 0), expected)


@pytest.mark.parametrize("where", ["before", "after"])
def test_exception_in_backward(where: str) -> None:
    """Before or after the compiled backward ran: buffers return and the next step is right."""
    module = offloading()
    expected = step(module, 0)
    inputs = arguments(1)
    output = Fails.apply(module(*inputs)) if where == "before" else module(Fails.apply(inputs[0]))
    loss = CASE.loss(output)
    with pytest.raises(KeyError, match="interrupted"):
        loss.backward()
    del loss, output
    assert in_use() == 0
    assert_equal_bits(step(module, 0), expected)


def test_exception_in_forward() -> None:
    """An error raised by the caller between forward and backward."""
    module = offloading()
    expected = step(module, 0)

    def interrupted() -> None:
        output = module(*arguments(1))
        assert output.shape
        raise KeyError("interrupted")

    with pytest.raises(KeyError):
        interrupted()
    assert in_use() == 0
    assert_equal_bits(step(module, 0), expected)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_between_steps(mode: str) -> None:
    """Nothing is offloaded without a backward to come; training goes on as before."""
    module = offloading()
    expected = step(module, 0)
    with observe() as seen, getattr(torch, mode)():
        module.eval()
        value = module(*arguments(0))
        module.train()
    assert seen.copied_bytes == 0
    assert torch.equal(value, expected.outputs[0])
    assert_equal_bits(step(module, 0), expected)


def test_backward_on_part_of_the_outputs() -> None:
    """Gradients of one output only, through torch.autograd.grad."""
    case = ZOO["saved_output"]
    found = []
    for chosen in (backend(), keep_all()):
        module = compiled(case.fresh("cpu"), chosen)
        outputs = module(*case.example("cpu"))
        found.append(list(torch.autograd.grad(weighted_loss(outputs[2]), list(module.first.parameters()))))  # type: ignore[union-attr]
        del outputs
    assert_same(*found)


@pytest.mark.parametrize("kind", ["clone", "numpy", "save_on_cpu"])
def test_saved_tensors_hooks_around_the_model(kind: str, inner: str) -> None:
    """Hooks of the user see the handles in place of the tensors, and may copy them."""
    module = offloading(inner)
    expected = step(module, 0)
    hooks: Any = {
        "clone": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()),
        "numpy": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy),
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
    }[kind]
    module.zero_grad()
    for _ in range(2):
        inputs = arguments(0)
        module.zero_grad()
        with hooks():
            loss = CASE.loss(module(*inputs))
        loss.backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, expected.grads[name]), name
        del loss
        assert in_use() == 0


def forget_copied_handles() -> None:
    """Nobody can tell when copies of a handle die that no backward asked for."""
    for queue in ENTRIES._copied.values():
        while queue:
            ENTRIES._close(queue.popleft())


def test_equal_blocks_compiled_one_by_one_under_hooks() -> None:
    """They share a plan, so that one forward calls it more often than the steps for which copied handles are kept."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(12)))
    plain = copy.deepcopy(blocks)
    for block in blocks:
        graphoffload.offload(block, policy="offload", inner="aot_eager", min_tensor_bytes=0)
    x = torch.randn(16, 32)
    for _ in range(2):
        for each in (blocks, plain):
            each.zero_grad()
            with torch.autograd.graph.save_on_cpu():
                loss = each(x).square().mean()
            loss.backward()
        assert_same(grads(blocks), grads(plain))
        assert in_use() == 0


@torch._functorch.config.patch("donated_buffer", False)
def test_a_retained_graph_under_hooks_keeps_its_copies() -> None:
    """Until the backward that does not retain it, also with another step between."""
    module = offloading()
    expected = step(module, 0).grads
    with torch.autograd.graph.save_on_cpu():
        loss = CASE.loss(module(*arguments(0)))
        loss.backward(retain_graph=True)
        held = in_use()
        assert held > 0
        CASE.loss(module(*arguments(1))).backward()
    assert in_use() == held
    module.zero_grad()
    loss.backward()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
    assert in_use() == 0


def test_forwards_dropped_under_hooks_are_given_up() -> None:
    """Copied handles that no backward asks for: those of a few steps stay, not of all."""
    module = offloading()
    used = []
    for _ in range(14):
        with torch.autograd.graph.save_on_cpu():
            module(*arguments(0))  # no backward
            CASE.loss(module(*arguments(1))).backward()
        used.append(in_use())
    assert used[1] > used[0]
    assert used[-1] == used[-2] == used[-3]
    forget_copied_handles()


def test_one_forward_dropped_under_hooks_is_given_up_without_them() -> None:
    """Hooks that are never active again do not keep its memory for ever."""
    module = offloading()
    with torch.autograd.graph.save_on_cpu():
        module(*arguments(0))  # no backward
    assert in_use() > 0
    for _ in range(KEPT_TURNS + 2):
        step(module, 1)
    assert in_use() == 0


def test_inside_a_checkpoint() -> None:
    """The compiled module in an eager checkpoint region: its forward runs twice, the first time without a backward."""
    from torch.utils.checkpoint import checkpoint

    module, plain = offloading(), compiled(CASE.fresh("cpu"), keep_all())
    found = []
    for each in (module, plain):
        for use_reentrant in (False, True):
            each.zero_grad()
            CASE.loss(checkpoint(each, *arguments(0), use_reentrant=use_reentrant)).backward()
            found.append(grads(each))
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])


def test_state_dict_keys_are_unchanged() -> None:
    """Compiled in place, the model's own names; a checkpoint loads into a plain model."""
    module, plain = offloading(), CASE.fresh("cpu", seed=1)
    step(module)
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict())


def test_deepcopy_is_independent() -> None:
    """torch drops an in-place compile in a deep copy; what counts is that the copy works and shares nothing."""
    module = offloading()
    expected = step(module)
    twin = copy.deepcopy(module)
    torch.testing.assert_close(step(twin).loss, expected.loss)
    assert_equal_bits(step(module), expected)


def test_training_goes_the_same_way() -> None:
    """Twenty steps of AdamW with clipping: the parameters end up equal to the bit."""
    found = []
    for chosen in (backend(), keep_all()):
        module = compiled(CASE.fresh("cpu"), chosen)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for seed in range(20):
            optimizer.zero_grad()
            CASE.loss(module(*arguments(seed))).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in module.parameters()])
    assert_same(*found)


def test_poisoned_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer is overwritten as soon as it is given back: nobody reads one that is no longer theirs."""
    module = offloading()
    expected = [step(module, seed) for seed in range(3)]
    monkeypatch.setattr(POOL, "poison", True)
    for seed in range(3):
        assert_equal_bits(step(module, seed), expected[seed])
    losses = [CASE.loss(module(*arguments(seed))) for seed in range(3)]
    module(*arguments(1))  # dropped: poisoned while the others are in flight
    for seed in (1, 2, 0):
        module.zero_grad()
        losses[seed].backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, expected[seed].grads[name])
    del losses


class Fault:
    """Calls of one function: the one at `at` raises, before or after it did its work; counts them all."""

    def __init__(self, original: Any, at: int, *, after: bool) -> None:
        self.original, self.at, self.after, self.calls = original, at, after, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 != self.at:
            return self.original(*args, **kwargs)
        if self.after:
            self.original(*args, **kwargs)
        raise KeyError("injected")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(slabs, "Slab"), (POOL, "acquire"), (ops, "_copy_to_host"), (ENTRIES, "add"), (ops, "_copy_to_device"), (ENTRIES, "find")],
    ids=["allocation", "buffer", "d2h", "handle", "h2d", "look-up"],
)
def test_a_fault_at_every_allocation_and_copy(owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call in turn raises: the step fails with that error, all memory comes back, the next step is right to the bit."""
    module = offloading()
    expected = step(module, 0)
    count = Fault(getattr(owner, name), -1, after=after)
    with monkeypatch.context() as patch:
        graphoffload.release_host_memory()
        patch.setattr(owner, name, count)
        step(module, 0)
    assert count.calls > 0
    if after and name in ("acquire", "Slab"):
        return  # nobody could give back what was never returned
    for at in range(count.calls):
        graphoffload.release_host_memory()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Fault(getattr(owner, name), at, after=after))
            with pytest.raises(KeyError, match="injected"):
                step(module, 1)
        assert in_use() == 0
        module.zero_grad()
        assert_equal_bits(step(module, 0), expected)
