"""Module paths and boundary names of graph nodes, from the metadata that tracing leaves on them."""

from __future__ import annotations

from torch.fx import Node

from graphoffload.options.boundaries import boundaries_of
from graphoffload.options.patterns import clean_path, root_of


def module_stack(node: Node) -> tuple[str, ...]:
    """Paths of the modules around an operation, outermost first. A backward operation has those of its forward operation."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = (clean_path(entry[0] if isinstance(entry, tuple) else str(entry)) for entry in stack.values())
    return tuple(dict.fromkeys(path for path in paths if path))


def module_path(node: Node) -> str:
    """Path of the innermost module around an operation; "" if tracing left none."""
    stack = module_stack(node)
    return stack[-1] if stack else ""


def module_class(node: Node) -> str:
    """Class of the innermost module around an operation, with its module's name; "" if tracing left none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = [entry for entry in stack.values() if isinstance(entry, tuple) and clean_path(entry[0])]
    kind = entries[-1][1] if entries else ""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def module_roots(node: Node) -> tuple[str, ...]:
    """Modules whose code is compiled on its own. A path of `module_stack` may also be written relative to one of them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    roots = (root_of(entry[0]) for entry in stack.values() if isinstance(entry, tuple))
    return tuple(dict.fromkeys(root for root in roots if root))


def boundary_names(node: Node) -> tuple[str, ...]:
    """Names of the boundaries (mark_boundary) around an operation."""
    return boundaries_of(node.meta)
