"""What tracing depends on besides a graph and its inputs: autocast, grad mode, default dtype, kernels that are allowed.

Dynamo compiles a graph in the state in which the graph is called, and guards on it. Whoever traces the graph again later may be
in another state: a step is planned where its first graph is called, and its other graphs may run under autocast. Public names,
in every release.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Ambient(NamedTuple):
    """A state, as the functions that set it and what they set; see `state_here`."""

    parts: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]

    def set(self) -> None:
        """Make it the state of this thread."""
        for function, values in self.parts:
            function(*values)


def state_here() -> Ambient:
    """The state of this thread. Without it: a graph that is traced again computes in other dtypes than its callers ask for."""
    backends = torch.backends.cuda
    parts: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (torch.set_grad_enabled, (torch.is_grad_enabled(),)),
        (torch.set_autocast_cache_enabled, (torch.is_autocast_cache_enabled(),)),
        (torch.set_default_dtype, (torch.get_default_dtype(),)),
        (backends.enable_flash_sdp, (backends.flash_sdp_enabled(),)),
        (backends.enable_mem_efficient_sdp, (backends.mem_efficient_sdp_enabled(),)),
        (backends.enable_math_sdp, (backends.math_sdp_enabled(),)),
        (backends.enable_cudnn_sdp, (backends.cudnn_sdp_enabled(),)),
    ]
    for kind in ("cpu", "cuda"):
        parts.append((torch.set_autocast_enabled, (kind, torch.is_autocast_enabled(kind))))
        parts.append((torch.set_autocast_dtype, (kind, torch.get_autocast_dtype(kind))))
    deterministic, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    parts.append((_set_deterministic, (deterministic, warns)))
    return Ambient(tuple(parts))


def _set_deterministic(deterministic: bool, warns: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=warns)


@contextlib.contextmanager
def as_in(state: Ambient) -> Iterator[None]:
    """A context in another state, which draws no random numbers from the generators of this one.

    Without it: as for `state_here`; and dropout after a compile differs from that of a run without one.
    """
    here, python, host = state_here(), random.getstate(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        state.set()
        yield
    finally:
        here.set()
        random.setstate(python)
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)
