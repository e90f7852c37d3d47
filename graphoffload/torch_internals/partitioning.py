"""torch's min-cut partitioner, how it is called, and what AOTAutograd says about a graph's inputs and outputs.

The partitioner chooses the saved values as a minimum cut of the joint graph, weighted by their bytes, since a fusing compiler
recomputes pointwise operations almost for free. He and Yu (MLSys 2023) describe such fusion-aware checkpointing.

Two questions are asked of a graph's inputs, and each is answered so that a mistake costs memory only:

    must_be_parameters   nothing but an optimizer writes to them    one too many: a wrong gradient; one too few: memory
    may_be_trained       an optimizer may make state for them       one too few: out of memory; one too many: memory

A frozen parameter is one of the first alone. An input that no module is known to hold, as where torch splits Dynamo's graph
for DDP, is one of the second alone.

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node

from graphoffload.torch_internals.collectives import RULES_OF_MIN_CUT

__all__ = [
    "CustomPartitionerFn", "aot_eager", "config", "may_be_trained", "min_cut", "must_be_parameters", "mutated_inputs",
    "parameter_positions", "placeholders_at", "torch_memory_budget", "uncompiled_module",
]  # fmt: skip


def min_cut(joint: GraphModule, joint_inputs: Any, kwargs: dict[str, Any]) -> tuple[GraphModule, GraphModule]:
    """torch's own min-cut partitioner, untouched, with its relative memory budget pinned to 1.0, and collectives as they stand.

    Without it: nothing works.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    arguments = {key: value for key, value in kwargs.items() if key in _MIN_CUT_ARGUMENTS}
    with config.patch(activation_memory_budget=1.0, enable_activation_offloading=False, **RULES_OF_MIN_CUT):
        return min_cut_rematerialization_partition(joint, joint_inputs, **arguments)


def uncompiled_module(module: GraphModule, graph: Graph) -> GraphModule:
    """A graph module that writes Python code for its graph only when it is called or printed.

    Most copies of a joint graph are partitioned and dropped, and torch asks for their code three times before. Without it:
    planning takes longer.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(module, graph)


_MIN_CUT_ARGUMENTS = ("compiler", "num_fwd_outputs", "static_lifetime_input_indices")


def aot_eager(
    gm: GraphModule, inputs: Sequence[Any], partition: Callable[..., tuple[GraphModule, GraphModule]] | None
) -> Callable[..., Any]:
    """One Dynamo graph partitioned by a function (None: torch's own min-cut) and run uncompiled. Without it: only Inductor."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    chosen = partition if partition is not None else min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=chosen, keep_inference_input_mutations=True)
    compiled: Callable[..., Any] = backend(gm, list(inputs))
    return compiled


def mutated_inputs(graph: Graph) -> frozenset[Node]:
    """Placeholders of a joint or forward graph that AOTAutograd writes to behind it: the new value is an output of the graph.

    All of them, where an output mutates an input that no placeholder is described as, such as one of several views of a base.
    Without it: what is written to after the graph would be recomputed from.
    """
    placeholders = graph.find_nodes(op="placeholder")
    output = next(iter(reversed(graph.nodes)))
    written = {_described(desc.mutated_input) for desc in map(_described, output.meta.get("desc", ())) if _mutates(desc)}
    found = frozenset(node for node in placeholders if written and _described(node.meta.get("desc")) in written)
    return found if len(found) >= len(written) else frozenset(placeholders)


def may_be_trained(joint: Graph, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Fake inputs of a joint graph, partitioned with these arguments, that an optimizer may train: those that it makes a
    gradient of, and which stay at one address from call to call, where torch says which do.

    A fake input says neither that it needs a gradient nor that it is a leaf. Without it: no reserve for optimizer state.
    """
    output = next(iter(reversed(joint.nodes)))
    made = {_described(d.grad_of) for d in map(_described, output.meta.get("desc", ())) if isinstance(d, GradAOTOutput)}
    placeholders = joint.find_nodes(op="placeholder")
    stays = set(kwargs.get("static_lifetime_input_indices") or range(len(placeholders)))
    return [
        node.meta["val"]
        for at, node in enumerate(placeholders)
        if at in stays and _described(node.meta.get("desc")) in made and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def _mutates(desc: Any) -> bool:
    return isinstance(desc, InputMutationAOTOutput)


def _described(desc: Any) -> Any:
    """The description of a whole argument, for that of a part of a tensor subclass."""
    while isinstance(desc, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        desc = desc.base
    return desc


def parameter_positions(graph: Graph, values: Iterable[Any] = ()) -> tuple[int, ...]:
    """Which inputs of one of Dynamo's graphs are parameters: their positions among its placeholders.

    Without it: parameters are offloaded like activations, which frees nothing.
    """
    placeholders = graph.find_nodes(op="placeholder")
    given = dict(enumerate(values))
    return tuple(at for at, node in enumerate(placeholders) if _is_parameter(node, given.get(at)))


def _is_parameter(node: Node, value: Any) -> bool:
    """By its value, or by where Dynamo found it: `_parameters` of a module may hold a plain tensor in a parameter's place."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")  # a property from torch 2.13 on, a method before
    shown = name() if callable(name) else name
    known = isinstance(value, torch.nn.Parameter) or isinstance(node.meta.get("example_value"), torch.nn.Parameter)
    return known or "._parameters[" in str(shown)


def must_be_parameters(joint: Graph, positions: tuple[int, ...] | None) -> frozenset[str]:
    """Names of a joint graph's placeholders that are parameters, trained or frozen: what torch or a module says is one.

    Args:
        positions: of parameters among what AOTAutograd was given; None: as the graph has them that Dynamo compiles now, and
            none where there is no such graph, or AOTAutograd has only a part of it.
    """
    named = _placeholders(joint, lambda desc: isinstance(desc, ParamAOTInput))
    return named | placeholders_at(joint, _positions_of_dynamos_graph() if positions is None else positions)


def placeholders_at(joint: Graph, positions: Collection[int]) -> frozenset[str]:
    """Names of a joint graph's placeholders for the inputs at these positions of what AOTAutograd was given.

    Without it: neither parameters nor inputs that other graphs computed are told from the caller's memory.
    """
    return _placeholders(joint, lambda desc: isinstance(desc, PlainAOTInput) and desc.idx in positions)


def _placeholders(joint: Graph, chosen: Callable[[Any], bool]) -> frozenset[str]:
    nodes = joint.find_nodes(op="placeholder")
    return frozenset(node.name for node in nodes if chosen(_described(node.meta.get("desc"))))


def _positions_of_dynamos_graph() -> tuple[int, ...]:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    context = torch._guards.TracingContext.try_get()
    if context is None or getattr(context, "ddp_optimizer_ctx", None) is not None:
        return ()
    try:
        return parameter_positions(InstructionTranslator.current_tx().output.graph)
    except AttributeError:
        return ()


def torch_memory_budget() -> float:
    """torch's own activation_memory_budget, which graphoffload pins to 1.0. Without it: nothing says that it is ignored."""
    return float(config.activation_memory_budget)
