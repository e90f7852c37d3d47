"""backend="graphoffload" on a model that Dynamo leaves to eager as a whole is said once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked import ROOT, run_script

SCRIPT = """
import sys
import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        out = self.layer(x)
        return self.head(out[0] if isinstance(out, tuple) else out).sum()


kind, stance = sys.argv[1:]
model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(0)) if kind == "Sequential" else Recurrent(getattr(nn, kind))
model.compile(backend="graphoffload", options={"inner": "aot_eager", "device_budget": "1GiB"})
optimizer = torch.optim.SGD(model.parameters())
with torch.compiler.set_stance(stance):
    for _ in range(4):
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        print("stepped", file=sys.stderr)
"""


CASES = [
    ("LSTM", "default", "allow_rnn"),
    ("Sequential", "default", "skips the code of torch.nn"),
    ("Linear", "default", ""),
    ("LSTM", "force_eager", ""),
    ("Sequential", "force_eager", ""),
]


@pytest.mark.parametrize(("kind", "stance", "why"), CASES)
def test_a_model_that_is_left_to_eager(tmp_path: Path, kind: str, stance: str, why: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "always"}
    done = run_script(script, kind, stance, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if 'backend="graphoffload" has no effect' in line]
    assert len(said) == bool(why), done.stderr
    if why:
        before = done.stderr[: done.stderr.index(said[0])]
        assert before.count("stepped") == 1, "by the second step"
        assert why in said[0]
        assert f"{script}:{1 + SCRIPT[: SCRIPT.index('optimizer.step()')].count(chr(10))}:" in said[0], "the user's own line"
