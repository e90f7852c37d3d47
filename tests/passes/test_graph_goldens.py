"""Skeletons of rewritten graphs as texts, each with a twin that runs the same model and compares gradients to the bit.

A skeleton is the order of operations: ours one a line with the tensor they move, the others between them by name. Accept
changed texts with one command, then read the diff:

    ACCEPT_GOLDENS=1 pytest tests/passes/test_graph_goldens.py

tests/golden/graph_<name>.txt is what the oldest torch supported gives; graph_<name>.torch2.15.txt, where there is one, is what
that release and later ones give instead.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import graphoffload
from graphoffload.compiler import compile_variant
from graphoffload.hardware.profile import PROFILES
from graphoffload.runtime import registry
from graphoffload.testing import ZOO, Case, assert_equal_bits, keep_all, observe, run_case
from graphoffload.testing.attention import Blocks
from graphoffload.testing.case import of
from graphoffload.torch_internals import releases

GOLDEN = Path(__file__).parents[1] / "golden"
ACCEPT = bool(os.environ.get("ACCEPT_GOLDENS"))
# A block's products take about as long as the copies of what it saves.
LINK = replace(
    PROFILES["h200-sxm"], matmul_flops_per_s=(("float32", 1e11),), d2h_bytes_per_s=2e9, h2d_bytes_per_s=2e9, copy_latency_s=1e-6
)
BLOCKS = replace(ZOO["three_blocks"], name="two_blocks", build=of(functools.partial(Blocks, 2)))


@dataclass(frozen=True)
class Golden:
    """A case and what is asked for it; `ours`: which of our ops the text must have (a skeleton of nothing compares equal)."""

    case: Case
    options: dict[str, Any]
    ours: tuple[str, ...] = ("offload", "release", "reload", "wait")


GOLDENS = {
    "offload": Golden(BLOCKS, {"policy": "offload"}),
    "mapping": Golden(BLOCKS, {"policy": {"*_norm": "recompute", "*.mlp.1": "recompute", "*.attn": "offload", "*": "keep"}}),
    "core_attn": Golden(BLOCKS, {"policy": "offload", "offload_modules": ("core_attn",)}),
    "recompute": Golden(BLOCKS, {"policy": "recompute"}, ours=()),
    "views": Golden(ZOO["saved_twice"], {"policy": "offload"}),
    "dynamic": Golden(ZOO["dynamic_views"], {"policy": "offload"}),
}


def skeleton(graphs: list[tuple[GraphModule, GraphModule]]) -> str:
    """Forward and backward of each graph; no addresses, no keys, no numbers that a torch release may count otherwise."""
    lines: list[str] = []
    for forward, backward in graphs:
        names = {node.args[-1]: node.args[0].name for node in forward.graph.nodes if is_ours(node, "offload")}  # type: ignore[union-attr]
        lines += ["forward", *order(forward.graph, names), "", "backward", *order(backward.graph, names), ""]
    return "\n".join(lines)


def order(graph: Graph, names: dict[Any, str]) -> Iterator[str]:
    """Lines of one graph: handles that come in, operations, and what goes out."""
    nodes = [node for node in graph.nodes if not str(node.target).startswith("<built-in function getitem")]
    for handle in graph.find_nodes(op="placeholder"):
        moved = [names[user.args[2]] for user in handle.users if is_ours(user, "reload") and user.args[0] is handle]
        yield from (f"    handle of {name}" for name in moved)
    for ours, group in itertools.groupby((n for n in nodes if n.op == "call_function"), key=is_ours):
        if ours:
            yield from (f"    {plain(node):<8} {names[identity(node)]}" for node in group)
        else:
            yield from textwrap.wrap(" ".join(map(plain, group)), 120, initial_indent="  ", subsequent_indent="  ")
    (output,) = (node for node in graph.nodes if node.op == "output")
    yield f"    outputs: {sum(isinstance(value, Node) for value in output.args[0])}"  # type: ignore[union-attr]


def is_ours(node: Node, name: str = "") -> bool:
    return str(node.target).startswith(f"graphoffload.{name}")


def plain(node: Node) -> str:
    """The name of an operation without namespace and overload."""
    name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")
    return name.removeprefix("graphoffload.").removeprefix("aten.").rsplit(".", 1)[0]


def identity(node: Node) -> Any:
    """The id in the arguments of one of our ops, which ties the four together."""
    return next(value for value in node.args if isinstance(value, int))


@functools.cache
def compile_and_run(name: str) -> tuple[str, list[Any]]:
    """(skeleton, results) of one golden, by the backend as users have it."""
    golden = GOLDENS[name]
    seen: list[tuple[GraphModule, GraphModule]] = []

    class Recording(compile_variant.OffloadPartitioner):
        def __call__(self, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            seen.append(super().__call__(*args, **kwargs))
            return seen[-1]

    options = {"inner": "aot_eager", "min_tensor_bytes": 0, "verify": "checksum", "hardware": LINK, **golden.options}
    with pytest.MonkeyPatch.context() as patch, observe() as observed:
        patch.setattr(compile_variant, "OffloadPartitioner", Recording)
        results = run_case(golden.case, graphoffload.OffloadBackend(**options), "cpu", seeds=(0, 1))
        assert registry.last_plans()
    assert observed.counters["offloads"] == observed.counters["waits"]
    assert bool(observed.counters["offloads"]) == bool(golden.ours)
    return skeleton(seen), results


def release_of(path: Path) -> tuple[int, ...]:
    """The release of torch from which a golden's text holds; () for the text of the oldest one."""
    return tuple(int(part) for part in re.findall(r"\d+", path.name.partition(".torch")[2]))


def golden_path(name: str, release: tuple[int, ...]) -> Path:
    """The newest text that is not newer than a release of torch."""
    return max((p for p in GOLDEN.glob(f"graph_{name}.*") if release_of(p) <= release), key=release_of)


def this_release() -> tuple[int, ...]:
    return tuple(int(part) for part in releases.torch_version().split(".")[:2])


def accept(name: str, text: str) -> None:
    """Write the text of this release: in the file that has it, or in one of its own where it is the first that differs."""
    own = GOLDEN / f"graph_{name}.txt"
    if own.exists() and this_release() > releases.OLDEST_TESTED:
        own = GOLDEN / f"graph_{name}.torch{'.'.join(map(str, this_release()))}.txt"
        own.unlink(missing_ok=True)
        if golden_path(name, this_release()).read_text(encoding="utf-8") == text:
            return
    own.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", GOLDENS)
def test_skeleton(name: str) -> None:
    text, _ = compile_and_run(name)
    if ACCEPT:
        accept(name, text)
    path = golden_path(name, this_release())
    assert text == path.read_text(encoding="utf-8"), f"{path.name} changed; accept: ACCEPT_GOLDENS=1 pytest {__file__}"
    assert all(f"\n    {op} " in text for op in GOLDENS[name].ours)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 128


@pytest.mark.parametrize("name", GOLDENS)
def test_twin(name: str) -> None:
    """The same run's losses, outputs and gradients are keep-all's to the bit."""
    _, results = compile_and_run(name)
    expected = run_case(GOLDENS[name].case, keep_all("aot_eager"), "cpu", seeds=(0, 1))
    for got, kept in zip(results, expected, strict=True):
        assert_equal_bits(got, kept)


def test_no_golden_is_left_over() -> None:
    assert {path.name.split(".")[0] for path in GOLDEN.glob("graph_*.txt")} == {f"graph_{name}" for name in GOLDENS}


def test_recomputation_is_in_the_text() -> None:
    """The recompute golden has the forward's operations in its backward, and nothing of ours."""
    text, _ = compile_and_run("recompute")
    backward = text.split("backward\n")[1]
    assert backward.split().count("gelu") == 2  # attention is not run again: it may draw random numbers
    assert "_scaled_dot_product_flash_attention_for_cpu" not in backward.split()
    assert "offload" not in text


def test_a_moved_operation_changes_the_text() -> None:
    """A release one operation later is another skeleton."""
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    handle = graph.call_function(torch.ops.graphoffload.offload.default, (y, "k", 0))
    z = graph.call_function(torch.ops.aten.cos.default, (y,))
    release = graph.call_function(torch.ops.graphoffload.release.default, (y, handle, "k", 0))
    graph.call_function(torch.ops.aten.tan.default, (z,))
    graph.output((z, handle))
    first = list(order(graph, {0: "sin"}))
    assert first == ["  sin", "    offload  sin", "  cos", "    release  sin", "  tan", "    outputs: 2"]
    handle.append(release)
    assert list(order(graph, {0: "sin"})) != first
