"""tune(): run real steps, compare them with the prediction, plan again, keep the best.

    report = graphoffload.tune(model, lambda: train_step(batch), device_budget="40GiB")

    keep-all, if it fits ─▶ plan ─▶ steps ─▶ measured against predicted ─▶ corrected goal ─▶ plan ─▶ ... ─▶ the best one

If a plan's measured peak misses its budget by n bytes, the next plan's budget differs by n bytes. Example: a plan for 40.0 GiB
that measures 40.5 GiB is followed by one for 39.5 GiB. If a plan is slower than allowed, the next one is for a smaller
slowdown. Nothing else is adjusted: times and bandwidths stay as measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphoffload.api.in_place import compile_in_place
from graphoffload.api.introspect import chosen_config
from graphoffload.compiler.backend import OffloadBackend
from graphoffload.compiler.device_limits import resolve_limits
from graphoffload.errors import BudgetError, ConfigError, GraphOffloadError
from graphoffload.facts.plan import Plan
from graphoffload.log import say
from graphoffload.options.config import OffloadConfig
from graphoffload.report.offload_report import Measured, OffloadReport
from graphoffload.report.progress import Bar, progress_bar
from graphoffload.runtime import registry
from graphoffload.torch_internals import dynamo
from graphoffload.torch_internals.modules import compiled_call, set_compiled_call
from graphoffload.units import format_bytes

_NO_LIMIT = 1_000_000
_WARM_UP = 3
_NEAR = 0.01  # a peak this close below its budget is not worth another plan
_NOISE = 0.005
_CALL = 'tune(model, lambda: model(x).sum().backward(), device_budget="40GiB")'


@dataclass(frozen=True, slots=True)
class _Trial:
    """One configuration as it ran: seconds a step (median), bytes at the peak (None without an allocator that counts)."""

    config: OffloadConfig
    compiled: Any
    plans: tuple[Plan, ...]
    step_s: float
    peak_bytes: int | None

    @property
    def predicted_peak_bytes(self) -> int:
        """The predicted peak of the largest graph."""
        return OffloadReport(plans=self.plans).predicted_peak_bytes

    def line(self, keep: _Trial | None) -> str:
        """The line of the report."""
        peak = "" if self.peak_bytes is None else (
            f", peak {format_bytes(self.peak_bytes)} (predicted {format_bytes(self.predicted_peak_bytes)})"
        )  # fmt: skip
        slower = "" if keep is None else f" ({self.step_s / keep.step_s - 1.0:+.1%})"
        return f"{_goal(self.config)}: {self.step_s * 1e3:.1f} ms a step{slower}{peak}"


def tune(
    model: nn.Module,
    step: Callable[[], object],
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    steps: int = 10,
    rounds: int = 2,
    **fields: Any,
) -> OffloadReport:
    """Compile `model` in place with the plan that real steps show to be the best for its budget or slowdown.

    Args:
        model: what it was compiled with before is replaced, unless there is an error.
        step: one training step of `model`, forward and backward at least. It is called (rounds + 2) * (steps + 3) times and
            really trains: leave the optimizer out, or restore the parameters, if they must not move.
        config: an OffloadConfig or options as for torch.compile; or its fields as keywords.
        steps: measured steps of each plan. rounds: plans made after the first.

    Returns:
        The report of the plan that stays: predicted against measured, and a note for each plan that was tried. On a CPU peaks
        are not measured, so budgets are taken as predicted.

    Raises:
        BudgetError: no plan that was tried keeps the budget in the measurement.
        ConfigError: a field is wrong, `step` cannot be called, or compiles nothing of the model that could be planned.
        GraphOffloadError: as compiling would.
    """
    if not callable(step):
        raise ConfigError(
            f"tune(model, step): step is a {type(step).__name__}, which cannot be called; it is a function without arguments "
            f"that runs one training step. The call is {_CALL}."
        )
    chosen = chosen_config(_CALL, config, fields)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"tune() takes an nn.Module; got {type(model).__name__}.")
    if steps < 1 or rounds < 0:
        raise ConfigError(f"tune(steps={steps}, rounds={rounds}): at least one step and no negative rounds.")
    if isinstance(chosen.policy, str) and chosen.policy != "auto":
        raise ConfigError(f'tune() plans for a budget or a slowdown: policy="{chosen.policy}" leaves nothing to plan.')
    tuner, before = _Tuner(model, step, steps), compiled_call(model)
    try:
        with progress_bar("tune", (rounds + 2) * (_WARM_UP + steps)) as tuner.bar:
            keep = tuner.keep_all(chosen)
            trials = tuner.trials(chosen, keep, rounds)
        best = min(trials, key=lambda trial: tuner.score(chosen, trial, keep))
        tuner.check(chosen, best, len(trials))
    except BaseException:
        set_compiled_call(model, before)
        raise
    set_compiled_call(model, best.compiled)
    return OffloadReport(
        plans=best.plans,
        measured=Measured(
            peak_bytes=best.peak_bytes, step_time_s=best.step_s, keep_step_time_s=None if keep is None else keep.step_s
        ),
        notes=tuple(("kept: " if trial is best else "tried: ") + trial.line(keep) for trial in trials),
    )


class _Tuner:
    """Runs configurations of one model."""

    def __init__(self, model: nn.Module, step: Callable[[], object], steps: int) -> None:
        self.model, self.step, self.steps, self.bar = model, step, steps, Bar()
        parameter = next(iter(model.parameters()), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")

    def keep_all(self, chosen: OffloadConfig) -> _Trial | None:
        """The step with everything kept, for comparison; None if it does not fit."""
        try:
            return self.run(replace(chosen, policy="keep", device_budget="auto", max_slowdown=None))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None

    def trials(self, chosen: OffloadConfig, keep: _Trial | None, rounds: int) -> list[_Trial]:
        """The requested configuration and up to `rounds` corrections of it."""
        trials = [self.run(chosen)]
        for _ in range(rounds):
            corrected = self.corrected(chosen, trials[-1], keep)
            if corrected is None:
                break
            try:
                trials.append(self.run(corrected))
            except BudgetError:
                break
        return trials

    def run(self, config: OffloadConfig) -> _Trial:
        """Compile, warm up and measure."""
        recorder = _Recorder(config)
        set_compiled_call(self.model, None)
        compile_in_place(self.model, recorder, **dynamo.isolated())  # Dynamo gives up at eight compiles of one forward
        try:
            # Each trial is one more compile of the same code: at its limit torch would run the model in eager.
            with dynamo.many_compiles(_NO_LIMIT, _NO_LIMIT):
                for number in range(_WARM_UP):
                    self.bar.doing(f"{_goal(config)}: {'warming up' if number else 'compiling'}")
                    self.step()
                    self.bar.advance()
        except dynamo.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, GraphOffloadError):
                raise error.inner_exception from None
            raise
        plans = recorder.plans()
        if not plans:
            raise ConfigError(
                "tune(): no graph of the model that needs a gradient was compiled, so nothing was planned. step() has to run "
                "forward and backward of this model, with parameters that require gradients, and torch has to compile it "
                "(TORCH_LOGS=graph_breaks,recompiles)."
            )
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = []
        self.bar.doing(f"{_goal(config)}: measuring {self.steps} steps")
        for _ in range(self.steps):
            began = time.perf_counter()
            self.step()
            if cuda:
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - began)
            self.bar.advance()
        peak_bytes = int(torch.cuda.max_memory_allocated(self.device)) if cuda else None
        trial = _Trial(config, compiled_call(self.model), plans, statistics.median(seconds), peak_bytes)
        say(f"tune: {trial.line(None)}")
        return trial

    def budget_bytes(self, chosen: OffloadConfig) -> int:
        """The bytes of the user's device_budget."""
        found = resolve_limits(chosen, self.model.parameters()).device_budget_bytes
        assert found is not None, "resolved from a number or a share of the device"
        return found

    def missed_bytes(self, chosen: OffloadConfig, trial: _Trial) -> int:
        """Measured bytes above an explicit budget; 0 or less when it is kept."""
        if trial.peak_bytes is None or not chosen.has_budget:
            return 0
        return trial.peak_bytes - self.budget_bytes(chosen)

    def check(self, chosen: OffloadConfig, best: _Trial, count: int) -> None:
        """Refuse the best of `count` plans if it does not keep the budget."""
        missed = self.missed_bytes(chosen, best)
        if missed > 0:
            assert best.peak_bytes is not None
            raise BudgetError(
                f"device_budget {format_bytes(self.budget_bytes(chosen))}: the best of {count} plans that were run reaches "
                f"{format_bytes(best.peak_bytes)}, {format_bytes(missed)} too much. Raise device_budget to that, or make the "
                "batch or sequence smaller."
            )

    def corrected(self, chosen: OffloadConfig, trial: _Trial, keep: _Trial | None) -> OffloadConfig | None:
        """The next goal to plan for; None when no correction would help."""
        if chosen.limits_time:
            over, planned = _slowdown_over(chosen, trial, keep), trial.config.max_slowdown or 0.0
            if keep is None or abs(over) <= _NOISE or (over > 0 and planned == 0.0):
                return None
            return trial.config.with_options(max_slowdown=max(0.0, planned - over))
        if trial.peak_bytes is None or not chosen.has_budget or not any(plan.changes_anything for plan in trial.plans):
            return None
        budget = self.budget_bytes(chosen)
        if (1.0 - _NEAR) * budget <= trial.peak_bytes <= budget:
            return None
        corrected = budget - (trial.peak_bytes - trial.predicted_peak_bytes)
        return replace(trial.config, device_budget=corrected) if corrected > 0 else None

    def score(self, chosen: OffloadConfig, trial: _Trial, keep: _Trial | None) -> tuple[float, float]:
        """Sort key, less is better: the smallest miss of the goal, then the fastest, or for a slowdown the smallest peak."""
        if not chosen.limits_time:
            return max(0, self.missed_bytes(chosen, trial)), trial.step_s
        size = trial.predicted_peak_bytes if trial.peak_bytes is None else trial.peak_bytes
        return max(0.0, _slowdown_over(chosen, trial, keep) - _NOISE), size


def _goal(config: OffloadConfig) -> str:
    """What a configuration asks for, short."""
    if config.policy == "keep":
        return "keep-all"
    if config.limits_time:
        return f"max_slowdown={config.max_slowdown:.4g}"
    budget = config.device_budget
    return f"device_budget={budget if isinstance(budget, str) else format_bytes(budget)}"


def _slowdown_over(chosen: OffloadConfig, trial: _Trial, keep: _Trial | None) -> float:
    """The measured slowdown minus the allowed one; without keep-all's time nothing shows a slowdown."""
    slowdown = 0.0 if keep is None else trial.step_s / keep.step_s - 1.0
    return slowdown - (chosen.max_slowdown or 0.0)


class _Recorder(OffloadBackend):
    """A backend that remembers the plans that it made or found. It equals no other, so its models are always compiled."""

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__(config)
        self._keys: list[str] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _planned(self, key: str) -> None:
        self._keys.append(key)

    def plans(self) -> tuple[Plan, ...]:
        """The plans in the order of compilation."""
        return tuple(plan for key in dict.fromkeys(self._keys) if (plan := registry.of_key(key)) is not None)
