"""Measures the time and workspace of a graph's kernels: each distinct (operation, shapes, dtypes, strides) once on the device.

    warm up ─▶ [products, kernel, products, kernel, ...] ─▶ median of the kernel's times

The products keep the device at the clocks of a training step. Inputs are random tensors of the graph's shapes. A kernel that
would need more than half of the free device memory is not run, and its time follows from the roofline model (costs.py). Results
are kept in the process and on disk, next to the hardware profile.

The time is wrong for a kernel that depends on its values (sorts, routing), and for one that finds its inputs in the cache here
but not in a step.

Another process on the device changes little: its time slices last 2 ms on an H200, and the median of single kernels that are
shorter is 1 to 3 % longer. A longer kernel is timed with the slices of the other process in it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from graphoffload.analysis.costs import Measured, argument_of
from graphoffload.analysis.fusion import kind_of
from graphoffload.analysis.storages import fake, tensor_nbytes
from graphoffload.cache_files import write_whole
from graphoffload.log import log
from graphoffload.torch_internals import allocator
from graphoffload.torch_internals.fake_tensors import outside_all_modes
from graphoffload.torch_internals.operators import OpOverload, packet_of, schema_of
from graphoffload.torch_internals.pytrees import tree_leaves, tree_map

_EDITION = 3
"""Of what is measured; figures of another edition are measured again."""

_REPEATS = 9
_TOTAL_S = 1.0
_HEAT_S = 0.3
_BETWEEN_S = 4e-3
_BETWEEN_MOST_S = 0.1
_LOAD_SHARE = 3.0
_MEMORY_SHARE = 0.5
_known: dict[str, Measured] = {}
_loaded: set[Path] = set()


def kernel_times(
    graphs: Iterable[Graph], device: torch.device, store: Path, channels_last: bool = False, fuses: bool = False
) -> dict[str, Measured]:
    """Time and workspace of every kernel that can be timed on `device`, by signature; {} without a CUDA device.

    Args:
        graphs: the graphs whose kernels are timed.
        device: the device to run them on.
        store: folder for the cache on disk.
        channels_last: convolutions of images run on channels_last memory, whatever strides the graphs say.
        fuses: convolutions run without their bias, as Inductor has it: a fused kernel adds it.
    """
    if device.type != "cuda":
        return {}
    path = store / f"kernels-{_EDITION}-{torch.cuda.get_device_name(device).replace(' ', '-')}-{torch.__version__}.json"
    _load(path)
    new, load = 0, _Load(device)
    for graph in graphs:
        for node in graph.nodes:
            name = signature(node, channels_last, fuses) if kind_of(node, fuses=True) == "kernel" else None
            if name is None or name in _known:
                continue
            found = _measure(node, device, load, channels_last, fuses)
            if found is not None:
                _known[name] = found
                new += 1
    if new:
        _save(path)
    return _known


def signature(node: Node, channels_last: bool = False, fuses: bool = False) -> str | None:
    """A text that is equal for two kernels that take the same time.

    None if a size is symbolic, or if an argument is neither a tensor nor a plain value. `channels_last`, `fuses`: as in
    kernel_times.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    parts = [str(node.target)]
    for argument in tree_leaves((_arguments(node, fuses), node.kwargs)):
        if isinstance(argument, Node):
            value = fake(argument)
            if value is None or tensor_nbytes(value) is None:
                return None
            stride = _strides(node, argument, value, channels_last)
            parts.append(f"{tuple(value.shape)}{stride}{value.dtype}{value.device.type}")
        else:
            parts.append(repr(argument))
    return " ".join(parts)


def _arguments(node: Node, fuses: bool) -> tuple[Any, ...]:
    """A kernel's arguments by position when it runs."""
    if fuses and node.target == torch.ops.aten.convolution.default:
        return *node.args[:2], None, *node.args[3:]
    return node.args


def _strides(node: Node, argument: Node, value: torch.Tensor, channels_last: bool) -> tuple[int, ...]:
    """Strides of a kernel's argument when it runs: of both that a convolution of images multiplies, channels_last ones."""
    own: tuple[int, ...] = tuple(value.stride())
    convolution = node.target in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    if not (channels_last and convolution and value.dim() == 4 and argument in node.args[:2]):
        return own
    _, channels, height, width = value.shape
    return channels * height * width, 1, width * channels, channels


def _measure(node: Node, device: torch.device, load: _Load, channels_last: bool, fuses: bool) -> Measured | None:
    values = [fake(argument) for argument in node.all_input_nodes]
    outputs = [value for value in tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]
    if any(value is None or (value.device.type != "cuda" and value.is_floating_point()) for value in values):
        return None
    if not may_run(node):
        return None
    wanted = sum(tensor_nbytes(value) or 0 for value in (*values, *outputs) if value is not None)
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 2 * wanted > (free + idle) * _MEMORY_SHARE:
        return None
    try:
        with outside_all_modes(), torch.no_grad(), _drawing(node, device):
            return _run(node, device, load, channels_last, fuses, sum(tensor_nbytes(value) or 0 for value in outputs))
    except Exception as error:  # random values are no valid inputs of this operation: the roofline time stays
        log.debug("not timed, priced by roofline: %s (%s)", node.target, error)
        return None


def may_run(node: Node) -> bool:
    """Whether a kernel can be timed on random values."""
    name = str(node.target)
    if "attention" in name:
        return "scaled_dot_product" in name  # what follows random sequence bounds can end the process
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(value is None or value.is_floating_point() for value in map(fake, node.all_input_nodes))  # indices have bounds


def _drawing(node: Node, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Attention with dropout draws random numbers. Those of the user stay as they are."""
    return torch.random.fork_rng([device]) if argument_of(node, ("dropout_p",)) else contextlib.nullcontext()


class _Load:
    """Matrix products that keep the device at the clocks of a training step, where power limits the clocks.

    Alone, attention's backward runs 13 % faster on an H200 than between the products of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._factor: torch.Tensor | None = None
        self._product_s = 0.0

    def run(self, seconds: float) -> None:
        """Enqueue products that take about this long. The first call runs them until the clocks have settled."""
        if self._factor is None:
            empty = torch.empty(4096, 4096, dtype=torch.bfloat16, device=self.device)
            self._factor = empty.normal_(generator=_generator(self.device))
            self._heat(self._factor)
        for _ in range(max(1, int(seconds / self._product_s))):
            self._factor @ self._factor

    def _heat(self, factor: torch.Tensor) -> None:
        began, count = time.perf_counter(), 0
        while (passed_s := time.perf_counter() - began) < _HEAT_S:
            for _ in range(20):
                factor @ factor
            torch.cuda.synchronize(self.device)
            count += 20
        self._product_s = passed_s / count


def _run(
    node: Node, device: torch.device, load: _Load, channels_last: bool, fuses: bool, output_bytes: int
) -> Measured | None:
    made: dict[Node, torch.Tensor] = {}

    def argument(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        if value not in made:
            like = fake(value)
            assert like is not None
            made[value] = _filled(like, _strides(node, value, like, channels_last))
        return made[value]

    target: Any = node.target
    args, kwargs = tree_map(argument, _arguments(node, fuses)), tree_map(argument, node.kwargs)
    if argument_of(node, ("dropout_p",)):
        args, kwargs = with_seeds_of_forward(node.target, args, kwargs)
    stream = torch.cuda.current_stream(device)
    target(*args, **kwargs)
    load.run(0.0)
    torch.cuda.synchronize(device)
    before, began = _allocated_so_far(device), time.perf_counter()
    target(*args, **kwargs)
    allocated = _allocated_so_far(device) - before
    torch.cuda.synchronize(device)
    once_s = time.perf_counter() - began
    repeats, between_s = repeats_of(once_s)
    if allocated > output_bytes:
        allocated = min(allocated, _most_allocated(functools.partial(target, *args, **kwargs), device) or allocated)
    workspace_bytes = max(0, allocated - output_bytes)
    if not repeats:
        return Measured(once_s, workspace_bytes)
    laps = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        load.run(between_s)
        start.record(stream)
        target(*args, **kwargs)
        end.record(stream)
        laps.append((start, end))
    torch.cuda.synchronize(device)
    seconds: list[float] = sorted(start.elapsed_time(end) / 1e3 for start, end in laps)
    return Measured(seconds[repeats // 2], workspace_bytes)


def with_seeds_of_forward(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of an attention's backward with the seeds of dropout that its forward makes; any other operation's own.

    Where seeds lie is known to the operations alone, and their fake tensors are wrong about it. Memory-efficient attention
    reads them on the host, and the address of device memory there ends the process.

    Raises:
        LookupError, AttributeError: forward is not known, or gives another number of seeds.
    """
    arguments = schema_of(target).arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    seeds = [name for name, value in named.items() if isinstance(value, torch.Tensor) and not value.is_floating_point()]
    if not seeds:
        return args, kwargs
    forward = getattr(getattr(torch.ops, target.namespace), packet_of(target).__name__.removesuffix("_backward")).default
    takes = {argument.name for argument in schema_of(forward).arguments}
    wants = {"compute_log_sumexp": True} if "compute_log_sumexp" in takes else {}
    results = forward(**{name: value for name, value in named.items() if name in takes}, **wants)
    made = [one for one in results if isinstance(one, torch.Tensor) and not one.is_floating_point()]
    if len(made) != len(seeds):
        raise LookupError(f"{forward} makes {len(made)} seeds, and {target} reads {len(seeds)}")
    named |= dict(zip(seeds, made, strict=True))
    return [named.pop(argument.name) for argument, _ in zip(arguments, args, strict=False)], named


def repeats_of(once_s: float) -> tuple[int, float]:
    """(repeats, seconds of products before each) for a kernel that takes `once_s`.

    All repeats together take at most a second. A kernel that takes half a second or more is not repeated: attention over 300
    thousand tokens runs for seconds, and brings the device to its clocks by itself.
    """
    between_s = min(max(_BETWEEN_S, _LOAD_SHARE * once_s), _BETWEEN_MOST_S)
    if 2 * once_s >= _TOTAL_S:
        return 0, 0.0
    return min(_REPEATS, max(1, int(_TOTAL_S / (once_s + between_s)))), between_s


def _allocated_so_far(device: torch.device) -> int:
    """Bytes that were allocated since the process began. A difference of two is a call's allocation; no statistic is reset."""
    return int(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0))


def _most_allocated(call: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes that a call has allocated at a time, its result included. None where somebody else records allocations.

    A convolution's backward takes one workspace for each of its gradients, one after the other: their sum is never allocated.
    """
    if not allocator.start():
        return None
    try:
        result = call()
    finally:
        changes = allocator.stop(torch.cuda.current_device() if device.index is None else device.index)
    del result
    return allocator.most(changes)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)  # the user's random numbers stay as they are


def _filled(like: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Random floats; zeros for the seeds, offsets and masks of an attention operation. Its memory is filled, as that of an
    expanded gradient is shorter."""
    length = 1 + sum((size - 1) * step for size, step in zip(like.shape, stride, strict=True)) if like.numel() else 0
    memory = torch.empty(length, dtype=like.dtype, device=like.device)
    filled = memory.normal_(generator=_generator(like.device)) if like.dtype.is_floating_point else memory.zero_()
    return filled.as_strided(like.shape, stride)


def _load(path: Path) -> None:
    if path in _loaded:
        return
    _loaded.add(path)
    try:
        stored = json.loads(path.read_text())
        _known.update({str(name): Measured(float(facts[0]), int(facts[1])) for name, facts in stored.items()})
    except (OSError, ValueError, TypeError, LookupError):  # an unreadable file or an earlier format: measure again
        return


def _save(path: Path) -> None:
    with contextlib.suppress(OSError):  # the next process measures again
        write_whole(path, json.dumps({name: (facts.time_s, facts.workspace_bytes) for name, facts in _known.items()}))
