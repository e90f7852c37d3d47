"""The identity of a graph under a configuration: the key of stored plans, and our part of torch's cache key.

It contains everything that decides a plan: graph text, module names and annotations (torch's own key has neither), tags,
layouts, the policies of checkpoint regions, the configuration, torch's version, and the source of this package.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import re
import secrets
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graphoffload.options.config import OffloadConfig
from graphoffload.options.policies import stable_text
from graphoffload.torch_internals import releases
from graphoffload.torch_internals.operators import OpOverload

_DEVICE = re.compile(r"\b(?:cuda|xpu|cpu):\d+|\bindex=\d+")


def graph_key(gm: GraphModule, config: OffloadConfig, extra: str = "") -> str:
    """Identity of a graph with its module names, annotations and tags, the configuration, torch, and our own source."""
    digest = hashlib.sha256()
    modules = [
        module for _, module in gm.named_modules() if isinstance(module, GraphModule)
    ]  # checkpoint regions are submodules
    for part in (releases.torch_version(), source_digest(), config.digest(), extra, *(str(module.graph) for module in modules)):
        digest.update(part.encode())
        digest.update(b"\0")
    for node in (node for module in modules for node in module.graph.nodes):
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        value = node.meta.get("val", node.meta.get("example_value"))
        layout = (tuple(value.shape), value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else None
        facts = (
            node.name,
            [entry[0] for entry in stack.values()],
            node.meta.get("custom"),
            str(node.meta.get("recompute")),
            layout,
            isinstance(value, torch.nn.Parameter),
        )
        digest.update(repr(facts).encode())
    for module in modules:
        digest.update(_context_text(module.meta.get("_checkpoint_context_fn")).encode())
    return digest.hexdigest()[:24]


def structure_key(modules: Iterable[GraphModule]) -> str:
    """Identity of what graphs compute, equal in every process of a program that runs on several devices: without options,
    versions and numbers of devices."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(_DEVICE.sub("device", str(module.graph)).encode())
        for node in module.graph.nodes:
            value = node.meta.get("val", node.meta.get("example_value"))
            if isinstance(value, torch.Tensor):
                digest.update(f"{node.name} {tuple(value.shape)} {value.stride()} {value.dtype}".encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _context_text(context: Any) -> str:
    """Selective checkpointing stores its policy outside the graph text: a text that differs when the policy does."""
    if isinstance(context, functools.partial):
        return _context_text(context.func) + "".join(map(_context_text, (*context.args, *context.keywords.values())))
    if isinstance(context, types.FunctionType):
        cells = (cell.cell_contents for cell in context.__closure__ or ())
        return stable_text(context) + "".join(map(_context_text, cells))
    if context is None or isinstance(context, (str, int, float, enum.Enum, type, torch.dtype, OpOverload)):
        return repr(context)
    if isinstance(context, (tuple, list, set, frozenset)):
        return "".join(sorted(map(_context_text, context)))
    return secrets.token_hex(16)  # its decisions are unknown: never reuse a plan


@functools.cache
def source_digest() -> str:
    """Digest of graphoffload's own source: a changed pass must never meet an old cache entry."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    folders = os.walk(root, followlinks=True)  # passes/ is a link in a checkout
    for path in sorted(Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
