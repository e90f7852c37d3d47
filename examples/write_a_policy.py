"""Two ways to say what should happen to which activation: a mapping in one line, and a policy object.

    python examples/write_a_policy.py

A policy is a function of facts: it sees a SavedTensor (name, bytes, dtype, shape, operation, modules) and returns "keep",
"recompute", "offload", or None to leave the decision to the planner. It must be a value (a frozen dataclass, or a
function at the top level of a module): compile caches have to tell two policies apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import graphoffload

# Recompute the norms and the activation function, offload the rest.
MAPPING = {"*norm*": "recompute", "*.activation": "recompute", "*": "offload"}


@dataclass(frozen=True)
class BigMatmulOutputs:
    """Offload what a matrix product made and is at least `from_bytes` large; recompute the pointwise rest.

    A product costs many FLOPs for each byte that it leaves behind, a pointwise operation nearly none.
    """

    from_bytes: int

    def __call__(self, tensor: graphoffload.SavedTensor) -> str | None:
        product = any(kind in tensor.op for kind in (".mm.", ".addmm.", ".bmm.", "attention"))
        if product and tensor.eligible and (tensor.nbytes or 0) >= self.from_bytes:
            return "offload"
        return "recompute" if tensor.recomputable and not product else None


class Block(nn.Module):
    """An MLP with its norm before it and a residual around it. The activation function's result is what `down` saves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, one after the other, as one graph. (torch compiles what is in a bare nn.Sequential block by block.)"""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train one step with each policy and print its plan. Returns {title: (loss, plans)}."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(512, 256, device=device, generator=torch.Generator(device).manual_seed(0))
    policies: dict[str, Any] = {"mapping": MAPPING, "policy object": BigMatmulOutputs(from_bytes=2**20)}
    shown: dict[str, Any] = {}
    for title, policy in policies.items():
        torch.manual_seed(0)
        model = Model(256, 3).to(device)
        model.compile(backend="graphoffload", options={"policy": policy, "min_tensor_bytes": 0})
        loss = model(x).square().mean()
        loss.backward()
        plan = graphoffload.last_plans()[-1]
        print(f"== {title}: {policy}")
        print(graphoffload.OffloadReport(plans=(plan,)))
        print(f"loss {loss.item():.6f}\n")
        shown[title] = (loss.item(), plan)
    return shown


if __name__ == "__main__":
    main()
