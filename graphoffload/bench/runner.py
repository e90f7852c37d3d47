"""Runs variants one after another against compiled keep-all, keeps going when one fails, and writes everything down at once.

    runner = Runner("llama4k", device, Options(steps=10, limit_s=540, out=folder))
    runner.start();  runner.run("offload:5.8GB");  runner.finish()

A hang cannot eat the call: past its limit the process writes what it has, says where it hung, and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphoffload.bench import measure, overlap, results
from graphoffload.bench.measure import Row, Session
from graphoffload.bench.models import Workload, build
from graphoffload.bench.observed import REPEATS, forget_plans, our_plans, our_stats, twin_error
from graphoffload.bench.table import progress_line, show_table
from graphoffload.bench.variants import Eligible, Variant, apply, parse
from graphoffload.torch_internals import dynamo
from graphoffload.torch_internals.modules import compiled_call


@dataclass(slots=True)
class Options:
    """How to measure.

    Attributes:
        solo: one model at a time; the baseline runs before and after instead of in between, and is not resident.
        limit_s: seconds after which remaining variants are skipped. variant_limit_s: one variant may take this long.
        tolerance: whole-gradient error above which (and above 1.5 x eager's) a variant is WRONG; None: by dtype.
        trace: profile one step of each variant of graphoffload.
        commit, command: what the files say of this run; found out where not given.
    """

    steps: int = 10
    block: int = 5
    warm_up: int = measure.WARM_UP_STEPS
    solo: bool = False
    limit_s: float = 540.0
    variant_limit_s: float = 200.0
    tolerance: float | None = None
    trace: bool = False
    tiny: bool = False
    sizes: dict[str, int] | None = None
    dtype: torch.dtype | None = None
    out: Path | None = None
    quiet: bool = False
    commit: str = ""
    command: str = ""


@dataclass(slots=True)
class _Lane:
    """A variant that is compiled and warm."""

    variant: Variant
    row: Row
    session: Session


class Runner:
    """One call: one model, one baseline, many variants. `in_turns` measures those that are ready, as measure.in_turns does."""

    def __init__(
        self, model: str, device: torch.device | str, options: Options, in_turns: Callable[..., None] = measure.in_turns
    ) -> None:
        self.model, self.device, self.options, self.in_turns = model, torch.device(device), options, in_turns
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {
            "model": model,
            "subject": results.subject_of(model, options.sizes or {}, tiny=options.tiny),
            "block": options.block,
            **results.circumstances(options.command or shlex.join(["python", *sys.argv]), options.commit, self.device.type),
        }
        self.began = time.perf_counter()
        self.eligible = Eligible()
        self.baseline: Session | None = None
        self.reference: list[Tensor] = []
        self.reference_loss = float("nan")
        self.noise: float | None = None
        self.repeat_noise = 0.0
        self.fatal = ""
        dynamo.config.recompile_limit = 512
        dynamo.config.accumulated_recompile_limit = 4096

    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self.began

    def say(self, text: str) -> None:
        """A progress line with the time."""
        if not self.options.quiet:
            print(f"[{self.elapsed_s():6.1f} s] {text}", flush=True)

    def fresh(self) -> Workload:
        """The model from the same seed."""
        return build(self.model, self.device, self.options.sizes, tiny=self.options.tiny, dtype=self.options.dtype)

    def session(self, variant: Variant) -> Session:
        """A fresh model under a variant; gradients exist before anything is planned."""
        workload = self.fresh()
        if self.baseline is not None:
            measure.share_parameters(workload.module, self.baseline.workload.module)
        measure.materialise_gradients(workload.module)
        return Session(workload, apply(variant, workload, self.eligible))

    def start(self) -> None:
        """Compile and measure keep-all, keep its gradients, and learn how far rounding alone goes."""
        self.say(f"{self.model} on {self.facts['device']}, torch {torch.__version__}: building keep-all")
        row = Row("keep-all before")
        session = self.session(parse("keep"))
        row.compile_s = measure.warm_up(session, self.options.warm_up)
        row.samples = [session.step() for _ in range(self.options.steps)]
        self.reference = session.gradients("cpu" if self.options.solo else None)
        self.reference_loss = row.samples[-1].loss
        for _ in range(REPEATS):
            session.step()
            self.repeat_noise = max(self.repeat_noise, session.check(self.reference, 0.0).error)
        self._eager_noise(session)
        self._finish_keep_row(row, session)
        self.facts.update(
            sizes=session.workload.sizes, eager_noise=self.noise, repeat_noise=self.repeat_noise, tokens=session.workload.tokens
        )
        self.say(
            f"gradients of two keep-all steps differ by {self.repeat_noise:.2g}, of eager by "
            + (f"{self.noise:.2g}" if self.noise is not None else "(unknown)")
        )
        if self.options.solo:
            session.close()
            measure.tidy()
        else:
            self.baseline = session

    def _eager_noise(self, session: Session) -> None:
        if session.workload.random:
            return
        try:
            with torch.compiler.set_stance("force_eager"):
                session.step()
            self.noise = session.check(self.reference, 0.0).error
        except Exception as error:
            self.say(f"eager step for the noise failed: {_first_line(error)}")
        measure.tidy()

    def _finish_keep_row(self, row: Row, session: Session) -> None:
        check = session.check(self.reference, 0.0)
        _, row.gradient_norm, _ = measure.compare_gradients(self.reference, self.reference)
        row.gradient_error = self.repeat_noise if row.variant.endswith("before") else check.error
        row.loss = row.samples[-1].loss
        row.peak_bytes = max((s.peak_bytes for s in row.samples if s.peak_bytes is not None), default=None)
        self._add(row)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.say(progress_line(row))
        self.write()

    def run(self, text: str) -> Row:
        """Measure one variant; whatever goes wrong ends up in its row."""
        return self.run_in_turns([text])[0]

    def run_in_turns(self, texts: list[str]) -> list[Row]:
        """Measure variants in turns, each alternating with the others and with keep-all, whose steps all of them share.

        All have one copy of the weights and gradients, so that it takes no more memory than one of them does.
        """
        rows, lanes = [], []
        with self._watched(texts):
            for text in texts:
                row, lane = self._prepare(text)
                rows.append(row)
                lanes += [lane] if lane is not None else []
            try:
                if lanes:
                    self.in_turns(
                        [(lane.row, lane.session) for lane in lanes], self.baseline, self.reference,
                        steps=self.options.steps, block=self.options.block,
                    )  # fmt: skip
            except Exception as error:
                for lane in lanes:
                    _failed(lane.row, error)
            self.rows += rows
            self.write()
            pinned_bytes = measure.pinned_bytes()
            for lane in lanes:
                lane.row.pinned_bytes = pinned_bytes
                self._look_closer(lane)
        self._notice_dead_device()
        self.write()
        for row in rows:
            self.say(progress_line(row))
        return rows

    @contextlib.contextmanager
    def _watched(self, texts: list[str]) -> Iterator[None]:
        limit_s = self.options.variant_limit_s * len(texts)
        watchdog = threading.Timer(limit_s, self._hung, args=(", ".join(texts), limit_s))
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def _prepare(self, text: str) -> tuple[Row, _Lane | None]:
        """A variant compiled and warm, or a row that says why not."""
        row = Row(text)
        if self.fatal or self.elapsed_s() > self.options.limit_s:
            row.status = f"SKIPPED: {self.fatal or 'out of time'}"
            return row, None
        began, session = time.perf_counter(), None
        try:
            variant = parse(text)
            if self.options.solo:
                torch.compiler.reset()
            forget_plans()
            session = self.session(variant)
            graphs = measure.graphs_compiled()
            row.compile_s = measure.warm_up(session, self.options.warm_up)
            row.graphs = measure.graphs_compiled() - graphs
            if variant.ours:
                self._note_plans(variant, row, session)
            self.say(f"{text}: ready after {time.perf_counter() - began:.1f} s")
            return row, _Lane(variant, row, session)
        except Exception as error:
            _failed(row, error)
            self._close(session)
            return row, None

    def _note_plans(self, variant: Variant, row: Row, session: Session) -> None:
        """What was planned, and what one step moves."""
        row.ours["plans"] = our_plans()
        before = our_stats()
        row.ours["static_bytes"] = session.step().static_bytes  # sessions that are compiled later bring their buffers
        row.ours["per_step"] = {name: value - before.get(name, 0) for name, value in our_stats().items()}
        row.ours["config"] = repr(compiled_call(session.workload.module))[:200] if row.ours["plans"] == [] else ""
        if variant.kind == "offload" and variant.argument == "all" and not variant.options and not variant.per_block:
            self.eligible.note(session.workload, int(row.ours["per_step"].get("d2h_bytes", 0)))

    def _look_closer(self, lane: _Lane) -> None:
        """What takes steps of its own, after all were measured; then the lane is closed."""
        try:
            if lane.row.samples and lane.variant.ours:
                self._measure_ours(lane.row, lane.session)
            if lane.row.status == "ok":
                self._judge(lane.variant, lane.row, lane.session)
        except Exception as error:
            _failed(lane.row, error)
        self._close(lane.session)

    def _close(self, session: Session | None) -> None:
        if session is not None:
            session.close()
        with contextlib.suppress(Exception):
            measure.tidy()

    def _measure_ours(self, row: Row, session: Session) -> None:
        if row.ours["per_step"].get("d2h_bytes"):
            row.ours["twin_error"], row.ours["twin_noise"] = twin_error(session, self.reference) or (None, None)
        if self.options.trace and self.device.type == "cuda":
            self._trace(row, session)

    def _trace(self, row: Row, session: Session) -> None:
        name = "".join(letter if letter.isalnum() else "_" for letter in row.variant)[:40]
        path = self.options.out / f"trace_{name}.json.gz" if self.options.out else None
        timeline = overlap.profile(session.step, path)
        row.ours["timeline"] = timeline.to_dict()
        for line in timeline.lines():
            self.say(f"    {line}")

    def _judge(self, variant: Variant, row: Row, session: Session) -> None:
        """Set the status: gradients first, then whether anything was compiled at all."""
        tolerance = self.options.tolerance
        if tolerance is None:
            tolerance = 1e-4 if session.parameters[0].dtype == torch.float32 else 1e-2
        noise = 1.5 * self.noise if self.noise is not None else 3 * self.repeat_noise  # eager draws other random numbers
        limit = max(tolerance, noise)
        comparable = variant.compiled or not session.workload.random
        twin = row.ours.get("twin_error")
        error = row.gradient_error
        if comparable and error is not None and not error <= limit:
            row.status = f"WRONG: gradient error {error:.3g} > {limit:.3g}"
        elif twin is not None and not twin <= max(5 * self.repeat_noise, 5 * row.ours["twin_noise"], 1e-6):
            row.status = f"WRONG: {twin:.3g} from its synchronous twin, which repeats to {row.ours['twin_noise']:.3g}"
        elif variant.compiled and row.graphs == 0:
            row.status = "NOT COMPILED: another variant's code ran"
        elif not comparable:
            row.status = "ok (other random numbers)"

    def _notice_dead_device(self) -> None:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as error:
                self.fatal = f"the device is unusable: {_first_line(error)}"

    def _hung(self, text: str, limit_s: float) -> None:
        print(f"[{self.elapsed_s():6.1f} s] {text} took more than {limit_s:.0f} s: giving up", flush=True)
        faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
        row = Row(text, status=f"HUNG: more than {limit_s:.0f} s")
        self.rows.append(row)
        self.write()
        show_table(self.rows, self.facts)
        sys.stdout.flush()
        os._exit(3)

    def finish(self) -> None:
        """Keep-all once more, the table, and the JSON."""
        if not self.fatal and self.elapsed_s() < self.options.limit_s + 20 and len(self.rows) > 1:
            row = Row("keep-all after")
            session = self.baseline
            if session is None:
                torch.compiler.reset()
                session = self.session(parse("keep"))
                row.compile_s = measure.warm_up(session, self.options.warm_up)
            row.samples = [session.step() for _ in range(self.options.steps)]
            if self.rows[0].samples:
                measure.compare_times(row, self.rows[0].samples)
            self._finish_keep_row(row, session)
        if self.options.solo:
            self._ratios_to_both_ends()
        self.write()
        if not self.options.quiet:
            show_table(self.rows, self.facts)

    def _ratios_to_both_ends(self) -> None:
        ends = [s for row in self.rows if row.variant.startswith("keep-all") for s in row.samples]
        for row in self.rows[1:]:
            measure.compare_times(row, ends)

    def write(self) -> None:
        """Everything so far, as JSON."""
        if self.options.out is None:
            return
        self.options.out.mkdir(parents=True, exist_ok=True)
        content = {**self.facts, "rows": [row.to_dict() for row in self.rows]}
        tiny = "_tiny" if self.options.tiny else ""
        (self.options.out / f"{self.model}{tiny}.json").write_text(json.dumps(content, indent=1, default=str))


def _failed(row: Row, error: Exception) -> None:
    row.status = f"FAILED: {type(error).__name__}: {_first_line(error)}"
    row.ours["traceback"] = "".join(traceback.format_exception(error))[-6000:]
    error.__traceback__ = None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0][:300]
