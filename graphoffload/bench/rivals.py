"""What others ship, measured as it is: each from its own package, none copied, in eager as its trainer runs it.

    hf-checkpoint           Transformers' gradient checkpointing
    hf-checkpoint-offload   the same with offload=True: what checkpoints hold waits in page-locked memory
    trl-offload             TRL's OffloadActivations: every activation, on streams of its own
    deepspeed-checkpoint    DeepSpeed's checkpointing function
    unsloth-checkpoint      Unsloth's: inputs of layers are copied to the host
    jax                     not measured yet

`compiled/NAME` compiles the whole model with plain torch.compile around it, `per-block/NAME` each layer. What is not installed
is a row "SKIPPED: needs trl (pip install trl)". Checkpoints need a model of Transformers, which has the switch for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from graphoffload.bench.models import Workload
from graphoffload.errors import ConfigError

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class NotMeasurable(ConfigError):
    """A variant that cannot run here: its package is missing, or too old, or the model is not one that it takes."""


def needed(module: str, package: str) -> Any:
    """A module of an installed package.

    Raises:
        NotMeasurable: it is not installed, or its import fails; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        also = f": {error}" if missing and missing != package.replace("-", "_") else ""
        raise NotMeasurable(f"needs {package} (pip install {package}){also}") from error
    except Exception as error:  # some packages refuse to be imported on a machine without their GPU
        raise NotMeasurable(f"{package} cannot be imported here ({type(error).__name__}: {error})") from error


def transformers_model(workload: Workload) -> Any:
    """The model of Transformers in a workload, which may be wrapped by its loss.

    Raises:
        NotMeasurable: there is none.
    """
    for module in (workload.module, getattr(workload.module, "model", None)):
        if hasattr(module, "gradient_checkpointing_enable"):
            return module
    raise NotMeasurable(f"needs a model of Transformers; {workload.name} is none")


def _hf_checkpoint(workload: Workload) -> Context:
    model = transformers_model(workload)
    _enable(model, use_reentrant=False)
    return contextlib.nullcontext


def _enable(model: Any, **options: Any) -> None:
    """By the name that this version of Transformers prefers."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _hf_checkpoint_offload(workload: Workload) -> Context:
    model = transformers_model(workload)
    switch = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    if "offload" not in inspect.signature(switch).parameters:
        raise NotMeasurable("needs transformers >= 5.17 (pip install -U transformers)")
    switch(offload=True)
    return contextlib.nullcontext


def _trl_offload(workload: Workload) -> Context:
    offloading = needed("trl.models.activation_offloading", "trl")
    on_gpu = torch.cuda.is_available()
    make = functools.partial(offloading.get_act_offloading_ctx_manager, warn_if_no_head=False)
    return functools.partial(make, model=workload.module, use_pin_memory=on_gpu, use_streams=on_gpu)


def _deepspeed_checkpoint(workload: Workload) -> Context:
    checkpointing = needed("deepspeed.runtime.activation_checkpointing.checkpointing", "deepspeed")
    checkpointing.configure(mpu_=None)
    _checkpoint_by(workload, checkpointing.checkpoint)
    return contextlib.nullcontext


def _unsloth_checkpoint(workload: Workload) -> Context:
    checkpointing = needed("unsloth_zoo.gradient_checkpointing", "unsloth_zoo")
    _checkpoint_by(workload, checkpointing.unsloth_offloaded_gradient_checkpoint)
    return contextlib.nullcontext


def _checkpoint_by(workload: Workload, function: Callable[..., Any]) -> None:
    """Have Transformers checkpoint its layers by another function than torch's."""
    model = transformers_model(workload)
    _enable(model, use_reentrant=True)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = function  # transformers' own


def _jax(workload: Workload) -> Context:
    needed("jax", "jax")
    raise NotMeasurable("a step of JAX is not measured yet")


RIVALS: dict[str, Callable[[Workload], Context]] = {
    "hf-checkpoint": _hf_checkpoint, "hf-checkpoint-offload": _hf_checkpoint_offload, "trl-offload": _trl_offload,
    "deepspeed-checkpoint": _deepspeed_checkpoint, "unsloth-checkpoint": _unsloth_checkpoint, "jax": _jax,
}  # fmt: skip
