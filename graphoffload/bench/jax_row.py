"""The same Llama in JAX as a row beside torch's: same weights, same batch, gradients compared. JAX has a process of its own.

    jax:nothing, jax:dots, jax:everything, jax:offload, jax:offload-dots     jax.checkpoint's policies (jax_step.py)

torch's allocator gives back what it does not use before, and the process is alone while it measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphoffload.bench import measure
from graphoffload.bench.jax_step import POLICIES, STACKED
from graphoffload.bench.measure import Row, Sample, Session
from graphoffload.bench.models import Workload
from graphoffload.bench.packages import NotMeasurable, needed
from graphoffload.errors import ConfigError

TOLERANCE = 0.1  # of the whole gradient, in bfloat16, between two implementations


def measure_jax(row: Row, policy: str, baseline: Session, reference: list[Tensor], steps: int, noise: float) -> None:
    """Fill a row with steps of JAX, and compare the last one's gradients with keep-all's, from which eager is `noise` away.

    Raises:
        ConfigError: no such policy. NotMeasurable: jax is not installed, the model is no Llama, or JAX fails.
    """
    if policy not in POLICIES:
        raise ConfigError(f"jax:{policy}: there are {', '.join(f'jax:{name}' for name in POLICIES)}")
    needed("jax", "jax")
    files = needed("safetensors.torch", "safetensors")
    workload = baseline.workload
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _hand_over(files, workload, folder)
        measure.tidy()
        found = _run(folder, policy, steps)
        gradients = files.load_file(folder / "gradients.safetensors", device=str(reference[0].device))
    named = [gradients[name] for name, parameter in _model(workload).named_parameters() if parameter.requires_grad]
    error, row.gradient_norm, whole = measure.compare_gradients(named, reference)
    row.gradient_error, row.loss, row.compile_s = error / whole, found["loss"], found["compile_s"]
    if not row.gradient_error <= max(TOLERANCE, 1.5 * noise):
        row.status = f"WRONG: gradient error {row.gradient_error:.3g} > {max(TOLERANCE, 1.5 * noise):.3g}"
    row.samples = [Sample(ms, ms, found["static_bytes"], found["peak_bytes"], found["loss"]) for ms in found["ms"]]
    row.peak_bytes, row.own_bytes = found["peak_bytes"], baseline.own_bytes()
    row.ours = {"jax": found["jax"], "temporary_bytes": found["temporary_bytes"]}
    row.baseline = [baseline.step() for _ in range(steps)]
    measure.compare_times(row, row.baseline)


def _model(workload: Workload) -> Any:
    return getattr(workload.module, "model", None) if not workload.hugging_face else workload.module


def _hand_over(files: Any, workload: Workload, folder: Path) -> None:
    """Weights by name, each once, and the batch."""
    model = _model(workload)
    weights = {name: value.detach().contiguous() for name, value in model.named_parameters()} if model is not None else {}
    known = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    known |= {f"model.layers.{index}.{name}.weight" for index in range(workload.sizes["layers"]) for name in STACKED}
    if not weights or weights.keys() - known or workload.sizes.get("chunk"):
        raise NotMeasurable(f"jax: {workload.name} is no Llama whose loss is taken at once")
    weights["inv_freq"] = model.model.rotary_emb.inv_freq.detach()
    files.save_file(weights, folder / "weights.safetensors")
    sizes = {**workload.sizes, "epsilon": model.config.rms_norm_eps}
    (folder / "batch.json").write_text(json.dumps({"sizes": sizes, "ids": workload.batch["input_ids"].tolist()}))


def _run(folder: Path, policy: str, steps: int) -> dict[str, Any]:
    device = {} if torch.cuda.is_available() else {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "graphoffload.bench.jax_step", str(folder), policy, str(steps)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **device})
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        said = ran.stderr.strip().splitlines() or ["no output"]
        raise NotMeasurable(f"jax:{policy} failed: {said[-1][:300]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
