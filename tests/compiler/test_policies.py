"""Constraints: who decides for one activation, in which order, within which limits, and the reason that is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.compiler.constraints import Constraint, check_tags, constraints_for, without_effect
from graphoffload.errors import ConfigError, PatternError, TagError
from graphoffload.facts.plan import Action
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.options.config import OffloadConfig
from graphoffload.options.patterns import resolve
from graphoffload.options.policies import ACTIONS, PatternPolicy, Policy, patterns_of

MIB = 2**20


def tensor(name: str, module: str = "layers.0.mlp", at: int = 0, mib: int = 4, **facts: Any) -> SavedTensor:
    """A fact of `mib` MiB produced in `module` and needed there."""
    plain = {"views": (name,), "nbytes": mib * MIB, "dtype": "float32", "shape": (1,), "strides": (1,), "op": "aten.mm.default"}
    return SavedTensor(name=name, module=module, produced_position=at, **{"saved_by": (module,), **plain, **facts})


def one(fact: SavedTensor, **options: Any) -> Constraint:
    """The constraint for one activation; patterns of other modules do not count as missing."""
    (constraint,) = constraints_for(SavedTable((fact,)), OffloadConfig(**options), fragment=True)
    return constraint


def actions(table: SavedTable, **options: Any) -> dict[str, Action | None]:
    return {constraint.name: constraint.action for constraint in constraints_for(table, OffloadConfig(**options))}


def by_bytes(fact: SavedTensor) -> Any:
    """Module-level: offload what is large; nonsense for "bad"."""
    return "nonsense" if fact.name == "bad" else "offload" if (fact.nbytes or 0) > 2 * MIB else None


@dataclass(frozen=True)
class Always:
    """A frozen policy object."""

    action: Any

    def __call__(self, fact: SavedTensor) -> Action | None:
        return self.action  # type: ignore[no-any-return]


def test_auto_leaves_it_to_the_planner() -> None:
    """Everything is allowed, nothing is asked."""
    constraint = one(tensor("x"))
    assert (constraint.action, constraint.binding, constraint.allowed) == (None, False, ("keep", "recompute", "offload"))


@pytest.mark.parametrize("action", ACTIONS)
def test_a_name_asks_for_everything(action: Action) -> None:
    """Binding, with the policy as its reason."""
    constraint = one(tensor("x"), policy=action)
    assert (constraint.action, constraint.binding, constraint.reason) == (action, True, f'policy="{action}"')


@pytest.mark.parametrize(
    ("action", "facts", "reason"),
    [
        ("offload", {"eligible": False, "why_not": "shares memory with an output"}, "shares memory with an output"),
        ("recompute", {"recomputable": False, "why_not_recompute": "draws random numbers"}, "draws random numbers"),
        ("offload", {"mib": 0}, "0 B is less than min_tensor_bytes=1.00 MiB"),
    ],
)
def test_what_cannot_be_is_kept_with_its_reason(action: Action, facts: dict[str, Any], reason: str) -> None:
    """And no warning: the policy said "all that may"."""
    constraint = one(tensor("x", **facts), policy=action)
    assert (constraint.action, constraint.binding, constraint.warning) == ("keep", True, "")
    assert reason in constraint.reason
    assert f'policy="{action}" asks to {action}' in constraint.reason
    assert action not in constraint.allowed


def test_nothing_but_keep_is_possible() -> None:
    """Under "auto" the planner need not ask; both reasons are told."""
    constraint = one(tensor("x", eligible=False, why_not="an output", recomputable=False, why_not_recompute="random"))
    assert constraint == Constraint("x", "keep", True, "random; an output", ("keep",), "", "an output", "random")
    tagged = one(tensor("x", nbytes=64, tag="must_save"), min_tensor_bytes=128)
    assert tagged.why_not_offload == "64 B is less than min_tensor_bytes=128 B"
    assert tagged.why_not_recompute == "tag MUST_SAVE"


def test_first_match_wins_and_the_rest_is_planned() -> None:
    """Order is meaning; "auto" carves an exception out."""
    table = SavedTable(
        (tensor("a", "layers.0.mlp"), tensor("b", "layers.1.mlp"), tensor("c", "layers.1.attn"), tensor("d", "head"))
    )
    policy = {"layers.0.*": "auto", "*.mlp": "recompute", "layers.*": "offload"}
    assert actions(table, policy=policy) == {"a": None, "b": "recompute", "c": "offload", "d": None}
    assert actions(table, policy={"*": "keep", "*.mlp": "recompute"}) == dict.fromkeys("abcd", "keep")


def test_norms_and_activation_function_in_one_line() -> None:
    """ "recompute the norms and the activation function, offload the rest": the residual is not recomputed."""
    table = SavedTable((
        tensor("residual", "layers.0", saved_by=("layers.0", "layers.0.norm")),
        tensor("normed", "layers.0.norm", saved_by=("layers.0", "layers.0.up")),
        tensor("up", "layers.0.up", saved_by=("layers.0", "layers.0.act")),
        tensor("acted", "layers.0.act", saved_by=("layers.0", "layers.0.down")),
    ))  # fmt: skip
    policy = {"*norm": "recompute", "*.act": "recompute", "*": "offload"}
    expected = {"residual": "offload", "normed": "recompute", "up": "offload", "acted": "recompute"}
    assert actions(table, policy=policy) == expected


def test_policies_as_objects_and_functions() -> None:
    """Each SavedTensor is asked; None is the planner's."""
    table = SavedTable((tensor("large", mib=4), tensor("small", mib=1)))
    assert actions(table, policy=by_bytes) == {"large": "offload", "small": None}
    assert actions(table, policy=Always("recompute")) == dict.fromkeys(("large", "small"), "recompute")
    assert isinstance(Always("keep"), Policy)
    policy = PatternPolicy((("*.mlp", "keep"),), resolve(["*.mlp"], ["layers.0.mlp"]))
    assert [policy(fact) for fact in (tensor("x"), tensor("y", "head"))] == ["keep", None]
    assert hash(policy) == hash(PatternPolicy((("*.mlp", "keep"),), resolve(["*.mlp"], ["layers.0.mlp"])))


@pytest.mark.parametrize(
    ("policy", "answer"), [(by_bytes, "'nonsense' (str)"), (Always(3), "3 (int)"), (Always("auto"), "'auto' (str)")]
)
def test_a_policy_that_answers_nonsense(policy: Any, answer: str) -> None:
    """Which policy, which tensor, what it said."""
    with pytest.raises(ConfigError) as info:
        one(tensor("bad"), policy=policy)
    for part in (answer, "bad", "layers.0.mlp", "keep, recompute, offload", "None"):
        assert part in str(info.value)
    assert (getattr(policy, "__qualname__", "Always")) in str(info.value)


@pytest.mark.parametrize(
    ("tag", "policy", "action", "binding"),
    [
        ("must_save", "auto", "keep", False),
        ("must_save", "keep", "keep", True),
        ("must_save", "offload", "offload", True),
        ("must_save", "recompute", "keep", True),
        ("must_recompute", "auto", "recompute", True),
        ("must_recompute", "keep", "recompute", True),
        ("must_offload", "auto", "offload", True),
        ("must_offload", "recompute", "offload", True),
        ("must_offload", {"*": "keep"}, "offload", True),
        ("must_offload", Always("keep"), "offload", True),
        ("must_save", {"*.mlp": "offload"}, "offload", True),
        ("must_save", {"*.mlp": "auto"}, "keep", False),
        ("prefer_save", "auto", "keep", False),
        ("prefer_recompute", "auto", "recompute", False),
        ("prefer_offload", "auto", "offload", False),
        ("prefer_recompute", "offload", "offload", True),
        ("prefer_recompute", {"*.mlp": "keep"}, "keep", True),
        ("prefer_recompute", {"*.attn": "keep"}, "recompute", False),
    ],
)  # fmt: skip
def test_tags(tag: Any, policy: Any, action: Action, binding: bool) -> None:
    """must_* binds, prefer_* advises; an explicit word wins over advice, a blanket one loses against a binding tag."""
    constraint = one(tensor("x", tag=tag), policy=policy)
    assert (constraint.action, constraint.binding) == (action, binding)
    assert constraint.action in constraint.allowed
    assert tag != "must_save" or "recompute" not in constraint.allowed


@pytest.mark.parametrize(
    ("tag", "name", "asked"),
    [
        ("must_save", "MUST_SAVE", "recompute"),
        ("must_recompute", "MUST_RECOMPUTE", "keep"),
        ("must_recompute", "MUST_RECOMPUTE", "offload"),
        ("must_offload", "MUST_CPU_OFFLOAD", "keep"),
        ("must_offload", "MUST_CPU_OFFLOAD", "recompute"),
    ],
)
def test_contradictory_wishes(tag: Any, name: str, asked: str) -> None:
    """Tensor, module, both constraints and what to do; also for a tagged operation that is no saved activation."""
    fact = tensor("x", tag=tag)
    with pytest.raises(TagError) as info:
        one(fact, policy={"*.mlp": asked})
    for part in ("x of module 'layers.0.mlp'", name, f"'*.mlp': '{asked}'", name.replace("MUST", "PREFER"), '"auto"'):
        assert part in str(info.value)
    config = OffloadConfig(policy={"*.mlp": asked})
    with pytest.raises(TagError):
        check_tags([fact], config, resolve(["*.mlp"], ["layers.0.mlp"]))
    check_tags([tensor("y", "head", tag=tag)], config, resolve(["*.mlp"], ["layers.0.mlp"]))


@pytest.mark.parametrize(("tag", "name"), [("must_offload", "MUST_CPU_OFFLOAD"), ("must_recompute", "MUST_RECOMPUTE")])
def test_a_binding_tag_that_cannot_be_obeyed(tag: Any, name: str) -> None:
    """Kept, with a warning that says what, how much, why and what to do."""
    constraint = one(tensor("x", tag=tag, eligible=False, why_not="an output", recomputable=False, why_not_recompute="random"))
    assert (constraint.action, constraint.may_offload, constraint.may_recompute) == ("keep", False, False)
    why = "an output" if tag == "must_offload" else "random"
    for part in ("x (4.00 MiB) of module 'layers.0.mlp'", name, why, "emove the tag"):
        assert part in constraint.warning


def test_limits_hold_for_policies_and_planner_but_not_for_binding_tags() -> None:
    """offload_modules and min_tensor_bytes."""
    table = SavedTable((
        tensor("inside", "layers.0.attn"), tensor("outside", "head"), tensor("small", "layers.0.attn", mib=0),
        tensor("tagged", "head", mib=0, tag="must_offload"),
    ))  # fmt: skip
    for policy, inside in (("offload", "offload"), ("auto", None)):
        found = {w.name: w for w in constraints_for(table, OffloadConfig(policy=policy, offload_modules=["*.attn"]))}
        assert found["inside"].action == inside
        assert found["inside"].may_offload
        assert found["tagged"].action == "offload"
        assert not found["outside"].may_offload
        assert not found["small"].may_offload
        assert found["outside"].may_recompute
    found = {w.name: w for w in constraints_for(table, OffloadConfig(policy="offload", offload_modules=["*.attn"]))}
    assert "outside offload_modules=*.attn" in found["outside"].reason
    assert "min_tensor_bytes" in found["small"].reason


def test_a_symbolic_size_is_not_small() -> None:
    """Its bytes are unknown, not zero."""
    assert one(tensor("x", nbytes=None), policy="offload").action == "offload"


def test_offload_fraction_takes_the_earliest() -> None:
    """By production, not by place in the table; what does not fit stays and smaller later ones go on."""
    table = SavedTable(
        (tensor("late", at=3, mib=2), tensor("first", at=1, mib=4), tensor("big", at=2, mib=8), tensor("last", at=4, mib=2))
    )
    assert actions(table, policy="offload", offload_fraction=0.5) == {
        "late": "offload",
        "first": "offload",
        "big": "keep",
        "last": "offload",
    }
    assert set(actions(table, policy="offload", offload_fraction=0.0).values()) == {"keep"}
    assert set(actions(table, policy="offload", offload_fraction=1.0).values()) == {"offload"}
    (constraint, *_) = constraints_for(SavedTable((tensor("x"),)), OffloadConfig(policy="offload", offload_fraction=0.25))
    assert "beyond offload_fraction=0.25" in constraint.reason


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0, 1), st.sets(st.integers(0, 11)))
def test_offload_fraction_is_never_exceeded(sizes: list[int], fraction: float, ineligible: set[int]) -> None:
    """Of the eligible bytes; every keep has a reason."""
    table = SavedTable(
        tuple(tensor(f"t{i}", at=i, mib=n, eligible=i not in ineligible, why_not="no") for i, n in enumerate(sizes))
    )
    result = constraints_for(table, OffloadConfig(policy="offload", offload_fraction=fraction))
    gone = sum(table[w.name].nbytes or 0 for w in result if w.action == "offload")
    assert gone <= fraction * table.eligible_bytes
    assert [w.name for w in result] == [t.name for t in table.tensors]
    assert all(w.reason for w in result)
    assert fraction < 1.0 or gone == table.eligible_bytes


def test_offload_fraction_takes_few_large_tensors() -> None:
    """Each transfer costs the host time, whatever its size. The copies of the last product overlap with nothing."""
    layers = [
        tensor(f"{name}{layer}", at=2 * layer + at, mib=mib)
        for layer in range(4)
        for at, name, mib in ((0, "q", 1), (1, "up", 4))
    ]
    table = SavedTable((*layers, tensor("logits", at=9, mib=12)))
    gone = {name for name, action in actions(table, policy="offload", offload_fraction=0.26).items() if action == "offload"}
    assert gone == {"up0", "up1"}


def test_a_pattern_without_a_match_is_an_error_in_a_whole_graph() -> None:
    """In a fragment it may match elsewhere."""
    table, config = SavedTable((tensor("x"),)), OffloadConfig(policy={"*.mpl": "keep"})
    with pytest.raises(PatternError, match=r"'\*\.mpl' matches no module.*'\*\.mlp'"):
        constraints_for(table, config)
    assert constraints_for(table, config, fragment=True)[0].action is None


def test_patterns_that_select_nothing_are_told() -> None:
    """They match a module, but nothing saved belongs to it."""
    table = SavedTable((tensor("x"),))
    config = OffloadConfig(policy={"*.down": "recompute", "*.mlp": "keep"}, offload_modules="*.down")
    assert patterns_of(config.policy, config.offload_modules) == ("*.down", "*.mlp")
    resolution = resolve(patterns_of(config.policy, config.offload_modules), ["layers.0.mlp", "layers.0.down"])
    (text,) = without_effect(table, config, resolution)
    assert text == "pattern '*.down' (recompute) selects nothing: no saved activation is produced inside it."


def test_offload_fraction_goes_by_production_not_by_place_in_the_table() -> None:
    """Two equal ones, half of the bytes: the one that is produced first."""
    table = SavedTable((tensor("late", at=3), tensor("first", at=1)))
    assert actions(table, policy="offload", offload_fraction=0.5) == {"late": "keep", "first": "offload"}


@pytest.mark.parametrize(("nbytes", "action"), [(MIB - 1, "keep"), (MIB, "offload")])
def test_min_tensor_bytes_is_the_smallest_that_goes(nbytes: int, action: Action) -> None:
    """Smaller tensors stay; equal ones go."""
    assert one(tensor("x", nbytes=nbytes), policy="offload").action == action
    assert one(tensor("x", nbytes=nbytes), policy="offload", min_tensor_bytes=nbytes).action == "offload"
