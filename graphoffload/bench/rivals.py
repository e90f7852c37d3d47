"""What others ship, measured as it is: each from its own package, none copied, in eager as its trainer runs it.

    hf-checkpoint           Transformers' gradient checkpointing
    hf-checkpoint-offload   the same with offload=True: what checkpoints hold waits in page-locked memory
    trl-offload             TRL's OffloadActivations: every activation, on streams of its own
    deepspeed-checkpoint    DeepSpeed's checkpointing function
    unsloth-checkpoint      Unsloth's: inputs of layers are copied to the host; its import needs a GPU
    jax:nothing, ...        the same Llama in JAX, in a process of its own (jax_row.py)

`compiled/NAME` compiles the whole model with plain torch.compile around it, `per-block/NAME` each layer. What is not installed
is a row "SKIPPED: needs trl (pip install trl)". Checkpoints need a model of Transformers, which has the switch for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from graphoffload.bench.models import Workload
from graphoffload.bench.packages import NotMeasurable, needed

Context = Callable[[], contextlib.AbstractContextManager[Any]]


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
    """One manager for all steps, as TRL's trainer has, made of the model with the head: its output is not offloaded."""
    offloading = needed("trl.models.activation_offloading", "trl")
    if not torch.cuda.is_available():
        raise NotMeasurable("trl offloads from a GPU alone")
    make = offloading.get_act_offloading_ctx_manager
    manager: contextlib.AbstractContextManager[Any] = make(model=transformers_model(workload), warn_if_no_head=False)
    return lambda: manager


def _deepspeed_checkpoint(workload: Workload) -> Context:
    checkpointing = needed("deepspeed.runtime.activation_checkpointing.checkpointing", "deepspeed")
    _checkpoint_by(workload, checkpointing.checkpoint)
    return contextlib.nullcontext


def _unsloth_checkpoint(workload: Workload) -> Context:
    if importlib.util.find_spec("unsloth") is None:  # without it, unsloth_zoo refuses to be imported
        raise NotMeasurable("needs unsloth (pip install unsloth)")
    checkpointing = needed("unsloth_zoo.gradient_checkpointing", "unsloth_zoo")
    _checkpoint_by(workload, checkpointing.unsloth_offloaded_gradient_checkpoint)
    return contextlib.nullcontext


def _checkpoint_by(workload: Workload, function: Callable[..., Any]) -> None:
    """Have Transformers checkpoint its layers by another function than torch's, which starts at an input with a gradient."""
    model = transformers_model(workload)
    _enable(model, use_reentrant=True)
    if not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = function  # transformers' own


def _jax(workload: Workload) -> Context:
    needed("jax", "jax")
    raise NotMeasurable("jax runs in a process of its own beside a baseline, which there is in `bench` without --solo")


RIVALS: dict[str, Callable[[Workload], Context]] = {
    "hf-checkpoint": _hf_checkpoint, "hf-checkpoint-offload": _hf_checkpoint_offload, "trl-offload": _trl_offload,
    "deepspeed-checkpoint": _deepspeed_checkpoint, "unsloth-checkpoint": _unsloth_checkpoint, "jax": _jax,
}  # fmt: skip
