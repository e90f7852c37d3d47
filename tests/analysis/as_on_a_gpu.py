"""Inductor as it is for a GPU, on a CPU: its thresholds, and its code for Triton, which is written and never run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._inductor import config, ir
from torch.fx import Graph, GraphModule, Node

from graphoffload.analysis.fusion import Fusion
from graphoffload.analysis.storages import fake, storage_id
from graphoffload.compiler.inner_compile import APART, AS_PLANNED, planned_fusions
from graphoffload.torch_internals.inductor import in_graph_order, without_onednn
from graphoffload.torch_internals.inductor_layouts import rows_alone_padded

THRESHOLDS: dict[str, Any] = {"realize_opcount_threshold": 30, "realize_acc_reads_threshold": 8}


@contextmanager
def writing_triton(unfused_bytes: int | None = None) -> Iterator[None]:
    """Inductor compiles as under a plan, and for Triton. unfused_bytes: the plan's."""
    apart = APART if unfused_bytes is not None else {}
    settings = {**AS_PLANNED, **apart, **THRESHOLDS, "fx_graph_cache": False, "cpu_backend": "triton"}
    settings["disable_padding_cpu"] = False
    no_cpu = mock.patch.object(ir, "is_cpu", return_value=False)
    with (
        config.patch(settings), planned_fusions(unfused_bytes), in_graph_order(), no_cpu, without_onednn(), rows_alone_padded(),
    ):  # fmt: skip
        yield


def copied(module: GraphModule) -> Graph:
    """A graph for Inductor, which changes the values of the nodes."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return graph


def exists(fusion: Fusion, node: Node) -> bool:
    """Whether a node's value is in memory."""
    value = fake(node)
    assert value is not None
    return storage_id(value) in fusion.real
