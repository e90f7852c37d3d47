"""Copies of a module that offload() compiled in place: compiled as well, or named."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphoffload
from graphoffload.errors import GraphOffloadWarning, NotOffloadedWarning
from tests.api.test_introspect import Tanhs

OPTIONS: dict[str, Any] = {"policy": "offload", "inner": "aot_eager", "min_tensor_bytes": 0}


def offloads(module: nn.Module) -> int:
    """Tensors that one step offloads."""
    before: int = graphoffload.stats()["offloads"]
    module(torch.randn(4, 8)).sum().backward()
    after: int = graphoffload.stats()["offloads"]
    return after - before


@pytest.mark.parametrize("build", [Tanhs, lambda: nn.Sequential(Tanhs(), Tanhs())], ids=["module", "sequential"])
@pytest.mark.parametrize("runs_before", [False, True])
def test_a_deep_copy_is_compiled(build: Any, runs_before: bool) -> None:
    """Also a copy of it, and one inside of what is copied; each trains its own parameters."""
    torch._dynamo.reset()
    model = build()
    keys = list(model.state_dict())
    graphoffload.offload(model, **OPTIONS)
    expected = offloads(model) if runs_before else None
    holder = nn.ModuleDict({"model": model})
    copies = [copy.deepcopy(model), copy.deepcopy(holder)["model"]]
    copies.append(copy.deepcopy(copies[0]))
    expected = expected or offloads(model)
    assert expected > 0
    model.zero_grad()
    for made in copies:
        assert offloads(made) == expected
        assert list(made.state_dict()) == keys
        assert all(parameter.grad is not None for parameter in made.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_is_held_by_nobody() -> None:
    """Neither it nor what it was made from."""
    model = graphoffload.offload(Tanhs(), **OPTIONS)
    made = copy.deepcopy(model)
    gone = [weakref.ref(model), weakref.ref(made)]
    del model, made
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_what_is_compiled_anew_is_copied_as_torch_does() -> None:
    """Nothing is left of offload(), neither in a copy nor in a warning."""
    model = graphoffload.offload(Tanhs(), **OPTIONS)
    model.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphOffloadWarning)
        assert copy.deepcopy(model)._compiled_call_impl is None
        assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None


def test_a_saved_module_says_that_it_is_not_compiled() -> None:
    """With what was asked, and the remedy, which works."""
    torch._dynamo.reset()
    model = graphoffload.offload(Tanhs(), **OPTIONS)
    file = io.BytesIO()
    with pytest.warns(NotOffloadedWarning, match=r"policy='offload'.* of this Tanhs is not saved with it.*offload\(\) on what"):
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert offloads(loaded) == 0
    assert offloads(graphoffload.offload(loaded, **OPTIONS)) > 0


def test_a_saved_module_loads_without_graphoffload(tmp_path: Path) -> None:
    """What is saved names nothing of this package."""
    with pytest.warns(NotOffloadedWarning):
        torch.save(graphoffload.offload(nn.Sequential(nn.Linear(2, 2)), **OPTIONS), tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['graphoffload'] = None; import torch; "
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(model(torch.ones(1, 2)).shape)"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # the entry point goes with the package
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "torch.Size([1, 2])" in done.stdout, done.stderr
