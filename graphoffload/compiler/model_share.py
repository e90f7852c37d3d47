"""How much of its model a graph has, by the modules of this process that hold its parameters.

    model ─┬─ embedding (frozen)      the graph of layers.0 is downstream of nothing that is trained, and looks like a whole
           ├─ layers.0                model; its module is inside one that holds four times as much
           ├─ layers.1, 2, 3
           └─ head (frozen)

Modules are found among the objects that Python's garbage collector tracks, since a module does not know what it is in. That
takes a few tenths of a second in a large process, once for each graph that nothing else tells of.
Wrong when: a list that is no module holds the blocks. Then a block is taken for a model, as long as no optimizer is known.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy


def share_of_its_model(inputs: Iterable[Any]) -> float:
    """The share of all elements that are trained in the outermost modules with a graph's parameters which is among its inputs;
    1 where no module has any of them, as for fake parameters."""
    own = {id(value) for value in inputs if isinstance(value, nn.Parameter) and value.requires_grad}
    trained: dict[int, int] = {}
    for module in _outermost() if own else ():
        held = {id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad}
        if not own.isdisjoint(held):
            trained |= {key: 0 if is_lazy(parameter) else parameter.numel() for key, parameter in held.items()}
    total = sum(trained.values())
    return sum(count for key, count in trained.items() if key in own) / total if total else 1.0


def _outermost() -> list[nn.Module]:
    """The modules of this process that are in no other one."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module) and "_modules" in vars(found)]
    inside = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inside]
