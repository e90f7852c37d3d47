"""Plans by key: what the ops need to know at run time, what last_plans() shows, and what survives in a compile-cache hit.

torch's compile caches skip the partitioner on a hit, so a plan is stored beside them under the key that is also part of
torch's cache key.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from graphoffload.saved import Plan


class RunPlan:
    """The part of a plan that the ops look at on every call."""

    __slots__ = ("checksum", "names", "nbytes")

    def __init__(self, plan: Plan | None) -> None:
        transfers = plan.transfers if plan is not None else ()
        self.names = {t.id: f"{t.tensor} of {t.module or 'the model'}" for t in transfers}
        self.nbytes = {t.id: t.nbytes for t in transfers}
        self.checksum = plan.checksum if plan is not None else False


_LOCK = threading.Lock()
_PLANS: dict[str, Plan] = {}
_RUN: dict[str, RunPlan] = {}
_BASES: dict[str, Plan] = {}


def cache_dir() -> Path:
    """Folder for plans and hardware profiles: GRAPHOFFLOAD_CACHE_DIR, else the user's cache folder."""
    configured = os.environ.get("GRAPHOFFLOAD_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphoffload"


def register(plan: Plan, *, store: bool = True) -> None:
    """Make a plan known to the ops and to last_plans(); `store` writes it to disk for later compile-cache hits."""
    with _LOCK:
        _PLANS.pop(plan.key, None)
        _PLANS[plan.key] = plan
        _RUN[plan.key] = RunPlan(plan)
    if store:
        _write(plan, plan.key)


def remember(base: str, plan: Plan) -> None:
    """Store a plan under the key of what it was made for: the next process uses the same plan key and hits torch's cache.

    A plan key is that base key and a random suffix: without a stored plan torch's cache cannot hit, so a compiled graph never
    runs without its plan.
    """
    if base not in _BASES:
        _BASES[base] = plan
        _write(plan, base)


def _write(plan: Plan, name: str) -> None:
    folder = cache_dir() / "plans"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".tmp") as file:
            file.write(plan.to_json())
        os.replace(file.name, folder / f"{name}.json")
    except OSError:
        return  # without a store a cache hit is compiled anew: slower, never wrong


def stored(key: str) -> Plan | None:
    """The plan of an earlier compile with this key, from this process or from disk."""
    plan = _PLANS.get(key) or _BASES.get(key)
    if plan is not None:
        return plan
    try:
        return Plan.from_json((cache_dir() / "plans" / f"{key}.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def of_key(key: str) -> Plan | None:
    """The plan that was made or loaded in this process under exactly this key."""
    return _PLANS.get(key)


def run_plan(key: str) -> RunPlan:
    """What the ops need of a plan; loaded from disk the first time after a cache hit."""
    run = _RUN.get(key)
    if run is None:
        run = _RUN.setdefault(key, RunPlan(stored(key)))
    return run


def last_plans() -> tuple[Plan, ...]:
    """Plans of everything compiled in this process, oldest first, also those that came from a compile-cache hit."""
    with _LOCK:
        return tuple(_PLANS.values())


def forget() -> None:
    """Drop what last_plans() shows. Compiled functions keep working."""
    with _LOCK:
        _PLANS.clear()
