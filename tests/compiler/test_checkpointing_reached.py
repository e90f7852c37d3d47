"""What torch.utils.checkpoint around every block reaches, a plan reaches: its peak is met, in no more time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.compiler import plan_search as search
from graphoffload.compiler import step_plan
from graphoffload.compiler.request import GraphAnalysis
from graphoffload.errors import BudgetError
from graphoffload.facts.plan import Plan
from graphoffload.hardware.profile import PROFILES
from graphoffload.runtime.registry import last_plans

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN, HEADS = 512, 64, 128, 4, 2, 4


class Experts(nn.Module):
    """A block whose tokens are sorted by expert, and multiplied group by group, as Transformers does it on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights, experts = self.router(normed).float().softmax(-1).topk(CHOSEN)
        sorted_experts, order = experts.reshape(-1).sort()
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(normed[order // CHOSEN], self.up, offs=offsets).chunk(2, dim=-1)
        made = F.grouped_mm(F.silu(gate) * up, self.down, offs=offsets)
        back = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        weighted = (made * weights.to(x.dtype).reshape(-1)[order].unsqueeze(-1))[back]
        return x + weighted.view(-1, CHOSEN, WIDTH).sum(1)


class Blocks(nn.Module):
    """Blocks one after the other, each of them checkpointed or none."""

    def __init__(self, count: int, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.float().square().mean()


class Sinks(nn.Module):
    """A block of eager attention with a sink, as in gpt-oss: its maximum decides where the gradient goes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.view(2, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = query @ key.transpose(2, 3) / 4
        scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(2, -1, scores.shape[2], 1)], dim=-1)
        weights = (scores - scores.max(dim=-1, keepdim=True).values).softmax(-1)[..., :-1]
        return x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class Attention(nn.Module):
    """A block of attention, which no chain of single activations runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for projection in self.projections:
            heads = (part.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for part in projection(x).chunk(3, dim=-1))
            x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x


class Noisy(nn.Module):
    """A block that drops features, and whose attention drops weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(seen)), 0.2)), 0.1)


def model_of(count: int, block: type[nn.Module] = Experts) -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(count, block).to(torch.bfloat16), torch.randn(TOKENS, WIDTH).to(torch.bfloat16)


def explained(model: Blocks, x: Tensor, budget: int) -> graphoffload.OffloadReport:
    options = {"hardware": PROFILES["h200-sxm"], "min_tensor_bytes": 1, "reserve": 0, "host_budget": 0}
    return graphoffload.explain(model, device_budget=budget, **options)(x)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [pytest.param(Experts, marks=pytest.mark.long), Attention])
def test_blocks_fit_into_the_memory_that_checkpointing_takes(block: type[nn.Module]) -> None:
    model, x = model_of(3, block)
    model.checkpointed = True
    checkpointing = explained(model, x, 1 << 40)
    model.checkpointed = False
    report = explained(model, x, checkpointing.keep_peak_bytes)
    assert report.predicted_peak_bytes <= checkpointing.keep_peak_bytes < report.keep_peak_bytes
    as_checkpointed = 1.0 / (1.0 + checkpointing.predicted_slowdown) - 1.0  # checkpointing's keep-all is its own step
    assert report.predicted_slowdown <= as_checkpointed + 1e-9


class Broken(Blocks):
    """The same with its loss in a graph of its own: the step is planned, and not a graph."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        torch._dynamo.graph_break()
        return x.float().square().mean()


@pytest.mark.parametrize("block", [pytest.param(Experts, marks=pytest.mark.long), Attention])
def test_a_step_of_several_graphs_fits_as_well(monkeypatch: pytest.MonkeyPatch, block: type[nn.Module]) -> None:
    """By blocks; a variant that is made for the step is taken where it is faster than these."""
    torch.manual_seed(0)
    made, x = Broken(3, block).to(torch.bfloat16), torch.randn(TOKENS, WIDTH).to(torch.bfloat16)
    made.checkpointed = True
    checkpointing = explained(made, x, 1 << 40)
    made.checkpointed = False
    fitted = explained(made, x, checkpointing.keep_peak_bytes)
    monkeypatch.setattr(step_plan, "choices_of", lambda *_: {})
    report = explained(made, x, checkpointing.keep_peak_bytes)
    for found in (report, fitted):
        assert found.predicted_peak_bytes <= checkpointing.keep_peak_bytes < found.keep_peak_bytes
    assert report.step is not None
    assert "blocks" in {variant for _, variant in report.step.calls}
    assert 0.0 < fitted.predicted_slowdown <= report.predicted_slowdown <= 0.5


def test_a_decision_of_a_block_is_saved_in_its_smallest_form() -> None:
    """Attention without a kernel asks which rows have no score at all: a byte a row is saved, and not a byte a score."""
    model, x = model_of(3, Noisy)
    model.checkpointed = True
    checkpointing = explained(model, x, 1 << 40)
    model.checkpointed = False
    budget = checkpointing.keep_peak_bytes * 101 // 100  # checkpointing decides again, and saves nothing for it
    report = explained(model, x, budget)
    assert report.predicted_peak_bytes <= budget < report.keep_peak_bytes
    as_checkpointed = 1.0 / (1.0 + checkpointing.predicted_slowdown) - 1.0
    assert report.predicted_slowdown <= as_checkpointed + 1e-9


def test_gradients_of_experts_that_are_computed_again_are_those_of_keep_all() -> None:
    """The grouped products and everything around them run again in backward; what was decided is saved."""
    model, x = model_of(3)
    found: list[list[Tensor]] = []
    for action in ("keep", "recompute"):
        torch._dynamo.reset()
        model.zero_grad()
        model.compile(backend="graphoffload", options={"inner": "aot_eager", "policy": {"*": action}, "min_tensor_bytes": 1})
        model(x).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    plan = graphoffload.last_plans()[-1]
    again = {plan.saved[decision.name].op for decision in plan.decisions if decision.action == "recompute"}
    assert "aten._grouped_mm.default" in again
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def trained(model: Blocks, x: Tensor, **options: Any) -> tuple[list[Tensor], Plan]:
    """Gradients of one step, and its plan."""
    torch._dynamo.reset()
    model.zero_grad()
    model.compile(backend="graphoffload", options={"inner": "aot_eager", "min_tensor_bytes": 1, "reserve": 0, **options})
    torch.manual_seed(1)
    model(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], last_plans()[-1]


@pytest.mark.parametrize("block", [Experts, Sinks, Attention, Noisy])
def test_blocks_that_are_computed_again_whole_repeat_to_the_bit(
    block: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing else meets the budget: no decision and no random number is made again."""
    model, x = model_of(3, block)
    expected, _ = trained(model, x, policy="keep")
    meets = search._meets

    def only_in_blocks(analysis: GraphAnalysis, ways: tuple[GraphAnalysis, ...]) -> Any:
        return meets(analysis, ways) if analysis.request.blocks else search._SearchResult(None, [], [])

    monkeypatch.setattr(search, "_meets", only_in_blocks)
    found, plan = trained(model, x, device_budget="1GiB", host_budget=0)
    assert any("blocks are computed again whole" in note for note in plan.notes)
    assert "computed again with its block" in {decision.reason for decision in plan.decisions}
    assert plan.recomputed_bytes > 0
    again = {plan.saved[decision.name].op for decision in plan.decisions if decision.action == "recompute"}
    assert "aten.topk.default" not in again
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.long
def test_a_budget_below_every_way_names_the_least_of_all_of_them() -> None:
    model, x = model_of(3, Attention)
    model.checkpointed = True
    least = explained(model, x, 1 << 40).keep_peak_bytes
    model.checkpointed = False
    with pytest.raises(BudgetError) as caught:
        explained(model, x, least // 2)
    named = caught.value.least_bytes
    assert named is not None
    assert named <= least * 1.01
    assert explained(model, x, named).predicted_peak_bytes <= named


def test_attention_that_runs_again_takes_time() -> None:
    """torch wraps it in operations that keep the random state, and leaves no value on those."""
    model, x = model_of(2, Attention)
    times = []
    for model.checkpointed in (False, True):
        (plan,) = explained(model, x, 1 << 40).plans
        times.append(plan.prediction.keep_time_s)
    kernels = 2 * 3 * PROFILES["h200-sxm"].kernel_launch_s
    assert times[1] >= times[0] + kernels


def test_what_somebody_asked_for_is_no_block() -> None:
    """On a slow link, computing blocks again whole would be faster than the copies that were asked for."""
    model, x = model_of(3, Attention)
    slow = {"hardware": PROFILES["h200-sxm"].scaled(link=1e-4), "min_tensor_bytes": 1, "reserve": 0}
    report = graphoffload.explain(model, policy="offload", **slow)(x)  # type: ignore[arg-type]
    assert report.offloaded_bytes > 0
    assert not any("again whole" in note for plan in report.plans for note in plan.notes)
    assert not any("with its block" in decision.reason for plan in report.plans for decision in plan.decisions)
