"""The result file as docs/models.md: `python -m net.page` writes it, and a test checks that it is what this makes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from net.on_gpu import RESULTS as GPU_RESULTS
from net.on_gpu import WAYS, is_whole
from net.runner import INNERS, RESULTS, ROOT, load
from net.table import everything

PAGE = ROOT / "docs" / "models.md"
COLUMNS = ("plain", "offload", "recompute", "slowdown", "budget")
BAD = ("wrong", "error", "timeout")
ON_A_GPU = """\
The same models under Inductor on a GPU, by `python -m net.on_gpu`: **offload** with copies that are delayed at random
and with released memory that is overwritten, **budget** with what is measured on that GPU. *padded*: Inductor pads each
product. *dynamic*: all sizes are symbols.

The first run found two errors that no CPU shows. BART and Marian did not compile for any length, since memory-efficient
attention saves 32 * ceil(tokens / 32) numbers, and a reload could not write that size. EVA02's step was ended: of a view that
Inductor's padded strides made two copies of, one was offloaded and the other one released. Both are mended, and their rows are
of after."""
WORDS = {"plain": {"off": "off", "error": "fails"}}

INTRODUCTION = """# Models

{count} architectures and kinds of training, built from their configs with random weights and tiny sizes: two training
steps, in float32 unless the row says otherwise, under plain `torch.compile` and under four ways of this package, with both
inner compilers. A row of training (`grpo`, `accumulation`) is a whole step: its forwards, backwards and updates. `make net`
runs what is missing here and writes this page from `docs/results/net.json`; `tests/net` has the builders and the judge.

* **torch.compile**: without this package. *ok*: its gradients are those of eager to {far:g} ({coarse}); *off*: they are
  not; *fails*: it raises. What fails there is not tried further.
* **offload**, **recompute**: `policy="offload"` and `policy="recompute"`, `min_tensor_bytes=0`, `verify="checksum"`.
* **slowdown**: `max_slowdown=0.3`. **budget**: a `device_budget` halfway between the predicted peak of keep-all and the least
  predicted peak of the ways before. Both with `hardware="h200-sxm"` and `reserve=0`. *keeps all*: that is what the plan is.
* *ok*: loss, every gradient and every buffer are right in both steps, copies were executed where the plan has some, as many
  came back as went, and the host holds nothing afterwards. A way is wrong where its error is above 3 x plain torch.compile's,
  over all gradients together (plus {floor:g}) and for each tensor by itself. The reference is the eager step in float64, with
  float32 that a model asks for by name widened as well; exceptions are [below](#judged-by-something-else). In 16 and 8 bits
  a way under `aot_eager`, which runs the same kernels, must also equal plain torch.compile (to {floor:g}).
* *not run*: nothing is known.

{versions}
"""


def cell(row: dict[str, Any], way: str) -> str:
    """One way's outcome in a word."""
    if not row:
        return "not run"
    plain = row.get("plain", {})
    found = row.get(way)
    if found is None:
        return "" if plain.get("outcome") in ("error", "skipped", "timeout") else "not run"
    if found["outcome"] == "ok" and any(note == "the plan keeps all" for note in found.get("notes", ())):
        return "keeps all"
    word = WORDS.get(way, {}).get(found["outcome"], found["outcome"])
    return f"**{word}**" if way != "plain" and found["outcome"] in BAD else str(word)


def table(results: dict[str, Any]) -> Iterator[str]:
    """A row for each architecture."""
    ways = " | ".join("torch.compile" if way == "plain" else way for way in COLUMNS)
    yield f"| architecture | what it is | parameters | {ways} | Inductor: {ways} |"
    yield "|---|---|---:|" + "---|" * (2 * len(COLUMNS))
    for name, architecture in everything().items():
        row = results["rows"].get(name, {})
        sizes = [row[inner]["plain"]["parameters"] for inner in INNERS if "parameters" in row.get(inner, {}).get("plain", {})]
        cells = [cell(row.get(inner, {}), way) for inner in INNERS for way in COLUMNS]
        yield f"| {name} | {architecture.kind} | {sizes[0] if sizes else ''} | {' | '.join(cells)} |"


def outcomes(results: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(architecture, inner, way, outcome) of all that was run, in the order of the table."""
    for name in everything():
        for inner in INNERS:
            for way, outcome in results["rows"].get(name, {}).get(inner, {}).items():
                if way != "ran":
                    yield name, inner, way, outcome


def listed(lines: list[str]) -> list[str]:
    """A list, or that there is nothing."""
    return [f"* {line.replace('|', '/')}" for line in lines] or ["Nothing."]


def summary(results: dict[str, Any]) -> Iterator[str]:
    """How many of what."""
    for inner in INNERS:
        rows = [row[inner] for row in results["rows"].values() if inner in row]
        plain = [row for row in rows if row["plain"]["outcome"] in ("ok", "off")]
        ways = [row[way] for row in plain for way in COLUMNS[1:] if way in row]
        bad = sum(way["outcome"] in BAD for way in ways)
        skipped = sum(row["plain"]["outcome"] == "skipped" for row in rows)
        yield (
            f"* `{inner}`: {len(rows)} of {len(everything())} architectures were run, {skipped} skipped; {len(plain)} compile "
            f"under plain torch.compile. Of {len(ways)} ways of these {len(ways) - bad} are ok, {bad} are not."
        )


def bytes_section(results: dict[str, Any]) -> Iterator[str]:
    """Where device bytes kept and host bytes together are what plain torch.compile saves, and where not."""
    offloads = [(n, i, o) for n, i, way, o in outcomes(results) if way == "offload" and "kept_bytes" in o]
    odd = [(n, i, note) for n, i, o in offloads for note in o.get("notes", ()) if note.startswith("identity: ")]
    yield ""
    yield "## Bytes"
    yield ""
    yield (
        "`torch.autograd.graph.saved_tensors_hooks` counts what a step saves, by storage, without parameters, buffers and the "
        'model\'s inputs: once under plain torch.compile, once under `policy="offload"`. Kept there and copied to the host '
        "(`stats()`) together are what plain torch.compile keeps, to the byte, in "
        f"{len(offloads) - len(odd)} of {len(offloads)} cases; the others:"
    )
    yield ""
    yield from listed([f"{n}, {i}: {note.removeprefix('identity: ')}" for n, i, note in odd])


def gpu_section(results: dict[str, Any]) -> Iterator[str]:
    """What the net did on a GPU."""
    rows = results["rows"]
    yield ""
    yield "## On a GPU"
    yield ""
    yield ON_A_GPU
    yield ""
    for ran, count in sorted(Counter(row["ran"] for row in rows.values()).items()):
        yield f"* {count} rows: {ran}"
    plain = {name: row for name, row in rows.items() if row.get("plain", {}).get("outcome") == "ok"}
    yield ""
    for way in WAYS:
        found = [row[way] for row in plain.values() if way in row]
        ok = sum(one["outcome"] == "ok" for one in found)
        yield f"* {way}: {ok} of {len(found)} ok, of {len(plain)} rows whose gradients are right under plain torch.compile"
    yield ""
    others = [(name, way, one) for name, row in rows.items() for way, one in row.items() if way != "ran"]
    others.sort(key=lambda found: found[2]["outcome"] == "skipped")
    yield from listed([f"{n}, {w}: {one['outcome']}: {one['why']}" for n, w, one in others if one["outcome"] != "ok"])
    left = {"not run": [name for name in everything() if name not in rows]}
    left["time was over"] = [name for name, row in rows.items() if not is_whole(row)]
    yield from [f"* {why}: {', '.join(names)}" for why, names in left.items() if names]


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    from net.judge import COARSE, FAR, FLOOR

    found = list(outcomes(results))
    ran = Counter(row["ran"] for rows in results["rows"].values() for row in rows.values())
    versions = "\n".join(f"* {count} rows: {when}" for when, count in sorted(ran.items()))
    command = f"`{results.get('command', '')}` ran:\n\n{versions}"
    coarse = ", ".join(f"{precision} {far:g}" for precision, far in COARSE.items())
    head = INTRODUCTION.format(count=len(everything()), far=FAR, coarse=coarse, floor=FLOOR, versions=command)
    ours = [f"{n}, {i}, {w}: {o['outcome']}: {o['why']}" for n, i, w, o in found if w != "plain" and o["outcome"] in BAD]
    theirs = [f"{n}, {i}: {o['why']}" for n, i, w, o in found if w == "plain" and o["outcome"] in ("error", "off", "timeout")]
    skipped = [f"{n}, {i}, {w}: {o['why']}" for n, i, w, o in found if o["outcome"] == "skipped"]
    judges = [(n, i, o["judge"]) for n, i, w, o in found if w == "plain" and "judge" in o]
    judged = [f"{n}, {i}: {judge}" for n, i, judge in judges if judge != "eager float64"]
    idle = [f"{n}, {i}, {w}: {note}" for n, i, w, o in found for note in o.get("notes", ()) if note.startswith("nothing to ")]
    more = [f"{n}, {i}: {o['graphs']} graphs" for n, i, w, o in found if w == "plain" and o.get("graphs", 1) > 1]
    sections = {
        "What fails under graphoffload and not under plain torch.compile": ours,
        "What fails under plain torch.compile": theirs,
        "Skipped": skipped,
        "Judged by something else": judged,
        "Nothing to move": idle,
        "More than one graph": more,
    }
    lines = [head, *summary(results), "", *table(results), *bytes_section(results)]
    for title, items in sections.items():
        lines += ["", f"## {title}", "", *listed(items)]
    lines += gpu_section(load(GPU_RESULTS))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = page(load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS))
    PAGE.write_text(text)
    print(f"{PAGE}: {len(text.splitlines())} lines")
