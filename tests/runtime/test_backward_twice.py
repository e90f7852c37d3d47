"""A backward that runs twice reads what was saved twice, whatever was compiled for the same graph before.

That of a gated MLP writes the gradient of `up` where `up` was saved.
"""

from __future__ import annotations

import pytest
import torch
from lazy import clean_slate, once
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import graphoffload
from tests.runtime.test_step_inductor import WIDTH, Gated

__all__ = ["clean_slate", "once"]

def gradients(y: Tensor, block: nn.Module, *, again: bool) -> list[Tensor]:
    return [each.clone() for each in torch.autograd.grad(y.square().sum(), list(block.parameters()), retain_graph=again)]


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute"])
def test_code_that_overwrites_what_it_reads_is_not_taken_for_a_backward_that_runs_twice(policy: str) -> None:
    """Inductor's cache has it under the same key, as torch does not say there which saved tensors backward may overwrite."""
    torch.manual_seed(0)
    block, x = Gated(), torch.randn(32, WIDTH)
    expected = gradients(block(x), block, again=False)
    options = {"policy": policy, "min_tensor_bytes": 1}
    for overwrites in (True, False):
        torch._dynamo.reset()
        caches = inductor.patch(fx_graph_cache=True), functorch.patch(enable_autograd_cache=False)
        with caches[0], caches[1], functorch.patch(donated_buffer=overwrites):
            y = torch.compile(block, backend=graphoffload.OffloadBackend(**options), dynamic=False)(x)
            for again in (False,) if overwrites else (True, False):
                for ours, theirs in zip(gradients(y, block, again=again), expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=f"{overwrites} {again}")
