"""Inductor: its settings, its two entry points, what it decides by rules of its own, and the code that it writes.

Seen in torch 2.11 to 2.15. What is slow to import is imported where it is called.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._inductor import config
from torch.fx import GraphModule, Node
from torch.torch_version import TorchVersion

from graphoffload.torch_internals.operators import OpOverload
from graphoffload.torch_internals.patching import replaced

__all__ = [
    "Ran", "choices", "choosing", "compile_graph", "compile_inner", "config", "falls_back", "forget_output_strides",
    "images_channels_last", "in_graph_order", "is_pointwise_use", "mixes_sums", "most_operations", "most_reads",
    "nodes_channels_last", "operations_of", "options_of_mode", "places_of", "reads_before", "reads_fused", "same_memory",
    "watching_codegen", "without_onednn", "wrapper_imports", "writes_remembered", "written_code",
]  # fmt: skip


def options_of_mode(mode: str | None = None) -> dict[str, Any]:
    """Settings of Inductor that a mode of torch.compile stands for; of all modes by name without one. Without it: `mode` cannot
    be checked, nor passed on."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def compile_graph(
    gm: GraphModule, inputs: Sequence[Any], *, settings: dict[str, Any], inner_compile: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph, with `inner_compile` for what AOTAutograd makes of it. Without it: only inner="aot_eager"."""
    from torch._inductor.compile_fx import compile_fx

    inner: Any = {} if inner_compile is None else {"inner_compile": inner_compile}
    compiled: Any = compile_fx(gm, list(inputs), config_patches=settings, **inner)
    return compiled  # type: ignore[no-any-return]


def compile_inner(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's own inner compile, for a forward or a backward graph. Without it: only inner="aot_eager".

    The key of Inductor's cache does not say what backward may overwrite. A backward that is to run twice would get the code of
    one that ran once, and read in its second run what the first has left there.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import get_donated_idxs

    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag} overwrites {get_donated_idxs()}"):
        return compile_fx_inner(gm, inputs, **kwargs)


def forget_output_strides() -> None:
    """Let what is traced now be compiled once more: a compile reports the strides of its outputs once.

    Without it: a graph whose capture was given up reports twice as many strides as it has outputs.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.clear()


def is_pointwise_use(node: Node) -> bool:
    """Whether Inductor counts what reads a value as pointwise, through views. Without it: kernels are predicted otherwise than
    Inductor makes them."""
    from torch._inductor import utils

    return bool(utils.is_pointwise_use(node))


def most_reads(device_type: str) -> int:
    """Buffers that a value may be computed from where it is read; what takes more Inductor stores. CPUs differ from 2.13 on.
    Without it: as for is_pointwise_use."""
    chosen: int | None = config.realize_acc_reads_threshold
    if chosen is None:
        name = "realize_cpu_acc_reads_threshold" if device_type == "cpu" else "_realize_acc_reads_threshold_default"
        chosen = int(getattr(config, name))
    return chosen


def most_operations(device_type: str) -> int:
    """Operations that may compute a value where it is read; what takes more Inductor stores. CPUs differ from 2.13 on. Without
    it: as for is_pointwise_use."""
    chosen: int | None = config.realize_opcount_threshold
    if chosen is None:
        name = "realize_cpu_opcount_threshold" if device_type == "cpu" else "_realize_opcount_threshold_default"
        chosen = int(getattr(config, name))
    return chosen


def mixes_sums(rows: int, columns: int) -> bool:
    """Whether sums over the rows and over the columns of one matrix may be one kernel on a GPU: not where it is small, and
    before 2.15 not where it is wide. Without it: as for is_pointwise_use."""
    if not getattr(config.triton, "mix_order_reduction", False) or columns > 2**14:
        return False
    if getattr(config.triton, "mix_order_reduction_non_strict_mode", False):
        return True
    tall = TorchVersion(torch.__version__) >= "2.15" or rows >= 2 * columns
    return tall and rows >= 2**12 and rows * columns >= 5 * 2**20


def images_channels_last(gm: GraphModule, *, on_gpu: bool) -> bool:
    """Whether Inductor runs a graph's convolutions of images on channels_last memory, whatever the graph says. Without it:
    convolutions are timed, and run in backward, in a layout that may take four times as long.

    on_gpu: it will run on a GPU, though this machine may have none.
    """
    from torch._inductor.graph import GraphLowering

    with without_onednn() if on_gpu else contextlib.nullcontext():
        return bool(GraphLowering.decide_layout_opt(gm, is_inference=False))


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """A context in which Inductor decides on convolutions of tensors on a CPU as on a GPU's, where oneDNN is not asked."""
    settings: Any = torch.backends.mkldnn
    before = settings.enabled
    settings.enabled = False
    try:
        yield
    finally:
        settings.enabled = before


def nodes_channels_last(gm: GraphModule) -> set[Node]:
    """The nodes that Inductor lays out channels_last then, inputs that it copies among them. Without it: the copies are missing
    in predicted peaks."""
    from torch._inductor.graph import GraphLowering

    return set(GraphLowering.find_nodes_prefer_channels_last(SimpleNamespace(module=gm)))  # type: ignore[arg-type]


def falls_back(target: OpOverload) -> bool:
    """Whether Inductor calls the operator's own kernel, since it has no code for it.

    The set that Inductor has of such operators also names those that fall back in some cases only, once one did. Without it:
    such an operation is predicted to cost nothing and to need no memory.
    """
    from torch._inductor.lowering import lowerings

    return bool(getattr(lowerings.get(target), "_is_fallback_handler", False))


def choices() -> Any:
    """What decides which operations are fused, as the user configured it. Without it: Inductor fuses over twelve layers, and
    what a plan counts as free is alive."""
    from torch._inductor.virtualized import V

    return V.choices


def choosing(handler: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which `handler` decides, a subclass of the class of `choices()`."""
    from torch._inductor.virtualized import V

    context: contextlib.AbstractContextManager[Any] = V.set_choices_handler(handler)
    return context


@contextlib.contextmanager
def watching_codegen(
    *, before: Callable[[Any], object] | None = None, after: Callable[[Any], object] | None = None
) -> Iterator[None]:
    """A context in which both get each lowered graph around the generation of its code; one that raises goes past `after`.

    Without it: reloads know not how Inductor laid out what was offloaded, and the ops are called through the dispatcher.
    """
    from torch._inductor.graph import GraphLowering

    codegen = GraphLowering.codegen

    def watched(lowering: Any) -> Any:
        if before is not None:
            before(lowering)
        result = codegen(lowering)
        if after is not None:
            after(lowering)
        return result

    with replaced(GraphLowering, codegen=watched):
        yield


@contextlib.contextmanager
def wrapper_imports(line: str) -> Iterator[None]:
    """A context in which Inductor's Python begins with this import. Without it: the ops are called through the dispatcher."""
    from torch._inductor.graph import GraphLowering

    init = GraphLowering.init_wrapper_code

    def importing(lowering: Any, *args: Any, **kwargs: Any) -> None:
        init(lowering, *args, **kwargs)
        if not lowering.cpp_wrapper:
            lowering.wrapper_code.imports.writeline(line)

    with replaced(GraphLowering, init_wrapper_code=importing):
        yield


@contextlib.contextmanager
def reads_before(*targets: OpOverload) -> Iterator[None]:
    """A context in which what reads the first operand of one of `targets`, which say that they write to it, is computed before
    it where the graph has it before.

    Inductor keeps that order where an operation has code of its own. Of another one, it notes the operation first, and only
    then what reads the operand and was not written out yet. Without it: memory is released before the last kernel that
    reads it.
    """
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    create: Any = vars(FallbackKernel)["create"].__func__

    def created(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kernel in targets:
            args[0].realize()
            V.graph.mark_buffer_mutated(args[0].get_name())
        return create(cls, kernel, *args, **kwargs)

    with replaced(FallbackKernel, create=classmethod(created)):
        yield


@contextlib.contextmanager
def same_memory(*targets: OpOverload) -> Iterator[None]:
    """A context in which calls of `targets` that agree in their last two operands get their first one in the same memory.

    A view that is no block of its tensor's memory is copied for whoever needs one. Inductor pads strides, after which a tensor
    of (2, 17, 85) is none of (34, 85). Without it: one copy of the view goes to the host, and another one is released.
    """
    from torch._inductor.ir import ExternKernel, FallbackKernel, TensorBox
    from torch._inductor.virtualized import V

    create: Any = vars(FallbackKernel)["create"].__func__
    known = WeakKeyDictionary[Any, dict[Any, Any]]()

    def created(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kernel in targets:
            given = known.setdefault(V.graph, {})
            if args[-2:] not in given:
                real = ExternKernel.realize_input(args[0])
                given[args[-2:]] = real if isinstance(real, TensorBox) else TensorBox(real)
            args = (given[args[-2:]], *args[1:])
        return create(cls, kernel, *args, **kwargs)

    with replaced(FallbackKernel, create=classmethod(created)):
        yield


@contextlib.contextmanager
def reads_fused(*targets: OpOverload) -> Iterator[None]:
    """A context in which what computes the operand of one of `targets`, which say that they write to it, may be one kernel with
    what reads it before that.

    To Inductor a buffer that is written to has another name from there on, and when it looks for two operations that share a
    buffer, it compares the last name with the first one. Without it: whatever reads a tensor that is offloaded, and could have
    been computed with it, is a kernel of its own, which reads the tensor again; and the values in it are rounded, where those
    of plain Inductor are not.

    An operation that reads the operand behind one of `targets` knows it by its last name, as before, and stays behind it.
    """
    from torch._inductor.scheduler import Scheduler

    compute = Scheduler.compute_dependencies

    def computed(scheduler: Any) -> None:
        compute(scheduler)
        writes = Counter(scheduler.mutation_real_name.values())
        for node in scheduler.nodes:
            if getattr(node.node, "op_overload", None) in targets:
                for name in (name for buffer in node.get_outputs() for name in buffer.get_mutations()):
                    if writes[name] == 1:  # nothing else writes to it
                        del scheduler.mutation_renames[name]

    with replaced(Scheduler, compute_dependencies=computed):
        yield


def places_of(scheduler: Any, namespace: str) -> list[int]:
    """Where a scheduler that begins to fuse has the operators of a namespace and their results, in order. Without it: the more
    tensors are offloaded, the less is fused."""
    found = []
    for node in scheduler.name_to_node.values():
        operator = getattr(node.node, "op_overload", None)
        if operator is None and (sources := getattr(node.node, "inputs", ())) and isinstance(sources, list):
            operator = getattr(sources[0], "op_overload", None)
        if operator is not None and operator.namespace == namespace:
            found.append(node.min_order)
    return sorted(found)


@contextlib.contextmanager
def in_graph_order() -> Iterator[None]:
    """A context in which a kernel of several operations runs as soon as all that it reads is there, and everything else where
    the graph has it.

    Inductor puts such a kernel where the first of its operations stands, and runs ahead of their turn all operations that it
    needs. Without it: labels that are shifted, and then looked up in the logits, have the logits computed before a release
    that stands behind them, and a plan has no place there for it.
    """
    import networkx as nx
    from torch._inductor.scheduler import Scheduler

    as_inductor_does = Scheduler.topological_sort_schedule

    def ordered(scheduler: Any, nodes: list[Any]) -> list[Any]:
        makers = {name: place for place, node in enumerate(nodes) for name in node.get_buffer_names()}
        needs = ((makers.get(dep.name, at), at) for at, node in enumerate(nodes) for dep in node.unmet_dependencies)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(nodes)))
        graph.add_edges_from((maker, at) for maker, at in needs if maker != at)
        try:
            return [nodes[at] for at in nx.lexicographical_topological_sort(graph)]
        except nx.NetworkXUnfeasible:  # some need each other
            return as_inductor_does(scheduler, nodes)

    with replaced(Scheduler, topological_sort_schedule=ordered):
        yield


@contextlib.contextmanager
def writes_remembered() -> Iterator[None]:
    """A context in which a kernel runs behind the writes to what it reads, also if its loops are made anew to fit another's.

    Before 2.15, Inductor forgets those writes for kernels of CPUs. Without it: a kernel reads memory before the wait for its
    copy, which is a wrong result where copies are not synchronous.
    """
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    def recomputed(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    with replaced(SchedulerNode, recompute_size_and_body=recomputed):
        yield


@dataclass(frozen=True)
class Ran:
    """An operation in the code that Inductor writes.

    name: Inductor's. target: the operator that it calls, if it is one without code of Inductor's own. operand, constants: that
    operator's first operand, and what it is given besides tensors. reads: what it reads. Memory goes by the name of the
    operation that allocates it, whoever writes to it later.
    """

    name: str
    target: OpOverload | None
    operand: str
    constants: tuple[Any, ...]
    reads: frozenset[str]


def operations_of(lowering: Any) -> Iterator[Ran]:
    """What a lowered graph runs, in its order, once its code is generated; parts of fused kernels one by one.

    Without it: nobody checks that the code keeps the order of copies and of what reads their memory.
    """
    from torch._inductor.dependencies import WeakDep

    scheduler = lowering.scheduler
    nodes = [part for whole in scheduler.nodes for part in whole.get_nodes()]
    owners: dict[str, str] = dict(scheduler.mutation_real_name)
    owners.update({made.get_name(): aliased for node in nodes for made in node.get_outputs() for aliased in made.get_aliases()})

    def owner(name: str) -> str:
        while name in owners and owners[name] != name:
            name = owners[name]
        return name

    for node in nodes:
        kernel = node.node
        target = getattr(kernel, "op_overload", None)
        operand = owner(kernel.inputs[0].get_name()) if target is not None and kernel.inputs else ""
        reads = frozenset(owner(read.name) for read in node.read_writes.reads if not isinstance(read, WeakDep))
        yield Ran(node.get_name(), target, operand, tuple(getattr(kernel, "constant_args", ())), reads)


def written_code() -> Iterator[Path]:
    """Files of Python that Inductor wrote. Without it: `bench where` cannot copy them."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()).glob("*/*.py")
