"""GRAPHOFFLOAD_ACROSS_RANKS=0: each rank plans alone, and asks nobody."""

from __future__ import annotations

import pytest
import torch

from graphoffload.compiler import ranks
from graphoffload.errors import ConfigError
from graphoffload.torch_internals import processes


def test_each_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no peers, whatever group there is; anything but on or off is an error."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(processes, "default_group", lambda: (store, 0, 2))
    assert ranks.peers() is not None
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_RANKS", "0")
    assert ranks.peers() is None
    monkeypatch.setenv("GRAPHOFFLOAD_ACROSS_RANKS", "maybe")
    with pytest.raises(ConfigError, match=r"RANKS='maybe' is neither on nor off\. Set it to 0 to have each rank plan alone"):
        ranks.peers()
