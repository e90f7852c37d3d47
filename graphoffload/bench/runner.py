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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphoffload.bench import measure, overlap, results
from graphoffload.bench.jax_row import measure_jax
from graphoffload.bench.measure import Row, Session
from graphoffload.bench.models import Workload, build
from graphoffload.bench.observed import REPEATS, forget_plans, heard, our_plans, our_stats, twin_error
from graphoffload.bench.packages import NotMeasurable
from graphoffload.bench.run_options import Options, baseline_row
from graphoffload.bench.table import progress_line, show_table
from graphoffload.bench.variants import Eligible, Variant, apply, parse
from graphoffload.bench.verdict import IN_PLAIN, NothingTrainsError, failed, first_line, judge, tolerance_of
from graphoffload.errors import ConfigError
from graphoffload.report.progress import Bar
from graphoffload.torch_internals import dynamo
from graphoffload.torch_internals.modules import compiled_call


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
            "subject": results.subject_of(model, {**(options.sizes or {}), **options.recipe.changes()}, tiny=options.tiny),
            "block": options.block,
            **results.circumstances(options.command or shlex.join(["python", *sys.argv]), options.commit, self.device.type),
        }
        self.began = time.perf_counter()
        self.eligible = Eligible()
        self.baseline: Session | None = None
        self.reference: list[Tensor] = []
        self.reference_loss = float("nan")
        self.said: list[str] = []
        self.noise: float | None = None
        self.repeat_noise = 0.0
        self.fatal = ""
        self.compares_compiled = True
        self.bar = Bar()
        self.plain = ""  # the status of keep-all
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
        options = self.options
        return build(
            self.model, self.device, options.sizes, tiny=options.tiny, dtype=options.dtype, recipe=options.recipe
        )  # fmt: skip

    def session(self, variant: Variant) -> Session:
        """A fresh model under a variant; what is allocated between steps exists before anything is planned."""
        workload = self.fresh()
        if self.baseline is not None:
            measure.share_parameters(workload.module, self.baseline.workload.module)
        session = Session(workload, contextlib.nullcontext, self.baseline)
        try:
            session.context = apply(variant, workload, self.eligible, session.own_bytes())
        except Exception:
            session.close()
            raise
        return session

    def start(self) -> None:
        """Compile and measure the baseline, keep its gradients, and learn how far rounding alone goes.

        Raises:
            NothingTrainsError: no baseline trains.
            ConfigError: there is no such model, or size of it.
        """
        for name in self.options.baselines:
            self.say(f"{self.model} on {self.facts['device']}, torch {torch.__version__}: building {baseline_row(name)}")
            row, session = Row(f"{baseline_row(name)} before"), None
            self.bar.doing(f"{baseline_row(name)}: compiling and measuring")
            try:
                self.compares_compiled = parse(name).compiled
                session = self.session(parse(name))
                self._measure_baseline(row, session)
                break
            except Exception as error:
                if isinstance(error, ConfigError) and not isinstance(error, NotMeasurable):
                    raise
                failed(row, error)
                if name == "keep":
                    row.status = self.plain = row.status.replace("FAILED: ", IN_PLAIN)
                self._add(row)
                self._close(session)
        else:
            said = "; ".join(f"{row.variant.removesuffix(' before')} {row.status}" for row in self.rows)
            raise NothingTrainsError(
                f"{self.model}: nothing that others could be compared with trains: {said}. Try a smaller --size."
            )
        self.facts["baseline"] = baseline_row(name)
        self.bar.advance()
        if self.options.solo:
            session.close()
            measure.tidy()
        else:
            self.baseline = session

    def _measure_baseline(self, row: Row, session: Session) -> None:
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
            f"gradients of two {row.variant.removesuffix(' before')} steps differ by {self.repeat_noise:.2g}, of eager by "
            + (f"{self.noise:.2g}" if self.noise is not None else "(unknown)")
        )

    def _eager_noise(self, session: Session) -> None:
        if session.workload.random or not self.compares_compiled:
            return
        try:
            with torch.compiler.set_stance("force_eager"):
                session.step()
            self.noise = session.check(self.reference, 0.0).error
        except Exception as error:
            self.say(f"eager step for the noise failed: {first_line(error)}")
        measure.tidy()
        if self.noise is None:
            session.step()  # one that failed has left no gradients, which are shared

    def _finish_keep_row(self, row: Row, session: Session) -> None:
        check = session.check(self.reference, 0.0)
        _, row.gradient_norm, _ = measure.compare_gradients(self.reference, self.reference)
        row.gradient_error = self.repeat_noise if row.variant.endswith("before") else check.error
        row.loss = row.samples[-1].loss
        peaks = [s.peak_bytes for s in row.samples if s.peak_bytes is not None]
        row.peak_bytes = max(peaks) if peaks else session.peak_bytes()
        row.own_bytes = session.own_bytes()
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
        rows: list[Row] = []
        lanes: list[_Lane] = []
        with self._watched(texts), heard() as self.said:
            for text in texts:
                row, lane = self._prepare(text, rows)
                rows.append(row)
                lanes += [lane] if lane is not None else []
            self._measure(lanes)
            self.rows += rows
            self.write()
            pinned_bytes = measure.pinned_bytes()
            for lane in lanes:
                lane.row.pinned_bytes = pinned_bytes
                self.bar.doing(f"{lane.row.variant}: checking copies and gradients")
                self._look_closer(lane)
        self._notice_dead_device()
        self.write()
        for row in rows:
            self.say(progress_line(row))
        self.bar.advance(len(rows))
        return rows

    def _measure(self, lanes: list[_Lane]) -> None:
        """Lanes in turns; where one of them fails, each by itself, so that none has another's error."""
        if not lanes:
            return
        self.bar.doing(f"measuring {', '.join(lane.row.variant for lane in lanes)}")
        try:
            self.in_turns(
                [(lane.row, lane.session) for lane in lanes], self.baseline, self.reference, steps=self.options.steps,
                block=self.options.block,
            )  # fmt: skip
            return
        except Exception as error:
            if len(lanes) == 1:
                failed(lanes[0].row, error, self.plain)
                return
        measure.tidy()  # here, where no traceback holds what the failed step had allocated
        for lane in lanes:
            lane.row.samples.clear()
            self._measure([lane])

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

    def _prepare(self, text: str, rows: list[Row]) -> tuple[Row, _Lane | None]:
        """A variant compiled and warm, or a row that says why not."""
        row = Row(text)
        if self.fatal or self.elapsed_s() > self.options.limit_s:
            row.status = f"SKIPPED: {self.fatal or 'out of time'}"
            return row, None
        began, session = time.perf_counter(), None
        self.bar.doing(f"{text}: compiling")
        try:
            variant = self._with_bytes(parse(text), rows)
            row.ours |= {"said": self.said} if variant.ours else {}
            if variant.kind == "jax" and self.baseline is not None:
                measure_jax(row, variant.argument, self.baseline, self.reference, self.options.steps, self.noise or 0.0)
                return row, None
            if self.options.solo:
                torch.compiler.reset()
            forget_plans()
            session = self.session(variant)
            graphs = measure.graphs_compiled()
            row.compile_s = measure.warm_up(session, self.options.warm_up)
            row.graphs = measure.graphs_compiled() - graphs
            row.peak_bytes, row.own_bytes = session.peak_bytes(), session.own_bytes()
            if variant.ours:
                self._note_plans(variant, row, session)
            self.say(f"{text}: ready after {time.perf_counter() - began:.1f} s")
            return row, _Lane(variant, row, session)
        except Exception as error:
            failed(row, error, self.plain if row.variant != "keep" else "")
            self._close(session)
            return row, None

    def _with_bytes(self, variant: Variant, beside: list[Row]) -> Variant:
        """A variant whose budget is what another one was seen to take, with that in bytes.

        Raises:
            NotMeasurable: the other one was not measured.
        """
        other = variant.relative_to
        if not other:
            return variant
        for row in (*beside, *self.rows):
            if row.variant in (other, f"{baseline_row(other)} before") and row.peak_bytes is not None:
                return variant.within(row.peak_bytes)
        raise NotMeasurable(f"{other} has no peak that could be its budget")

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
                judge(
                    lane.variant, lane.row, lane.session, noise=self.noise, repeat_noise=self.repeat_noise,
                    tolerance=tolerance_of(lane.session, self.options.tolerance, self.compares_compiled),
                )  # fmt: skip
        except Exception as error:
            failed(lane.row, error)
        self._close(lane.session)

    def _close(self, session: Session | None) -> None:
        if session is not None:
            session.close()
        with contextlib.suppress(Exception):
            measure.tidy()

    def _measure_ours(self, row: Row, session: Session) -> None:
        if row.ours["per_step"].get("d2h_bytes"):
            row.ours["twin_error"], row.ours["twin_noise"] = twin_error(session) or (None, None)
        if self.options.trace and self.device.type == "cuda":
            self._trace(row, session)

    def _trace(self, row: Row, session: Session) -> None:
        name = "".join(letter if letter.isalnum() else "_" for letter in row.variant)[:40]
        path = self.options.out / f"trace_{name}.json.gz" if self.options.out else None
        timeline = overlap.profile(session.step, path)
        row.ours["timeline"] = timeline.to_dict()
        for line in timeline.lines():
            self.say(f"    {line}")

    def _notice_dead_device(self) -> None:
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except Exception as error:
                self.fatal = f"the device is unusable: {first_line(error)}"

    def _hung(self, text: str, limit_s: float) -> None:
        print(f"[{self.elapsed_s():6.1f} s] {text} took more than {limit_s:.0f} s: giving up", flush=True)
        faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
        row = Row(text, status=f"HUNG: more than {limit_s:.0f} s", ours={"said": self.said})
        self.rows.append(row)
        self.write()
        show_table(self.rows, self.facts)
        sys.stdout.flush()
        os._exit(3)

    def finish(self) -> None:
        """Keep-all once more, the table, and the JSON."""
        if not self.fatal and self.elapsed_s() < self.options.limit_s + 20 and len(self.rows) > 1:
            row = Row(f"{self.facts['baseline']} after")
            session = self.baseline
            if session is None:
                torch.compiler.reset()
                session = self.session(parse(self.facts["baseline"].replace("keep-all", "keep")))
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

    def close(self) -> None:
        """Give back what was kept for comparison, and the code of all variants: another model may follow in this process."""
        self._close(self.baseline)
        self.baseline, self.reference = None, []
        torch.compiler.reset()
        measure.tidy()

    def _ratios_to_both_ends(self) -> None:
        ends = [s for row in self.rows if row.variant.startswith(self.facts["baseline"]) for s in row.samples]
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
