"""backend="graphoffload" that gets no graph: Dynamo leaves to eager all that was to be compiled, as a model with an nn.LSTM, or
skips it, as an nn.Sequential that was compiled in place.

Plain torch.compile says nothing of it either. Here a budget was asked for, and nothing keeps it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from graphoffload.errors import NotOffloadedWarning, warn
from graphoffload.torch_internals import dynamo

_NAME, _STEPS = "graphoffload", 2
_settled: list[bool] = []
_stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def got_a_graph() -> None:
    """Something is compiled: nothing is to be said in this process any more."""
    _settled[:] = [True]


_LEFT = (
    "Dynamo compiled nothing at all: it leaves torch.nn's recurrent layers and functions that call them to eager "
    "(torch._dynamo.config.allow_rnn), and what it cannot trace. TORCH_LOGS=graph_breaks says what it met; compile the layers "
    "beside it one by one."
)
_SKIPPED = (
    "Dynamo was given nothing to compile: it skips the code of torch.nn, so that `model.compile(...)` does nothing where model "
    "is an nn.Sequential of torch's own layers. `model = torch.compile(model, ...)` and `graphoffload.offload(model, ...)` "
    "compile it. If what is compiled has not run yet, nothing has to be done."
)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or _settled or dynamo.eager_is_asked_for() or not dynamo.compiles_nothing_for(_NAME):
        return
    steps = _stepped[optimizer] = _stepped.get(optimizer, 0) + 1
    if steps == _STEPS:
        got_a_graph()
        why = _LEFT if dynamo.has_tried_frames() else _SKIPPED
        warn(NotOffloadedWarning, f'backend="{_NAME}" has no effect: an optimizer has stepped {_STEPS} times, and {why}')


register_optimizer_step_post_hook(_after_step)
