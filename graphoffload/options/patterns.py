"""The activations that a pattern selects. Pure strings: module paths and operation names in, selections out; no torch.

    pattern          selects
    "*"              everything
    "*.self_attn"    a glob on module paths: "*" also spans dots, and "*.x" also matches the path "x"
    "my_boundary"    modules that mark_boundary gave this name
    "core_attn"      a name that Megatron users know; megatron_aliases.py says what it means in other models
    "op:aten.silu*"  results of operations of that name

A module's saved activations are those that an operation inside it *needs for backward*, including its inputs. Recomputing a
module means running it again from its inputs, so for "recompute" a pattern selects results that were *produced* inside it:
{"*norm": "recompute"} drops the normed values and not the residual stream that the norm reads.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate

from graphoffload.errors import PatternError
from graphoffload.facts.plan import Action
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.options.megatron_aliases import MEGATRON_NAMES, BodyRule, rules_for

_AROUND = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WRAPPERS = _AROUND | {"", "_modules", "__dict__", "__wrapped__", "__self__", "__func__"}
_PLACED = re.compile(r"M\[(['\"])([^'\"]*)\1\]")
_OP_PREFIX = "op:"


def placed(root: str, path: str) -> str:
    """A module's path in tracing's form: `path` relative to the compiled module, whose path in the model is `root`.

    clean_path joins the two, and root_of returns `root`.
    """
    return ".".join(part for part in (f"M['{root}']", path) if part)


def root_of(raw: str) -> str:
    """The first argument of `placed`; "" for any other path."""
    found = _PLACED.match(raw.strip())
    return found[2] if found else ""


def clean_path(raw: str) -> str:
    """A module path as `named_modules` gives it, from tracing's name; "" is the root.

    "L['self'].layers[0]._modules['mlp']" and "getattr(L['self'].layers, '0').mlp" both become "layers.0.mlp". A root of any
    name (L['self'], L['s'], G['model']) is dropped, and so are the wrappers that compile and checkpointing put around a module.
    The root that `placed` writes is kept: "M['model'].layers[0]" becomes "model.layers.0".
    """
    text = re.sub(r"@\d+$", "", raw.strip())
    text = _PLACED.sub(r"\2", text, count=1) if _PLACED.match(text) else text
    text = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", text)
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"getattr\(([^(),]*), (['\"])([^'\"]*)\2\)", r"\1.\3", text)
    text = re.sub(r"\.__getitem__\((\d+)\)", r".\1", text)
    text = re.sub(r"\[slice\([^)]*\)\]|\.slice\([^)]*\)", "", text)
    text = re.sub(r"^[LG]\[(['\"])[^'\"]*\1\]", "", text)
    text = re.sub(r"\[(['\"]?)([^\[\]'\"]*)\1\]", r".\2", text)
    parts = [part for part in text.split(".") if part not in _WRAPPERS]
    while parts and parts[0] == "self":
        parts = parts[1:]
    return ".".join(parts)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def matches(pattern: str, path: str, roots: Iterable[str] = ()) -> bool:
    """Whether a glob matches a module path: "*" spans dots, and "*.self_attn" also matches "self_attn".

    The pattern may contain the wrappers of torch.compile and checkpointing ("_orig_mod") or leave them out. roots: modules from
    which the path may start as well.
    """
    pattern = _without_wrappers(pattern)
    if _compiled(pattern).match(path):
        return True
    if pattern.startswith("*.") and _compiled(pattern[2:]).match(path) is not None:
        return True
    return any(path.startswith(root + ".") and matches(pattern, path[len(root) + 1 :]) for root in roots if root)


@functools.cache
def _without_wrappers(pattern: str) -> str:
    return ".".join(part for part in pattern.split(".") if part not in _AROUND) or pattern


def ancestors(path: str) -> tuple[str, ...]:
    """The path and the path of every module around it, innermost first, without the root ""."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[:end]) for end in range(len(parts), 0, -1))


@dataclass(frozen=True, slots=True)
class Selection:
    """The activations that one pattern selects in one graph.

    Attributes:
        pattern: as the user wrote it.
        everything: the pattern is "*", which also selects activations that belong to no module.
        modules: paths of selected modules; everything inside them is selected too.
        boundaries: names given by mark_boundary. boundary_modules: innermost modules inside those boundaries.
        op: glob on the producing operation.
        rules: operations that run directly in the body of some modules, for names without a module of their own.
    """

    pattern: str
    everything: bool = False
    modules: frozenset[str] = frozenset()
    boundaries: frozenset[str] = frozenset()
    boundary_modules: frozenset[str] = frozenset()
    op: str = ""
    rules: tuple[BodyRule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.everything or self.modules or self.boundaries or self.op or self.rules)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The selections of all patterns of a configuration, in order, and the patterns that match nothing."""

    selections: tuple[Selection, ...] = ()
    unmatched: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    boundaries: tuple[str, ...] = ()

    def __getitem__(self, pattern: str) -> Selection:
        for selection in self.selections:
            if selection.pattern == pattern:
                return selection
        raise KeyError(pattern)

    def error(self, where: str = "policy or offload_modules") -> PatternError | None:
        """The error for the unmatched patterns; None if all match."""
        if not self.unmatched:
            return None
        first, *others = self.unmatched
        return no_match(first, self.paths, where=where, boundaries=self.boundaries, others=others)


def resolve(
    patterns: Iterable[str],
    paths: Iterable[str],
    boundaries: Mapping[str, Collection[str]] | Iterable[str] = (),
    ops_by_path: Mapping[str, Collection[str]] | None = None,
    roots: Collection[str] = (),
) -> Resolution:
    """The selection of each pattern among the modules, boundaries and operations of a graph.

    Args:
        patterns: globs, boundary names, Megatron names or "op:" globs; any order, duplicates once.
        paths: module paths of the graph's operations, as clean_path gives them; the modules around them follow from the paths.
        boundaries: names given by mark_boundary; a mapping also gives the innermost modules inside each.
        ops_by_path: forward operations directly inside each module path ("" for none); None if they are unknown.
        roots: modules whose code is compiled on its own. A pattern may be relative to one of them.

    Bad patterns do not raise here: `Resolution.error()` makes the PatternError.
    """
    known = tuple(dict.fromkeys(outer for path in paths for outer in reversed(ancestors(path))))
    inside: dict[str, Collection[str]] = dict(boundaries) if isinstance(boundaries, Mapping) else dict.fromkeys(boundaries, ())
    found: list[Selection] = []
    unmatched: list[str] = []
    for pattern in dict.fromkeys(patterns):
        selection = _select(pattern, known, inside, ops_by_path, roots)
        (found if selection else unmatched).append(selection if selection else pattern)  # type: ignore[arg-type]
    return Resolution(tuple(found), tuple(unmatched), known, tuple(inside))


def _select(
    pattern: str,
    paths: tuple[str, ...],
    boundaries: Mapping[str, Collection[str]],
    ops_by_path: Mapping[str, Collection[str]] | None,
    roots: Collection[str],
) -> Selection:
    if pattern and not pattern.strip("*"):
        return Selection(pattern, everything=True)
    if pattern.startswith(_OP_PREFIX):
        op = pattern[len(_OP_PREFIX) :].strip()
        known = ops_by_path is None or any(_op_matches(op, name) for names in ops_by_path.values() for name in names)
        return Selection(pattern, op=op if known else "")
    named = frozenset(name for name in boundaries if matches(pattern, name))
    modules = frozenset(path for path in paths if matches(pattern, path, roots))
    if named or modules or pattern not in MEGATRON_NAMES:
        within = frozenset(path for name in named for path in boundaries[name])
        return Selection(pattern, modules=modules, boundaries=named, boundary_modules=within)
    modules, rules = rules_for(pattern, paths, ops_by_path)
    return Selection(pattern, modules=modules, rules=rules)


def selects(selection: Selection, tensor: SavedTensor, action: Action = "offload") -> bool:
    """Whether a pattern selects this activation.

    "keep" and "offload" select an activation that is needed inside the modules, and "recompute" one that is produced inside. If
    the table does not say where an activation is needed, its producer decides.
    """
    if selection.everything:
        return True
    if selection.op:
        return _op_matches(selection.op, tensor.op)
    if action == "recompute":
        inside = any(path in selection.modules for path in ancestors(tensor.module))
        return inside or tensor.module in selection.boundary_modules or any(rule.produces(tensor) for rule in selection.rules)
    if selection.boundaries.intersection(tensor.boundaries):
        return True
    needed_by = tensor.saved_by or (tensor.module,)
    return any(outer in selection.modules for path in needed_by for outer in ancestors(path)) or any(
        rule.needs(tensor) for rule in selection.rules
    )


def _op_matches(pattern: str, op: str) -> bool:
    """ "aten.silu*" matches "aten.silu.default"; so do "silu*" and, being exact up to the overload, "aten.silu" and "silu"."""
    names = (op, op.split(".", 1)[-1])
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*") for name in names)


def no_match(
    pattern: str, paths: Iterable[str], *, where: str, boundaries: Iterable[str] = (), others: Iterable[str] = ()
) -> PatternError:
    """The error for a pattern that matches nothing: near misses, some existing names, and the forms of a pattern.

    others: patterns that match nothing either, each named with its own near misses.
    """
    paths = tuple(paths)
    lines = [f"{where}: the pattern {pattern!r} matches no module, boundary or operation of this graph."]
    lines.append(what_there_is(pattern, paths, boundaries))
    for other in others:
        near = _near_text(other, (*boundaries, *paths))
        lines.append(f"{other!r} matches none either.{' ' if near else ''}{near}")
    lines.append('Write a glob such as "*.self_attn", a name given by mark_boundary, a Megatron name, or "op:aten.silu*".')
    return PatternError(" ".join(lines))


def what_there_is(pattern: str, paths: Iterable[str], boundaries: Iterable[str] = ()) -> str:
    """Suggestions for a pattern that matches nothing, and some of the modules that exist."""
    paths = tuple(paths)
    lines = []
    if pattern in MEGATRON_NAMES:
        lines.append(f"It stands for {MEGATRON_NAMES[pattern]}, and the model has none that is known by name.")
    known = (*boundaries, *paths)
    if near := _near_text(pattern, known):
        lines.append(near)
    shown = [path for path in paths if path not in near_misses(pattern, known)][:8]
    if shown:
        lines.append(f"Modules here ({len(paths)}): {', '.join(shown)}{', …' if len(paths) > len(shown) else ''}.")
    elif not paths:
        lines.append("Its operations carry no module names.")
    return " ".join(lines)


def _near_text(pattern: str, known: Iterable[str]) -> str:
    near = [name for name in near_misses(pattern, dict.fromkeys(known)) if name != pattern]
    return f"Near: {', '.join(repr(name) for name in near)}." if near else ""


def near_misses(pattern: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Up to `count` names close to the pattern: known paths and boundary names, and Megatron's names only if none of those is
    close."""
    last = pattern.removeprefix(_OP_PREFIX).strip("*.").rsplit(".", maxsplit=1)[-1]
    return (_near(last, known) or _near(last, MEGATRON_NAMES))[:count]


def _near(last: str, known: Iterable[str]) -> tuple[str, ...]:
    """Names whose last part is close to `last`, the closest first."""
    by_last: dict[str, str] = {}
    for name in known:
        end = name.rsplit(".", maxsplit=1)[-1]
        if end and not end.isdigit():
            by_last.setdefault(end, f"*.{end}" if "." in name else name)
    close = difflib.get_close_matches(last, by_last, n=len(by_last) or 1, cutoff=0.5)
    # "kk" and "k" are close to a person, but not by the ratio that suits longer names.
    close += [end for end in by_last if last and end not in close and (end in last or last in end)]
    return tuple(by_last[end] for end in close)
