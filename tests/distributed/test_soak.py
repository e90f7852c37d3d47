"""Two processes train for a while under FSDP2, with failures on one rank, evaluation and a checkpoint: tests/rank_soak.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without torch.distributed or gloo", allow_module_level=True)

from rank_soak import check_soak, soak
from ranks import CPU, spawned


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    """On two GPUs it is longer: tests/gpu/test_two_gpus.py."""
    check_soak(spawned(soak, tmp_path, CPU, 36), 36)
