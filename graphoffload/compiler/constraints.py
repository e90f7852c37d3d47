"""From the user's requests to the planner's choices: one Constraint for each saved activation, each with its reason.

    source                                         strength
    must_* tag                                     binding; against an explicit pattern it is an error
    mapping pattern, policy object or function     binding
    policy "keep", "offload", "recompute"          binding, but a must_* tag wins; so it does against the pattern "*"
    prefer_* tag                                   advice, followed if no other source decides; the planner may overrule it
    none                                           the planner decides among the allowed actions

A constraint cannot force an action that is impossible for an activation (it shares memory with an output, it draws random
numbers). The limits (offload_modules, min_tensor_bytes, offload_fraction) hold for every offload except a must_offload tag's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from graphoffload.errors import TagError
from graphoffload.facts.plan import Action
from graphoffload.facts.refusals import Refusal
from graphoffload.facts.remedies import disobeyed
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.options.patterns import Resolution, resolve, selects
from graphoffload.options.policies import PatternPolicy, StoredPolicy, ask, patterns_of
from graphoffload.units import format_bytes

_TAG_NAMES = {
    "must_save": "MUST_SAVE",
    "must_recompute": "MUST_RECOMPUTE",
    "must_offload": "MUST_CPU_OFFLOAD",
    "prefer_save": "PREFER_SAVE",
    "prefer_recompute": "PREFER_RECOMPUTE",
    "prefer_offload": "PREFER_CPU_OFFLOAD",
}
# The actions that a binding tag leaves open. Saved means not recomputed: on the device or on the host.
_TAG_ALLOWS: dict[str, tuple[Action, ...]] = {
    "must_save": ("keep", "offload"),
    "must_recompute": ("recompute",),
    "must_offload": ("offload",),
}
_TAG_ASKS: dict[str, Action] = {
    "must_save": "keep",
    "must_recompute": "recompute",
    "must_offload": "offload",
    "prefer_save": "keep",
    "prefer_recompute": "recompute",
    "prefer_offload": "offload",
}


class Settings(Protocol):
    """The part of OffloadConfig that this module reads."""

    @property
    def policy(self) -> StoredPolicy | Mapping[str, str]:
        """As OffloadConfig's."""
        ...

    @property
    def offload_modules(self) -> Sequence[str] | None:
        """As OffloadConfig's."""
        ...

    @property
    def min_tensor_bytes(self) -> int:
        """As OffloadConfig's."""
        ...

    @property
    def offload_fraction(self) -> float:
        """As OffloadConfig's."""
        ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """The request for one saved activation.

    Attributes:
        name: SavedTensor.name.
        action: the requested action; None: the planner decides among `allowed`.
        binding: the planner must not choose otherwise.
        reason: for the plan's table; a keep always has one.
        allowed: actions that are possible and permitted; "keep" is the last resort and always among them.
        warning: text for a NotOffloadedWarning when a binding tag cannot be obeyed, else "".
        why_not_offload, why_not_recompute: why that action is not in `allowed`; "" if it is.
    """

    name: str
    action: Action | None
    binding: bool
    reason: str
    allowed: tuple[Action, ...] = ("keep", "recompute", "offload")
    warning: str = ""
    why_not_offload: str = ""
    why_not_recompute: str = ""

    @property
    def may_offload(self) -> bool:
        """Whether the planner may offload it."""
        return "offload" in self.allowed

    @property
    def may_recompute(self) -> bool:
        """Whether the planner may recompute it."""
        return "recompute" in self.allowed


@dataclass(frozen=True, slots=True)
class _Asked:
    """The request of one source. `pattern` is set if a mapping's pattern other than "*" decides."""

    action: Action | None
    binding: bool
    source: str
    pattern: str = ""


def resolve_table(table: SavedTable, config: Settings) -> Resolution:
    """Resolution from a table alone; the joint graph knows more (modules that save nothing)."""
    ops: dict[str, list[str]] = {}
    for tensor in table.tensors:
        ops.setdefault(tensor.module, []).append(tensor.op)
        for operation, _, path in (reader.partition("@") for reader in tensor.saved_by_ops):
            ops.setdefault(path, []).append(operation)
    paths = [path for tensor in table.tensors for path in (*tensor.saved_by, tensor.module)]
    names = [name for tensor in table.tensors for name in tensor.boundaries]
    return resolve(patterns_of(config.policy, config.offload_modules), [*paths, *ops], names, ops)


def constraints_for(
    table: SavedTable, config: Settings, resolution: Resolution | None = None, *, fragment: bool = False
) -> tuple[Constraint, ...]:
    """One Constraint for each activation, in the table's order.

    Args:
        resolution: what the configuration's patterns mean in this graph (patterns.resolve); by default from the table alone.
        fragment: the graph is a part of the model (graph breaks): a pattern may match in another part, so
            one that matches nothing here is not an error; the caller warns with `resolution.error()`.

    Raises:
        PatternError: a pattern that matches nothing in a whole graph.
        TagError: a must_* tag against an explicit pattern of a mapping policy.
        ConfigError: a policy object or function whose answer is neither an action nor None.
    """
    resolution = resolve_table(table, config) if resolution is None else resolution
    error = None if fragment else resolution.error()
    if error is not None:
        raise error
    asked = {tensor.name: _asked(tensor, config, resolution) for tensor in table.tensors}
    barred = {tensor.name: _barred(tensor, config, resolution) for tensor in table.tensors}
    _spend_fraction(table, config, asked, barred)
    return tuple(_told(_wish(tensor, asked[tensor.name], barred[tensor.name]), tensor, barred) for tensor in table.tensors)


def check_tags(tensors: Iterable[SavedTensor], config: Settings, resolution: Resolution) -> None:
    """Check tags against patterns, for tagged operations of the joint graph that never become saved activations.

    Raises:
        TagError: as constraints_for.
    """
    for tensor in tensors:
        _asked(tensor, config, resolution)


def without_effect(table: SavedTable, config: Settings, resolution: Resolution) -> tuple[str, ...]:
    """Patterns that match a module or boundary but select no saved activation, as sentences for the report."""
    pairs = dict(config.policy) if isinstance(config.policy, tuple) else {}
    found = []
    for selection in resolution.selections:
        word = pairs.get(selection.pattern, "offload")
        action = cast("Action", word if word != "auto" else "keep")
        if not any(selects(selection, tensor, action) for tensor in table.tensors):
            what = "produced" if action == "recompute" else "needed for backward"
            found.append(f"pattern {selection.pattern!r} ({word}) selects nothing: no saved activation is {what} inside it.")
    return tuple(found)


def _asked(tensor: SavedTensor, config: Settings, resolution: Resolution) -> _Asked:
    """The source that decides for this activation, by the table in the module's docstring."""
    spoken = _spoken(tensor, config, resolution)
    if tensor.tag is None:
        return spoken
    name, action = _TAG_NAMES[tensor.tag], _TAG_ASKS[tensor.tag]
    if tensor.tag not in _TAG_ALLOWS:
        return spoken if spoken.action is not None else _Asked(action, False, f"tag {name}")
    if spoken.action in _TAG_ALLOWS[tensor.tag]:
        return replace(spoken, source=f"{spoken.source}, tag {name}")
    if spoken.pattern and spoken.action is not None:
        raise TagError(
            f"{tensor.name} of module {tensor.module or 'unknown'!r} is tagged {name} by the model's checkpoint policy, but "
            f"policy {{{spoken.pattern!r}: {spoken.action!r}}} asks to {spoken.action} it. Both are binding: change the tag to "
            f'{name.replace("MUST", "PREFER")}, or put {{"<narrower pattern>": "auto"}} before {spoken.pattern!r}.'
        )
    against = f" (against {spoken.source})" if spoken.action is not None else ""
    # MUST_SAVE under "auto" leaves the host open to the planner: saved is not recomputed, on either memory.
    return _Asked(action, tensor.tag != "must_save" or spoken.binding, f"tag {name}{against}")


def _spoken(tensor: SavedTensor, config: Settings, resolution: Resolution) -> _Asked:
    """The policy's request, ignoring tags."""
    policy = config.policy
    if isinstance(policy, str):
        action = None if policy == "auto" else cast("Action", policy)
        return _Asked(action, action is not None, f'policy="{policy}"')
    if callable(policy):
        action = ask(policy, tensor)
        name = getattr(policy, "__qualname__", type(policy).__qualname__)
        return _Asked(action, action is not None, f"policy {name}")
    found = PatternPolicy(cast("tuple[tuple[str, str], ...]", policy), resolution).match(tensor)
    if found is None:
        return _Asked(None, False, "no pattern of the policy selects it")
    pattern, action = found
    return _Asked(action, action is not None, f'policy "{pattern}"', pattern if pattern.strip("*") else "")


def _barred(tensor: SavedTensor, config: Settings, resolution: Resolution) -> dict[Action, str]:
    """Why this activation may not be offloaded or recomputed."""
    why: dict[Action, str] = {}
    if not tensor.recomputable:
        why["recompute"] = tensor.why_not_recompute or "it cannot be recomputed"
    if not tensor.eligible:
        why["offload"] = tensor.why_not or "it cannot be offloaded"
    elif tensor.tag == "must_offload":
        pass
    elif config.offload_modules is not None and not any(
        selection.pattern in config.offload_modules and selects(selection, tensor) for selection in resolution.selections
    ):
        why["offload"] = Refusal.OUTSIDE_MODULES.because(modules=", ".join(config.offload_modules))
    elif tensor.planned_bytes < config.min_tensor_bytes and (tensor.nbytes is not None or tensor.example_bytes):
        sizes = {"nbytes": format_bytes(tensor.planned_bytes), "least": format_bytes(config.min_tensor_bytes)}
        why["offload"] = Refusal.BELOW_MIN_BYTES.because(**sizes)
    return why


def _spend_fraction(
    table: SavedTable, config: Settings, asked: Mapping[str, _Asked], barred: dict[str, dict[Action, str]]
) -> None:
    """Choose offload_fraction of the eligible bytes, the cheapest first; one that does not fit is skipped, smaller ones may
    follow."""
    if config.offload_fraction >= 1.0:
        return
    may_go = _cheapest_first(
        [
            tensor
            for tensor in table.tensors
            if "offload" not in barred[tensor.name]
            and (asked[tensor.name].action in (None, "offload") or not asked[tensor.name].binding)
        ]
    )
    left = config.offload_fraction * sum(tensor.planned_bytes for tensor in may_go)
    left -= sum(tensor.planned_bytes for tensor in may_go if tensor.tag == "must_offload")
    for tensor in may_go:
        if tensor.tag == "must_offload":
            continue
        if tensor.planned_bytes <= left and config.offload_fraction > 0.0:
            left -= tensor.planned_bytes
        else:
            barred[tensor.name]["offload"] = Refusal.BEYOND_FRACTION.because(fraction=config.offload_fraction)


def _cheapest_first(tensors: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Sort key. Fewer, larger transfers take less host time. Of tensors of about the same size (a factor of two), the earliest
    overlap with most of forward. A tensor after which fewer bytes are produced than it holds itself comes last.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.produced_position)
    behind = sum(tensor.planned_bytes for tensor in ordered)
    largest = max((tensor.planned_bytes for tensor in ordered), default=0)
    keys: dict[str, tuple[bool, int]] = {}
    for tensor in ordered:
        nbytes = tensor.planned_bytes
        behind -= nbytes
        keys[tensor.name] = (behind < nbytes, (largest // max(nbytes, 1)).bit_length())
    return sorted(ordered, key=lambda tensor: keys[tensor.name])


def _told(constraint: Constraint, tensor: SavedTensor, barred: Mapping[str, Mapping[Action, str]]) -> Constraint:
    """The constraint with reasons for the actions that it does not allow: a limit, the tensor itself, or its tag."""
    why = barred[tensor.name]
    tagged = Refusal.TAGGED_TO_RECOMPUTE if tensor.tag == "must_recompute" else Refusal.TAGGED
    tag = tagged.because(tag=_TAG_NAMES[tensor.tag]) if tensor.tag else ""
    return replace(
        constraint,
        why_not_offload="" if constraint.may_offload else why.get("offload", tag),
        why_not_recompute="" if constraint.may_recompute else why.get("recompute", tag),
    )


def _wish(tensor: SavedTensor, asked: _Asked, barred: Mapping[Action, str]) -> Constraint:
    allowed: tuple[Action, ...] = ("keep", *(action for action in ("recompute", "offload") if action not in barred))
    if tensor.tag in _TAG_ALLOWS:
        allowed = tuple(action for action in allowed if action == "keep" or action in _TAG_ALLOWS[tensor.tag])
    if asked.action is None:
        if allowed == ("keep",):
            return Constraint(tensor.name, "keep", True, "; ".join(dict.fromkeys(barred.values())), allowed)
        return Constraint(tensor.name, None, False, asked.source, allowed)
    if asked.action not in barred:
        return Constraint(tensor.name, asked.action, asked.binding, asked.source, allowed)
    why = barred[asked.action]
    warning = ""
    if tensor.tag in ("must_offload", "must_recompute"):
        warning = disobeyed(tensor, _TAG_NAMES[tensor.tag], why)
    return Constraint(tensor.name, "keep", asked.binding, f"{asked.source} asks to {asked.action}: {why}", allowed, warning)
