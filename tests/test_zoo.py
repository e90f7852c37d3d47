"""Every case of the zoo, every policy: gradients, losses, outputs and buffers are those of keep-all."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import graphoffload
from graphoffload.errors import ChecksumError
from graphoffload.runtime import twin_copies
from graphoffload.testing import (
    ZOO,
    Case,
    Result,
    Scattered,
    assert_equal_bits,
    case_steps,
    compile_case,
    differences,
    float64_step,
    keep_all,
    observe,
    run_case,
    whole_gradient_error,
)
from graphoffload.testing.faults import host_copies, reloads

POLICIES = {
    "keep": "keep",
    "offload": "offload",
    "recompute": "recompute",
    "auto": "auto",
    "mapping": {"*": "offload"},
    "scattered": Scattered(seed=1),
}
ALIKE = {"keep", "auto", "mapping"}
"""On a CPU "auto" decides what "keep" does, nothing, and this mapping what "offload" does: a few cases show that they do."""
FEW = ("three_blocks", "checkpoint", "dynamic_views", "graph_break", "double_use", "block_autocast")
INDUCTOR = (
    "attention", "sdpa_dropout", "fused_qkv_unbind", "conv_net", "embedding_loss", "double_use", "small_slice", "dynamic_views",
    "block_autocast", "checkpoint",
)  # fmt: skip
"""Where compilers change layouts, fuse, or draw random numbers of their own. Each costs several compiles."""
LONG = ("block_autocast", "checkpoint", "conv_net", "dynamic_views", "embedding_loss", "sdpa_dropout", "small_slice")
"""Whose like every run has by others: layouts and slices in tests/runtime/test_layouts.py."""

FLOOR = 1e-8
"""Gradient errors below this are the float64 reference's own rounding."""


def config(policy: object, inner: str = "aot_eager") -> graphoffload.OffloadConfig:
    """Nothing is too small to be moved, and every reload is compared with what was offloaded."""
    return graphoffload.OffloadConfig(policy=policy, inner=inner, min_tensor_bytes=0, verify="checksum")  # type: ignore[arg-type]


def seeds_of(case: Case) -> tuple[int, ...]:
    return (0, 1, 2) if case.dynamic else (0, 1)


class Counted:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.graphs = backend, 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, inputs)


@functools.cache
def kept(name: str) -> tuple[list[Result], int]:
    """The steps to be equal to, and how many graphs torch compiles for them without us; none where they run in eager."""
    case = ZOO[name]
    plain = CompileCounterWithBackend(keep_all("aot_eager"))
    results = run_case(case, plain if case.reference == "keep_all" else None, "cpu", seeds=seeds_of(case))
    return results, int(plain.frame_count)


def reference(name: str) -> list[Result]:
    """The steps to be equal to."""
    return kept(name)[0]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[pytest.mark.long] * (policy == "scattered" and name not in FEW))
        for name in ZOO
        for policy in POLICIES
        if policy not in ALIKE or name in FEW
    ],
)
def test_equal_to_keep_all(name: str, policy: str) -> None:
    """To the bit: under aot_eager every operation runs as it is written, recomputed or not.

    With symbolic sizes torch compiles as often as without us: a size that became an int would compile anew for every batch.
    Decisions that are scattered over all cases are for long runs: test_zoo_hypothesis.py scatters them in every run.
    """
    case, ours = ZOO[name], Counted(graphoffload.OffloadBackend(config(POLICIES[policy])))
    with observe() as seen:
        results = run_case(case, ours, "cpu", seeds=seeds_of(case))
    for got, expected in zip(results, reference(name), strict=True):
        assert_equal_bits(got, expected)
    assert seen.plans
    assert not case.dynamic or ours.graphs == kept(name)[1] > 0
    if policy in ("offload", "mapping") and case.offloads:
        assert seen.copied_bytes > 0
        assert seen.counters["offloads"] == seen.counters["releases"]
        assert seen.counters["reloads"] == seen.counters["waits"] == seen.counters["checked"] == seen.counters["offloads"]
        assert case.dynamic or seen.copied_bytes == len(results) * seen.planned_bytes
    if policy in ("keep", "auto"):
        assert seen.copied_bytes == seen.planned_bytes == 0


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.dynamic])
def test_no_size_is_guarded_on_in_planning(name: str) -> None:
    """Planning for a number looks at hints."""
    ours = Counted(graphoffload.OffloadBackend(config("auto").with_options(max_slowdown=10.0, hardware="h200-sxm")))
    run_case(ZOO[name], ours, "cpu", seeds=seeds_of(ZOO[name]))
    assert ours.graphs == kept(name)[1] > 0


def test_recompute_recomputes() -> None:
    """A policy that changes nothing would be equal to keep-all as well."""
    with observe() as seen:
        run_case(ZOO["three_blocks"], graphoffload.OffloadBackend(config("recompute")), "cpu")
    assert sum(plan.recomputed_bytes for plan in seen.plans) > 0
    assert seen.copied_bytes == 0


def test_scattered_mixes_all_three() -> None:
    """The policy object really leads to all decisions in one plan."""
    with observe() as seen:
        run_case(ZOO["three_blocks"], graphoffload.OffloadBackend(config(POLICIES["scattered"])), "cpu")
    assert {decision.action for plan in seen.plans for decision in plan.decisions} == {"keep", "recompute", "offload"}


def test_first_match_wins() -> None:
    """A mapping with several patterns: the norms and the activation are recomputed, the rest is offloaded."""
    policy = {"*_norm": "recompute", "*.mlp.1": "recompute", "*": "offload"}
    case = ZOO["three_blocks"]
    with observe() as seen:
        results = run_case(case, graphoffload.OffloadBackend(config(policy)), "cpu", seeds=(0, 1))
    for got, expected in zip(results, reference(case.name), strict=True):
        assert_equal_bits(got, expected)
    (plan,) = seen.plans
    assert plan.recomputed_bytes > 0
    assert plan.offloaded_bytes > 0


def test_the_comparison_sees_a_wrong_reload() -> None:
    """Zeros in place of one reloaded tensor: otherwise every test above could pass by itself."""
    case = ZOO["attention"]
    backend = graphoffload.OffloadBackend(config("offload").with_options(verify="graph"))
    with reloads(lambda y: y.zero_()):
        (got,) = run_case(case, backend, "cpu")
    assert [line for line in differences(got, reference(case.name)[0]) if line.startswith("grad of q.weight")]


def test_checksums_see_a_wrong_host_copy() -> None:
    """The same in checksum mode raises before a gradient comes out."""
    case = ZOO["attention"]
    with host_copies(lambda host: host.view(torch.uint8).add_(1)), pytest.raises(ChecksumError, match="are not those"):
        run_case(case, graphoffload.OffloadBackend(config("offload")), "cpu")


@functools.cache
def inductor_reference(name: str) -> tuple[list[Result], list[Result]]:
    """(keep-all under Inductor, float64) for five seeds."""
    case = ZOO[name]
    exact = [float64_step(case, "cpu", seed=seed) for seed in range(5)]
    return run_case(case, keep_all("inductor"), "cpu", seeds=tuple(range(5))), exact


def assert_as_accurate(name: str, results: list[Result]) -> None:
    """Median whole-gradient error at most 1.5 times keep-all's; random cases draw the same numbers as keep-all."""
    kept, exact = inductor_reference(name)
    if ZOO[name].random:  # float64 draws other numbers
        assert max(whole_gradient_error(got, keep) for got, keep in zip(results, kept, strict=True)) < 1e-5
        return
    error = statistics.median(whole_gradient_error(got, true) for got, true in zip(results, exact, strict=True))
    assert error <= 1.5 * statistics.median(whole_gradient_error(k, true) for k, true in zip(kept, exact, strict=True)) + FLOOR


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in INDUCTOR])
def test_offload_under_inductor(name: str) -> None:
    """Equal to the bit to the twin (the same graphs, copies replaced by device clones), and as accurate as keep-all."""
    case, seeds = ZOO[name], tuple(range(5))
    module = compile_case(case, graphoffload.OffloadBackend(config("offload", "inductor")), "cpu")
    with observe() as seen:
        results = case_steps(case, module, "cpu", seeds=seeds)
    assert seen.copied_bytes > 0
    assert seen.counters["checked"] == seen.counters["reloads"] == seen.counters["offloads"] > 0
    with twin_copies(), observe() as twin:
        clones = case_steps(case, module, "cpu", seeds=seeds)
    assert twin.counters["offloads"] == seen.counters["offloads"]
    for got, clone in zip(results, clones, strict=True):
        assert_equal_bits(got, clone)
    assert_as_accurate(name, results)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "scattered"])
@pytest.mark.parametrize(
    "name", ["attention", "counted_buffer", *(pytest.param(name, marks=pytest.mark.long) for name in ("dropout", "conv_net"))]
)
def test_recompute_under_inductor(name: str, policy: str) -> None:
    """Recomputed values are as accurate as kept ones, and recomputed dropout draws the same numbers."""
    case = ZOO[name]
    with observe() as seen:
        backend = graphoffload.OffloadBackend(config(POLICIES[policy], "inductor"))
        results = run_case(case, backend, "cpu", seeds=tuple(range(5)))
    assert seen.plans
    if case.reference == "eager":
        exact = [float64_step(case, "cpu", seed=seed) for seed in range(5)]
        assert max(whole_gradient_error(got, true) for got, true in zip(results[:1], exact[:1], strict=True)) < 1e-5
    else:
        assert_as_accurate(name, results)
