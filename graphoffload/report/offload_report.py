"""OffloadReport: the plans of all graphs that one call compiled, their predicted costs, and measurements.

    print(graphoffload.explain(model, config)(*args))

prints a table for every graph (identical graphs, as per-block compile makes them, share one), totals, and predicted against
measured values if a step ran. graphoffload.report.table explains the table.

    OffloadReport(plans=graphoffload.last_plans()).save_pictures("pictures")

draws the predicted step of every graph; see graphoffload.report.step_picture. `save_html("plan.html")` writes one page with all
of it; see graphoffload.report.page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphoffload.errors import ConfigError, PlanError
from graphoffload.facts.plan import TINY_BYTES, Plan, Prediction
from graphoffload.report.dump import write_pictures, write_step_pictures
from graphoffload.report.ledger import Ledger, fit_lines, ledger_lines
from graphoffload.report.page.content import Shown, content_of, shown_of
from graphoffload.report.page.html import can_draw, framed, page_html, write_page
from graphoffload.report.predictions import predicted_of
from graphoffload.report.step_report import StepReport
from graphoffload.report.table import ACTIONS, bound, folded_rows, percent, table_of, total_lines, totals
from graphoffload.report.table import plan_table as plan_table
from graphoffload.report.table import summary_line as summary_line
from graphoffload.units import format_bytes

_FORMAT = 1
_RELAXED = 1e-6  # a plan that keeps all is faster than keep-all only where it relaxes checkpoint regions


def running(plans: Sequence[Plan]) -> list[Plan]:
    """The plans without those that a graph ran by before its step was planned."""
    stepped = {plan.graph for plan in plans if plan.variant and not plan.part}
    return [plan for plan in plans if plan.graph not in stepped or (plan.variant and not plan.part)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a real step. Bytes are absolute device bytes at the peak; times are one step; None if not measured."""

    peak_bytes: int | None = None
    step_time_s: float | None = None
    keep_step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """The plans of all graphs that one call compiled, their predicted costs and, once run, the measured ones.

    Attributes:
        plans: in the order of compilation.
        graph_breaks: how often the model's code was cut into graphs.
        measured: None until a step ran.
        notes: plans that `tune` tried, or memory that `explain` leaves out, a line each.
        calls: how often each plan's graph ran in the forward that was explained; () if unknown.
        step: where the plans are variants of the graphs of one step, what is planned for the step; None otherwise, and where
            it is unknown. Figures of this class are then the step's.
        ledger, keep_ledger: what the memory at the peak is, for the plan and for keep-all; None if `explain` was not given the
            optimizer, and planned no step.
        budget_bytes: what the peak and the reserve were to stay within; None if unknown, or there was none.
    """

    plans: tuple[Plan, ...] = ()
    graph_breaks: int = 0
    measured: Measured | None = None
    notes: tuple[str, ...] = ()
    calls: tuple[int, ...] = ()
    step: StepReport | None = None
    ledger: Ledger | None = None
    keep_ledger: Ledger | None = None
    budget_bytes: int | None = None

    @property
    def _predictions(self) -> list[Prediction]:
        """One of each graph that is planned alone, and one of each step: its variants have it in common."""
        alone = [plan.prediction for plan in self._running if not plan.variant]
        return [*alone, *dict.fromkeys(plan.prediction for plan in self._running if plan.variant)]

    @property
    def _running(self) -> list[Plan]:
        return running(self.plans)

    @property
    def predicted_peak_bytes(self) -> int:
        """Largest predicted peak of any graph of the call; 0 without a prediction.

        Each plan's peak is absolute: it includes memory outside its graph, as far as its planner knew of it. Graphs that are
        planned one by one, each as if alone, do not know each other's saved activations; this is then a lower bound.
        `reserve_bytes` is not included.
        """
        return max((prediction.predicted_peak_bytes for prediction in self._predictions), default=0)

    @property
    def keep_peak_bytes(self) -> int:
        """Largest keep-all peak of any graph of the call."""
        return max((prediction.keep_peak_bytes for prediction in self._predictions), default=0)

    @property
    def reserve_bytes(self) -> int:
        """Bytes that are left free above a graph's predicted peak, the most of any graph; for example for optimizer state."""
        return max((prediction.reserve_bytes for prediction in self._predictions), default=0)

    @property
    def predicted_slowdown(self) -> float:
        """Extra time of all graphs together relative to keep-all, 0.02 for 2 %; 0.0 if nothing changes or no time is known.

        Negative if checkpoint regions of the model are relaxed: keep-all recomputes them, as plain torch.compile does.
        """
        keep_s = sum(prediction.keep_time_s for prediction in self._predictions)
        changed = any(
            plan.transfers or plan.recomputed_bytes or plan.offloaded_bytes or plan.prediction.predicted_slowdown < -_RELAXED
            for plan in self._running
        )
        planned_s = sum(prediction.predicted_time_s for prediction in self._predictions)
        return planned_s / keep_s - 1.0 if keep_s and changed else 0.0

    @property
    def lower_bound_slowdown(self) -> float | None:
        """Lower bound on the extra time of any plans under the same budgets; None if a graph with times has no bound."""
        timed = [prediction for prediction in self._predictions if prediction.keep_time_s]
        bounds = [prediction.lower_bound_time_s for prediction in timed if prediction.lower_bound_time_s is not None]
        if not timed or len(bounds) < len(timed):
            return None
        return sum(bounds) / sum(prediction.keep_time_s for prediction in timed) - 1.0

    @property
    def lower_bound_peak_bytes(self) -> int | None:
        """Lower bound on the peak of any plans within the same slowdown; None if no graph was planned for a slowdown."""
        bounds = [prediction.lower_bound_peak_bytes for prediction in self._predictions]
        return max((least for least in bounds if least is not None), default=None)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in one forward."""
        return self.step.offloaded_bytes if self.step else totals(folded_rows(self._running))["offload"][1]

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that backward recomputes."""
        return self.step.recomputed_bytes if self.step else totals(folded_rows(self._running))["recompute"][1]

    @property
    def kept_bytes(self) -> int:
        """Bytes kept on the device until backward."""
        return self.step.kept_bytes if self.step else totals(folded_rows(self._running))["keep"][1]

    @property
    def measured_peak_bytes(self) -> int | None:
        """The measured counterpart of predicted_peak_bytes; None until a step ran."""
        return self.measured.peak_bytes if self.measured else None

    @property
    def measured_slowdown(self) -> float | None:
        """The measured counterpart of predicted_slowdown; None until a step ran with this plan and one with everything kept."""
        if self.measured is None or self.measured.step_time_s is None or not self.measured.keep_step_time_s:
            return None
        return self.measured.step_time_s / self.measured.keep_step_time_s - 1.0

    def save_pictures(self, folder: str | Path) -> list[Path]:
        """Write each graph's predicted step into `folder`, as a picture (SVG) and as a trace for Perfetto (JSON); where `step`
        is known, one picture of all of it.

        The picture has compute, D2H and H2D over time with stalls in red, and the memory of keep-all and of the plan. Only the
        process that planned has the prediction: for a plan from a compile cache or from_json the picture says so.

        Returns:
            The files written.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        if self.step is not None:
            name = f"step.{self.plans[0].key[:8] if self.plans else 'nokey'}"
            return write_step_pictures(folder, name, self.step.picture)
        return [path for plan in self.plans for path in write_pictures(folder, plan, predicted_of(plan.key))]

    def save_html(self, path: str | Path, *, others: Sequence[OffloadReport] = ()) -> Path:
        """Write one self-contained page: lanes and memory over the step, what to do with each tensor and why. Needs plotly.

        The page works without a network, and has about 5 MB, since plotly.js is in it.

        Args:
            path: a file such as "plan.html"; its folder is made if needed.
            others: reports of the same model for other budgets. A slider on the page goes through them.

        Returns:
            The file written.

        Raises:
            ConfigError: the report has no plan, plotly is not installed, or the file cannot be written.
        """
        return write_page(path, *self._page(others))

    def _page(self, others: Sequence[OffloadReport] = ()) -> tuple[str, dict[str, Any]]:
        """Title and content of the page."""
        if not self.plans:
            why = "; ".join(self.notes) or "nothing was compiled or explained that saves activations for backward"
            raise ConfigError(f"there is nothing to show: the report has no plan ({why}).")
        own = self._shown()
        title = "graphoffload: one training step" if self.step or len(own) == 1 else f"graphoffload: {len(own)} graphs"
        return title, content_of(own, [other._shown() for other in others], notes=self.notes, text=str(self))

    def _shown(self) -> list[Shown]:
        if self.step is None:
            return shown_of(self._running, budget_bytes=self.budget_bytes)
        return shown_of(self.plans, self.calls, self.step, self.budget_bytes)

    def _repr_html_(self) -> str:
        """The page for a notebook, in a frame; the printed table where there is no plotly, or no plan."""
        if not self.plans or not can_draw():
            return f"<pre>{html.escape(str(self))}</pre>"
        return framed(page_html(*self._page()))

    def to_json(self) -> str:
        """Plans, measurements and, under "derived", every figure of this class; from_json reads it back."""
        names = ("predicted_peak_bytes", "keep_peak_bytes", "lower_bound_peak_bytes", "predicted_slowdown",
                 "lower_bound_slowdown", "offloaded_bytes", "recomputed_bytes", "kept_bytes", "measured_peak_bytes",
                 "measured_slowdown")  # fmt: skip
        data = {
            "format": _FORMAT,
            "graph_breaks": self.graph_breaks,
            "measured": asdict(self.measured) if self.measured else None,
            "notes": self.notes,
            "calls": self.calls,
            "step": asdict(self.step) if self.step else None,
            "ledger": asdict(self.ledger) if self.ledger else None,
            "keep_ledger": asdict(self.keep_ledger) if self.keep_ledger else None,
            "budget_bytes": self.budget_bytes,
            "plans": [json.loads(plan.to_json()) for plan in self.plans],
            "derived": {name: getattr(self, name) for name in names},
        }
        return json.dumps(data, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> OffloadReport:
        """Inverse of to_json; "derived" is computed again.

        Raises:
            PlanError: `text` was not written by to_json of this format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != _FORMAT:
                raise ValueError(f"it has format {data['format']!r}, this version reads {_FORMAT}")
            return cls(
                plans=tuple(Plan.from_json(json.dumps(plan)) for plan in data["plans"]),
                graph_breaks=data["graph_breaks"],
                measured=Measured(**data["measured"]) if data["measured"] else None,
                notes=tuple(data.get("notes", ())),
                calls=tuple(data.get("calls", ())),
                step=StepReport.from_dict(data["step"]) if data.get("step") else None,
                ledger=Ledger(**data["ledger"]) if data.get("ledger") else None,
                keep_ledger=Ledger(**data["keep_ledger"]) if data.get("keep_ledger") else None,
                budget_bytes=data.get("budget_bytes"),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"OffloadReport.to_json did not write this ({type(error).__name__}: {error}; {len(text)} characters). "
                "Write it again with this version of graphoffload."
            ) from error

    def __str__(self) -> str:
        shown = [plan for plan in self._running if not plan.is_tiny] or self._running
        parts = [table_of(group, summary=not group[0].variant) for group in _alike(shown)]
        steps = dict.fromkeys(plan.summary for plan in self._running if plan.variant and plan.summary)
        breaks = f"{self.graph_breaks} graph break{'s' * (self.graph_breaks != 1)}"
        if self.step is not None:
            parts.append("\n".join(self.step.lines()) + "\n")
        elif steps:
            parts.append("\n".join(steps) + "\n")
        if self.step is None and len({plan.graph for plan in self._running}) != 1:
            tiny = len(self._running) - len(shown)
            title = f"all {len(self._running)} graphs" + f", {breaks}" * bool(self.graph_breaks)
            title += f" ({tiny} without a table: less than {format_bytes(TINY_BYTES)} saved, all kept)" * bool(tiny)
            parts.append("\n".join([title, *total_lines(totals(folded_rows(self._running)))]) + "\n")
        elif self.graph_breaks:
            parts.append(f"{breaks}\n")
        lines = [*self._in_one_forward(), *self._against_measured(), *self._memory(), *self.notes]
        return "\n".join([*parts, *lines]).rstrip("\n")

    def _memory(self) -> list[str]:
        """The ledger, and what does not fit."""
        if self.ledger is None or self.keep_ledger is None:
            return []
        fit = fit_lines(self.ledger.total_bytes, self.keep_ledger.total_bytes, self.budget_bytes)
        return [*ledger_lines(self.ledger, self.keep_ledger), *fit, ""]

    def _in_one_forward(self) -> list[str]:
        """Bytes that all calls of one forward hold until backward, if some graph runs more than once (blocks of one shape)."""
        if max(self.calls, default=1) < 2 or self.step is not None:
            return []
        ran = ", ".join(f"{plan.graph} {count} times" for plan, count in zip(self.plans, self.calls, strict=True) if count > 1)
        amounts = [
            f"{action} {format_bytes(sum(plan.bytes_of(action) * n for plan, n in zip(self.plans, self.calls, strict=True)))}"
            for action in ACTIONS
        ]
        return [f"one forward runs {ran}: together they {', '.join(amounts)}", ""]

    def _against_measured(self) -> list[str]:
        """Predicted against measured, one line a figure; empty until a step ran, and for several graphs without predictions."""
        if self.measured is None and (len(self._predictions) < 2 or not self.predicted_peak_bytes):
            return []
        peak, slowdown = self.predicted_peak_bytes, self.predicted_slowdown
        timed = any(plan.prediction.keep_time_s for plan in self.plans)
        least, reserve = self.lower_bound_peak_bytes, self.reserve_bytes
        against = [f"{format_bytes(reserve)} of it reserved"] if reserve and peak else []
        against.append(f"keep-all {format_bytes(self.keep_peak_bytes + reserve)}")
        against += [f"bound {format_bytes(least + reserve)}"] if least else []
        shown = format_bytes(peak + reserve) if peak else "nothing"
        lines = [f"peak      predicted {shown} ({', '.join(against)})"]
        lines.append(f"slowdown  predicted {percent(slowdown) + bound(self.lower_bound_slowdown) if timed else 'nothing'}")
        if self.measured_peak_bytes is not None:
            # It is unknown how much of the reserve was in use by then: a peak between the two is as predicted.
            measured = self.measured_peak_bytes
            due = max(peak, min(measured, peak + reserve))
            off = f" ({percent(measured / due - 1.0)})" if peak and (due != measured or not reserve) else ""
            lines[0] += f", measured {format_bytes(measured)}{off}"
        if self.measured_slowdown is not None:
            lines[1] += f", measured {percent(self.measured_slowdown)}"
        elif self.measured is not None and self.measured.step_time_s is not None:
            lines[1] += f", measured a step of {self.measured.step_time_s * 1e3:.1f} ms"
        return lines


def _alike(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Plans in groups of identical graphs (per-block compile gives one a layer): same rows up to numbers in module paths."""
    groups: dict[tuple[Any, ...], list[Plan]] = {}
    for plan in plans:
        shapes = tuple(
            (re.sub(r"\d+", "#", row.module), row.op, row.shape, row.dtype, row.action, row.why, row.count, row.nbytes)
            for row in folded_rows([plan])
        )
        groups.setdefault((plan.device, plan.notes, shapes), []).append(plan)
    return list(groups.values())
