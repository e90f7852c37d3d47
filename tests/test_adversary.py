"""Programs written to break the rewrite: wrong gradients, lost updates, silent recompiles. Each found something, or could."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import graphoffload
from graphoffload.testing import ZOO, run_case

DYNAMIC = [name for name, case in ZOO.items() if case.dynamic]


class Counted:
    """A backend that counts the graphs it is given."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.graphs = backend, 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(gm, inputs)


@pytest.mark.parametrize("policy", ["keep", "offload", "recompute", "auto"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_no_size_is_guarded_on(name: str, policy: str) -> None:
    """Planning looks at hints: a symbolic size that became an int would compile anew for every batch."""
    options = {"inner": "aot_eager", "policy": policy, "min_tensor_bytes": 0}
    if policy == "auto":
        options |= {"max_slowdown": 10.0, "hardware": "h200-sxm"}
    ours, plain = Counted(graphoffload.OffloadBackend(**options)), CompileCounterWithBackend("aot_eager")
    run_case(ZOO[name], plain, "cpu", seeds=(0, 1, 2))
    run_case(ZOO[name], ours, "cpu", seeds=(0, 1, 2))
    assert ours.graphs == plain.frame_count
