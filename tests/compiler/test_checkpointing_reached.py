"""What torch.utils.checkpoint around every block reaches, a plan reaches: its peak is a budget that is met, and in no more time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphoffload
from graphoffload.hardware.profile import PROFILES

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 512, 64, 128, 4, 2


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

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(count))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.float().square().mean()


def model_of(count: int) -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks(count).to(torch.bfloat16), torch.randn(TOKENS, WIDTH).to(torch.bfloat16)


def explained(model: Blocks, x: Tensor, budget: int) -> graphoffload.OffloadReport:
    options = {"hardware": PROFILES["h200-sxm"], "min_tensor_bytes": 1, "reserve": 0}
    return graphoffload.explain(model, device_budget=budget, **options)(x)  # type: ignore[arg-type]


def test_blocks_of_experts_fit_into_the_memory_that_checkpointing_takes() -> None:
    model, x = model_of(6)
    model.checkpointed = True
    checkpointing = explained(model, x, 1 << 40)
    model.checkpointed = False
    report = explained(model, x, checkpointing.keep_peak_bytes)
    assert report.predicted_peak_bytes <= checkpointing.keep_peak_bytes < report.keep_peak_bytes
    as_checkpointed = 1.0 / (1.0 + checkpointing.predicted_slowdown) - 1.0  # checkpointing's keep-all is its own step
    assert report.predicted_slowdown <= as_checkpointed


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
