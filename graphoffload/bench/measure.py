"""The protocol by which every figure is measured.

A step is forward and backward; gradients stay allocated and are zeroed outside the timed region, as in training with
set_to_none=False, so that what is allocated between steps ("static") is the same before every step:

    static = memory_allocated() before the step: parameters, gradients, the batch, and whatever else lives
    peak over static = max_memory_allocated() during the step - static
    peak in all = peak over static + what a process that trains this model alone has allocated between steps
    step time = CUDA events around forward and backward;  host time = until the last launch returned

With an optimizer (recipe.py) its step is in the timed region, and gradients are freed before each step instead. They are
compared after it: AdamW only reads them. Without a GPU, the peak is of one step that torch's profiler recorded.

Every variant is compared with compiled keep-all of the same call, in alternating blocks (A B A B ...), because clocks and
neighbours drift; the ratio of medians carries a 95 % bootstrap interval. Gradients are compared after every single step, as
one vector in float32, with keep-all's; how far eager is from keep-all says how far bfloat16 rounding alone goes.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from graphoffload.bench.models import Workload
from graphoffload.runtime import host_memory, release_host_memory
from graphoffload.torch_internals import dynamo
from graphoffload.torch_internals.operators import zero_all
from graphoffload.torch_internals.streams import empty_host_cache

WARM_UP_STEPS = 3
ALLOCATED_IN_BYTES = 512
"""What torch's allocator on a GPU rounds up to."""

_CHUNK = 2**26


@dataclass(slots=True)
class Sample:
    """One step: milliseconds on the device and on the host until launched, bytes before it and the most above that."""

    step_ms: float
    host_ms: float
    static_bytes: int | None
    peak_bytes: int | None
    loss: float


@dataclass(slots=True)
class GradientCheck:
    """The whole gradient against keep-all's: |g - k| / |k|, |g|, and the loss."""

    error: float
    norm: float
    loss: float


@dataclass(slots=True)
class Row:
    """Everything that is known about one variant after it ran, or why it did not."""

    variant: str
    status: str = "ok"
    compile_s: float = 0.0
    graphs: int = 0
    samples: list[Sample] = field(default_factory=list)
    baseline: list[Sample] = field(default_factory=list)
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    gradient_error: float | None = None
    gradient_norm: float | None = None
    loss: float | None = None
    peak_bytes: int | None = None
    own_bytes: int | None = None  # allocated between steps by a process that trains nothing else
    static_growth_bytes: int | None = None
    pinned_bytes: int | None = None  # of all that take turns together
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def step_ms(self) -> float | None:
        """Median step time."""
        return statistics.median(s.step_ms for s in self.samples) if self.samples else None

    @property
    def spread_ms(self) -> float | None:
        """Half the distance between the quartiles."""
        if len(self.samples) < 4:
            return None
        low, _, high = statistics.quantiles([s.step_ms for s in self.samples], n=4)
        return (high - low) / 2

    @property
    def host_ms(self) -> float | None:
        """Median host time of a step."""
        return statistics.median(s.host_ms for s in self.samples) if self.samples else None

    @property
    def total_bytes(self) -> int | None:
        """The peak in all."""
        return None if self.peak_bytes is None or self.own_bytes is None else self.peak_bytes + self.own_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Of all plans, over what was allocated between steps when they were made; None without a plan."""
        peaks = [plan["prediction"]["predicted_peak_bytes"] for plan in self.ours.get("plans") or []]
        last = self.samples[-1].static_bytes if self.samples else None
        return max(peaks) - (self.ours.get("static_bytes") or last or 0) if peaks else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types, medians included."""
        return {**asdict(self), "step_ms": self.step_ms, "spread_ms": self.spread_ms, "host_ms": self.host_ms}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """What to_dict gave, read back from JSON."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("samples", "baseline"):
            known[name] = [Sample(**sample) for sample in known[name]]
        return cls(**known)


class Session:
    """One workload under one variant, ready to step. `beside` is one whose weights it shares, and so the optimizer's state."""

    def __init__(
        self,
        workload: Workload,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        beside: Session | None = None,
    ) -> None:
        self.workload, self.context = workload, context
        self.parameters = [p for p in workload.module.parameters() if p.requires_grad]
        self.cuda = self.parameters[0].device.type == "cuda"
        self.family: list[Session] = [] if beside is None else beside.family
        shared = None if beside is None else beside.optimizer
        self.optimizer: torch.optim.Optimizer | None = workload.recipe.make_optimizer(self.parameters, shared)
        self.family.append(self)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """As before a step: all zero, or, with an optimizer, not there, in no session that shares these weights."""
        if self.optimizer is None:
            materialise_gradients(self.workload.module)
            zero_all([_gradient(p) for p in self.parameters])
            return
        for session in self.family:
            for parameter in session.parameters:
                parameter.grad = None

    def own_bytes(self) -> int:
        """What a process that trains this model alone has allocated between steps."""
        module = self.workload.module
        tensors: list[Any] = [*module.parameters(), *module.buffers(), *self.workload.batch.values()]
        if self.optimizer is None:
            tensors += [_gradient(p) for p in self.parameters]
        else:
            tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        device = self.parameters[0].device
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device}
        return sum(-(-nbytes // ALLOCATED_IN_BYTES) * ALLOCATED_IN_BYTES for nbytes in storages.values())

    def step(self) -> Sample:
        """One timed step. Same random seed each time, so that dropout draws the same masks."""
        self.clear_gradients()
        torch.manual_seed(1234)
        if not self.cuda:
            return self._step_on_cpu()
        torch.cuda.synchronize()
        static = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        start.record()
        loss = self._run()
        end.record()
        host_ms = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - static
        return Sample(start.elapsed_time(end), host_ms, static, peak, loss.item())

    def _step_on_cpu(self) -> Sample:
        began = time.perf_counter()
        loss = self._run()
        elapsed_ms = (time.perf_counter() - began) * 1e3
        return Sample(elapsed_ms, elapsed_ms, None, None, loss.item())

    def peak_bytes(self) -> int | None:
        """Of one more step, over what is allocated between steps."""
        if self.cuda:
            return self.step().peak_bytes
        self.clear_gradients()
        return recorded_peak_bytes(self.step)

    def _run(self) -> Tensor:
        with self.context():
            loss = self.workload.loss()
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def gradients(self, device: torch.device | str | None = None) -> list[Tensor]:
        """Copies of all gradients."""
        return [_gradient(p).detach().to(device or p.device, copy=True) for p in self.parameters]

    def check(self, reference: list[Tensor], loss: float) -> GradientCheck:
        """The gradients of the latest step against `reference`."""
        error, norm, whole = compare_gradients([_gradient(p) for p in self.parameters], reference)
        return GradientCheck(error / whole if whole else error, norm, loss)

    def close(self) -> None:
        """Free parameters and gradients even where compiled code still refers to them."""
        for tensor in (*self.workload.module.parameters(), *self.workload.module.buffers()):
            tensor.grad = None
            tensor.data = tensor.data.new_empty(0)
        self.parameters, self.optimizer = [], None
        self.family.remove(self)
        self.workload.batch.clear()


def recorded_peak_bytes(step: Callable[[], object]) -> int:
    """The most that a step on a CPU has allocated beyond what was there, as torch's profiler saw it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    total = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "gradients exist before the first step"
    return parameter.grad


def materialise_gradients(module: nn.Module) -> None:
    """Allocate every gradient, zero."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def share_parameters(module: nn.Module, other: nn.Module) -> None:
    """Give a module the memory of another's parameters and gradients: whoever steps has its gradients there."""
    for own, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert own.shape == theirs.shape
        own.data, own.grad = theirs.data, theirs.grad


def compare_gradients(found: list[Tensor], reference: list[Tensor]) -> tuple[float, float, float]:
    """(|found - reference|, |found|, |reference|) over all tensors as one vector, in float32, summed in float64."""
    assert len(found) == len(reference), (len(found), len(reference))
    device = found[0].device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for left, right in zip(found, reference, strict=True):
        for a, b in zip(left.reshape(-1).split(_CHUNK), right.reshape(-1).split(_CHUNK), strict=True):
            wide, other = a.float(), b.to(device, non_blocking=True).float()
            sums[1] += wide.square().sum(dtype=torch.float64)
            sums[2] += other.square().sum(dtype=torch.float64)
            sums[0] += (wide - other).square_().sum(dtype=torch.float64)
    error, norm, whole = sums.sqrt().tolist()
    return error, norm, whole


def bootstrap_ratio(top: list[float], bottom: list[float], *, resamples: int = 4000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of median(top) / median(bottom), both resampled with replacement."""
    draw = random.Random(seed)
    ratios = sorted(
        statistics.median(draw.choices(top, k=len(top))) / statistics.median(draw.choices(bottom, k=len(bottom)))
        for _ in range(resamples)
    )
    return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples) - 1]


def warm_up(session: Session, steps: int = WARM_UP_STEPS) -> float:
    """Untimed steps; returns the seconds of the first, which compiles."""
    began = time.perf_counter()
    session.step()
    first_s = time.perf_counter() - began
    for _ in range(steps - 1):
        session.step()
    return first_s


def in_turns(
    lanes: list[tuple[Row, Session]], baseline: Session | None, reference: list[Tensor], *, steps: int, block: int
) -> None:
    """Measure `steps` steps of each side in blocks of `block`: the baseline, each lane, and again; all share the baseline's.

    Every step's gradients are compared.
    """
    checks: list[list[GradientCheck]] = [[] for _ in lanes]
    kept: list[Sample] = []
    for done in range(0, steps, block):
        count = min(block, steps - done)
        if baseline is not None:
            kept += [baseline.step() for _ in range(count)]
        for (row, session), seen in zip(lanes, checks, strict=True):
            for _ in range(count):
                row.samples.append(session.step())
                seen.append(session.check(reference, row.samples[-1].loss))
    for (row, _), seen in zip(lanes, checks, strict=True):
        row.baseline += kept
        _sum_up(row, seen)


def _sum_up(row: Row, checks: list[GradientCheck]) -> None:
    worst = max(checks, key=lambda c: (c.error != c.error, c.error))
    row.gradient_error, row.gradient_norm, row.loss = worst.error, worst.norm, worst.loss
    peaks = [s.peak_bytes for s in row.samples if s.peak_bytes is not None]
    statics = [s.static_bytes for s in row.samples if s.static_bytes is not None]
    if peaks:
        row.peak_bytes, row.static_growth_bytes = max(peaks), statics[-1] - statics[0]
    compare_times(row, row.baseline)


def compare_times(row: Row, baseline: list[Sample]) -> None:
    """Ratio of medians to `baseline` with its interval."""
    if not baseline or not row.samples:
        return
    ours, theirs = [s.step_ms for s in row.samples], [s.step_ms for s in baseline]
    row.ratio = statistics.median(ours) / statistics.median(theirs)
    row.ratio_interval = bootstrap_ratio(ours, theirs)


@contextlib.contextmanager
def many_variants() -> Iterator[None]:
    """Let one function be compiled for many variants in one process; restores Dynamo's limits."""
    with dynamo.many_compiles(512, 4096):
        yield


def graphs_compiled() -> int:
    """Graphs that Dynamo has handed to backends so far."""
    return dynamo.count_of_graphs()


def pinned_bytes() -> int | None:
    """Page-locked host bytes: torch's own allocator's and graphoffload's together."""
    if not torch.cuda.is_available():
        return None
    torch_bytes = 0
    with contextlib.suppress(Exception):
        torch_bytes = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    with contextlib.suppress(Exception):
        return torch_bytes + int(host_memory().held_bytes)
    return torch_bytes


def tidy() -> None:
    """Give device and host memory of a finished variant back."""
    gc.collect()
    with contextlib.suppress(Exception):
        release_host_memory()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with contextlib.suppress(Exception):
            empty_host_cache()
