"""The four ops that move activations. Only the graph passes insert them.

    forward    handle = offload(x)            starts D2H on the D2H stream, after the work that compute has issued so far
               release(x, handle)             compute waits for that D2H; a use of x, so its memory is not reused before
    backward   y = reload(handle, size, ...)  allocates y on the compute stream, starts H2D on the H2D stream
               wait(y, handle)                compute waits for that H2D; ordered before every reader of y

        compute  |--- layer 0 ---|--- layer 1 ---|R|--- layer 2 ---| ... |--- layer 2' ---|W|--- layer 1' ---|
        D2H         |== x ============|                                                                        R release
        H2D                                                        |== y ============|                         W wait

release and wait declare that they mutate x and y. They do not, but the declaration orders them in every compiler: all earlier
readers of x run before release, all readers of y run after wait, and Inductor cannot give x's memory to another tensor before
release. Layouts are those of run time. Inductor may choose other strides for x than the graph says, so bytes are copied in
their order in memory, with their strides, and reload returns the strides that backward was compiled for.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphoffload.errors import CaptureError, ChecksumError, HostMemoryError, NotOffloadedWarning, RuntimeStateError, warn
from graphoffload.runtime.checksum import digest
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.hooks import ACTIVE
from graphoffload.runtime.layouts import empty, same_layout
from graphoffload.runtime.offloaded_tensors import (
    COPYING,
    LENT,
    ON_HOST,
    PREFETCHED,
    RESIDENT,
    STAYING,
    HostCopy,
    OffloadedTensor,
    is_sole_owner,
)
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.runtime.registry import RunPlan, run_plan
from graphoffload.runtime.step import between_graphs as between
from graphoffload.runtime.step.calls import STEPS, Steps
from graphoffload.runtime.streams.copy_streams import streams_of
from graphoffload.runtime.streams.protocol import Block
from graphoffload.torch_internals import autograd

HANDLE_DTYPE = torch.int64
_ONE = (1,)

LIBRARY = torch.library.Library("graphoffload", "DEF")
# Inductor captures CUDA graphs between these ops and calls them: a replay would copy to the buffers of its capture. The same
# ops as captured.py has them are not tagged so, and Inductor captures them.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)
_SCHEMAS = {
    "offload": "(Tensor x, str plan, int id) -> Tensor",
    "release": "(Tensor(a!) x, Tensor handle, str plan, int id) -> ()",
    "reload": "(Tensor handle, str plan, int id, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
    "wait": "(Tensor(a!) y, Tensor handle, str plan, int id) -> ()",
}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The block of memory of a dense tensor, in its order in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def handles_may_be_copied() -> bool:
    """Whether saved-tensor hooks are active that may save copies of handles instead of the handles."""
    hooks = autograd.saved_tensor_hooks(True)
    # Checkpointing's own hooks keep the tensor itself (detached, same storage) or nothing at all.
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def offload(x: torch.Tensor, plan: str, id: int) -> torch.Tensor:
    """Start the copy of x to the host; returns the handle, int64 of shape (1,)."""
    run = run_plan(plan)
    if id == 0:
        _start_forward(run, x.device)
    layout = run.layout(x, id)
    handle = empty(_ONE, _ONE, HANDLE_DTYPE, layout.device)
    entry = OffloadedTensor(x, layout, run, id)
    try:
        between.enter(entry)
        if run.checksum:
            entry.digest = digest(x)
        if ACTIVE.twin:
            entry.start_copy()
            entry.host = HostCopy(None, x.clone())
        elif not between.stays(entry) and _has_host_memory(entry):
            entry.start_copy()
            if layout.nbytes:
                _copy_to_host(x, entry)
        ENTRIES.add(handle, entry, may_be_copied=handles_may_be_copied())
    except BaseException:
        ENTRIES.abandon(entry)
        raise
    if entry.state is COPYING:
        COUNTERS.offloaded(layout.nbytes)
    else:
        COUNTERS.stayed(layout.nbytes)
    between.offloaded(entry)
    return handle


def _start_forward(run: RunPlan, device: torch.device) -> None:
    if ENTRIES.start_forward(run.key) and STEPS.call is None:  # else the run has counted the turn
        POOL.turn()
    streams = streams_of(device)
    index = -1 if streams is None else streams.index
    POOL.arrange(run.key, (layout.nbytes for layout in run.layouts.values()), pin=streams is not None, device=index)


def _has_host_memory(entry: OffloadedTensor) -> bool:
    """Take a buffer on the host for its copy; False where host_budget is spent, and it stays on the device instead.

    Raises:
        HostMemoryError: there is none, and it may not stay: memory of a graph that is not linked is used again.
    """
    nbytes, streams, run = entry.layout.nbytes, entry.streams, entry.run
    if not nbytes:
        return True
    on_device = streams is not None
    name = run.name(entry.id) if on_device else entry.name
    try:
        buffer = POOL.acquire(nbytes, pin=on_device, name=name, device=-1 if streams is None else streams.index)
    except HostMemoryError as error:
        if POOL.has_room(nbytes) or not run.linked or (streams is not None and streams.capturing()):
            raise
        if not run.told_full:
            run.told_full = True
            stays = "Until then it stays on the device, as does all of this graph that finds no room."
            warn(NotOffloadedWarning, f"{error} {stays}")
        entry.let_stay(None if streams is None else streams.compute())
        return False
    entry.host = HostCopy(buffer)
    return True


def _copy_to_host(x: torch.Tensor, entry: OffloadedTensor) -> None:
    host, layout, streams = entry.host, entry.layout, entry.streams
    assert host is not None
    assert host.buffer is not None
    if streams is None:
        host.buffer.flat(layout.dtype).copy_(_flat(x if layout.dense else x.contiguous()))
        return
    before = host.buffer.last_copy
    host.written = streams.copy("d2h", entry, (before,), *copy_to_host(x, entry))
    host.buffer.last_copy = None
    streams.recycle(before)


def copy_to_host(x: torch.Tensor, entry: OffloadedTensor) -> tuple[Callable[[], None], Block | None]:
    """The copy of x to its entry's buffer, as DeviceStreams.copy takes it."""
    host, layout = entry.host, entry.layout
    if host is None or (buffer := host.buffer) is None:  # no bytes
        return (lambda: None), None

    def run() -> None:
        buffer.flat(layout.dtype).copy_(_flat(x if layout.dense else x.contiguous()), non_blocking=True)

    return run, (buffer.address, x.data_ptr(), layout.nbytes) if layout.dense else None


def release(x: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    """Let compute wait for the copy of x; its memory is free afterwards."""
    entry = ENTRIES.find(handle, plan, id)
    state = entry.state
    if state is not COPYING and state is not STAYING:
        raise RuntimeStateError(f"{entry.name} was released twice (plan {plan}): it is {state.words} already.")
    nbytes = entry.layout.nbytes
    if x.data_ptr() != entry.source_ptr:
        raise RuntimeStateError(
            f"{entry.name}: release was given memory at {x.data_ptr():#x}, but offload copies from {entry.source_ptr:#x} "
            f"({nbytes} bytes). A compiler passed one of them a temporary; the copy could be of freed memory. "
            'Try inner="aot_eager" or keep this tensor with policy={"<its module>": "keep"}, and report this.'
        )
    if state is STAYING:
        entry.become_resident(autograd.version(x))
        between.passed(entry)
        return
    if entry.call is not None and between.defers(entry):
        return
    try:
        entry.release()
    finally:
        COUNTERS.released(nbytes)
    if entry.call is not None:
        between.released(entry)
    if ACTIVE.release is not None and id not in entry.run.inputs:
        ACTIVE.release(x, entry.name)


def reload(
    handle: torch.Tensor, plan: str, id: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Start the copy back to new memory of this size and these strides. The content is valid after `wait`."""
    entry = ENTRIES.find(handle, plan, id)
    as_it_lies = checked_layout(entry, size, stride, dtype)
    between.reloading(entry)
    entry.run.asked[id] = (size, stride, dtype)
    y = between.take(entry, size, stride, dtype) if entry.state is PREFETCHED else None
    if y is None:
        y = _reload_now(entry, size, stride, as_it_lies=as_it_lies)
    entry.reloads += 1
    ENTRIES.reloaded = True
    COUNTERS.reloads += 1
    between.reloaded(entry, _copy_as_it_lies)
    return y


def checked_layout(entry: OffloadedTensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether backward's layout is that of the host's bytes; if not, they must be laid out again.

    Raises:
        RuntimeStateError: it is the layout of another tensor.
    """
    layout = entry.layout
    as_it_lies = layout.returns_as_it_lies(size, stride)
    if as_it_lies is None or dtype != layout.dtype:
        raise RuntimeStateError(
            f"{entry.name}: backward asks for {tuple(size)} {dtype}, but {tuple(layout.size)} {layout.dtype} was offloaded "
            f"(plan {entry.run.key}). torch traced the one and the operation made the other, and code compiled for the one "
            'would read garbage. Keep it, with policy={"<its module>": "keep"}, and report the operation to torch.'
        )
    return as_it_lies


def _reload_now(entry: OffloadedTensor, size: Sequence[int], stride: Sequence[int], *, as_it_lies: bool) -> torch.Tensor:
    layout = entry.layout
    if entry.state is not ON_HOST and entry.stays:
        return _hand_back(entry, size, stride)
    y = empty(size, stride, layout.dtype, layout.device)
    entry.start_reload(y)
    host = entry.host
    if host is not None and host.clone is not None:
        y.copy_(host.clone)
    elif layout.nbytes:
        _copy_to_device(y, entry, as_it_lies=as_it_lies)
    COUNTERS.h2d_bytes += layout.nbytes
    return y


def _hand_back(entry: OffloadedTensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A tensor that stayed on the device: its own memory if no other tensor uses it and no other backward can come, else a
    copy."""
    source, streams = entry.source, entry.streams
    if source is None:
        raise RuntimeStateError(
            f"{entry.name}: its memory was handed to a backward that did not come to its end (plan {entry.run.key}). "
            "Run forward again."
        )
    if entry.state is not RESIDENT and entry.state is not LENT:
        raise entry.refusal("hand_over")
    if autograd.version(source) != entry.version:
        raise RuntimeStateError(
            f"{entry.name}: its memory was written to between forward and backward (plan {entry.run.key}). The gradient would "
            "be wrong, so the step is stopped. Please report this with a graph dump (GRAPHOFFLOAD_DUMP_DIR)."
        )
    if streams is not None and streams.capturing():
        raise CaptureError(f"{entry.name}: stayed on the device, and its backward is being captured in a CUDA graph.")
    same_stream = streams is None or streams.compute() is entry.stream
    again = autograd.keeps_graph()
    if same_stream and not again and same_layout(size, source.stride(), stride) and _owns_all_of_its_memory(source):
        y = source.as_strided(size, stride, source.storage_offset())
        entry.hand_over(y)
        return y
    if streams is not None and not same_stream:
        streams.compute().wait_stream(entry.stream)
        source.record_stream(streams.compute())
    y = torch.empty_strided(size, stride, dtype=source.dtype, device=source.device).copy_(source)
    if again:
        entry.lend(y)
    else:
        entry.hand_over(y)
    return y


def _owns_all_of_its_memory(x: torch.Tensor) -> bool:
    """Whether no other tensor, and nothing else, uses its storage."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size() and is_sole_owner(x)


def _copy_as_it_lies(y: torch.Tensor, entry: OffloadedTensor) -> None:
    _copy_to_device(y, entry, as_it_lies=True)
    COUNTERS.h2d_bytes += entry.layout.nbytes


Steps.copy_back = staticmethod(_copy_as_it_lies)


def _copy_to_device(y: torch.Tensor, entry: OffloadedTensor, *, as_it_lies: bool) -> None:
    run, block = copy_to_device(y, entry, as_it_lies=as_it_lies)
    streams = entry.streams
    if streams is None:
        run()
        return
    host = entry.host
    assert host is not None
    before = host.read
    host.read = streams.copy("h2d", entry, (host.written, before), run, block)
    entry.stream = streams.compute()
    streams.recycle(before)


def copy_to_device(y: torch.Tensor, entry: OffloadedTensor, *, as_it_lies: bool) -> tuple[Callable[[], None], Block | None]:
    """The copy of an entry's buffer to y, as DeviceStreams.copy takes it."""
    host, layout = entry.host, entry.layout
    if host is None or (buffer := host.buffer) is None:  # no bytes
        return (lambda: None), None
    if not as_it_lies:
        COUNTERS.relaid += 1
        COUNTERS.relaid_bytes += layout.nbytes

    def run() -> None:
        flat = buffer.flat(layout.dtype)
        if as_it_lies:
            _flat(y).copy_(flat, non_blocking=True)
        else:  # allocated and used only on the side stream
            staged = torch.empty(flat.shape, dtype=layout.dtype, device=y.device)
            staged.copy_(flat, non_blocking=True)
            y.copy_(staged.as_strided(layout.size, layout.stride))

    return run, (y.data_ptr(), buffer.address, layout.nbytes) if as_it_lies else None


def wait(y: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    """Let compute wait for the copy to y."""
    entry = ENTRIES.find(handle, plan, id)
    target = entry.target
    if target is None or (y is not target and y.data_ptr() != target.data_ptr()):
        reloaded = target is not None and entry.state is not PREFETCHED
        raise RuntimeStateError(
            f"{entry.name}: wait was given memory at {y.data_ptr():#x}, but "
            + (f"reload writes to {target.data_ptr():#x}" if target is not None and reloaded else "nothing was reloaded")
            + f" (plan {plan}). The gradient could be wrong, so the step is stopped. Please report this with a graph dump."
        )
    entry.wait()
    if entry.run.checksum:
        _check(entry, y)
    COUNTERS.waits += 1
    if entry.call is not None:
        between.waited(entry)
    if entry.ticket is not None and not autograd.keeps_graph():
        ENTRIES.finish(entry)


def _check(entry: OffloadedTensor, y: torch.Tensor) -> None:
    found = digest(y)
    COUNTERS.checked += 1
    if entry.digest is None or not torch.equal(found, entry.digest):
        raise ChecksumError(
            f"{entry.name}: the {entry.layout.nbytes} bytes that came back from the host are not those that were offloaded "
            f"(digest {found.tolist()}, expected {entry.digest.tolist() if entry.digest is not None else None}; "
            f"plan {entry.run.key}). The gradients of this step are wrong and were stopped here. "
            "Please report this with a graph dump (GRAPHOFFLOAD_DUMP_DIR)."
        )


def _fake_handle(x: torch.Tensor, plan: str, id: int) -> torch.Tensor:
    return torch.empty(1, dtype=HANDLE_DTYPE, device=x.device)


def _fake_nothing(x: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    return None


def _fake_reload(
    handle: torch.Tensor, plan: str, id: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=handle.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "offload": _fake_handle, "release": _fake_nothing, "reload": _fake_reload, "wait": _fake_nothing,
}  # fmt: skip


def define(op: str, name: str, kernel: Callable[..., Any], tags: tuple[torch.Tag, ...]) -> None:
    """Register torch.ops.graphoffload.<name> with the schema of one of the four."""
    LIBRARY.define(name + _SCHEMAS[op], tags=tags)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphoffload::{name}", _FAKES[op], lib=LIBRARY)


KERNELS = types.SimpleNamespace(offload=offload, release=release, reload=reload, wait=wait)
"""The four ops as Inductor's code calls them: torch's dispatcher adds nothing and costs as much as the ops do."""

for _op, _kernel in vars(KERNELS).items():
    define(_op, _op, _kernel, _TAGS)
