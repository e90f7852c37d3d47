"""torch.utils.checkpoint and its tags: binding ones bind, advice is taken where nothing speaks against it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphoffload
from graphoffload.errors import TagError
from graphoffload.facts.plan import Plan
from graphoffload.testing import ZOO, Observed, Result, assert_equal_bits, compiled, draw, keep_all, observe, run_step
from graphoffload.testing.structure import Selective, tag_everything

WIDTH = 16
TANH = torch.ops.aten.tanh.default


class OnlyTanh:
    """A selective policy that tags tanh and leaves the rest to `otherwise`."""

    def __init__(self, tag: CheckpointPolicy, otherwise: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE) -> None:
        self.tag, self.otherwise = tag, otherwise

    def __call__(self, _ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return self.tag if op == TANH else self.otherwise


class Region(nn.Module):
    """Three linears; the middle one, with a tanh and a product of its result, in a selective checkpoint region."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.policy = policy

    def inside(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x))
        return torch.exp(-y * y) * y.sin()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.first(x))
        if self.policy is None:
            x = checkpoint(self.inside, x, use_reentrant=False)
        else:
            context = partial(create_selective_checkpoint_contexts, self.policy)
            x = checkpoint(self.inside, x, use_reentrant=False, context_fn=context)
        out: Tensor = self.third(x)
        return out


def run(tags: Any, **options: Any) -> tuple[Result, Observed]:
    """One step of Region; equal to keep-all to the bit."""
    inputs = (draw(4, WIDTH, device="cpu", dtype=torch.float32, seed=0, requires_grad=True),)
    torch.manual_seed(0)
    expected = run_step(compiled(Region(tags), keep_all()), inputs)
    config = graphoffload.OffloadConfig(inner="aot_eager", min_tensor_bytes=0, verify="checksum", **options)
    torch.manual_seed(0)
    with observe() as seen:
        got = run_step(compiled(Region(tags), graphoffload.OffloadBackend(config)), inputs)
    assert_equal_bits(got, expected)
    return got, seen


def action_of_tanh(seen: Observed) -> str:
    (plan,) = seen.plans
    (tensor,) = [tensor for tensor in plan.saved.tensors if "tanh" in tensor.op]
    return plan.action(tensor.name)


def saved_ops(plan: Plan) -> set[str]:
    return {tensor.op for tensor in plan.saved.tensors if plan.action(tensor.name) != "recompute"}


@pytest.mark.parametrize("policy", ["auto", "keep", "offload", "recompute"])
def test_must_save_is_never_recomputed(policy: str) -> None:
    """Saved: kept, or offloaded where the policy says so."""
    _, seen = run(OnlyTanh(CheckpointPolicy.MUST_SAVE), policy=policy)
    assert action_of_tanh(seen) == ("offload" if policy == "offload" else "keep")


def test_must_cpu_offload_is_offloaded() -> None:
    """No released torch acts on this tag; we do, also under "auto" where everything would fit."""
    _, seen = run(OnlyTanh(CheckpointPolicy.MUST_CPU_OFFLOAD))
    assert action_of_tanh(seen) == "offload"
    assert seen.copied_bytes == 4 * WIDTH * 4


def test_must_recompute_is_recomputed() -> None:
    """Binding also against policy="keep"? No policy asks for it here: "auto" obeys the tag."""
    _, seen = run(OnlyTanh(CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE))
    (plan,) = seen.plans
    assert not {op for op in saved_ops(plan) if "tanh" in op}
    assert seen.copied_bytes == 0


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        (CheckpointPolicy.PREFER_SAVE, "keep"),
        (CheckpointPolicy.PREFER_RECOMPUTE, "recompute"),
        (CheckpointPolicy.PREFER_CPU_OFFLOAD, "offload"),
    ],
    ids=lambda value: str(value).rsplit(".", maxsplit=1)[-1],
)
def test_advice_is_taken_where_nothing_speaks_against_it(tag: CheckpointPolicy, expected: str) -> None:
    """Without a budget, a slowdown or a policy the user's advice is all there is."""
    _, seen = run(OnlyTanh(tag))
    (plan,) = seen.plans
    found = [tensor.name for tensor in plan.saved.tensors if "tanh" in tensor.op]
    if expected == "recompute":
        assert all(plan.action(name) == "recompute" for name in found)
    else:
        assert [plan.action(name) for name in found] == [expected]
    assert (seen.copied_bytes > 0) == (expected == "offload")


def test_a_policy_wins_over_advice() -> None:
    """PREFER_RECOMPUTE with policy="offload": what the policy names is done."""
    _, seen = run(OnlyTanh(CheckpointPolicy.PREFER_RECOMPUTE), policy="offload")
    assert seen.copied_bytes > 0


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_reentrant"])
def test_a_plain_region_stays_recomputed(name: str) -> None:
    """Under "auto" without a number, as torch.compile itself would."""
    case = ZOO[name]
    config = graphoffload.OffloadConfig(inner="aot_eager", min_tensor_bytes=0)
    with observe() as seen:
        run_step(compiled(case.fresh("cpu"), graphoffload.OffloadBackend(config)), case.example("cpu"))
    (plan,) = seen.plans
    inside = [tensor for tensor in plan.saved.tensors if "inside" in tensor.module and "gelu" in tensor.op]
    assert all(plan.action(tensor.name) == "recompute" for tensor in inside)
    assert not [t for t in plan.saved.tensors if "inside.first" in t.module and plan.action(t.name) != "recompute"]
    assert [t for t in plan.saved.tensors if "before" in t.module and plan.action(t.name) == "keep"]


CONTRADICTIONS = [
    (CheckpointPolicy.MUST_SAVE, "recompute"),
    (CheckpointPolicy.MUST_RECOMPUTE, "offload"),
    (CheckpointPolicy.MUST_RECOMPUTE, "keep"),
    (CheckpointPolicy.MUST_CPU_OFFLOAD, "keep"),
    (CheckpointPolicy.MUST_CPU_OFFLOAD, "recompute"),
]


@pytest.mark.parametrize(("tag", "action"), CONTRADICTIONS, ids=str)
def test_contradictory_wishes_are_an_error(tag: CheckpointPolicy, action: str) -> None:
    """A binding tag and a pattern that names the same tensors otherwise: neither may be ignored in silence."""
    case = ZOO["selective"]
    config = graphoffload.OffloadConfig(inner="aot_eager", min_tensor_bytes=0, policy={"inside*": action})
    module = compiled(Selective(tag_everything(tag)), graphoffload.OffloadBackend(config))
    with pytest.raises(BackendCompilerFailed) as info:
        run_step(module, case.example("cpu"))
    error = info.value.inner_exception
    assert isinstance(error, TagError)
    for part in (tag.name, "inside*", action):
        assert part in str(error)


def test_the_pattern_for_everything_contradicts_nothing() -> None:
    """{"*": "offload"} is a default, not a constraint for one tensor: tags go before it."""
    _, seen = run(OnlyTanh(CheckpointPolicy.MUST_SAVE), policy={"*": "recompute"})
    assert action_of_tanh(seen) == "keep"


class Deep(nn.Module):
    """Blocks in checkpoint regions, plain or with one tag on every operation: 8 MiB each at the least."""

    def __init__(self, tag: CheckpointPolicy | None = None) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
        self.tag = tag

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            context = {}
            if self.tag is not None:
                context["context_fn"] = partial(create_selective_checkpoint_contexts, tag_everything(self.tag))
            x = checkpoint(block, x, use_reentrant=False, **context).tanh()
        return x.sum()


PLANNED: dict[str, graphoffload.OffloadReport] = {}


def planned(tag: CheckpointPolicy | None, **number: Any) -> graphoffload.OffloadReport:
    """What a GPU that is not here would do. Planned once, whatever looks at it."""
    key = repr((tag, number))
    if key not in PLANNED:
        PLANNED[key] = explained(tag, **number)
    return PLANNED[key]


def explained(tag: CheckpointPolicy | None, **number: Any) -> graphoffload.OffloadReport:
    with torch.device("meta"):
        module, x = Deep(tag), torch.empty(4096, 512)
    return graphoffload.explain(module, inner="aot_eager", hardware="h200-sxm", reserve=0, **number)(x)


@pytest.mark.parametrize("slowdown", [0.0, 0.05])
def test_a_plain_region_is_planned_where_a_slowdown_was_given(slowdown: float) -> None:
    """Recomputing it all costs 20 %: the number goes before the region's advice."""
    report = planned(None, max_slowdown=slowdown)
    assert report.predicted_slowdown <= max(slowdown, 0.005)
    assert any("checkpoint region relaxed" in note for note in report.plans[0].notes)


def test_a_plain_region_is_kept_where_the_budget_has_room() -> None:
    """The least time at that memory is to recompute nothing: less than the step takes as written, and the line says so."""
    report = planned(None, device_budget="10GiB")
    assert report.recomputed_bytes == 0
    assert report.predicted_slowdown < -0.1
    assert f"checkpoint regions relaxed ({report.predicted_slowdown:+.1%}".replace("%", " %") in report.plans[0].summary


@pytest.mark.parametrize(
    "number",
    [{}, {"policy": "offload"}, {"max_slowdown": 0.05}, {"device_budget": "10GiB"}, {"device_budget": "160MiB"}],
    ids=str,
)
def test_keep_all_is_the_step_as_written(number: dict[str, Any]) -> None:
    """One meaning: the regions are recomputed in it, whatever is asked for."""
    keep, report = planned(None, policy="keep"), planned(None, **number)
    (one,), (other,) = keep.plans, report.plans
    assert keep.keep_peak_bytes == keep.predicted_peak_bytes == report.keep_peak_bytes
    assert other.prediction.keep_time_s == pytest.approx(one.prediction.keep_time_s, rel=1e-9)


@pytest.mark.parametrize("slowdown", [0.0, 0.01, 0.05, 0.3])
def test_a_slowdown_never_raises_the_peak(slowdown: float) -> None:
    """Against the step as written. Planned only from the regions relaxed, 0.05 took more memory than doing nothing."""
    report = planned(None, max_slowdown=slowdown)
    assert report.predicted_peak_bytes <= planned(None, policy="keep").predicted_peak_bytes
    assert report.predicted_slowdown <= max(slowdown, 0.005) + 1e-9


def test_a_budget_that_the_step_meets_as_written_is_met_at_no_cost() -> None:
    """Whatever relaxed regions would need for it: the fastest plan of both kinds."""
    written = planned(None, policy="keep")
    report = planned(None, device_budget=written.keep_peak_bytes)
    assert report.predicted_peak_bytes <= written.keep_peak_bytes
    assert report.predicted_slowdown <= 0.0


@pytest.mark.parametrize("options", [{}, {"policy": "offload"}, {"policy": {"blocks*": "offload"}}], ids=str)
def test_regions_that_decide_most_bytes_are_named(options: dict[str, Any]) -> None:
    """A policy reaches what is saved around them: without a word it would move an eighth of what it seems to."""
    (plan,) = planned(None, **options).plans
    (note,) = [note for note in plan.notes if "checkpoint regions recompute" in note]
    assert "recompute 192.0 MiB of the 216.0 MiB that backward reads" in note
    assert "gradient_checkpointing=False" in note
    assert "checkpoint regions recompute 192.0 MiB" in plan.summary


def test_regions_that_decide_little_are_not_named() -> None:
    (plan,) = planned(CheckpointPolicy.MUST_SAVE).plans
    assert not [note for note in plan.notes if "checkpoint" in note]


@pytest.mark.parametrize(
    ("tag", "not_done"),
    [
        (CheckpointPolicy.MUST_SAVE, "recompute"),
        (CheckpointPolicy.PREFER_SAVE, None),
        (CheckpointPolicy.PREFER_CPU_OFFLOAD, None),
    ],
    ids=lambda value: str(value).rsplit(".", maxsplit=1)[-1],
)
def test_a_budget_goes_before_advice(tag: CheckpointPolicy, not_done: str | None) -> None:
    """What is to be saved may lie on the host; what is only advised may be overruled."""
    roomy = planned(tag, device_budget="10GiB")
    assert roomy.offloaded_bytes == 0
    budget = roomy.keep_peak_bytes * 9 // 10
    report = planned(tag, device_budget=budget)
    assert report.predicted_peak_bytes <= budget
    assert report.offloaded_bytes + report.recomputed_bytes > 0
    assert not_done not in {decision.action for decision in report.plans[0].decisions}
