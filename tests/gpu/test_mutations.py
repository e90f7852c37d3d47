"""A rule that can be broken without a test failing is not tested. Here each is broken, and something has to complain."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu import mutations, races
from gpu.mutations import Mutation
from gpu.races import BEFORE, LAG, SEEDS, Disturbance, disturbed, found_differences, twin

import graphoffload
from graphoffload.errors import GraphOffloadError, RuntimeStateError, VerifyError
from graphoffload.testing import ZOO, Case, Result, compile_case

SLOW_COPIES = Disturbance("copies start 5 ms late", before_ms=5.0)
LATE_COMPUTE = Disturbance("compute lags", lag_ms=50.0)

AT_RUN_TIME: dict[str, tuple[Mutation, str, Disturbance]] = {
    "release_without_wait": (mutations.release_without_wait, "three_blocks", SLOW_COPIES),
    "wait_without_wait": (mutations.wait_without_wait, "three_blocks", SLOW_COPIES),
    "d2h_without_compute": (mutations.d2h_without_compute, "three_blocks", LATE_COMPUTE),
    "h2d_without_compute": (mutations.h2d_without_compute, "three_blocks", LATE_COMPUTE),
    "flat_in_wrong_strides": (mutations.flat_in_wrong_strides, "channels_last", BEFORE),
    "reload_nothing": (mutations.reload_nothing, "three_blocks", BEFORE),
}
IN_THE_GRAPH: dict[str, Mutation] = {
    "drop_release": mutations.drop_release,
    "release_at_once": mutations.release_at_once,
    "drop_wait": mutations.drop_wait,
    "wait_after_readers": mutations.wait_after_readers,
}


def compile_offloaded(case: Case, *, verify: str = "graph") -> torch.nn.Module:
    """Everything that may go, one tensor in flight. No compile cache is involved: aot_eager has none."""
    config = graphoffload.OffloadConfig(
        policy="offload", inner="aot_eager", min_tensor_bytes=0, max_inflight_bytes=1, verify=verify
    )
    return compile_case(case, graphoffload.OffloadBackend(config), races.DEVICE)


def complaints(
    case: Case, module: torch.nn.Module, reference: list[Result], disturbance: Disturbance, *, compiled: bool = False
) -> list[str]:
    """Differences from the twin, or the error that stopped the step; of copies call by call, or of compiled ones."""
    for repeat in range(5):
        try:
            found = found_differences(disturbed(case, module, disturbance, seed=2 * repeat + compiled)[0], reference)
        except GraphOffloadError as error:
            return [str(error)]
        if found:
            return found
    return []


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_broken_order_shows(name: str) -> None:
    """The same module and disturbance: nothing to complain about before, something with the rule broken, nothing after.

    Of copies that are issued call by call, and of compiled ones.
    """
    mutation, case_name, disturbance = AT_RUN_TIME[name]
    case = ZOO[case_name]
    module = compile_offloaded(case)
    reference = twin(case, module)
    for compiled in (False, True):
        assert not complaints(case, module, reference, disturbance, compiled=compiled)
        with mutation():
            noticed = complaints(case, module, reference, disturbance, compiled=compiled)
            assert noticed, f"nothing noticed {name}, compiled: {compiled}"
        assert not complaints(case, module, reference, disturbance, compiled=compiled)


@pytest.mark.usefixtures("deterministic")
def test_broken_order_between_graphs_shows() -> None:
    """A window of one small tensor: what the graph before left pending is settled in the next graph."""
    case = ZOO["three_blocks"]
    config = graphoffload.OffloadConfig(
        policy="offload", inner="aot_eager", min_tensor_bytes=0, max_inflight_bytes="16KiB", hardware=races.SLOW_LINK
    )
    module = races.compile_blocks(case, graphoffload.OffloadBackend(config))
    reference = twin(case, module)
    assert not complaints(case, module, reference, SLOW_COPIES)
    with mutations.settle_without_wait():
        assert complaints(case, module, reference, SLOW_COPIES), "nothing noticed settle_without_wait"
    assert not complaints(case, module, reference, SLOW_COPIES)


@pytest.mark.usefixtures("deterministic")
def test_temporary_is_refused() -> None:
    """No delay is needed: release compares the memory it is given with what offload reads."""
    case = ZOO["three_blocks"]
    module = compile_offloaded(case)
    twin(case, module)
    with mutations.offload_a_temporary(), pytest.raises(RuntimeStateError, match="release was given memory at"):
        disturbed(case, module, BEFORE)


@pytest.mark.parametrize("name", IN_THE_GRAPH)
def test_broken_graph_is_refused(name: str) -> None:
    """By the verifier, before anything runs."""
    case = ZOO["three_blocks"]
    with IN_THE_GRAPH[name](), pytest.raises(Exception, match=r"(?i)verif|release|wait") as caught:  # Dynamo may wrap it
        twin(case, compile_offloaded(case))
    assert VerifyError.__name__ in repr(caught.value) or isinstance(caught.value.__cause__, VerifyError)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["wait_after_readers", "drop_wait", "source_dies_early"])
def test_broken_graph_runs_wrong_without_the_verifier(name: str) -> None:
    """What the verifier stands between: with verify="off" and slow copies the gradients differ, or the step is stopped."""
    case = ZOO["three_blocks"]
    right = compile_offloaded(case)
    reference = twin(case, right)
    with contextlib.ExitStack() as stack:
        stack.enter_context(getattr(mutations, name)())
        wrong = compile_offloaded(case, verify="off")
        assert complaints(case, wrong, reference, SLOW_COPIES), f"nothing noticed {name}"


def test_seeds_alternate() -> None:
    """Stale memory of the step before must be wrong, so consecutive steps differ."""
    assert len(set(SEEDS)) == len(SEEDS) > 1
    assert LAG.lag_ms > 0
