"""The problem of a step as JSON and back: what a dump keeps, so that a step can be planned again where its GPU is not.

    StepProblem ──▶ {"format": 1, "facts": {...}, "hardware": {...}, "goal": {"kind": "MeetBudget", ...}, ...} ──▶ StepProblem

Every dataclass of the facts is an object of its fields, whatever they are; a tuple is a list, and a set is a sorted one. Types
say how a value is read back, so a field of the facts that is added later needs nothing here. One that is not in the file has
its default. The clock of planning is not kept.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from functools import cache
from typing import Any

from graphoffload.errors import ConfigError, PlanError
from graphoffload.facts.goals import KeepIfFits, MeetBudget, WithinSlowdown
from graphoffload.hardware.profile import HardwareProfile
from graphoffload.planner.step.facts import StepFacts, StepProblem

FORMAT = 1
_GOALS = {goal.__name__: goal for goal in (KeepIfFits, MeetBudget, WithinSlowdown)}
_PLAIN = ("reserve_bytes", "taken_bytes", "host_budget_bytes", "or_least")


def to_json(problem: StepProblem) -> str:
    """Everything that a plan of this step follows from, but for the clock."""
    content = {
        "format": FORMAT,
        "facts": _plain(problem.facts),
        "hardware": _plain(problem.hardware),
        "goal": {"kind": type(problem.goal).__name__, **_plain(problem.goal)},
        **{name: getattr(problem, name) for name in _PLAIN},
    }
    return json.dumps(content, default=lambda number: number.item())  # numpy's, in a profile of the user's


def from_json(text: str) -> StepProblem:
    """Inverse of to_json.

    Raises:
        ConfigError: it is something else, or of another format; the message says what.
    """
    try:
        content = json.loads(text)
        found = content["format"]
        if found != FORMAT:
            raise ConfigError(f"the problem of a step has format {found}; this version reads {FORMAT}.")
        goal = dict(content["goal"])
        return StepProblem(
            facts=_read(StepFacts, content["facts"]),
            hardware=HardwareProfile.from_json(json.dumps(content["hardware"])),
            goal=_read(_GOALS[goal.pop("kind")], goal),
            **{name: content[name] for name in _PLAIN if name in content},
        )
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, PlanError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"no problem of a step ({said}); a dump has one as *.problem.json.") from None


def _plain(value: Any) -> Any:
    """A value in terms of JSON."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Of a class's fields."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read(kind: Any, value: Any) -> Any:
    """A value of a type from JSON."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**{name: _read(own, value[name]) for name, own in _types(kind).items() if name in value})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _read(next(one for one in inner if one is not types.NoneType), value)
    if origin is tuple:
        return tuple(_read(inner[0], each) for each in value)
    if origin is frozenset:
        return frozenset(value)
    return value
