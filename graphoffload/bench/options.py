"""Options that several tools of the bench share."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from graphoffload.bench.recipe import OPTIMIZERS, PRECISIONS
from graphoffload.bench.results import export


def size_change(text: str) -> tuple[str, int]:
    """NAME=N of --size."""
    name, equals, number = text.partition("=")
    if not (name and equals and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=N, such as tokens=8192")
    return name, int(number)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--tiny and --size."""
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, where memory is not measured")
    parser.add_argument(
        "--size", nargs="*", type=size_change, default=[], metavar="NAME=N", help="change single sizes of the model"
    )


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """--optimizer, --precision and --dtype."""
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="none", help="its step is measured as well (default: none)")
    parser.add_argument("--precision", choices=PRECISIONS, default="pure", help="amp, cast: float32 parameters")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="of parameters, where not mixed")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """--steps and --block."""
    parser.add_argument("--steps", type=int, default=10, help="measured steps a side (default: 10)")
    parser.add_argument("--block", type=int, default=5, help="steps before the other side has its turn (default: 5)")


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """--results and --commit."""
    parser.add_argument(
        "--results", type=Path, default=None, metavar="DIR", help="write result files to DIR/DATE-COMMIT-GPU, as `export` does"
    )
    parser.add_argument("--commit", default="", help="what result files say was measured (default: this checkout's)")


@contextlib.contextmanager
def keep_results(given: argparse.Namespace) -> Iterator[None]:
    """Where --results is given: result files of what runs meanwhile, also when it is cut short."""
    if given.results is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if given.out is None:
            given.out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            yield
        finally:
            for path in export(given.out, given.results, given.commit):
                print(f"wrote {path}", flush=True)
