"""A fused SwiGLU as people write it: two Triton kernels inside a function of autograd. Imported where Triton is.

Annotations stay objects here: Triton reads those of its kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def swiglu_forward(gate, up, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def swiglu_backward(gate, up, grad, dgate, dup, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + at, d * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(dup + at, d * g * s, mask=inside)


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up: one kernel forward, one backward; keeps both operands."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        swiglu_forward[(-(-out.numel() // BLOCK),)](gate, up, out, out.numel(), block=BLOCK)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad, dgate, dup = grads[0].contiguous(), torch.empty_like(gate), torch.empty_like(up)
        swiglu_backward[(-(-grad.numel() // BLOCK),)](gate, up, grad, dgate, dup, grad.numel(), block=BLOCK)
        return dgate, dup
