"""Step time against peak memory, drawn from rows of result files: one figure a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAMILIES = {
    "graphoffload, device_budget": ("over",),
    "graphoffload, max_slowdown": ("slowdown",),
    "keep-all": ("keep",),
    "full checkpointing": ("checkpoint",),
    "selective checkpointing": ("selective",),
    "activation_memory_budget": ("budget",),
    "torch's offload pass": ("torch-offload",),
    "save_on_cpu": ("save_on_cpu",),
}
"""What stands in the legend, and how its variants' names begin."""
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:brown", "tab:purple", "black", "tab:cyan", "tab:gray")
_OURS: dict[str, dict[str, Any]] = {
    "graphoffload, device_budget": {"marker": "o", "linestyle": "-", "color": "tab:red"},
    "graphoffload, max_slowdown": {"marker": "D", "linestyle": "", "color": "tab:red", "markerfacecolor": "white"},
}


def points_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that can be drawn: measured, with a peak and right gradients."""
    return [row for row in rows if row.get("ratio") is not None and row.get("peak_bytes") and row["status"].startswith("ok")]


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> bool:
    """Peak over static against step time relative to keep-all. False where there is nothing, or no matplotlib, to draw with."""
    points = points_of(rows)
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not points:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    families: dict[str, list[dict[str, Any]]] = {}
    for point in sorted(points, key=lambda p: p["peak_bytes"]):
        families.setdefault(_family(point["variant"]), []).append(point)
    known = [*FAMILIES, *sorted(families.keys() - FAMILIES.keys())]
    for family, members in sorted(families.items(), key=lambda item: item[0] in _OURS):
        x, y = [p["peak_bytes"] / 1e9 for p in members], [(p["ratio"] - 1) * 100 for p in members]
        style = _OURS.get(family, {"marker": "s", "linestyle": "", "color": _COLOURS[known.index(family) % len(_COLOURS)]})
        axes.plot(x, y, label=family, zorder=3 if family in _OURS else 2, **style)
        bound = [(at, (p["bound_ratio"] - 1) * 100) for at, p in zip(x, members, strict=True) if p.get("bound_ratio")]
        if bound:
            axes.plot(*zip(*bound, strict=True), "--", color="black", alpha=0.6, label="no plan is predicted below (LP)")
    _scale(axes, max((p["ratio"] - 1) * 100 for p in points))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return True


def _scale(axes: Any, highest: float) -> None:
    axes.set_yscale("symlog", linthresh=5)
    ticks = [-2, 0, 2, 5, 10, *(tick for tick in (20, 50, 100, 200, 400, 800) if tick < 2 * highest)]
    axes.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
    axes.set_xlabel("peak memory of a step over what is allocated between steps, GB")
    axes.set_ylabel("step time over keep-all")


def _family(variant: str) -> str:
    return next((family for family, prefixes in FAMILIES.items() if variant.startswith(prefixes)), variant)
