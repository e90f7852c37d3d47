"""The four ops that move activations. Only the graph passes put them into a graph.

    forward    handle = offload(x)            starts D2H on the D2H stream, after what compute has issued so far
               release(x, handle)             compute waits for that D2H; a use of x, so nothing may reuse its memory before
    backward   y = reload(handle, size, ...)  allocates y on the compute stream, starts H2D on the H2D stream
               wait(y, handle)                compute waits for that H2D; ordered before every reader of y

        compute  |--- layer 0 ---|--- layer 1 ---|R|--- layer 2 ---| ... |--- layer 2' ---|W|--- layer 1' ---|
        D2H         |== x ============|                                                                        R release
        H2D                                                        |== y ============|                         W wait

release and wait declare that they mutate x and y. They do not, but it is what orders them in every compiler: all earlier
readers of x stay before release, all readers of y after wait, and Inductor cannot give x's memory to another tensor while
release still has to come. Layouts are those of run time: Inductor may lay x out otherwise than the graph says, so bytes are
copied as they lie, with their strides, and reload returns the strides that backward was compiled for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphoffload.errors import ChecksumError, RuntimeStateError
from graphoffload.runtime.checksum import digest
from graphoffload.runtime.counters import COUNTERS
from graphoffload.runtime.entries import ENTRIES, Entry
from graphoffload.runtime.hooks import ACTIVE
from graphoffload.runtime.pool import POOL
from graphoffload.runtime.registry import RunPlan, run_plan
from graphoffload.runtime.streams import streams_of

HANDLE_DTYPE = torch.int64

LIBRARY = torch.library.Library("graphoffload", "DEF")
_TAGS = (torch.Tag.flexible_layout,)
LIBRARY.define("offload(Tensor x, str plan, int id) -> Tensor", tags=_TAGS)
LIBRARY.define("release(Tensor(a!) x, Tensor handle, str plan, int id) -> ()", tags=_TAGS)
LIBRARY.define(
    "reload(Tensor handle, str plan, int id, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor", tags=_TAGS
)
LIBRARY.define("wait(Tensor(a!) y, Tensor handle, str plan, int id) -> ()", tags=_TAGS)


def _contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def same_layout(size: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two strides address the same elements; strides of dimensions of length 1 do not count."""
    return all(a == b or length == 1 for length, a, b in zip(size, left, right, strict=True))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in whatever order."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's block of memory as it lies."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _handles_may_be_copied() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # Checkpointing's own hooks keep the tensor itself (detached, same storage) or nothing at all.
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def _offload(x: torch.Tensor, plan: str, id: int) -> torch.Tensor:
    if id == 0:
        ENTRIES.sweep()
    run = run_plan(plan)
    handle = torch.empty(1, dtype=HANDLE_DTYPE, device=x.device)
    dense = is_dense(x.shape, x.stride())
    entry = Entry(
        x, plan=plan, name=_name(run, id), stride=tuple(x.stride()) if dense else _contiguous_strides(x.shape)
    )
    if run.checksum:
        entry.digest = digest(x)
    if ACTIVE.twin:
        entry.clone = x.clone()
    elif entry.nbytes:
        _copy_to_host(x, entry, dense=dense)
    ENTRIES.add(handle, entry, may_be_copied=_handles_may_be_copied())
    COUNTERS.offloads += 1
    COUNTERS.d2h_bytes += entry.nbytes
    COUNTERS.inflight_bytes += entry.nbytes
    COUNTERS.inflight_peak_bytes = max(COUNTERS.inflight_peak_bytes, COUNTERS.inflight_bytes)
    entry.inflight = True
    return handle


def _name(run: RunPlan, id: int) -> str:
    return run.names.get(id) or f"tensor {id}"


def _copy_to_host(x: torch.Tensor, entry: Entry, *, dense: bool) -> None:
    streams = streams_of(x.device)
    entry.pin = x.device.type == "cuda"
    buffer = entry.buffer = POOL.acquire(entry.nbytes, pin=entry.pin, name=entry.name)
    host = buffer.flat(x.dtype)

    def run() -> None:
        host.copy_(_flat(x) if dense else _flat(x.contiguous()), non_blocking=True)

    if streams is None:
        run()
    else:
        entry.d2h_done = streams.copy("d2h", entry.name, (buffer.last_copy,), run)
        streams.recycle(buffer.last_copy)
        buffer.last_copy = None


def _release(x: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    entry = ENTRIES.find(handle, plan=plan, name=_name(run_plan(plan), id))
    if entry.source is None:
        raise RuntimeStateError(f"{entry.name} was released twice (plan {plan}).")
    if x.data_ptr() != entry.source_ptr:
        raise RuntimeStateError(
            f"{entry.name}: release was given memory at {x.data_ptr():#x}, but offload copies from {entry.source_ptr:#x} "
            f"({entry.nbytes} bytes). A compiler passed one of them a temporary; the copy could be of freed memory. "
            'Try inner="aot_eager" or keep this tensor with policy={"<its module>": "keep"}, and report this.'
        )
    if entry.d2h_done is not None:
        streams = streams_of(x.device)
        assert streams is not None
        streams.compute_waits(entry.d2h_done)
    entry.source = None
    entry.inflight = False
    COUNTERS.releases += 1
    COUNTERS.inflight_bytes -= entry.nbytes
    if ACTIVE.release is not None:
        ACTIVE.release(x, entry.name)


def _reload(
    handle: torch.Tensor, plan: str, id: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    entry = ENTRIES.find(handle, plan=plan, name=_name(run_plan(plan), id))
    if tuple(size) != entry.size or dtype != entry.dtype:
        raise RuntimeStateError(
            f"{entry.name}: backward asks for {tuple(size)} {dtype}, but {entry.size} {entry.dtype} was offloaded "
            f"(plan {plan})."
        )
    y = torch.empty_strided(size, stride, dtype=dtype, device=handle.device)
    if entry.clone is not None:
        y.copy_(entry.clone)
    elif entry.nbytes:
        _copy_to_device(y, entry)
    entry.target = y
    entry.reloads += 1
    COUNTERS.reloads += 1
    COUNTERS.h2d_bytes += entry.nbytes
    return y


def _copy_to_device(y: torch.Tensor, entry: Entry) -> None:
    assert entry.buffer is not None
    host = entry.buffer.flat(entry.dtype)
    as_it_lies = same_layout(entry.size, entry.stride, y.stride()) and is_dense(y.shape, y.stride())
    if not as_it_lies:
        COUNTERS.relaid += 1
        COUNTERS.relaid_bytes += entry.nbytes

    def run() -> None:
        if as_it_lies:
            _flat(y).copy_(host, non_blocking=True)
        else:  # allocated and used on the side stream alone
            staged = torch.empty(host.shape, dtype=entry.dtype, device=y.device)
            staged.copy_(host, non_blocking=True)
            y.copy_(staged.as_strided(entry.size, entry.stride))

    streams = streams_of(y.device)
    if streams is None:
        run()
    else:
        entry.h2d_done = streams.copy("h2d", entry.name, (entry.d2h_done, entry.h2d_done), run)


def _wait(y: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    run = run_plan(plan)
    entry = ENTRIES.find(handle, plan=plan, name=_name(run, id))
    if entry.target is None or y.data_ptr() != entry.target.data_ptr():
        raise RuntimeStateError(
            f"{entry.name}: wait was given memory at {y.data_ptr():#x}, but "
            + ("nothing was reloaded" if entry.target is None else f"reload writes to {entry.target.data_ptr():#x}")
            + f" (plan {plan}). The gradient could be wrong, so the step is stopped. Please report this with a graph dump."
        )
    if entry.h2d_done is not None:
        streams = streams_of(y.device)
        assert streams is not None
        streams.compute_waits(entry.h2d_done)
    if run.checksum:
        _check(entry, y)
    entry.target = None
    COUNTERS.waits += 1


def _check(entry: Entry, y: torch.Tensor) -> None:
    found = digest(y)
    COUNTERS.checked += 1
    if entry.digest is None or not torch.equal(found, entry.digest):
        raise ChecksumError(
            f"{entry.name}: the {entry.nbytes} bytes that came back from the host are not those that were offloaded "
            f"(digest {found.tolist()}, expected {entry.digest.tolist() if entry.digest is not None else None}; "
            f"plan {entry.plan}). The gradients of this step are wrong and were stopped here. "
            "Please report this with a graph dump (GRAPHOFFLOAD_DUMP_DIR)."
        )


LIBRARY.impl("offload", _offload, "CompositeExplicitAutograd")
LIBRARY.impl("release", _release, "CompositeExplicitAutograd")
LIBRARY.impl("reload", _reload, "CompositeExplicitAutograd")
LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")


@torch.library.register_fake("graphoffload::offload", lib=LIBRARY)
def _(x: torch.Tensor, plan: str, id: int) -> torch.Tensor:
    return torch.empty(1, dtype=HANDLE_DTYPE, device=x.device)


@torch.library.register_fake("graphoffload::release", lib=LIBRARY)
def _(x: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    return None


@torch.library.register_fake("graphoffload::reload", lib=LIBRARY)
def _(
    handle: torch.Tensor, plan: str, id: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=handle.device)


@torch.library.register_fake("graphoffload::wait", lib=LIBRARY)
def _(y: torch.Tensor, handle: torch.Tensor, plan: str, id: int) -> None:
    return None
