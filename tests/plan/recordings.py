"""Planning instances of real models, recorded as compressed JSON under tests/plan/recorded, so that solvers are tested on them
without torch tracing a model.

    python -m tests.plan.recordings llama8l-cache        # traces it and records it again; all of MODELS without a name

A recording is the Program that a budget is planned on first: nothing recomputed yet.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from graphoffload.hardware.profile import PROFILES, HardwareProfile
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step

FOLDER = Path(__file__).with_name("recorded")


def to_json(program: Program) -> str:
    """A Program as JSON, a list for each kind of part."""

    def steps(parts: tuple[Step, ...]) -> list[list[Any]]:
        return [[step.name, float(f"{step.time_s:.5g}"), step.workspace_bytes] for step in parts]

    candidates = []
    for c in program.candidates:
        again = None
        if c.recompute is not None:
            again = [float(f"{c.recompute.time_s:.5g}"), c.recompute.reads, c.recompute.temp_bytes]
        life = [c.nbytes, c.produced_at, c.last_forward_use, c.backward_uses]
        over = [] if c.overwritten_at is None else [c.overwritten_at]
        candidates.append([c.name, *life, int(c.can_offload), again, c.fixed, c.group, *over])
    parts = {
        "forward": steps(program.forward),
        "backward": steps(program.backward),
        "buffers": [[b.name, b.nbytes, b.first, b.last] for b in program.buffers],
        "candidates": candidates,
        "bytes": [program.static_bytes, program.reserve_bytes],
        "reload_steps": program.reload_steps,
    }
    return json.dumps(parts, separators=(",", ":"))


def from_json(text: str) -> Program:
    """Inverse of to_json, up to the digits of times."""
    parts: dict[str, Any] = json.loads(text)
    candidates = []
    for name, nbytes, made, last, uses, can_offload, again, fixed, group, *over in parts["candidates"]:
        recompute = None if again is None else Recompute(again[0], tuple(again[1]), again[2])
        candidates.append(Candidate(name, nbytes, made, last, tuple(uses), bool(can_offload), recompute, fixed, group, *over))
    static_bytes, reserve_bytes = parts["bytes"]
    return Program(
        tuple(Step(*step) for step in parts["forward"]),
        tuple(Step(*step) for step in parts["backward"]),
        tuple(Buffer(*buffer) for buffer in parts["buffers"]),
        tuple(candidates),
        static_bytes,
        reserve_bytes,
        tuple(parts["reload_steps"]),
    )


def names() -> list[str]:
    """What is recorded."""
    return sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


def load(name: str) -> Program:
    """A recorded Program."""
    return from_json(_text(name))


def hardware_of(name: str) -> HardwareProfile:
    """The profile whose times were recorded."""
    return PROFILES[json.loads(_text(name))["hardware"]]


def _text(name: str) -> str:
    return gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode()


def record(name: str, model: Any, *args: Any, hardware: str, **named: Any) -> Path:
    """Trace one step of a model, which may be on the meta device, and record the Program of its largest graph."""
    import graphoffload
    from graphoffload.compiler import trial as trials

    found: list[Program] = []
    build = trials.build_program

    def noting(*given: Any, **options: Any) -> Any:
        instance = build(*given, **options)
        found.append(instance.program)
        return instance

    with mock.patch.object(trials, "build_program", noting):
        graphoffload.explain(model, hardware=hardware, device_budget="100TiB", host_budget="100TiB")(*args, **named)
    program = max(found, key=lambda program: len(program.backward))
    return write(name, program, hardware)


def write(name: str, program: Program, hardware: str) -> Path:
    """A recording of a Program and the name of the profile that its times come from."""
    path, text = FOLDER / f"{name}.json.gz", to_json(program)
    path.write_bytes(gzip.compress(f'{{"hardware":"{hardware}",{text[1:]}'.encode(), mtime=0))
    return path


def norm_mlps() -> tuple[Any, Any]:
    """Six blocks of a LayerNorm and an MLP, fp32, and 512 rows of width 192, on the meta device."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(192), nn.Linear(192, 768), nn.Linear(768, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(6))), torch.empty(512, 192)


def record_model(name: str) -> Path:
    """Record one of tests/plan/models.py, or norm-mlps."""
    if name == "norm-mlps":
        model, x = norm_mlps()
        return record(name, model, x, hardware="h100-sxm")
    from tests.plan.models import MODELS

    hardware, build = MODELS[name]
    model, named = build()
    return record(name, model, hardware=hardware, **named)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(record_model(wanted))
