"""Policies: the user's decisions about saved activations, checked and stored as values.

    policy "auto"                          no constraint: the planner decides
    policy "keep" | "offload" | "recompute"   the same constraint for every activation that allows it
    policy {"*.mlp": "recompute", ...}     the first match wins, the planner decides the rest; `patterns.py` defines matches
    policy MyPolicy(...) or my_function    called with each SavedTensor; returns an action, or None to let the planner decide

compiler/constraints.py turns a policy, the user's tags and the limits into the actions that each activation may have.

A policy is a *value*: torch's compile cache must be able to tell two of them apart, and pickles the partitioner that holds
one. So a callable is a module-level function or an instance of a frozen dataclass; a lambda or closure is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Action
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.options.patterns import Resolution, selects

ACTIONS: tuple[Action, ...] = ("keep", "recompute", "offload")
POLICY_NAMES = ("auto", "keep", "offload", "recompute")


@runtime_checkable
class Policy(Protocol):
    """A frozen, hashable object that maps a SavedTensor to an action, or to None if the planner shall decide."""

    def __call__(self, tensor: SavedTensor, /) -> Action | None:
        """The action for one saved activation; None: the planner decides."""
        ...


PatternPairs: TypeAlias = tuple[tuple[str, str], ...]
StoredPolicy: TypeAlias = str | PatternPairs | Callable[[SavedTensor], Action | None]


def is_fixed(policy: object) -> bool:
    """Whether it asks the same of every activation, so that nothing is left to plan."""
    return isinstance(policy, str) and policy in ACTIONS


def normalize_policy(value: object) -> StoredPolicy:
    """A policy as the configuration stores it: a name, a tuple of (pattern, action) pairs, or the callable itself.

    Raises:
        ConfigError: an unknown name or action, or a callable that cannot be told apart from another or pickled.
    """
    if isinstance(value, str):
        if value not in POLICY_NAMES:
            close = difflib.get_close_matches(value, POLICY_NAMES, n=1)
            hint = f'; did you mean "{close[0]}"?' if close else "."
            raise ConfigError(
                f"policy={value!r} is no policy; known: {', '.join(POLICY_NAMES)}, a mapping {{pattern: action}}, "
                f"a frozen policy object or a module-level function{hint}"
            )
        return value
    if isinstance(value, (Mapping, tuple, list)):
        return _normalize_pairs(value)
    if isinstance(value, types.FunctionType):
        return _check_function(value)
    if callable(value):
        return _check_object(value)
    raise ConfigError(
        f"policy={value!r} is a {type(value).__name__}; a policy is one of {', '.join(POLICY_NAMES)}, "
        "a mapping {pattern: action}, a frozen policy object or a module-level function."
    )


def _normalize_pairs(value: Mapping[Any, Any] | tuple[Any, ...] | list[Any]) -> PatternPairs:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else tuple(value)
    if not pairs:
        raise ConfigError('policy={} is an empty mapping; give at least one {pattern: action}, or policy="auto".')
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ConfigError(f"policy holds {pair!r}, which is no (pattern, action) pair; write {{pattern: action}}.")
        pattern, action = pair
        if not isinstance(pattern, str) or not pattern.strip():
            raise ConfigError(
                f'policy has the pattern {pattern!r} ({type(pattern).__name__}); a pattern is a str such as "*.mlp".'
            )
        if action not in (*ACTIONS, "auto"):
            close = difflib.get_close_matches(str(action), ACTIONS, n=1)
            hint = f'; did you mean "{close[0]}"?' if close else "."
            raise ConfigError(f"policy[{pattern!r}]={action!r} is no action; known: {', '.join(ACTIONS)}, auto{hint}")
    return tuple((pattern.strip(), action) for pattern, action in pairs)


_WHY_A_VALUE = "the compile cache must tell two policies apart, and the partitioner that holds one is pickled"


def _check_function(function: types.FunctionType) -> Callable[[SavedTensor], Action | None]:
    name = f"{function.__module__}.{function.__qualname__}"
    kind = (
        "lambda"
        if "<lambda>" in name
        else "closure"
        if function.__closure__
        else "local function"
        if "<locals>" in name
        else ""
    )
    if kind or _resolve(function.__module__, function.__qualname__) is not function:
        raise ConfigError(
            f"policy={name} is a {kind or 'function that its module does not hold by that name'}: {_WHY_A_VALUE}. Use a "
            "function at the top level of a module, or an instance of a frozen dataclass with __call__(self, tensor)."
        )
    return cast("Callable[[SavedTensor], Action | None]", function)


def _check_object(policy: Any) -> Callable[[SavedTensor], Action | None]:
    if isinstance(policy, type):
        raise ConfigError(f"policy={policy.__qualname__} is a class; pass an instance: policy={policy.__name__}(...).")
    kind = type(policy)
    params = getattr(kind, "__dataclass_params__", None)
    remedy = "Decorate its class with @dataclass(frozen=True) and keep its settings in hashable fields."
    if params is None or not params.frozen:
        raise ConfigError(f"policy={kind.__qualname__} is no instance of a frozen dataclass: {_WHY_A_VALUE}. {remedy}")
    if _resolve(kind.__module__, kind.__qualname__) is not kind:
        raise ConfigError(
            f"policy={kind.__qualname__} has a class defined inside a function: {_WHY_A_VALUE}. Move it to the top level."
        )
    try:
        hash(policy)
    except TypeError as error:
        raise ConfigError(f"policy={policy!r} is not hashable ({error}): {_WHY_A_VALUE}. {remedy}") from error
    return cast("Callable[[SavedTensor], Action | None]", policy)


def _resolve(module: str, qualname: str) -> object:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def stable_text(value: object) -> str:
    """Text that is equal for equal values in every process: no addresses, no hash order; functions by name and source."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{stable_text(k)}: {stable_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(stable_text(item) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(stable_text(item) for item in value)) + "}"
    if isinstance(value, (types.FunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}#{_source_digest(value)}"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{stable_text(type(value))}({stable_text(fields)})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _source_digest(value: types.FunctionType | type) -> str:
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        # A function typed at a prompt has no source file; its byte code and constants replace the source.
        codes = [value] if isinstance(value, types.FunctionType) else [v for v in vars(value).values() if inspect.isfunction(v)]
        source = "".join(f"{f.__code__.co_code.hex()}{f.__code__.co_consts!r}{f.__code__.co_names!r}" for f in codes)
        source = re.sub(r" at 0x[0-9a-fA-F]+", "", source)
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PatternPolicy:
    """{pattern: action} as a policy: the first pattern that selects an activation decides, the rest is left to the planner.

    `resolution` holds the meaning of the patterns in this graph. A policy is called once the modules of the graph are known.
    """

    pairs: PatternPairs
    resolution: Resolution

    def match(self, tensor: SavedTensor) -> tuple[str, Action | None] | None:
        """(pattern, action) of the first pattern that selects the activation; None if there is none.

        The action is None for "auto".
        """
        by_pattern = {selection.pattern: selection for selection in self.resolution.selections}
        for pattern, word in self.pairs:
            action = None if word == "auto" else cast("Action", word)
            if pattern in by_pattern and selects(by_pattern[pattern], tensor, action or "keep"):
                return pattern, action
        return None

    def __call__(self, tensor: SavedTensor, /) -> Action | None:
        """The action of the first pattern that selects an activation."""
        found = self.match(tensor)
        return found[1] if found else None


def patterns_of(policy: object, offload_modules: Sequence[str] | None = None) -> tuple[str, ...]:
    """All patterns of a configuration, for patterns.resolve: those of a mapping policy, then those of offload_modules."""
    pairs = policy if isinstance(policy, tuple) else ()
    return tuple(dict.fromkeys((*(pattern for pattern, _ in pairs), *(offload_modules or ()))))


def ask(policy: Callable[[SavedTensor], Action | None], tensor: SavedTensor) -> Action | None:
    """The answer of a policy object or function for one activation.

    Raises:
        ConfigError: the answer is neither an action nor None.
    """
    answer = policy(tensor)
    if answer is None or answer in ACTIONS:
        return answer
    name = getattr(policy, "__qualname__", type(policy).__qualname__)
    raise ConfigError(
        f"policy {name} answered {answer!r} ({type(answer).__name__}) for {tensor.name} of module "
        f"{tensor.module or 'unknown'!r}; an answer is one of {', '.join(ACTIONS)}, or None to let the planner decide."
    )
