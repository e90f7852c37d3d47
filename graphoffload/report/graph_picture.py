"""A graph as a picture: forward on the left, read downwards; backward on the right, read upwards. The two halves of a layer
face each other, and saved activations cross from left to right.

    fx.GraphModule -- drawn_nodes --> DrawnNode, edges -- graph_svg --> SVG

Boxes are colored by decision, ops that copy have colors of their own, and everything else is grey. Runs of grey nodes of one
module are one box, so that 2000 nodes stay readable. Inputs that are not saved and outputs are left out. Bands behind the boxes
are layers. Hovering over a box shows its full name, operation, module, shape and bytes. Graphs are only read here.

The layers of the drawing are topological generations (networkx): O(nodes + edges), no crossing minimization beyond one
barycenter sweep. Merging a run is sound because nodes come in program order: an interval of a topological order that becomes
one box cannot close a cycle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx

from graphoffload.options.patterns import clean_path
from graphoffload.report.svg import element, page, shorten
from graphoffload.units import format_bytes

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

Role = Literal["keep", "recompute", "offload", "offload_op", "release", "reload", "wait", "other"]
Side = Literal["forward", "backward"]
Edge = tuple[str, str]

_LOOKS: dict[Role, tuple[str, str, str]] = {  # box, text, legend
    "keep": ("#4c78a8", "#ffffff", "keep"),
    "recompute": ("#3f8f3a", "#ffffff", "recompute"),
    "offload": ("#f58518", "#000000", "offload"),
    "offload_op": ("#9c4a00", "#ffffff", "offload op: D2H starts"),
    "release": ("#8c6d5a", "#ffffff", "release: source is free"),
    "reload": ("#9467bd", "#ffffff", "reload: H2D starts"),
    "wait": ("#edc948", "#000000", "wait for H2D"),
    "other": ("#e4e4e4", "#333333", "other (runs of one module in one box)"),
}
_OUR_OP = re.compile(r"graphoffload\.(offload|release|reload|wait)(\.|$)")
_BOX_W, _BOX_H, _STEP_X, _STEP_Y, _LABEL_W, _BOW, _TOP, _ACROSS = 204, 20, 220, 32, 150, 56, 60, 3


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One node to draw. `name` is unique in the picture; `nbytes` is None when unknown; `shape` is free text."""

    name: str
    op: str
    module: str
    nbytes: int | None
    role: Role
    side: Side = "forward"
    shape: str = ""


def drawn_nodes(
    graph_module: GraphModule,
    actions: Mapping[str, str],
    *,
    side: Side | None = None,
    modules: Mapping[str, str] | None = None,
) -> tuple[list[DrawnNode], list[Edge]]:
    """Nodes and edges of `graph_module` in program order; it is not changed.

    Args:
        actions: "keep", "recompute" or "offload" by node name, such as a plan's decisions.
        side: the graph's side; None for a joint graph, whose backward is everything computed from a placeholder "tangents_*"
            and everything that only backward reads.
        modules: module paths by node name; for other nodes the path is read from `nn_module_stack`.
    """
    nodes: list[DrawnNode] = []
    edges: list[Edge] = []
    in_backward: set[str] = set()
    for node in graph_module.graph.nodes:
        inputs = [source.name for source in node.all_input_nodes]
        if (node.op == "placeholder" and node.name.startswith("tangents")) or not in_backward.isdisjoint(inputs):
            in_backward.add(node.name)
        shape, nbytes = _shape_and_bytes(node.meta.get("val"))
        op = str(node.target) if node.op == "call_function" else node.op
        where = side or ("backward" if node.name in in_backward and node.op != "output" else "forward")
        module = (modules or {}).get(node.name) or _module_of(node)
        nodes.append(DrawnNode(node.name, op, module, nbytes, _role(node.name, op, actions), where, shape))
        edges += [(name, node.name) for name in inputs]
    return (_backward_only(nodes, edges) if side is None else nodes), edges


def drawn_pair(
    forward: GraphModule, backward: GraphModule, actions: Mapping[str, str], *, modules: Mapping[str, str] | None = None
) -> tuple[list[DrawnNode], list[Edge]]:
    """Forward and backward in one picture, joined where a backward placeholder has the name of a forward node.

    Names of backward nodes get the prefix "bwd/".
    """
    nodes, edges = drawn_nodes(forward, actions, side="forward", modules=modules)
    after, inner = drawn_nodes(backward, actions, side="backward", modules=modules)
    saved = {node.name for node in nodes}
    crossing = [(node.name, f"bwd/{node.name}") for node in after if node.op == "placeholder" and node.name in saved]
    nodes += [replace(node, name=f"bwd/{node.name}") for node in after]
    return nodes, [*edges, *((f"bwd/{source}", f"bwd/{target}") for source, target in inner), *crossing]


def graph_svg(nodes: Sequence[DrawnNode], edges: Iterable[Edge], *, title: str = "") -> str:
    """The picture as the text of an SVG file.

    Args:
        nodes: in program order, forward before backward.
        edges: (from, to) by name.

    Raises:
        ValueError: an edge runs against the order of `nodes` or names a node that is not there.
    """
    boxes, links = _boxes(nodes, edges)
    rows = {side: _rows([box for box in boxes if box.side == side], links) for side in ("forward", "backward")}
    depth = _STEP_Y * max((len(side_rows) for side_rows in rows.values()), default=0)
    left = float(_BOW)
    body: list[str] = []
    for side, side_rows in rows.items():
        if not side_rows:
            continue
        step = depth / len(side_rows)  # the shorter side is spread out, so that a layer's halves face each other
        for index, row in enumerate(side_rows):
            for place, box in enumerate(row):
                box.x, box.row = left + place * _STEP_X, index
                box.y = _TOP + step * (index if side == "forward" else len(side_rows) - 1 - index)
        wide = max(len(row) for row in side_rows) * _STEP_X + _LABEL_W
        body += _bands(side_rows, left - 10, wide, (step - _BOX_H) / 2)
        left += wide + _BOW
    body += [_edge(boxes[source], boxes[target]) for source, target in sorted(links)]
    body += [_drawn_box(box) for box in boxes]
    body += _legend(nodes, title)
    return page(max(left, 1080), _TOP + depth + 20, body)


@dataclass(slots=True)
class _Box:
    """One node, or a run of grey nodes of one module."""

    index: int
    members: list[DrawnNode] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    row: int = 0

    @property
    def role(self) -> Role:
        return self.members[0].role

    @property
    def side(self) -> Side:
        return self.members[0].side

    @property
    def module(self) -> str:
        return self.members[0].module


def _boxes(nodes: Sequence[DrawnNode], edges: Iterable[Edge]) -> tuple[list[_Box], set[tuple[int, int]]]:
    """Boxes in program order and the edges between them, by index; a node that is not drawn has none."""
    order = {node.name: place for place, node in enumerate(nodes)}
    boxes: list[_Box] = []
    box_of: dict[str, int] = {}
    for node in nodes:
        if node.role == "other" and node.op in ("placeholder", "get_attr", "output"):
            continue
        last = boxes[-1].members[-1] if boxes else None
        same = last is not None and last.role == node.role == "other" and (last.side, last.module) == (node.side, node.module)
        if not same:
            boxes.append(_Box(len(boxes)))
        boxes[-1].members.append(node)
        box_of[node.name] = len(boxes) - 1
    links: set[tuple[int, int]] = set()
    for source, target in edges:
        if source not in order or target not in order or order[source] >= order[target]:
            raise ValueError(
                f"edge {source!r} -> {target!r} does not run forward through the {len(nodes)} nodes given in program order."
            )
        if source in box_of and target in box_of and box_of[source] != box_of[target]:
            links.add((box_of[source], box_of[target]))
    return boxes, links


def _rows(boxes: Sequence[_Box], links: set[tuple[int, int]]) -> list[list[_Box]]:
    """Topological generations, each at most _ACROSS boxes wide (a wider one takes several rows)."""
    by_index = {box.index: box for box in boxes}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(by_index)
    graph.add_edges_from((source, target) for source, target in links if source in by_index and target in by_index)
    depth = {index: level for level, generation in enumerate(nx.topological_generations(graph)) for index in generation}
    for index in reversed(list(nx.topological_sort(graph))):  # above its first reader, not at the top
        depth[index] = min((depth[reader] - 1 for reader in graph.successors(index)), default=depth[index])
    levels: dict[int, list[int]] = {}
    for index, level in depth.items():
        levels.setdefault(level, []).append(index)
    place: dict[int, float] = {}
    rows: list[list[_Box]] = []
    for level in sorted(levels):
        wanted = {index: _mean([place[p] for p in graph.predecessors(index) if p in place]) for index in levels[level]}
        row = sorted(levels[level], key=lambda index: (wanted[index], index))
        place.update((index, position % _ACROSS) for position, index in enumerate(row))
        rows += [[by_index[index] for index in row[start : start + _ACROSS]] for start in range(0, len(row), _ACROSS)]
    return rows


def _bands(rows: Sequence[Sequence[_Box]], left: float, width: float, margin: float) -> list[str]:
    """A background for every run of rows of one layer, its name at the right; rows of unknown modules join the one before."""
    runs: list[tuple[str, list[_Box]]] = []
    for row in rows:
        layers = Counter(_layer(box.module) for box in row if box.module)
        layer = layers.most_common(1)[0][0] if layers else runs[-1][0] if runs else ""
        if runs and runs[-1][0] in (layer, ""):
            runs[-1] = (layer, [*runs[-1][1], *row])
        else:
            runs.append((layer, list(row)))
    drawn = []
    for number, (layer, boxes) in enumerate(runs):
        top, bottom = min(box.y for box in boxes), max(box.y for box in boxes) + _BOX_H
        fill = "#f3f6fa" if number % 2 else "#fbf8f1"
        tall = bottom - top + 2 * margin
        drawn.append(element("rect", class_="band", x=left, y=top - margin, width=width, height=tall, fill=fill, title=layer))
        label = shorten(layer, 22)
        drawn.append(element("text", text=label, x=left + width - 6, y=top + 14, text_anchor="end", fill="#8a8a8a"))
    return drawn


def _edge(source: _Box, target: _Box) -> str:
    """A curve: across for saved activations, straight to the next row, around the left for longer distances."""
    colour, weight = "#9a9a9a", 0.8
    if source.side != target.side:
        colour, weight = _LOOKS[source.role][0] if source.role != "other" else "#777777", 1.4
        start, end = (source.x + _BOX_W, source.y + _BOX_H / 2), (target.x, target.y + _BOX_H / 2)
        bend = (end[0] - start[0]) / 2
        points = (start, (start[0] + bend, start[1]), (end[0] - bend, end[1]), end)
    elif target.row - source.row > 1:
        start, end = (source.x, source.y + _BOX_H / 2), (target.x, target.y + _BOX_H / 2)
        out = min(start[0], end[0]) - min(_BOW - 6, 12 + 3 * (target.row - source.row))
        points = (start, (out, start[1]), (out, end[1]), end)
    else:
        down = target.y > source.y
        start = (source.x + _BOX_W / 2, source.y + (_BOX_H if down else 0))
        end = (target.x + _BOX_W / 2, target.y + (0 if down else _BOX_H))
        middle = (start[1] + end[1]) / 2
        points = (start, (start[0], middle), (end[0], middle), end)
    flat = " ".join(f"{x:.1f},{y:.1f}" for x, y in points[1:])
    data = f"M{points[0][0]:.1f},{points[0][1]:.1f} C{flat}"
    return element("path", d=data, fill="none", stroke=colour, stroke_width=weight, stroke_opacity=0.6)


def _drawn_box(box: _Box) -> str:
    """The box, its name and size, and the rest as a tooltip."""
    fill, ink, _ = _LOOKS[box.role]
    first, count = box.members[0], len(box.members)
    size = format_bytes(first.nbytes) if box.role != "other" and first.nbytes is not None else ""
    name = first.name.removeprefix("bwd/") if count == 1 else f"{count} ops: {first.name.removeprefix('bwd/')} .."
    room = (_BOX_W - 12) // 6 - (len(size) + 1 if size else 0)
    lines = [
        f"{node.name}  {node.op}  {node.shape}  {format_bytes(node.nbytes) if node.nbytes is not None else ''}".rstrip()
        for node in box.members[:20]
    ]
    lines += [f"and {count - 20} more"] if count > 20 else []
    lines += [f"module {box.module or 'unknown'}", f"{_LOOKS[box.role][2]}"]
    shape = element("rect", class_=f"box {box.role}", x=box.x, y=box.y, width=_BOX_W, height=_BOX_H, rx=3, fill=fill)
    label = element("text", text=shorten(name, room), x=box.x + 6, y=box.y + 14, fill=ink)
    amount = element("text", text=size, x=box.x + _BOX_W - 6, y=box.y + 14, fill=ink, text_anchor="end") if size else ""
    return element("g", shape, label, amount, title="\n".join(lines))


def _legend(nodes: Sequence[DrawnNode], title: str) -> list[str]:
    """Title and one swatch for every role that occurs, with its count."""
    counts = Counter(node.role for node in nodes)
    drawn = [element("text", text=title, x=12, y=20, font_size=14, fill="#222222")] if title else []
    left = 12.0
    for role, (fill, _, name) in _LOOKS.items():
        if counts[role]:
            text = f"{name} ({counts[role]})"
            drawn.append(element("rect", class_="legend", x=left, y=30, width=12, height=12, rx=2, fill=fill))
            drawn.append(element("text", text=text, x=left + 17, y=40, fill="#333333"))
            left += 17 + 6.1 * len(text) + 16
    return drawn


def _backward_only(nodes: Sequence[DrawnNode], edges: Iterable[Edge]) -> list[DrawnNode]:
    """The same nodes; grey ones that only backward reads (transposed weights) move to its side."""
    readers: dict[str, list[str]] = {}
    for source, target in edges:
        readers.setdefault(source, []).append(target)
    sides = {node.name: node.side for node in nodes}
    for node in reversed(nodes):
        movable = node.role == "other" and node.op != "placeholder" and node.name in readers
        if movable and all(sides[reader] == "backward" for reader in readers[node.name]):
            sides[node.name] = "backward"
    return [replace(node, side=sides[node.name]) for node in nodes]


def _role(name: str, op: str, actions: Mapping[str, str]) -> Role:
    """Our own operations by their target, saved activations by their decision."""
    ours = _OUR_OP.match(op)
    if ours:
        roles: dict[str, Role] = {"offload": "offload_op", "release": "release", "reload": "reload", "wait": "wait"}
        return roles[ours[1]]
    decided: dict[str, Role] = {"keep": "keep", "recompute": "recompute", "offload": "offload"}
    return decided.get(actions.get(name, ""), "other")


def _module_of(node: Node) -> str:
    """Path of the innermost module on the node's stack, "" without one."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return clean_path(str(list(stack.values())[-1][0])) if stack else ""


def _shape_and_bytes(value: Any) -> tuple[str, int | None]:
    """("8x64 bfloat16", bytes) of a node's example value; bytes are None when symbolic or no tensor."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return "", None
    shape = f"{'x'.join(map(str, value.shape)) or '()'} {str(value.dtype).removeprefix('torch.')}"
    sizes = [size for size in value.shape if isinstance(size, int)]
    if len(sizes) < len(value.shape):
        return shape, None
    nbytes = int(value.dtype.itemsize)
    for size in sizes:
        nbytes *= size
    return shape, nbytes


def _layer(module: str) -> str:
    """The band a module belongs to: its path up to the first number, else its first two names."""
    numbered = re.match(r".*?\.?\d+(?=\.|$)", module)
    return numbered[0] if numbered else ".".join(module.split(".")[:2])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
