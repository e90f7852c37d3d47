"""Generated planning instances, and a stack of equal layers of any depth."""

from __future__ import annotations

from hypothesis import strategies as st

from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step


def toy(
    bytes_per_s: float = 1.0, *, latency_s: float = 0.0, slowdown: float = 0.0, host_s_per_copy: float = 0.0
) -> HardwareProfile:
    """A link of so many bytes a second each way."""
    return HardwareProfile(
        name="toy",
        source="datasheet",
        memory_bytes=1000,
        d2h_bytes_per_s=bytes_per_s,
        h2d_bytes_per_s=bytes_per_s,
        copy_latency_s=latency_s,
        compute_slowdown_while_copying=slowdown,
        host_s_per_copy=host_s_per_copy,
    )


@st.composite
def hardwares(draw: st.DrawFn) -> HardwareProfile:
    """Links from far too slow to far too fast for `programs`, of hosts that are late or not."""
    rate, late_s = draw(st.sampled_from([2.0, 10.0, 40.0, 1000.0])), draw(st.sampled_from([0.0, 0.0, 0.3, 2.0]))
    latency_s, slowdown = draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0.0, 0.04, 0.5]))
    return toy(rate, latency_s=latency_s, slowdown=slowdown, host_s_per_copy=late_s)


@st.composite
def programs(draw: st.DrawFn, *, most: int = 7, free: bool = False) -> Program:
    """A few steps, candidates with chains over each other or that a kernel writes over, a buffer, workspaces; `free`: no fixed
    actions."""
    forward_steps, backward_steps = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    time_s = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    forward = tuple(Step(f"f{i}", draw(time_s), draw(st.integers(0, 5))) for i in range(forward_steps))
    backward = tuple(Step(f"b{i}", draw(time_s), draw(st.integers(0, 5))) for i in range(backward_steps))
    candidates: list[Candidate] = []
    produced = sorted(draw(st.lists(st.integers(0, forward_steps - 1), min_size=1, max_size=most)))
    for index, position in enumerate(produced):
        reads = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set[int]()
        chain = Recompute(draw(st.sampled_from([0.0, 0.1, 0.7, 2.0])), tuple(sorted(reads)), draw(st.integers(0, 8)))
        recompute = chain if draw(st.integers(0, 3)) else None
        uses = draw(st.sets(st.integers(0, backward_steps - 1), max_size=3))
        over = draw(st.none() | st.integers(min(uses), max(uses))) if uses else None
        can_offload = draw(st.integers(0, 4)) > 0
        fixed = None
        if not free and draw(st.integers(0, 5)) == 0:
            fixed = draw(
                st.sampled_from(["keep", *(["offload"] if can_offload else []), *(["recompute"] if recompute else [])])
            )
        last = draw(st.integers(position, forward_steps - 1))
        size = draw(st.integers(0, 20))
        group = draw(st.sampled_from(["", "g"]))
        candidates.append(
            Candidate(f"x{index}", size, position, last, tuple(sorted(uses)), can_offload, recompute, fixed, group, over)
        )  # type: ignore[arg-type]
    first = draw(st.integers(0, forward_steps + backward_steps - 1))
    last = draw(st.integers(first, forward_steps + backward_steps - 1))
    return Program(
        forward, backward, (Buffer("other", draw(st.integers(0, 20)), first, last),), tuple(candidates), static_bytes=3
    )


def stack(layers: int) -> Program:
    """Equal layers: a residual that chains start from, cheap pointwise tensors, dear large ones; 3 ms a layer."""
    forward, backward, candidates, uses = (
        [Step("embed", 1e-5)],
        [Step("d_loss", 1e-3)],
        list[Candidate](),
        dict[int, list[int]](),
    )
    mib = 1 << 20
    candidates.append(Candidate("residual", 64 * mib, 0, 0, ()))
    parts = (
        ("norm", 64, 5e-5, 1e-5),
        ("attention", 64, 1e-3, 1e-3),
        ("hidden", 224, 1.5e-3, 1.5e-3),
        ("gated", 224, 1e-4, 1e-4),
    )
    for layer in range(layers):
        residual = len(candidates) - 1
        for name, size, time_s, again_s in parts:
            forward.append(Step(f"{name}.{layer}", time_s))
            reads = (residual,) if name == "norm" else (len(candidates) - 1,)
            position = len(forward) - 1
            candidates.append(
                Candidate(
                    f"{name}.{layer}", size * mib, position, position + 1, (), True, Recompute(again_s, reads), None, name
                )
            )
        forward.append(Step(f"out.{layer}", 5e-4))
        reads = (residual, len(candidates) - 1)
        position = len(forward) - 1
        chain = Recompute(5e-4, reads)
        candidates.append(Candidate(f"residual.{layer}", 64 * mib, position, position + 1, (), True, chain, None, "residual"))
    forward.append(Step("loss", 1e-3))
    for layer in reversed(range(layers)):
        for part in (4, 3, 2, 1):
            uses.setdefault(1 + 5 * layer + part - 1, []).append(len(backward))
            if part == 1:
                uses.setdefault(5 * layer, []).append(len(backward))
            backward.append(Step(f"d{part}.{layer}", 2 * parts[part - 1][2]))
    done = tuple(
        Candidate(c.name, c.nbytes, c.produced_at, c.last_forward_use, tuple(uses.get(k, ())), True, c.recompute, None, c.group)
        for k, c in enumerate(candidates)
    )
    return Program(tuple(forward), tuple(backward), (), done, static_bytes=layers * 256 * mib)
