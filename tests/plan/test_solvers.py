"""solve() on instances whose answer is known, its messages, folding, and the link-filling rule."""

from __future__ import annotations

import dataclasses
import time

import pytest

from graphoffload.errors import BudgetError
from graphoffload.hardware.profile import PROFILES
from graphoffload.planner import search as searches
from graphoffload.planner import solver as solvers
from graphoffload.planner.arrays import arrays_of
from graphoffload.planner.goals import Evaluator, Proposal
from graphoffload.planner.problem import Buffer, Candidate, Program, Recompute, Step
from graphoffload.planner.simulator import simulate
from graphoffload.planner.solver import MeetBudget, WithinSlowdown, least_budget_bytes, solve
from graphoffload.planner.strategies.greedy import greedy_moves
from graphoffload.planner.strategies.local_search import improve, without_stalled
from tests.plan.bounds import lower_bound_peak_bytes, lower_bound_s
from tests.plan.instances import stack, toy

H200 = PROFILES["h200-sxm"]


def ladder(layers: int = 6, *, again_s: float = 0.5, nbytes: int = 2) -> Program:
    """Each forward step of 1 s makes one tensor for its mirror of 1 s."""
    forward = tuple(Step(f"f{i}", 1.0) for i in range(layers))
    backward = tuple(Step(f"b{i}", 1.0) for i in range(layers))
    candidates = tuple(
        Candidate(f"x{i}", nbytes, i, i, (layers - 1 - i,), recompute=Recompute(again_s), group="x") for i in range(layers)
    )
    return Program(forward, backward, (Buffer("logits", 3, layers - 1, layers),), candidates, static_bytes=10)


def test_what_fits_is_kept_and_says_so() -> None:
    found = solve(ladder(), toy(), MeetBudget(10 + 12 + 3))
    assert found.actions == ("keep",) * 6
    assert set(found.reasons) == {"fits"}
    assert found.timeline.slowdown == 0.0
    assert found.lower_bound_s == found.timeline.time_s == 12.0


def test_the_reserve_is_taken_off_the_budget() -> None:
    program = dataclasses.replace(ladder(), reserve_bytes=4)
    assert solve(program, toy(), MeetBudget(29)).actions == ("keep",) * 6
    tight = solve(program, toy(), MeetBudget(28))
    assert tight.actions != ("keep",) * 6
    assert tight.timeline.peak_bytes <= 24


def test_a_hidden_copy_beats_recomputation_and_a_slow_link_loses_to_it() -> None:
    fast = solve(ladder(), toy(2.0), MeetBudget(21))
    assert "recompute" not in fast.actions
    assert fast.timeline.time_s == pytest.approx(12.0)
    assert fast.actions[0] == "offload", "what is produced first has most time to travel"
    assert "hidden" in fast.reasons[0]
    slow = solve(ladder(), toy(0.01), MeetBudget(21))
    assert "offload" not in slow.actions
    assert slow.timeline.time_s == pytest.approx(13.0)
    assert slow.actions.count("recompute") == 2


def test_a_chain_is_priced_with_what_it_reads() -> None:
    """Offloading `inner` hides and making `big` again costs 0.1 s; but together b0 waits 4 s for `inner`."""
    forward = tuple(Step(f"f{i}", 4.0) for i in range(4))
    backward = tuple(Step(f"b{i}", 4.0) for i in range(4))
    candidates = (
        Candidate("inner", 4, 0, 1, (3,), recompute=None),
        Candidate("big", 4, 1, 1, (0,), can_offload=False, recompute=Recompute(0.1, reads=(0,))),
        Candidate("other", 4, 2, 2, (1,), recompute=Recompute(1.0)),
    )
    found = solve(Program(forward, backward, (Buffer("logits", 20, 3, 3),), candidates), toy(1.0), MeetBudget(24))
    assert found.timeline.time_s == pytest.approx(33.0)
    assert found.actions == ("offload", "keep", "recompute")


def small_and_large() -> Program:
    """Eight tensors of 2 bytes whose recomputation takes 1 s each, and one of 20 whose takes 5 s."""
    forward = tuple(Step(f"f{i}", 1.0) for i in range(10))
    backward = tuple(Step(f"b{i}", 1.0) for i in range(10))
    small = [Candidate(f"x{i}", 2, i, i, (9,), can_offload=False, recompute=Recompute(1.0)) for i in range(8)]
    large = Candidate("large", 20, 8, 8, (9,), can_offload=False, recompute=Recompute(5.0))
    return Program(forward, backward, (Buffer("logits", 30, 9, 10),), (*small, large), static_bytes=1)


@pytest.mark.parametrize(("need", "moved"), [(5, {"x"}), (12, {"large"})])
def test_greedy_pays_for_no_more_bytes_than_are_needed(need: int, moved: set[str]) -> None:
    """By the byte the large one is cheapest (5 s for 20); where 5 are needed, three small ones are."""
    program = small_and_large()
    arrays = arrays_of(program, toy())
    target = simulate(program, program.keep_actions(), toy()).peak_bytes - need
    evaluator = Evaluator(arrays, MeetBudget(target))
    actions = greedy_moves(evaluator, program.keep_actions(), target)
    assert {c.name[:5].rstrip("0123456789") for c, a in zip(program.candidates, actions, strict=True) if a != "keep"} == moved


def test_what_compute_waits_for_is_replaced() -> None:
    """A large copy that ends behind forward gives way to several small ones that hide."""
    forward = tuple(Step(f"f{i}", 4.0) for i in range(12))
    backward = tuple(Step(f"b{i}", 4.0) for i in range(12))
    small = [Candidate(f"x{i}", 2, i, i, (11 - i,)) for i in range(10)]
    program = Program(forward, backward, (), (*small, Candidate("large", 20, 9, 9, (1,))), static_bytes=1)
    evaluator = Evaluator(arrays_of(program, toy()), MeetBudget(36), budget=500)
    start = evaluator.propose(["keep"] * 10 + ["offload"], "start")
    assert evaluator.evaluate(start.actions)[0].stalls
    (move,) = without_stalled(evaluator, start)
    actions = list(start.actions)
    for index, action in move:
        actions[index] = action
    assert actions[-1] == "keep"
    assert actions.count("offload") == 3
    found = evaluator.propose(actions, "moved")
    assert found.feasible
    assert found.score < start.score
    assert not evaluator.evaluate(actions)[0].stalls
    assert list(without_stalled(evaluator, found)) == []


def test_a_budget_that_cannot_be_met_names_the_least_and_what_holds_it() -> None:
    with pytest.raises(BudgetError, match=r"device_budget 12 B: no plan can meet it.*\((\d+) bytes\)") as raised:
        solve(ladder(), toy(), MeetBudget(12))
    text = str(raised.value)
    least = least_budget_bytes(ladder(), toy()).timeline.peak_bytes
    assert f"({least} bytes)" in text
    assert "parameters and other static memory 10 B" in text
    assert "logits 3 B" in text
    assert "Raise device_budget" in text
    assert solve(ladder(), toy(), MeetBudget(least)).timeline.peak_bytes == least
    with pytest.raises(BudgetError):
        solve(ladder(), toy(), MeetBudget(least - 1))


@pytest.mark.parametrize(("freed", "descents"), [(0, 0), (1, 1)])
def test_what_is_known_of_a_like_instance_ends_a_search(monkeypatch: pytest.MonkeyPatch, freed: int, descents: int) -> None:
    """One that holds less elsewhere, and has the same least peak, is not searched to the end a second time."""
    descend, seen = solvers._descended, list[Evaluator]()

    def descended(evaluator: Evaluator, least: Proposal) -> Proposal:
        seen.append(evaluator)
        return descend(evaluator, least)

    monkeypatch.setattr(solvers, "_descended", descended)
    logits = Buffer("logits", 3 - freed, 5, 6)
    held = dataclasses.replace(ladder(), buffers=(*ladder().buffers, Buffer("held", 1, 0, 0)))
    program = dataclasses.replace(ladder(), buffers=(logits,))
    known: list[solvers.Least] = []
    for one in (held, program):
        least = solvers.least_of(known, one, toy())
        with pytest.raises(BudgetError, match="no plan can meet it") as raised:
            solve(one, toy(), MeetBudget(12), least=least, like=solvers.like(known, least.program))
    assert len(seen) == 1 + descents
    assert raised.value.least_bytes == 15 - freed


def test_waiting_for_memory_meets_a_budget_that_free_running_copies_miss() -> None:
    """Nothing can be recomputed and a copy takes 3 steps: only a window of outstanding copies keeps the forward small."""
    program = ladder()
    fixed = tuple(dataclasses.replace(c, recompute=None, last_forward_use=c.produced_at) for c in program.candidates)
    program = dataclasses.replace(program, candidates=fixed, buffers=())
    free = simulate(program, ["offload"] * 5 + ["keep"], toy(2 / 3))
    found = solve(program, toy(2 / 3), MeetBudget(10 + 8))
    assert free.peak_bytes > 18 >= found.timeline.peak_bytes
    assert found.max_inflight_bytes is not None
    assert found.timeline.stall_s > 0


@pytest.mark.parametrize(("link", "share"), [(1.0, 0.2), (1.0, 0.1), (0.2, 0.2)])
def test_small_budgets_are_met_where_compute_has_to_wait(link: float, share: float) -> None:
    """Down to the memory of a few tensors: a copy is waited for before the next begins, if nothing else meets the budget."""
    program, hardware = stack(8), PROFILES["h200-sxm"].scaled(link=link)
    keep_bytes = simulate(program, program.keep_actions(), hardware).peak_bytes - program.static_bytes
    solution = solve(program, hardware, MeetBudget(int(share * keep_bytes) + program.static_bytes))
    assert solution.timeline.peak_bytes - program.static_bytes <= share * keep_bytes
    assert solution.lower_bound_s is not None
    assert solution.timeline.time_s <= 1.06 * solution.lower_bound_s


def test_the_least_budget_is_what_offloading_everything_at_a_time_needs() -> None:
    """Not what copies that run freely leave behind: an error that named that would send users to larger machines."""
    program, hardware = stack(6), PROFILES["h200-sxm"].scaled(link=0.2)
    waiting = simulate(program, ["offload"] * len(program.candidates), hardware, max_inflight_bytes=0)
    least = least_budget_bytes(program, hardware)
    assert least.timeline.peak_bytes <= waiting.peak_bytes
    assert least.lower_bound_peak_bytes is not None
    assert least.timeline.peak_bytes <= 1.01 * least.lower_bound_peak_bytes


@pytest.mark.parametrize(("layers", "host_share", "percents"), [(6, 0.2, (40, 42, 44, 46)), (8, 0.1, (40, 42, 44, 46))])
def test_who_can_do_with_less_can_do_with_more(layers: int, host_share: float, percents: tuple[int, ...]) -> None:
    """Where host memory is short the solvers lost their way at one budget, met a lower one, and the user was refused."""
    program, hardware = stack(layers), PROFILES["h200-sxm"]
    keep_bytes = simulate(program, program.keep_actions(), hardware).peak_bytes
    host_bytes = int(host_share * sum(candidate.nbytes for candidate in program.candidates))
    for percent in percents:
        budget = MeetBudget(keep_bytes * percent // 100)
        solution = solve(program, hardware, budget, host_budget_bytes=host_bytes)
        assert solution.timeline.peak_bytes <= budget.device_budget_bytes
        assert solution.timeline.host_bytes <= host_bytes


def test_fixed_actions_and_the_host_budget_bind() -> None:
    program = ladder()
    first = dataclasses.replace(program.candidates[0], fixed="recompute")
    program = dataclasses.replace(program, candidates=(first, *program.candidates[1:]))
    found = solve(program, toy(2.0), MeetBudget(19), host_budget_bytes=2)
    assert found.actions[0] == "recompute"
    assert found.reasons[0] == "fixed to recompute"
    assert found.timeline.host_bytes <= 2
    within = solve(program, toy(2.0), WithinSlowdown(0.0))
    assert within.timeline.time_s == pytest.approx(12.5), "a binding tag is paid even where no slowdown is allowed"


def test_before_an_error_nothing_is_searched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits early for memory was among the first proposals of a small instance; another start is still tried."""
    starts: list[tuple[int, Proposal]] = []
    judges: list[Evaluator] = []  # alive, so that no two have one identity

    def counting(evaluator: Evaluator, start: Proposal, *, small: bool) -> Proposal:
        judges.append(evaluator)
        starts.append((id(evaluator), start))
        return improve(evaluator, start, small=small)

    for module in (solvers, searches):
        monkeypatch.setattr(module, "improve", counting)
    for budget in (12, 14):
        starts.clear()
        with pytest.raises(BudgetError, match="no plan"):
            solve(ladder(), toy(), MeetBudget(budget))
        assert starts
        assert len(set(starts)) == len(starts)


def test_hardly_any_choice_among_many_tensors() -> None:
    """Most tensors too small to move: few assignments, but of more tensors than an array of numpy has dimensions."""
    program = ladder(80)
    kept = tuple(dataclasses.replace(c, fixed="keep") for c in program.candidates[2:])
    program = dataclasses.replace(program, candidates=(*program.candidates[:2], *kept))
    found = solve(program, toy(2.0), MeetBudget(10 + 160 + 3 - 4))
    assert found.timeline.peak_bytes <= 169
    assert found.actions == ("offload", "offload", *("keep",) * 78)
    assert found.timeline.slowdown == 0.0


def test_more_fixed_to_offload_than_the_host_holds_is_an_error() -> None:
    program = ladder()
    program = dataclasses.replace(
        program, candidates=tuple(dataclasses.replace(c, fixed="offload") for c in program.candidates)
    )
    with pytest.raises(BudgetError, match="host_budget 11 B: what is fixed to offload needs 12 B"):
        solve(program, toy(), WithinSlowdown(0.1), host_budget_bytes=11)


def test_more_time_never_buys_less_memory_and_less_budget_never_more_peak() -> None:
    program = stack(8)
    keep = simulate(program, program.keep_actions(), H200)
    peaks = [solve(program, H200, WithinSlowdown(share)).timeline.peak_bytes for share in (0.0, 0.01, 0.02, 0.05, 0.1, 0.3)]
    assert peaks == sorted(peaks, reverse=True)
    least = peaks[-1]
    last = keep.peak_bytes
    for part in range(1, 11):
        budget = keep.peak_bytes - (keep.peak_bytes - least) * part // 10
        found = solve(program, H200, MeetBudget(budget))
        assert found.timeline.peak_bytes <= min(budget, last)
        assert found.lower_bound_s is not None
        assert found.timeline.time_s - found.lower_bound_s <= 0.05 * keep.time_s, "at most 5 points from the bound"
        last = found.timeline.peak_bytes


def test_many_layers_cost_little_more_than_few() -> None:
    """Plans for 80 layers take at most 3 x those for 8 layers plus a second, at every budget tried."""
    spent: dict[int, float] = {}
    for layers in (8, 80):
        program = stack(layers)
        keep = simulate(program, program.keep_actions(), H200).peak_bytes
        saved = keep - program.static_bytes
        begin = time.process_time()
        for share in (0.7, 0.35):
            solve(program, H200, MeetBudget(program.static_bytes + int(saved * share)))
        spent[layers] = (time.process_time() - begin) / 2
    assert spent[80] <= 3 * spent[8] + 1.0, spent


def test_bound_is_exact_where_nothing_is_split_and_says_when_there_is_no_plan() -> None:
    program = ladder(again_s=0.5)
    assert lower_bound_s(program, toy(1e-6), device_budget_bytes=21) == pytest.approx(13.0, rel=1e-4)
    assert lower_bound_s(program, toy(), device_budget_bytes=9) == float("inf")
    assert lower_bound_s(program, toy()) == pytest.approx(12.0, rel=1e-4)
    assert lower_bound_peak_bytes(program, toy(1e-6), max_slowdown=1.0 / 12) == pytest.approx(21, abs=1)
