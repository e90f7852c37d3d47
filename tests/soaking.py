"""A long run of planned steps: blocks compiled one by one, AdamW, batches of several shapes; budgets that change, evaluations,
losses that are dropped, exceptions and copies that fail in between; and books on what is alive.

    course = Course(steps=2000, rows=(1024, 2048), shares=(0.02, 0.3, 0.7), rounds=4)
    log = run(model, course)
    with twin_copies():
        twin = run(model, course)       the same from the same weights, with synchronous clones as copies
    assert log.losses == twin.losses
    assert_flat(log, course)

The goals come in rounds: each round has all of them, in an order of its own. After the first round every shape was planned for
every goal, and from then on nothing grows.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphoffload
from graphoffload.compiler.step_runs import _PLANNER
from graphoffload.errors import BudgetError
from graphoffload.runtime import host_memory, ops
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.offloaded_tensors import OffloadedTensor
from graphoffload.runtime.pinned.slabs import HostBuffer, Slab
from graphoffload.runtime.step.call import StepCall
from graphoffload.runtime.step.calls import StepRun
from graphoffload.runtime.step.schedule import Mark

PLENTY = 2**40
EVENTS = ("evaluate", "evaluate with gradients", "drop", "raise in forward", "raise in backward", "fail to copy", "two at once")
FEW_SLABS = 4
TRACKED = (OffloadedTensor, StepRun, StepCall, Mark, HostBuffer, Slab)


class Injected(RuntimeError):
    """The failure of a step, on purpose."""


@dataclass(frozen=True)
class Course:
    """What is run. shares: of the way from the least budget to that for keep-all; each round of goals has these, a slowdown and
    "auto". every: steps between two events. looks: steps between two looks at what is alive."""

    steps: int
    rows: tuple[int, ...]
    shares: tuple[float, ...]
    rounds: int
    every: int = 5
    looks: int = 5
    blocks: int = 6
    width: int = 64
    device: str = "cpu"
    seed: int = 0

    @property
    def goals(self) -> list[float | str]:
        """One round of them."""
        return [*self.shares, "slowdown", "auto"]

    @property
    def first_round(self) -> int:
        """Steps until every goal was there once."""
        return self.steps // self.rounds


@dataclass(frozen=True)
class Step:
    """One step of a course. rows, seed: of its batch. event: before it, with another batch. goal: set before it, if any."""

    rows: int
    seed: int
    event: str
    other_rows: int
    at: int
    goal: float | str | None


@dataclass
class Log:
    """Losses in order; refused: goals that were not met when a step began, as the number of losses and the least budget;
    refused_beside: the same where another microbatch was alive, whose activations no plan of this one moves. books: step, and
    what was alive then."""

    losses: list[float] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[int, int]] = field(default_factory=list)
    refused_beside: list[tuple[int, int]] = field(default_factory=list)
    books: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    def between(self, what: str, first: int, last: int) -> list[int]:
        """Entries of the books from one step to another."""
        return [page[what] for step, page in self.books if first <= step <= last]


class Block(nn.Module):
    """Norm, two linears and GELU, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """A linear layer in eager before the blocks; `stop`: the block before which the next forward raises."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        self.first = nn.Linear(course.width, course.width)
        self.layers = nn.ModuleList(Block(course.width) for _ in range(course.blocks))
        self.stop = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            if index == self.stop:
                raise Injected("in the middle of a forward")
            x = layer(x)
        return x


def build(course: Course, **how: Any) -> Model:
    """The model with its blocks compiled, always with the same parameters."""
    torch.manual_seed(course.seed)
    model = Model(course).to(course.device)
    for layer in model.layers:
        layer.compile(dynamic=False, **how)
    return model


def script(course: Course) -> list[Step]:
    """The steps of a course: drawn before it begins, so that what happens changes nothing of them."""
    draw = random.Random(course.seed)
    goals: dict[int, float | str] = {}
    length = course.first_round // len(course.goals)
    for turn in range(course.rounds):
        order = draw.sample(course.goals, len(course.goals))
        for at, goal in enumerate(order):
            goals[turn * course.first_round + at * length + draw.randrange(length // 4)] = goal
    events = itertools.cycle(EVENTS)
    rows: list[int] = []
    while len(rows) < course.steps:
        rows += draw.sample(course.rows, len(course.rows))
    return [
        Step(
            rows=rows[step],
            seed=draw.randrange(2**31),
            event=next(events) if step % course.every == course.every - 1 else "",
            other_rows=draw.choice(course.rows),
            at=draw.randrange(course.blocks),
            goal=goals.get(step),
        )
        for step in range(course.steps)
    ]


def batch(course: Course, rows: int, seed: int) -> Tensor:
    """Numbers that are the same on every device."""
    return torch.randn(rows, course.width, generator=torch.Generator().manual_seed(seed)).to(course.device)


class Run:
    """A model on a course, with its optimizer; `planned` is False for a model that graphoffload did not compile."""

    def __init__(self, model: Model, course: Course, *, planned: bool) -> None:
        self.model, self.course, self.planned = model, course, planned
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.log = Log()
        self.least = self.most = 0

    def loss(self, rows: int, seed: int, *, beside: bool = False) -> Tensor:
        """A forward; where a budget can no longer be met, with the least one that the error names, or as compiled first.
        beside: another one is alive."""
        for attempt in range(3):
            found = self.try_forward(rows, seed)
            if isinstance(found, Tensor):
                return found
            refused = self.log.refused_beside if beside else self.log.refused
            refused.append((len(self.log.losses), found))
            if attempt == 0:
                graphoffload.set_budget(int(1.02 * found))
        raise AssertionError("an error of planning stops a step that runs as it was compiled first")

    def try_forward(self, rows: int, seed: int) -> Tensor | int:
        """The loss, or the least budget of an error."""
        try:
            loss: Tensor = self.model(batch(self.course, rows, seed)).square().mean()
        except BudgetError as error:
            return error.least_bytes or 0
        return loss

    def step(self, rows: int, seed: int) -> None:
        """The usual loop's body."""
        loss = self.loss(rows, seed)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.log.losses.append(loss.item())

    def measure(self) -> None:
        """The least budget of the largest batch, and the one that keeps everything: once the optimizer has its state, and every
        shape was planned."""
        rows = max(self.course.rows)
        self.step(rows, 0)
        if self.planned:
            graphoffload.set_budget(PLENTY)
        for other in self.course.rows:
            for _ in range(3):
                self.step(other, 0)
        for _ in range(2):
            self.step(rows, 0)
        if not self.planned:
            return
        known = next(known for known in reversed(_PLANNER.known.values()) if len(known.sequence) == self.course.blocks)
        assert known.plan is not None
        self.most = known.plan.solution.keep_timeline.peak_bytes
        graphoffload.set_budget(known.start_bytes + 2**12)
        least = self.try_forward(rows, 0)
        assert isinstance(least, int), "a budget of nearly nothing is met"
        assert 0 < least < self.most
        self.least = least
        graphoffload.set_budget(PLENTY)

    def set_goal(self, goal: float | str) -> None:
        """Another goal from here on."""
        self.log.happened["goal"] += 1
        if goal == "slowdown":
            graphoffload.set_slowdown(0.05)
        elif goal == "auto":
            graphoffload.set_budget("auto")
        else:
            assert isinstance(goal, float)
            graphoffload.set_budget(int(self.least + goal * (self.most - self.least)))

    def happen(self, step: Step) -> None:
        """What else a training loop does; no parameter changes by it."""
        self.log.happened[step.event] += 1
        rows, seed = step.other_rows, step.seed + 1
        model = self.model
        if step.event == "evaluate":
            model.eval()
            with torch.no_grad():
                self.log.losses.append(self.loss(rows, seed).item())
            model.train()
        elif step.event == "evaluate with gradients":
            model.eval()
            self.log.losses.append(self.loss(rows, seed).item())
            model.train()
        elif step.event == "drop":
            self.loss(rows, seed)
        elif step.event == "raise in forward":
            model.stop = step.at
            with suppress(Injected):
                self.loss(rows, seed)
            model.stop = -1
        elif step.event == "raise in backward":
            with once_raising(list(model.layers)[step.at].up.weight), suppress(Injected):
                self.loss(rows, seed).backward()
        elif step.event == "fail to copy":
            with failing_copy(after=step.at), suppress(Injected):
                self.loss(rows, seed).backward()
        elif step.event == "two at once":
            losses = [self.loss(rows, seed), self.loss(step.rows, seed, beside=True)]
            self.log.losses += [loss.item() for loss in losses]
            for loss in losses:
                loss.backward()
        self.optimizer.zero_grad()

    def keep_books(self, step: int) -> None:
        """What is alive between two steps."""
        gc.collect()
        held = host_memory()
        assert held.in_use_bytes == 0, "between steps no activation is on the host"
        assert len(ENTRIES) == 0
        page = {"held": held.held_bytes, "pinned": held.pinned_bytes}
        if self.course.device != "cpu":
            page["device"], page["reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with suppress(OSError):
            page["resident"] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        counts = Counter(type(thing) for thing in gc.get_objects())
        page.update({kind.__name__: counts[kind] for kind in TRACKED})
        page["sequences"] = len(_PLANNER.known)
        self.log.books.append((step, page))


def run(model: Model, course: Course, *, planned: bool = True, books: bool = True) -> Log:
    """A course from the model's present weights, which are put back afterwards. books: kept, which takes a while."""
    before = copy.deepcopy(model.state_dict())
    this = Run(model, course, planned=planned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphoffload.errors.GraphOffloadWarning)
        this.measure()
        for at, step in enumerate(script(course)):
            if step.goal is not None and planned:
                this.set_goal(step.goal)
            if step.event:
                this.happen(step)
            this.step(step.rows, step.seed)
            if books and at % course.looks == 0:
                this.keep_books(at)
    model.load_state_dict(before)
    return this.log


def assert_flat(log: Log, course: Course, *, slack_bytes: int) -> None:
    """After the first round nothing is more than it was in it. slack_bytes: what the process itself may still take.

    Host memory that goes back and is taken again is cut otherwise, into a few slabs of as many bytes. Two microbatches at once
    may meet a goal with more copies than in the first round. The last step holds the records of its copies until the next
    begins. What leaks grows by more.
    """
    for what in log.books[0][1]:
        early = max(log.between(what, 0, course.first_round - 1))
        late = max(log.between(what, course.first_round, course.steps))
        print(f"{what}: at most {early} until step {course.first_round}, {late} from there on")
        most = early
        if what in ("resident", "reserved"):
            most += slack_bytes
        elif what in ("held", "pinned", "HostBuffer", "Slab", "OffloadedTensor"):
            most += early // 2 + (FEW_SLABS if what == "Slab" else 0)
        assert late <= most, f"{what} grew from {early} to {late}"


@contextmanager
def once_raising(parameter: Tensor) -> Iterator[None]:
    """A backward raises where this parameter's gradient comes."""

    def stop(_: Tensor) -> None:
        raise Injected("in the middle of a backward")

    hook = parameter.register_hook(stop)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def failing_copy(*, after: int) -> Iterator[None]:
    """A copy to the host raises, after so many others."""
    original, count = ops._copy_to_host, itertools.count()

    def fails(*args: Any) -> Any:
        if next(count) == after:
            raise Injected("in a copy")
        return original(*args)

    with mock.patch.object(ops, "_copy_to_host", fails):
        yield
