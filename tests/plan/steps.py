"""Training steps to plan: generated ones, and a stack of blocks with the sizes of a Llama on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step
from graphoffload.planner.step.facts import CallFacts, Gap, StepFacts, Variant
from graphoffload.planner.step.joint import Joined
from tests.plan.instances import programs
from tests.plan.recordings import load


def alone(program: Program) -> Program:
    """The program as that of one call: no static bytes, no chains, buffers that end in the half that they begin in."""
    forward_steps = len(program.forward)
    buffers = []
    for buffer in program.buffers:
        last = min(buffer.last, forward_steps - 1) if buffer.first < forward_steps else buffer.last
        buffers.append(replace(buffer, last=last))
    candidates = tuple(
        replace(c, recompute=None, fixed=None if c.fixed == "recompute" else c.fixed) for c in program.candidates
    )
    return replace(program, buffers=tuple(buffers), candidates=candidates, static_bytes=0)


@st.composite
def steps(draw: st.DrawFn, *, most_calls: int = 4, most: int = 4) -> StepFacts:
    """One or two graphs of one or two variants each, a few calls, and memory outside that rises and falls."""
    nbytes = st.integers(0, 30)
    graphs = []
    for graph in range(draw(st.integers(1, 2))):
        variants = []
        for index in range(draw(st.integers(1, 2))):
            program = alone(draw(programs(most=most, free=True)))
            if draw(st.booleans()):  # kernels of two steps
                program = replace(program, reload_steps=tuple(at - at % 2 for at in range(len(program.backward))))
            variants.append(Variant(f"{graph}.{index}", frozenset(), program, draw(st.sampled_from([0, 0, 4]))))
        graphs.append(tuple(variants))
    calls = []
    for _ in range(draw(st.integers(1, most_calls))):
        graph = draw(st.integers(0, len(graphs) - 1))
        ran = draw(st.integers(0, len(graphs[graph]) - 1))
        gaps = [Gap(draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([0, 20, 60]))) for _ in range(2)]
        calls.append(CallFacts(graph, draw(nbytes) + 20, draw(nbytes) + 20, ran, *gaps))
    return StepFacts(tuple(graphs), tuple(calls), base_bytes=draw(st.sampled_from([0, 5, 30])))


MB = 1_000_000
_POINTWISE = ("norm1", "rotary_q", "rotary_k", "residual1", "norm2", "silu")  # what "light" recomputes, and more below
_SAVED = (  # name, MB, share of the forward after which it is produced, share of the backward at which it is read
    ("norm1", 134, 0.02, 0.97),
    ("q", 134, 0.10, 0.80),
    ("k", 34, 0.14, 0.80),
    ("v", 34, 0.18, 0.80),
    ("rotary_q", 134, 0.20, 0.78),
    ("rotary_k", 34, 0.21, 0.78),
    ("attention", 134, 0.36, 0.70),
    ("residual1", 134, 0.44, 0.56),
    ("norm2", 134, 0.46, 0.52),
    ("gate", 470, 0.62, 0.22),
    ("up", 470, 0.78, 0.21),
    ("gated", 470, 0.80, 0.04),
)
_RECOMPUTES = {
    "all kept": (),
    "light": ("norm1", "rotary_q", "rotary_k", "norm2", "gated"),
    "matmuls kept": ("norm1", "rotary_q", "rotary_k", "norm2", "gated", "residual1"),
    "attention kept": ("norm1", "q", "k", "v", "rotary_q", "rotary_k", "norm2", "gated", "residual1"),
    "all": tuple(name for name, *_ in _SAVED),
}
_EXTRA_S = {"all kept": 0.0, "light": 0.24e-3, "matmuls kept": 0.3e-3, "attention kept": 1.5e-3, "all": 12.5e-3}


def block(name: str, count: int = 40) -> Program:
    """One variant of a block: 13 ms forward, 27 ms backward in `count` steps each, before what it recomputes."""
    recomputed = _RECOMPUTES[name]
    forward = tuple(Step(f"f{i}", 13e-3 / count, 60 * MB) for i in range(count))
    backward = tuple(Step(f"b{i}", 27e-3 / count, 140 * MB) for i in range(count))
    saved = []
    buffers = [Buffer("grad", 134 * MB, count, 2 * count - 1)]
    extra = [0.0] * count
    for label, size, produced, used in _SAVED:
        at, use = int(produced * count), int(used * count)
        if label not in recomputed:
            saved.append(Candidate(label, size * MB, at, min(at + 2, count - 1), (use, min(use + 2, count - 1))))  # type: ignore[arg-type]
            continue
        buffers.append(Buffer(label, size * MB, at, min(at + 2, count - 1)))
        first = 0 if name == "all" else use
        extra[first] += _EXTRA_S[name] / len(recomputed)
        buffers.append(Buffer(f"{label} again", size * MB, count + first, count + min(use + 2, count - 1)))
    backward = tuple(replace(step, time_s=step.time_s + more) for step, more in zip(backward, extra, strict=True))
    return Program(forward, backward, tuple(buffers), tuple(saved))


_CHAINS = {  # ms, and what each is computed from; norm1 and residual1 read the block's input as well
    "norm1": (0.05, ()), "q": (0.8, ("norm1",)), "k": (0.2, ("norm1",)), "v": (0.2, ("norm1",)),
    "rotary_q": (0.05, ("q",)), "rotary_k": (0.02, ("k",)), "attention": (2.4, ("rotary_q", "rotary_k", "v")),
    "residual1": (0.06, ("attention",)), "norm2": (0.05, ("residual1",)),
    "gate": (4.3, ("norm2",)), "up": (4.3, ("norm2",)), "gated": (0.07, ("gate", "up")),
}  # fmt: skip


def chained(count: int = 40) -> Program:
    """The block that keeps everything, with the chains of what can be recomputed."""
    program = block("all kept", count)
    index = {candidate.name: k for k, candidate in enumerate(program.candidates)}
    candidates = []
    for candidate in program.candidates:
        time_ms, reads = _CHAINS[candidate.name]
        chain = Recompute(time_ms * 1e-3, tuple(sorted(index[name] for name in reads)))
        candidates.append(replace(candidate, recompute=chain))
    return replace(program, candidates=tuple(candidates))


def with_ops(facts: StepFacts, joined: Joined, chosen: Sequence[int], offloaded: set[int]) -> set[int]:
    """Candidates that are offloaded, and those that stay in a call whose code could copy them: another call of it does."""
    code = [(facts.calls[call].graph, chosen[call], own) for call, own in joined.of]
    copied = {code[at] for at in offloaded}
    return {at for at, key in enumerate(code) if key in copied}


def less_than_keep_all(program: Program, offloaded: set[int], away: set[int], step: int) -> int:
    """Bytes that keep-all holds at a step and a plan does not, if these candidates have ops and those have no copy here.

    What a kernel writes over under keep-all is still there if it was reloaded, or could have been.
    """
    less = 0
    for index in offloaded:
        candidate = program.candidates[index]
        over, last = candidate.overwritten_at, len(program.forward) + candidate.backward_uses[-1]
        kept = step <= (last if over is None else len(program.forward) + over - 1)
        if index in away:
            less += candidate.nbytes * kept
        elif step <= last and not kept:
            less -= candidate.nbytes
    return less


def llama(blocks: int, *, count: int = 40, names: tuple[str, ...] = tuple(_RECOMPUTES)) -> StepFacts:
    """A stack of equal blocks with an eager loss of 20 ms and 7 GB; each block saves its input of 134 MB."""
    variants = tuple(Variant(name, frozenset(_RECOMPUTES[name]), block(name, count), 134 * MB) for name in names)
    static = 16_000 * MB
    calls = []
    for index in range(blocks):
        outside = static + 134 * MB * (index + 1)
        loss = Gap(20e-3, outside + 7_000 * MB) if index == blocks - 1 else Gap()
        calls.append(CallFacts(0, outside, outside + 134 * MB, before_backward=loss))
    return StepFacts((variants,), tuple(calls), static, (chained(count),))


def recomputing(program: Program, names: set[str]) -> Program:
    """The program of a variant that computes these candidates again, each right before its first use."""
    forward_steps, backward = len(program.forward), list(program.backward)
    buffers = list(program.buffers)
    for candidate in program.candidates:
        if candidate.name in names:
            first, last = candidate.backward_uses[0], candidate.backward_uses[-1]
            buffers.append(Buffer(candidate.name, candidate.nbytes, candidate.produced_at, candidate.last_forward_use))
            buffers.append(Buffer(f"{candidate.name} again", candidate.nbytes, forward_steps + first, forward_steps + last))
            time_s = candidate.recompute.time_s if candidate.recompute else 0.0
            backward[first] = replace(backward[first], time_s=backward[first].time_s + time_s)
    kept = tuple(replace(candidate, recompute=None) for candidate in program.candidates if candidate.name not in names)
    return alone(replace(program, backward=tuple(backward), buffers=tuple(buffers), candidates=kept))


_LLAMA_BLOCK = {  # by name, what of the recorded block it computes again
    "all kept": set[str](),
    "pointwise": {"rsqrt", "mul_1", "rsqrt_1", "mul_7", "mul_8"},
    "attention kept": {"rsqrt", "mul_1", "rsqrt_1", "mul_7", "mul_8", "mm_2", "add_1", "add_2", "mm_3"},
    "gate too": {"rsqrt", "mul_1", "rsqrt_1", "mul_7", "mul_8", "mm_2", "add_1", "add_2", "mm_3", "mm_4"},
}


def recorded_llama(blocks: int) -> StepFacts:
    """A stack of the recorded block of a Llama, its loss as in `llama`; every variant saves the block's input."""
    program = load("llama-block")
    whole = replace(program, buffers=alone(program).buffers, static_bytes=0)
    variants = tuple(
        Variant(name, frozenset(names), recomputing(whole, names), 134 * MB) for name, names in _LLAMA_BLOCK.items()
    )
    calls = []
    for index in range(blocks):
        outside = 16_000 * MB + 134 * MB * (index + 1)
        loss = Gap(20e-3, outside + 7_000 * MB) if index == blocks - 1 else Gap()
        calls.append(CallFacts(0, outside, outside + 134 * MB, before_backward=loss))
    return StepFacts((variants,), tuple(calls), 16_000 * MB, (whole,))
