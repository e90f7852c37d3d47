"""What somebody wraps around the compiled call, so that a plan for its activations has little or no effect.

    checkpoint(block, x)              block is compiled: what it saves is thrown away and computed again in backward
    with save_on_cpu(): model(x)      what a plan keeps on the device is copied away by hooks, on the compute stream
    with OffloadActivations(model):   the same, as TRL's and torchtune's activation offloading do it
    DistributedDataParallel(model)    torch splits what is compiled by gradient buckets, and no step is planned of the parts

Seen while a graph is compiled: its first call runs inside of what is around it.
"""

from __future__ import annotations

from graphoffload.errors import NotOffloadedWarning, StepNotPlannedWarning, warn
from graphoffload.torch_internals import autograd

_TRAINERS = (
    "gradient_checkpointing=False of Transformers' and TRL's arguments, or a gradient_checkpointing_disable() of the model"
)


def warn_of_outer_hooks() -> None:
    """Name checkpointing or offloading that is around the graph that is compiled now."""
    hooks = autograd.saved_tensor_hooks(True)
    pack = None if hooks is None else hooks[0]
    module, name = getattr(pack, "__module__", "") or "", getattr(pack, "__qualname__", "") or ""
    if module == "torch.utils.checkpoint" or autograd.computes_again():
        warn(
            NotOffloadedWarning,
            "a compiled graph is called inside of torch.utils.checkpoint: what it saves is dropped after its forward and "
            "computed again in backward, whatever is planned for it. Take the checkpointing away, and the budget decides what "
            f"is recomputed ({_TRAINERS}); or checkpoint inside of what is compiled.",
        )
    elif "save_on_cpu" in name or "ffload" in name or "ffload" in module.rpartition(".")[2]:
        whose = f"{module}.{name.partition('.')[0]}"
        warn(
            NotOffloadedWarning,
            f"a compiled graph is called inside of {whose}: its hooks copy what the plan keeps on the device to the host, one "
            "tensor after the other, beside the copies that are planned. Take it away (activation_offloading=False of TRL's "
            "arguments, enable_activation_offloading=False of torchtune's), and the budget decides what is offloaded.",
        )


def warn_of_parts() -> None:
    """Say that DDP has torch split what is compiled, each part with a plan of its own; at its second part."""
    warn(
        StepNotPlannedWarning,
        "torch splits what is compiled under DistributedDataParallel by its gradient buckets, and each part is planned alone, "
        "for the whole budget: no plan is made of their step. torch._dynamo.config.optimize_ddp = False keeps compiled blocks "
        "whole, and plans their step; gradients of one block are then reduced while the block before it runs. (A model that is "
        "compiled as a whole would reduce them at its end: compile its blocks one by one.)",
    )
