"""What an architecture is, and all of them by name."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphoffload.testing.case import weighted_loss

MODULES = (
    "dense", "moe", "recurrent", "encoders", "pairs", "speech", "vision", "detection", "multimodal", "diffusion", "adapters",
    "timm_models", "precisions", "attentions", "losses", "trainings",
)  # fmt: skip

Built = tuple[nn.Module, dict[str, Any]]


class Missing(Exception):
    """This machine's libraries lack what the architecture is built from; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model with its inputs.

    Attributes:
        name: key in ALL.
        kind: what it is an example of, for the page.
        build: makes the model and the keyword arguments of its forward; draws from torch's global generator.
        needs: packages beyond torch and transformers.
        random: draws random numbers in forward (dropout above 0).
        fast: belongs to the subset that every run of the tests has.
        precision: what the products are computed in.
    """

    name: str
    kind: str
    build: Callable[[], Built]
    needs: tuple[str, ...] = ()
    random: bool = False
    fast: bool = False
    precision: str = "float32"

    def fresh(self, device: str = "cpu") -> Built:
        """The model in training mode with its inputs: two calls give equal ones that share nothing.

        Every parameter is moved by a little, so that what starts at zero (an adapter's second matrix, a modulation) does not
        give zero gradients. Quantized weights stay as they are.

        Raises:
            Missing: a library is not there, or too old to have the architecture.
        """
        torch.manual_seed(0)
        try:
            for package in self.needs:
                importlib.import_module(package)
            model, inputs = self.build()
        except ImportError as error:
            raise Missing(f"not in the libraries installed here: {' '.join(str(error).split())[:120]}") from error
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and not is_traceable_wrapper_subclass(parameter):
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        model.train()
        return model.to(device), {name: _to(value, device) for name, value in inputs.items()}


def _to(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return value


ALL: dict[str, Architecture] = {}
REGISTERED_BY: dict[str, str] = {}


def architecture(
    name: str,
    kind: str,
    *,
    needs: tuple[str, ...] = (),
    random: bool = False,
    fast: bool = False,
    precision: str = "float32",
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Decorator: the function builds the architecture of this name."""
    REGISTERED_BY[name] = sys._getframe(1).f_globals["__name__"]

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        assert name not in ALL, name
        ALL[name] = Architecture(
            name=name, kind=kind, build=build, needs=needs, random=random, fast=fast, precision=precision
        )
        return build

    return register


@functools.cache
def everything() -> dict[str, Architecture]:
    """All architectures by name, in the order of MODULES, whichever of them was imported first."""
    places = {importlib.import_module(f"net.{module}").__name__: at for at, module in enumerate(MODULES)}
    return dict(sorted(ALL.items(), key=lambda item: places[REGISTERED_BY[item[0]]]))


def loss_of(output: Any) -> Tensor:
    """The model's own loss; where it has none, a scalar that weighs every element of its outputs differently."""
    loss = output.get("loss") if hasattr(output, "get") else None
    return loss if loss is not None else weighted_loss(output)


def hf(name: str) -> Any:
    """A class of transformers by name.

    Raises:
        Missing: the release that is installed has none.
    """
    import transformers

    try:
        return getattr(transformers, name)
    except AttributeError:
        raise Missing(f"transformers {transformers.__version__} has no {name}") from None


def ids(*shape: int, high: int = 128, low: int = 5) -> Tensor:
    """Token ids; the lowest are left to padding and the like."""
    return torch.randint(low, high, shape)
