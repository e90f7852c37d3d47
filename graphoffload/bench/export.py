"""Write result files of what a run left in its --out folder.

    python -m graphoffload bench export out --into docs/results --commit d9c92da

Every run below the folder becomes one small file, DATE-COMMIT-GPU/SUBJECT.json (results.py says what is in it). A page's tables
are written from them: python -m graphoffload bench page docs/benchmarks.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from graphoffload.bench import results


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="what a run had for its --out; folders below count as well")
    parser.add_argument("--into", type=Path, default=Path("docs/results"), metavar="DIR", help="default: docs/results")
    parser.add_argument("--commit", default="", help="what was measured, where the run could not know (no checkout)")


def start(given: argparse.Namespace) -> int:
    """Write the files; their paths are printed."""
    for path in results.export(given.folder, given.into, given.commit):
        print(f"wrote {path}")
    return 0
