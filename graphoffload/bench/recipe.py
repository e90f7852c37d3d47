"""How a model is trained: its optimizer, and in what precision a step computes.

    optimizer    none   a step is forward and backward; gradients stay allocated and are zeroed in between
                 adamw  torch's AdamW, fused, at a learning rate of 0; its step is part of the step that is measured, and
                        gradients are freed between steps, as zero_grad() does
    precision    pure   parameters, gradients and activations in the model's dtype, bfloat16 unless said otherwise
                 amp    parameters, gradients and AdamW's state in float32, forward under torch.autocast
                 cast   the same, but every module casts its parameters to bfloat16 where it uses them, as FSDP's mixed
                        precision does: activations between modules are bfloat16 as well, which autocast leaves in float32

A learning rate of 0 leaves every weight as it was, to the bit, and takes the same time as any other: the decay multiplies by
1 and the update adds 0. So each step of each variant begins with the same weights, and its gradient can be compared with
keep-all's. AdamW reads gradients and does not write to them.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphoffload.errors import ConfigError
from graphoffload.torch_internals.modules import own_parameters

OPTIMIZERS = ("none", "adamw")
PRECISIONS = ("pure", "amp", "cast")
LOW = torch.bfloat16


@dataclass(frozen=True)
class Recipe:
    """An optimizer and a precision, both by name.

    Raises:
        ConfigError: a name that is not known.
    """

    optimizer: str = "none"
    precision: str = "pure"

    def __post_init__(self) -> None:
        for field, value, known in (("optimizer", self.optimizer, OPTIMIZERS), ("precision", self.precision, PRECISIONS)):
            if value not in known:
                raise ConfigError(f"{field} {value!r} is not known; there are: {', '.join(known)}")

    @property
    def mixed(self) -> bool:
        """Whether parameters are float32 while products of matrices are not."""
        return self.precision != "pure"

    @property
    def frees_gradients(self) -> bool:
        """Whether no gradient is allocated when a step begins."""
        return self.optimizer != "none"

    def changes(self) -> dict[str, str]:
        """What differs from a step of forward and backward in the model's own dtype."""
        named = {"optimizer": self.optimizer, "precision": self.precision}
        return {name: value for name, value in named.items() if value != getattr(PLAIN, name)}

    def forward_context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """What forward runs in."""
        return torch.autocast(device.type, LOW) if self.precision == "amp" else contextlib.nullcontext()

    def make_optimizer(
        self, parameters: list[nn.Parameter], shared: torch.optim.Optimizer | None = None
    ) -> torch.optim.Optimizer | None:
        """The optimizer with its state allocated, or with the state of `shared`, whose parameters have the same memory."""
        if self.optimizer == "none":
            return None
        optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
        if shared is not None:
            theirs = [parameter for group in shared.param_groups for parameter in group["params"]]
            for own, other in zip(parameters, theirs, strict=True):
                optimizer.state[own] = shared.state[other]
            return optimizer
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


PLAIN = Recipe()


def cast_where_used(module: nn.Module) -> None:
    """Have every module read its parameters in bfloat16, while the parameters, and their gradients, become float32.

    A module's class gets a subclass whose attributes cast, one for each class, so that equal blocks share compiled code.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.float()
    for part in module.modules():
        names = tuple(name for name, value in own_parameters(part).items() if value is not None)
        if names:
            part.__class__ = _casting(type(part), names)  # type: ignore[arg-type]  # a class has a hash


@functools.cache
def _casting(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def reading(name: str) -> property:
        return property(lambda module: own_parameters(module)[name].to(LOW))

    attributes: dict[str, Any] = {name: reading(name) for name in names}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **attributes})
