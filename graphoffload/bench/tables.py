"""Measure a table by name: what others publish, and graphoffload at the memory of each. `--list` describes them.

    python -m graphoffload bench table perf-maxing-llama3-1b --out DIR --results DIR
    python -m graphoffload bench table hf-qwen3-8b --size tokens=32768
    python -m graphoffload bench table trl-qwen3-8b --tiny             # on a CPU: shows that it runs

Processes of a table run one after another; `bench together --table NAME` runs those of several tables side by side. A variant
of somebody else that fails, or that is not installed, is a row. Exit status: 1 where a gradient was wrong, or a variant of
graphoffload or the baseline failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from graphoffload.bench import catalogue
from graphoffload.bench.measure import Row
from graphoffload.bench.options import add_model_options, add_result_options, add_step_options, keep_results
from graphoffload.bench.process import DEFAULT, parse_process
from graphoffload.bench.run_options import Options
from graphoffload.bench.runner import Runner
from graphoffload.bench.variants import parse
from graphoffload.bench.verdict import NothingTrainsError
from graphoffload.errors import ConfigError
from graphoffload.report.progress import progress_bar


def arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options."""
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="describe the tables and exit")
    add_model_options(parser)
    add_step_options(parser)
    parser.add_argument("--at-once", type=int, default=2, help="variants that take turns with one baseline (default: 2)")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="skip what has not begun by then, in each process")
    parser.add_argument("--variant-limit-s", type=float, default=400.0, help="a variant that takes longer is a hang")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="of parameters, where not mixed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="folder for every sample as JSON")
    add_result_options(parser)


def start(given: argparse.Namespace) -> int:
    """Run the tables, one after another.

    Raises:
        ConfigError: no name, or one that is not known.
    """
    if given.list:
        print(catalogue.described())
        return 0
    if not given.names:
        raise ConfigError(f"give a NAME; there are: {', '.join(catalogue.TABLES)}.")
    found = [catalogue.find(name) for name in given.names]
    failures = 0
    with keep_results(given):
        for table in found:
            for number, text in enumerate(table.texts(tiny=given.tiny, sizes=dict(given.size))):
                failures += _measured(table.name, number, text, given)
    return int(failures > 0)


def _measured(name: str, number: int, text: str, given: argparse.Namespace) -> int:
    """Run one process of a table; how many of its rows count as failures."""
    process = parse_process(text)
    options = Options(
        given.steps, given.block, limit_s=given.limit_s, variant_limit_s=given.variant_limit_s, tiny=given.tiny,
        dtype=getattr(torch, given.dtype) if given.dtype else None, out=given.out and given.out / f"{name}-{number}",
        commit=given.commit, command=given.command_line,
    )  # fmt: skip
    runner = Runner(process.model, given.device, process.fill(options))
    try:
        with progress_bar(f"table {name}", 1 + len(process.variants or DEFAULT)) as runner.bar:
            process.measure(runner, given.at_once)
        runner.finish()
    except NothingTrainsError as error:  # another process of the table may
        print(f"{name}: {error}", flush=True)
        return 1
    finally:
        runner.close()
    return sum(counts_as_failure(row) for row in runner.rows)


def counts_as_failure(row: Row) -> bool:
    """Whether a row is one that must not be: a wrong gradient of anybody, or a variant of graphoffload without figures."""
    if row.status.startswith(("WRONG", "HUNG")):
        return True
    is_baseline = row.variant.endswith((" before", " after"))
    return not is_baseline and parse(row.variant).ours and row.status.startswith(("FAILED: ", "NOT COMPILED"))
