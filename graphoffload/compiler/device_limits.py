"""The limits of this process in bytes: "auto" and percentages, resolved against the device and the host as they are now."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphoffload.analysis.storages import example_storage_nbytes, storage_id
from graphoffload.compiler.link import hardware_of
from graphoffload.compiler.optimizer_state import state_bytes
from graphoffload.compiler.ranks import local_ranks
from graphoffload.facts.limits import Limits
from graphoffload.hardware import host_memory
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.log import log, say
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime.pinned.pool import POOL
from graphoffload.torch_internals import allocator
from graphoffload.torch_internals.fake_tensors import outside_all_modes
from graphoffload.units import parse_size

_MARGIN_BYTES = 512 * 2**20
_MARGIN_SHARE = 0.02
_MARGIN_OF_RESERVE = 1 / 16
_MARGIN_OF_PIECES = {False: 1 / 32, True: 1 / 64}
_PIECES_BY_PAGES = 768 * 2**20  # 40 blocks that each keep one small tensor, which a page of 20 MiB is held for
_HOST_SHARE = 0.8
_UNKNOWN_SHARE = 1 / 64  # of what is allocated: what is no input of a graph may be garbage
_ROOMY = 0.9  # of the memory: what needs no more has no trouble with memory in pieces
_UNCUT_SHARE, _UNCUT_BYTES = 1 / 512, 4 * 2**20


def resolve_limits(config: OffloadConfig, tensors: Iterable[Any], parameters: Sequence[torch.Tensor] | None = None) -> Limits:
    """Limits for a graph with these inputs (parameters among them).

    Args:
        tensors: real ones, or fake ones that stand for them.
        parameters: those that may be trained, if `tensors` cannot tell; None: leaves that require a gradient.
    """
    inputs = [value for value in tensors if isinstance(value, torch.Tensor)]
    device = device_of(inputs)
    hardware = hardware_of(config.hardware, str(device))
    reserve_bytes = _reserve(config, inputs, parameters, device, hardware)
    host_budget_bytes, host_auto = _host_budget(config), config.host_budget == "auto"
    budget = _device_budget(config, device, hardware, reserve_bytes)
    static_bytes, uncut_bytes = _static_bytes(device, inputs), 0
    if config.has_budget and budget is not None and device.type == "cuda":  # "auto" leaves a margin
        uncut_bytes = _uncut_bytes(max(0, budget - static_bytes))
    return Limits(
        explicit=config.has_budget or config.limits_time,
        device_budget_bytes=budget,
        static_bytes=static_bytes + uncut_bytes,
        uncut_bytes=uncut_bytes,
        reserve_bytes=reserve_bytes,
        host_budget_bytes=host_budget_bytes,
        host_auto=host_auto,
        host_locked=host_auto and host_budget_bytes == _lockable_bytes(),
    )


def device_of(inputs: Iterable[Any]) -> torch.device:
    """Where a graph with these inputs runs."""
    devices = (value.device for value in inputs if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _static_bytes(device: torch.device, inputs: list[torch.Tensor]) -> int:
    if device.type == "cuda":
        _allocate_workspaces(device)
        return int(torch.cuda.memory_allocated(device))
    return _bytes_of(inputs)


def _uncut_bytes(room_bytes: int) -> int:
    """What is left for the ends of blocks that torch's allocator does not cut off and counts as allocated, of the room that a
    given budget has."""
    return 0 if allocator.maps_by_pages() else min(_UNCUT_BYTES, int(room_bytes * _UNCUT_SHARE))


def _bytes_of(inputs: Iterable[torch.Tensor]) -> int:
    return sum({storage_id(value): example_storage_nbytes(value) for value in inputs}.values())


def free_garbage(tensors: Iterable[Any]) -> None:
    """Before a graph with these inputs is compiled, have Python collect what may be a model that was deleted: a cycle, which
    would be planned around for good. Not where a step is planned again: garbage that comes back is memory that it needs."""
    inputs = [value for value in tensors if isinstance(value, torch.Tensor)]
    device = device_of(inputs)
    if device.type == "cuda":
        allocated = int(torch.cuda.memory_allocated(device))
        if allocated - _bytes_of(inputs) > _UNKNOWN_SHARE * allocated:
            gc.collect()


def _allocate_workspaces(device: torch.device) -> None:
    """Have cuBLAS allocate what the first step would: a workspace for this thread and one for the thread that runs backward. On
    Hopper each is 32 MiB for good."""
    if not torch.cuda.is_available():
        return
    try:
        with outside_all_modes(), torch.inference_mode(False), torch.enable_grad():
            one = torch.ones(1, 1, device=device, requires_grad=True)
            (product := one * 1).register_hook(lambda gradient: gradient @ gradient)
            _ = one.detach() @ one.detach()
            torch.autograd.grad(product, one, torch.ones_like(product))
    except RuntimeError as error:  # out of memory, or products that deterministic algorithms forbid
        log.debug("workspaces of cuBLAS are not allocated before planning: %s", error)


def _device_budget(config: OffloadConfig, device: torch.device, hardware: HardwareProfile, reserve_bytes: int) -> int | None:
    wanted = config.device_budget
    if wanted != "auto":
        return parse_size(wanted, field="device_budget", whole_bytes=hardware.memory_bytes)
    if device.type != "cuda":
        whole = hardware.memory_bytes  # planned for a GPU that is not there: its memory is the budget
        return None if hardware.source == "cpu" else max(0, whole - _margin(whole, reserve_bytes))
    return device_budget_now(device, reserve_bytes)


def device_budget_now(device: torch.device, reserve_bytes: int = 0, *, of_a_step: bool = False) -> int:
    """What "auto" comes to on a GPU at this moment, with a reserve that is to come; of what the process may allocate, where it
    may not allocate all of it.

    of_a_step: what eager code allocates between the graphs is in the plan as well. The large blocks of a loss must fit in one
    piece each, and what activations leave is in pieces, so more is left free; less if torch maps its memory page by page.
    """
    free, total = torch.cuda.mem_get_info(device)
    most = int(total * allocator.allowed_share(device))
    pieces = _for_pieces(most) if of_a_step else 0
    return int(min(free + torch.cuda.memory_reserved(device), most) - _margin(most, reserve_bytes) - pieces)


def _for_pieces(most: int) -> int:
    """Bytes left free since memory is in pieces. A step has as many kept tensors on a small device, and pages are as large."""
    in_blocks, in_pages = (int(most * _MARGIN_OF_PIECES[by_pages]) for by_pages in (False, True))
    return min(in_blocks, max(in_pages, _PIECES_BY_PAGES)) if allocator.maps_by_pages() else in_blocks


def map_by_pages_if_tight(device: torch.device, keep_all_bytes: int, budget_bytes: int | None, *, of_a_step: bool) -> bool:
    """Have torch map device memory page by page from now on, and say so, where it would not do in pieces: what is planned for
    is nearly all that the device has, and keeping everything would take that much. Whether that changed anything."""
    if device.type != "cuda" or budget_bytes is None or keep_all_bytes <= _ROOMY * budget_bytes:
        return False
    if budget_bytes < _ROOMY * device_budget_now(device, of_a_step=of_a_step) or not allocator.map_by_pages():
        return False
    torch.cuda.empty_cache()
    say("device memory is mapped page by page from now on (expandable_segments): in pieces it would not do for this plan")
    return True


def _margin(whole_bytes: int, reserve_bytes: int) -> int:
    """Bytes left free for memory that is not predicted. More if a large reserve is to come: it is allocated where activations
    were, which fragments the memory that torch's allocator holds."""
    return max(_MARGIN_BYTES, int(whole_bytes * _MARGIN_SHARE)) + int(reserve_bytes * _MARGIN_OF_RESERVE)


def _reserve(
    config: OffloadConfig,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor] | None,
    device: torch.device,
    hardware: HardwareProfile,
) -> int:
    """Bytes of optimizer state that does not exist yet. None without a GPU, where no training runs: explain() says so."""
    if config.reserve != "auto":
        return parse_size(config.reserve, field="reserve", whole_bytes=hardware.memory_bytes)
    if not _is_gpu(device):
        return 0
    leaves = [value for value in inputs if value.requires_grad and value.is_leaf]
    if parameters is None:
        parameters = [value for value in leaves if isinstance(value, torch.nn.Parameter)]
    return state_bytes(parameters, leaves)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _host_budget(config: OffloadConfig) -> int:
    """Host bytes for page-locked buffers: configured, or a share of what RAM, cgroup and memlock leave, per process here.

    The share is of what is available now. What this process's pool holds already is its own and counts as available to it
    alone: a second compile sees as much as the first, and so does each of several ranks that hold equally much.
    """
    ram = host_memory.for_this_process()
    if config.host_budget != "auto":
        return parse_size(config.host_budget, field="host_budget", whole_bytes=ram.total_bytes)
    share = int(ram.available_bytes * _HOST_SHARE) // max(1, local_ranks()) + int(POOL.snapshot().held_bytes * _HOST_SHARE)
    locked = _lockable_bytes()
    return share if locked is None else min(share, locked)


def _lockable_bytes() -> int | None:
    """Bytes that RLIMIT_MEMLOCK lets this user lock; None if nothing limits that or nothing is locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft not in (resource.RLIM_INFINITY, -1) and torch.cuda.is_available() and os.geteuid() != 0
    return soft if limited else None
