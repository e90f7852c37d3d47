"""Plans by key: for the ops at run time, for last_plans(), and for hits in a compile cache.

torch's compile caches skip the partitioner on a hit. A plan is therefore stored next to them, under the key that is also part
of torch's cache key.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence

import torch

from graphoffload.cache_files import cache_dir, keep_newest, write_whole
from graphoffload.facts.plan import Plan
from graphoffload.facts.saved_tensors import INPUT
from graphoffload.options.switches import is_on
from graphoffload.runtime.layouts import Layout
from graphoffload.runtime.pinned.preallocation import prepare_plan
from graphoffload.runtime.step.resident import Budget


class RunPlan:
    """The part of a plan that the ops read on every call, and values learned from the last calls.

    at_end: ids that are released at the end of forward. inputs: ids of tensors that other graphs computed, which others may
    hold as well. asked: size, stride and type that backward reloads an id with. order:
    ids in the order in which backward reloads them. capturable: forward was compiled to be captured with its copies.
    downstream: this graph reads results of other graphs, and has no goal: all its releases may be left to the next graph. If
    its call is the last of a forward, the tensors that it offloads stay on the device (see step/between_graphs.py). strides:
    the compiler's layout of an id's source, if known. channels_last: the compiler lays out images of convolutions so.
    told_full: a warning has said that host_budget was spent while it ran.
    """

    __slots__ = (
        "_names",
        "asked",
        "at_end",
        "budget",
        "capturable",
        "channels_last",
        "checksum",
        "downstream",
        "inputs",
        "key",
        "layouts",
        "linked",
        "order",
        "strides",
        "told_full",
        "transfers",
        "window_bytes",
    )  # fmt: skip

    def __init__(self, plan: Plan | None, key: str) -> None:
        transfers = plan.transfers if plan is not None else ()
        self.key = key
        self._names = {t.id: f"{t.tensor} of {t.module or 'the model'}" for t in transfers}
        self.layouts: dict[int, Layout] = {}
        self.checksum = plan.checksum if plan is not None else False
        self.transfers = len(transfers)
        self.at_end = frozenset(t.id for t in transfers if t.release_after is None)
        ops = {tensor.name: tensor.op for tensor in plan.saved.tensors} if plan is not None else {}
        self.inputs = frozenset(t.id for t in transfers if ops.get(t.tensor) == INPUT)
        self.linked = self.capturable = self.downstream = self.channels_last = self.told_full = False
        self.window_bytes: int | None = None
        self.budget: Budget | None = None
        self.asked: dict[int, tuple[Sequence[int], Sequence[int], torch.dtype]] = {}
        self.order: tuple[int, ...] = ()
        self.strides: dict[int, tuple[int, ...]] = {}

    def link(self, window_bytes: int | None, budget: Budget | None = None, *, downstream: bool = False) -> None:
        """Let this plan's copies outlive its graphs (step/between_graphs.py): nothing in them reuses a released source.

        `window_bytes`: what may be outstanding across graphs; None: what the largest of them offloads. `budget`: shared with
        other graphs; what it has room for stays on the device. `downstream`: as the attribute.
        """
        self.linked, self.window_bytes, self.budget, self.downstream = True, window_bytes, budget, downstream

    def name(self, id: int) -> str:
        """A transfer's tensor and module, for messages."""
        return self._names.get(id) or f"tensor {id}"

    def layout(self, x: torch.Tensor, id: int) -> Layout:
        """The layout of a transfer's source: the last one seen, while it is still true."""
        layout = self.layouts.get(id)
        if (
            layout is None
            or x.shape != layout.size
            or x.stride() != layout.given
            or x.dtype is not layout.dtype
            or x.device != layout.device
        ):
            layout = self.layouts[id] = Layout(x)
        return layout


_LOCK = threading.Lock()
_PLANS: dict[str, Plan] = {}
_EXPLAINED: dict[str, Plan] = {}
_RUN: dict[str, RunPlan] = {}
_BASES: dict[str, Plan] = {}
_written = itertools.count()
_PRUNED_EVERY = 64  # files that this process has written: to look at a folder takes a while on a network
_MOST_FILES, _MOST_BYTES = 1000, 256 * 2**20


def across_graphs() -> bool:
    """Whether copies may outlive their graph and start in another one's backward; GRAPHOFFLOAD_ACROSS_GRAPHS=0 forbids it.

    Raises:
        ConfigError: the variable is neither on nor off.
    """
    return is_on("GRAPHOFFLOAD_ACROSS_GRAPHS", "keep copies inside their graph")


def register(plan: Plan, *, runs: bool = False, store: bool = True) -> None:
    """Make a plan known to the ops and to last_plans().

    Where it is going to run (`runs`), host memory for it is taken from now on, and `store` writes it to disk for later hits of
    torch's compile cache.
    """
    if runs and not plan.variant:  # a step's plan takes host memory for all of its calls
        prepare_plan(plan)
    with _LOCK:
        _PLANS.pop(plan.key, None)
        _PLANS[plan.key] = plan
        _RUN[plan.key] = RunPlan(plan, plan.key)
    if store and runs:
        _write(plan, plan.key)


def amend(plan: Plan) -> None:
    """Another prediction and summary for a plan: those of the step that it is part of."""
    with _LOCK:
        for plans in (_PLANS, _EXPLAINED):
            if plan.key in plans:
                plans[plan.key] = plan


def explained(plan: Plan) -> None:
    """Make a plan known that nothing is compiled under: last_plans() does not show it."""
    with _LOCK:
        _EXPLAINED[plan.key] = plan
        _RUN[plan.key] = RunPlan(plan, plan.key)


def remember(base: str, plan: Plan) -> None:
    """Store a plan under the key of its inputs: the next process then uses the same plan key and hits torch's cache.

    A plan key is that base key and a random suffix. Without a stored plan torch's cache cannot hit, so a compiled graph never
    runs without its plan.
    """
    known = _BASES.get(base)
    if known is None or known.key != plan.key:
        _BASES[base] = plan
        _write(plan, base)


def _write(plan: Plan, name: str) -> None:
    folder = cache_dir() / "plans"
    with contextlib.suppress(OSError):  # without a store a cache hit is compiled anew: slower, never wrong
        write_whole(folder / f"{name}.json", plan.to_json())
    if next(_written) % _PRUNED_EVERY == 0:
        keep_newest(folder, files=_MOST_FILES, nbytes=_MOST_BYTES)


def stored(key: str) -> Plan | None:
    """The plan of an earlier compile with this key, from this process or from disk; what cannot be read is none."""
    plan = _PLANS.get(key) or _BASES.get(key)
    if plan is not None:
        return plan
    try:
        return Plan.from_json((cache_dir() / "plans" / f"{key}.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def of_key(key: str) -> Plan | None:
    """The plan that was made, explained or loaded in this process under exactly this key."""
    return _PLANS.get(key) or _EXPLAINED.get(key)


def run_plan(key: str) -> RunPlan:
    """The part of a plan that the ops need; loaded from disk on the first call after a cache hit."""
    run = _RUN.get(key)
    if run is None:
        run = _RUN.setdefault(key, RunPlan(stored(key), key))
    return run


def last_plans() -> tuple[Plan, ...]:
    """Plans of everything compiled in this process, oldest first, including those from a hit in a compile cache.

    Plans of explain() are in its report and not here, since nothing is compiled under them.
    """
    with _LOCK:
        return tuple(_PLANS.values())


def forget() -> None:
    """Clear the plans that last_plans() shows. Compiled functions keep working."""
    with _LOCK:
        _PLANS.clear()
        _EXPLAINED.clear()
