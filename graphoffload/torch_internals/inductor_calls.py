"""What torch.compile calls where the backend is Inductor. Seen in torch 2.11 to 2.15.

Apart from `inductor`, since importing that takes seconds: this module is imported while torch is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule


class Taker(Protocol):
    """What gets each graph in Inductor's place."""

    def __call__(
        self, gm: GraphModule, inputs: Sequence[Any], settings: dict[str, Any], as_before: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Compile a graph. settings: of torch._inductor.config, as torch.compile was given them. as_before: Inductor."""


def take_over(taker: Taker) -> Callable[[], None]:
    """Have `taker` compile what torch.compile hands to Inductor; returns what undoes that.

    Without it: only scripts that name the backend are planned.
    """
    wrapper: Any = torch._TorchCompileInductorWrapper
    before = wrapper.__call__
    undone = False

    def call(self: Any, model_: GraphModule, inputs_: Sequence[Any], **kwargs: Any) -> Any:
        if undone:  # somebody wrapped this function and calls it still
            return before(self, model_, inputs_, **kwargs)
        settings = {**self.config, **(kwargs.get("config_patches") or {})}
        return taker(model_, inputs_, settings, lambda: before(self, model_, inputs_, **kwargs))

    wrapper.__call__ = call

    def undo() -> None:
        nonlocal undone
        undone = True
        if wrapper.__call__ is call:
            wrapper.__call__ = before

    return undo


def eager_is_asked_for() -> bool:
    """As dynamo.eager_is_asked_for, without an import of Dynamo. Without it: steps in eager that were asked for are a warning
    that nothing was compiled."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    from graphoffload.torch_internals import dynamo

    return dynamo.eager_is_asked_for()
