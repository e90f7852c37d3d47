"""Planning instances of real models, recorded as compressed JSON under tests/plan/recorded, so that solvers are tested on them
without torch tracing a model.

    python -m tests.plan.recordings llama8l-cache        # traces it and records it again; all of MODELS without a name

A recording is the Program that a budget is planned on first: nothing recomputed yet.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

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
        candidates.append([c.name, *life, int(c.can_offload), again, c.fixed, c.group])
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
    for name, nbytes, made, last, uses, can_offload, again, fixed, group in parts["candidates"]:
        recompute = None if again is None else Recompute(again[0], tuple(again[1]), again[2])
        candidates.append(Candidate(name, nbytes, made, last, tuple(uses), bool(can_offload), recompute, fixed, group))
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
    return from_json(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode())


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
    path = FOLDER / f"{name}.json.gz"
    path.write_bytes(gzip.compress(to_json(program).encode(), mtime=0))
    return path


def _llama(name: str, *, use_cache: bool) -> Path:
    """Hugging Face's Llama, 8 layers of width 4096, 2 x 4096 tokens, bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8, "num_attention_heads": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, use_cache=use_cache, **sizes)).to(torch.bfloat16)
        ids = torch.zeros(2, 4096, dtype=torch.int64)
    return record(name, model, ids, labels=ids, hardware="h100-sxm")


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


def _norm_mlps(name: str) -> Path:
    model, x = norm_mlps()
    return record(name, model, x, hardware="h100-sxm")


MODELS: dict[str, Callable[[str], Path]] = {
    "llama8l": lambda name: _llama(name, use_cache=False),
    "llama8l-cache": lambda name: _llama(name, use_cache=True),
    "norm-mlps": _norm_mlps,
}


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MODELS:
        print(MODELS[wanted](wanted))
