"""The code that Inductor writes keeps the order of a plan's ops and of what reads their memory, or is not run.

The graphs that Inductor is given are checked by analysis/verify.py. Inductor has an order of its own, and makes one kernel of
several operations, each of which has a place in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from graphoffload.errors import VerifyError
from graphoffload.log import log
from graphoffload.runtime import registry
from graphoffload.torch_internals import inductor

OFFLOADS = (torch.ops.graphoffload.offload.default, torch.ops.graphoffload.offload_captured.default)
RELEASES = (torch.ops.graphoffload.release.default, torch.ops.graphoffload.release_captured.default)
WAITS = (torch.ops.graphoffload.wait.default, torch.ops.graphoffload.wait_captured.default)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Let graphs that are compiled in the block run what reads memory before its release, and after the wait for its copy; and
    release the memory that they offload.

    Raises:
        VerifyError: as `check_written_order`.
    """
    with (
        inductor.in_graph_order(),
        inductor.reads_before(*RELEASES),
        inductor.same_memory(*OFFLOADS, *RELEASES),
        inductor.reads_fused(*RELEASES),
        inductor.writes_remembered(),
        inductor.watching_codegen(after=check_written_order),
    ):
        yield


def check_written_order(lowering: Any) -> None:
    """Check a graph whose code is generated.

    What runs behind a release and reads its tensor is no error: Python holds the tensor, and its memory, until then. Code that
    cannot be looked through, such as that of a torch yet to come, is let pass.

    Raises:
        VerifyError: something reads a reloaded tensor before the wait for its copy.
    """
    try:
        ran = list(inductor.operations_of(lowering))
    except Exception as error:
        log.info("the order of Inductor's code was not checked: %s: %s", type(error).__name__, error)
        return
    read_at: dict[str, str] = {}
    for operation in ran:
        if operation.target in WAITS and operation.operand in read_at:
            plan, number = operation.constants[:2]
            raise VerifyError(
                f"Inductor's code reads {registry.run_plan(plan).name(number)} in {read_at[operation.operand]}, before the "
                f'wait for its copy ({operation.name}). Keep that tensor with policy={{"<its module>": "keep"}}, or take '
                'inner="aot_eager", and report this. Nothing was run.'
            )
        for name in operation.reads:
            read_at.setdefault(name, operation.name)
