"""Drawings: well-formed SVG with a box for every decision, readable at 2000 nodes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import graphoffload.runtime.ops  # noqa: F401  registers torch.ops.graphoffload
from graphoffload.report.graph_picture import (
    DrawnNode,
    Edge,
    Role,
    drawn_nodes,
    drawn_pair,
    graph_svg,
)
from graphoffload.report.svg import clean, shorten

SVG = "{http://www.w3.org/2000/svg}"
ROLES: tuple[Role, ...] = ("keep", "recompute", "offload", "offload_op", "release", "reload", "wait", "other")


def boxes(svg: str) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(svg.encode()).iter(f"{SVG}rect") if "box" in rect.get("class", "").split()]


def role_counts(svg: str) -> Counter[str]:
    return Counter(rect.get("class", "").split()[1] for rect in boxes(svg))


def titles(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg.encode()).iter(f"{SVG}title")]


def chain(roles: list[Role], module: str = "layers.{}") -> tuple[list[DrawnNode], list[Edge]]:
    """A forward chain, four nodes a layer."""
    nodes = [DrawnNode(f"n{i}", "aten.mm.default", module.format(i // 4), 2**20, role) for i, role in enumerate(roles)]
    return nodes, [(f"n{i}", f"n{i + 1}") for i in range(len(roles) - 1)]


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) @ w


def traced() -> torch.fx.GraphModule:
    """A graph with shapes on its nodes: matmul, relu, matmul."""
    graph = torch.fx.symbolic_trace(Block())
    torch.fx.passes.shape_prop.ShapeProp(graph).propagate(torch.ones(4, 8), torch.ones(8, 8))
    for node in graph.graph.nodes:
        if "tensor_meta" in node.meta:
            node.meta["val"] = torch.empty(node.meta["tensor_meta"].shape)
        node.meta["nn_module_stack"] = {"a": ("L['self'].layers.0", Block), "b": ("L['self'].layers.0.mlp", Block)}
    return graph


# graph_svg


def test_every_decision_is_a_box_of_its_colour() -> None:
    nodes, edges = chain([*ROLES, "keep", "offload"])
    svg = graph_svg(nodes, edges)
    assert role_counts(svg) == {**dict.fromkeys(ROLES, 1), "keep": 2, "offload": 2}
    fills = {(rect.get("class") or "").split()[1]: rect.get("fill") for rect in boxes(svg)}
    assert len(set(fills.values())) == len(ROLES), "two roles share a colour"


@given(st.lists(st.sampled_from(ROLES), max_size=40), st.data())
def test_any_graph_draws_each_saved_node_once_and_nothing_overlaps(roles: list[Role], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(roles)))
    nodes = [
        DrawnNode(f"n{i}", "op", f"layers.{i // 5}", None, role, "forward" if i < cut else "backward")
        for i, role in enumerate(roles)
    ]
    pairs = st.tuples(st.integers(0, max(len(roles) - 1, 0)), st.integers(0, max(len(roles) - 1, 0)))
    edges = [(f"n{a}", f"n{b}") for a, b in data.draw(st.lists(pairs, max_size=60)) if a < b]
    svg = graph_svg(nodes, edges)
    counts = role_counts(svg)
    assert {role: counts[role] for role in ROLES[:-1]} == {role: roles.count(role) for role in ROLES[:-1]}
    places = [(float(rect.get("x", "")), float(rect.get("y", ""))) for rect in boxes(svg)]
    height = float(boxes(svg)[0].get("height", "")) if places else 0.0
    for x in {x for x, _ in places}:
        column = sorted(y for left, y in places if left == x)
        assert all(below - above >= height for above, below in pairwise(column))
    page = ElementTree.fromstring(svg.encode())
    assert all(0 <= x < float(page.get("width", "")) and 0 <= y < float(page.get("height", "")) for x, y in places)


def test_grey_runs_of_a_module_become_one_box_that_names_them() -> None:
    nodes, edges = chain(["other"] * 4 + ["keep"] + ["other"] * 3)
    svg = graph_svg(nodes, edges)
    assert role_counts(svg) == {"other": 2, "keep": 1}
    run = next(title for title in titles(svg) if "n0" in title)
    assert all(f"n{i}" in run for i in range(4))
    assert "module layers.0" in run
    assert "n5" not in run
    assert role_counts(graph_svg(*chain(["other"] * 8))) == {"other": 2}, "two modules are two boxes"


def test_boxes_stand_below_what_they_read() -> None:
    nodes = [DrawnNode(name, "op", "m", None, "keep") for name in "abcd"]
    svg = graph_svg(nodes, [("b", "c"), ("a", "d")])
    (a, b, c, d) = (float(rect.get("x", "")) for rect in boxes(svg))
    assert (a, b) == (d, c)
    assert a != b


def test_two_thousand_nodes_stay_readable() -> None:
    roles: list[Role] = ["keep" if i % 40 == 0 else "offload" if i % 40 == 20 else "other" for i in range(2000)]
    nodes, edges = chain(roles)
    svg = graph_svg(nodes, edges)
    assert role_counts(svg)["keep"] == role_counts(svg)["offload"] == 50
    assert len(boxes(svg)) <= 650
    assert len(svg) < 500_000


def test_backward_stands_right_of_forward_and_is_read_upwards() -> None:
    nodes = [
        DrawnNode("first", "op", "a", None, "keep"),
        DrawnNode("second", "op", "b", None, "keep"),
        DrawnNode("bwd_second", "op", "b", None, "wait", "backward"),
        DrawnNode("bwd_first", "op", "a", None, "wait", "backward"),
    ]
    svg = graph_svg(nodes, [("first", "second"), ("second", "bwd_second"), ("bwd_second", "bwd_first")])
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = ((float(r.get("x", "")), float(r.get("y", ""))) for r in boxes(svg))
    assert x0 == x1 < x2 == x3
    assert y0 < y1
    assert (y2, y3) == (y1, y0), "a layer's two halves face each other"


def test_layers_are_bands_and_names_survive_xml() -> None:
    nodes = [DrawnNode("a<b>&\"'\x00\x1b", "op", "L['self'].layers.0.<locals>", 5, "keep", shape="4x8 & more")]
    svg = graph_svg(nodes, [], title="graph <0>")
    assert any("a<b>&\"'??" in title and "4x8 & more" in title and "5 B" in title for title in titles(svg))
    two = graph_svg(*chain(["keep"] * 8))
    bands = [rect for rect in ElementTree.fromstring(two.encode()).iter(f"{SVG}rect") if rect.get("class") == "band"]
    assert len(bands) == 2
    assert {"layers.0", "layers.1"} <= set(titles(two))


@pytest.mark.parametrize("edge", [("n1", "n0"), ("n0", "n0"), ("n0", "gone")])
def test_an_edge_against_the_order_is_refused(edge: Edge) -> None:
    nodes, _ = chain(["keep", "keep"])
    with pytest.raises(ValueError, match=rf"'{edge[0]}' -> '{edge[1]}' does not run forward through the 2 nodes"):
        graph_svg(nodes, [edge])


def test_nothing_to_draw_is_an_empty_page() -> None:
    assert boxes(graph_svg([], [])) == []


# drawn_nodes


def test_nodes_carry_role_module_shape_and_bytes_and_the_graph_is_untouched() -> None:
    graph = traced()
    before = graph.print_readable(print_output=False)
    nodes, edges = drawn_nodes(graph, {"relu": "offload", "matmul": "keep"}, modules={"matmul": "from.the.table"})
    by_name = {node.name: node for node in nodes}
    assert by_name["relu"] == DrawnNode(
        "relu", by_name["relu"].op, "layers.0.mlp", 4 * 8 * 4, "offload", "forward", "4x8 float32"
    )
    assert by_name["matmul"].module == "from.the.table"
    assert (by_name["x"].role, by_name["matmul_1"].role) == ("other", "other")
    assert {("x", "matmul"), ("w", "matmul"), ("matmul", "relu"), ("relu", "matmul_1"), ("w", "matmul_1")} <= set(edges)
    assert graph.print_readable(print_output=False) == before
    assert role_counts(graph_svg(nodes, edges)) == {"keep": 1, "offload": 1, "other": 1}, "inputs and output are left out"


def test_a_joint_graph_splits_at_its_tangents() -> None:
    graph = torch.fx.Graph()
    x, w, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    out = graph.call_function(torch.ops.aten.mm.default, (x, w))
    turned = graph.call_function(torch.ops.aten.t.default, (w,))
    grad = graph.call_function(torch.ops.aten.mm.default, (tangent, turned))
    graph.output((out, grad))
    nodes, _ = drawn_nodes(torch.fx.GraphModule(torch.nn.Module(), graph), {out.name: "keep"})
    sides = {node.name: node.side for node in nodes}
    assert (sides[out.name], sides[tangent.name], sides[grad.name]) == ("forward", "backward", "backward")
    assert sides[turned.name] == "backward", "only backward reads the transposed weight"
    assert sides[w.name] == "forward"


def test_our_operations_are_known_by_their_target() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    ours = torch.ops.graphoffload
    handle = graph.call_function(ours.offload.default, (x, "plan", 0))
    released = graph.call_function(ours.release.default, (x, handle, "plan", 0))
    back = graph.call_function(ours.reload.default, (handle, "plan", 0, [4], [1], torch.float32))
    graph.call_function(ours.wait.default, (back, handle, "plan", 0))
    graph.output(graph.call_function(torch.relu, (back,)))
    nodes, _ = drawn_nodes(torch.fx.GraphModule(torch.nn.Module(), graph), {released.name: "keep", "x": "offload"})
    assert [node.role for node in nodes] == ["offload", "offload_op", "release", "reload", "wait", "other", "other"]


def test_a_pair_is_joined_where_a_saved_tensor_crosses() -> None:
    forward, backward = traced(), torch.fx.GraphModule(torch.nn.Module(), backward_of("relu"))
    nodes, edges = drawn_pair(forward, backward, {"relu": "offload"})
    assert ("relu", "bwd/relu") in edges
    assert ("bwd/relu", "bwd/neg") in edges
    assert {node.name: node.side for node in nodes}["bwd/neg"] == "backward"
    assert len({node.name for node in nodes}) == len(nodes)
    assert role_counts(graph_svg(nodes, edges))["offload"] == 2


def backward_of(saved: str) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder(saved),)))
    return graph


# svg


@given(st.text())
@example("a line of Windows\r\nand one of old\r")
def test_any_text_is_xml(text: str) -> None:
    """And the same text, but for characters that XML cannot hold."""
    parsed = ElementTree.fromstring(f"<a>{clean(text)}</a>".encode()).text or ""
    assert len(parsed) == len(text)
    assert all(found in (given, "?") for found, given in zip(parsed, text, strict=True))


@given(st.text(max_size=30), st.integers(1, 20))
def test_shortened_text_fits_and_keeps_both_ends(text: str, room: int) -> None:
    short = shorten(text, room)
    assert len(short) <= room
    assert short == text or (len(short) == room and "\u2026" in short)
    if room >= 3 and text:
        assert (short[0], short[-1]) == (text[0], text[-1])
