"""The command line: what this GPU can do, what a plan for a model would be, any script as it is, and what steps really take.

    python -m graphoffload hardware [NAME] [--list]
    python -m graphoffload explain script.py:build --hardware h200-sxm --device-budget 40GiB --out pictures
    python -m graphoffload run --device-budget 40GiB torchrun train.py --lr 1e-4
    python -m graphoffload bench --model llama4k --variants checkpoint over:8.6GB

`build` is a function of the script without arguments that returns (model, args), (model, args, kwargs) or (model, kwargs): args
a tuple or list, kwargs a dict. Nothing is computed and no memory is taken where the model is on the meta device.

Exit status: 0, done; 2, the budget cannot be met; 1, everything else, with one line on stderr that says what and what to do.
Every field of OffloadConfig is an option, read as in its environment variable. docs/cli.md has examples.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from graphoffload import bench
from graphoffload.api.introspect import explain
from graphoffload.bench.cli import add_tools, completed
from graphoffload.compiler.optimizer_state import NAMES
from graphoffload.errors import BudgetError, ConfigError, GraphOffloadError
from graphoffload.hardware.measurement import cache_path, measure, resolve_hardware
from graphoffload.hardware.profile import PROFILES
from graphoffload.integrations.commands import launch
from graphoffload.log import log
from graphoffload.options.config import ENV_PREFIX, FIELD_NAMES, OffloadConfig, parse_text
from graphoffload.report.offload_report import OffloadReport
from graphoffload.units import format_bytes

DONE, FAILED, OVER_BUDGET = 0, 1, 2
_FORMS = "(model, args), (model, args, kwargs) or (model, kwargs), with args a tuple or list and kwargs a dict"


class CommandError(GraphOffloadError):
    """The command line cannot be carried out as it is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        args = _arguments(argv)
        with nullcontext() if args.command == "bench" else _quiet():
            return int(args.run(args))
    except BudgetError as error:
        _complain(error)
        return OVER_BUDGET
    except GraphOffloadError as error:
        _complain(error)
        return FAILED
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return DONE


def _complain(error: Exception) -> None:
    sys.stderr.write(f"error: {error}\n")


def _print(*lines: object) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the one line after each compile, which the report repeats, unless logging was set up."""
    before = log.level
    if before == logging.NOTSET:
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As every other complaint, with status 1: 2 is for budgets."""
        raise CommandError(f"{message}. See: {self.prog} --help")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked, or a complaint that names the nearest option there is."""
    argv = completed(sys.argv[1:] if argv is None else argv)
    args, unknown = _parser().parse_known_args(argv)
    args.argv = argv
    if not unknown:
        return args
    command = f"{args.command} {args.tool}" if args.command == "bench" else args.command
    known = [f"--{_dashed(field.name)}" for field in dataclasses.fields(OffloadConfig)]
    known = getattr(args, "known", [*known, "--out", "--json", "--meta", "--optimizer", "--list", "--device"])
    close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise CommandError(f"{unknown[0]} is no argument of {command}.{hint} See: python -m graphoffload {command} --help")


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="python -m graphoffload", description=__doc__, **shape)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    text = inspect.cleandoc(_hardware.__doc__ or "")
    hardware = commands.add_parser("hardware", help="what a GPU and its link can do", description=text, **shape)
    hardware.add_argument("name", nargs="?", help="a named profile; without one this machine's GPU, measured once and cached")
    hardware.add_argument("--list", action="store_true", help="names of the profiles that are known")
    hardware.add_argument("--device", type=int, default=0, metavar="INDEX", help="which CUDA device to measure (default: 0)")
    hardware.add_argument("--json", action="store_true", help="the profile as JSON")
    hardware.set_defaults(run=_hardware)
    text = inspect.cleandoc(_explain.__doc__ or "")
    explained = commands.add_parser("explain", help="plan a model without training", description=text, **shape)
    explained.add_argument("script", metavar="SCRIPT.py[:FUNCTION]", help='the function is "build" where none is named')
    explained.add_argument("--out", metavar="DIR", help="write the report as text and JSON, pictures and traces there")
    explained.add_argument("--json", action="store_true", help="print the report as JSON")
    explained.add_argument("--meta", action="store_true", help="call the function on the meta device: no memory is taken")
    known = f"count the state of {', '.join(NAMES)}, which training makes; without it the report says what it leaves out"
    explained.add_argument("--optimizer", metavar="NAME", help=known)
    _add_fields(explained, [field.name for field in dataclasses.fields(OffloadConfig)])
    explained.set_defaults(run=_explain)
    text = inspect.cleandoc(_run.__doc__ or "")
    started = commands.add_parser("run", help="a script or a command as it is, planned", description=text, **shape)
    _add_fields(started, FIELD_NAMES)
    rest: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
    started.add_argument("-m", dest="module", metavar="MODULE", help="a module and its arguments, as python -m runs it", **rest)
    started.add_argument("command_given", metavar="COMMAND", help="a script, or a command such as torchrun", **rest)
    started.set_defaults(run=_run, known=[f"--{_dashed(name)}" for name in FIELD_NAMES])
    add_tools(commands.add_parser("bench", help="measure steps on this machine", description=bench.__doc__, **shape), shape)
    return parser


def _add_fields(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    fields = parser.add_argument_group("the configuration", f"Also set by {ENV_PREFIX}<FIELD>; an option wins.")
    for name in names:
        fields.add_argument(f"--{_dashed(name)}", dest=f"field_{name}", metavar="VALUE", help=field_help(name))


def field_help(name: str) -> str:
    """What OffloadConfig's docstring says of a field."""
    names = "|".join(field.name for field in dataclasses.fields(OffloadConfig))
    _, _, fields = (OffloadConfig.__doc__ or "").partition("Attributes:")  # under -OO a dataclass writes a signature there
    text = re.search(rf"\b{name}: (.*?)(?=\s+(?:{names}): |\n\s*\n)", fields, re.S)
    return re.sub(r"\s+", " ", text[1]).replace("%", "%%").rstrip(".") if text else ""


# hardware


def _hardware(args: argparse.Namespace) -> int:
    """Print what a device and its link to the host can do: every figure with its unit and where it comes from."""
    if args.list:
        _print(*_profile_lines())
        return DONE
    if args.name not in (None, "measure"):
        profile = resolve_hardware(args.name)
    elif not torch.cuda.is_available():
        _print(
            "No CUDA device here: there is nothing to measure, and nothing to gain from offloading.",
            "To plan for a GPU that is not there, name one (--hardware NAME of explain, hardware=NAME in code):",
            "",
            *_profile_lines(),
        )
        return DONE
    elif args.device not in range(torch.cuda.device_count()):
        raise CommandError(f"--device {args.device}: this machine has CUDA devices 0 to {torch.cuda.device_count() - 1}.")
    else:
        profile = measure(args.device)
    _print(profile.to_json() if args.json else "\n".join(profile.table_lines()))
    if args.name in (None, "measure") and profile.source == "measured" and not args.json:
        _print("", f"kept in {cache_path(profile.name, str(torch.__version__))}; delete it to measure again")
    return DONE


def _profile_lines() -> list[str]:
    """The known profiles, one a line."""
    lines = [f"{'name':<12}{'memory':>10}{'D2H':>12}{'H2D':>12}{'bfloat16':>14}  source"]
    for name, profile in PROFILES.items():
        lines.append(
            f"{name:<12}{format_bytes(profile.memory_bytes):>10}{profile.d2h_bytes_per_s / 1e9:>7.1f} GB/s"
            f"{profile.h2d_bytes_per_s / 1e9:>7.1f} GB/s{profile.matmul_rate_flops_per_s('bfloat16') / 1e12:>6.4g} TFLOP/s"
            f"  {profile.source}"
        )
    return lines


# explain


def _explain(args: argparse.Namespace) -> int:
    """Plan a model's training step without running it, and print the plan of every graph.

    The function returns (model, args), (model, args, kwargs) or (model, kwargs); the model is called as in training, so what
    it returns should be the loss, or whatever backward starts from.
    """
    config = _config(args)
    folder = _folder(args.out)
    model, inputs, named = _built(args.script, meta=args.meta)
    chosen = {} if args.optimizer is None else {"optimizer": args.optimizer}
    report = _report(model, inputs, named, config, chosen)
    _print(report.to_json() if args.json else report)
    if not args.json:
        _print(*_no_gpu(config))
    if folder is not None:
        written = _write(folder, report)
        if not args.json:
            _print("", *(f"wrote {path}" for path in written))
    return DONE


def _given(args: argparse.Namespace) -> dict[str, str]:
    return {name[len("field_") :]: text for name, text in vars(args).items() if name.startswith("field_") and text is not None}


def _config(args: argparse.Namespace) -> OffloadConfig:
    """The options given, over the environment."""
    given = _given(args)
    inductor: dict[str, Any] = {}
    if (text := given.pop("inductor_options", None)) is not None:
        try:
            inductor = dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f'inductor_options={text!r} is no JSON object ({error}); write {{"max_autotune": true}}.'
            ) from None
    return OffloadConfig.from_options({**inductor, **{name: parse_text(name, text) for name, text in given.items()}})


def _folder(out: str | None) -> Path | None:
    """The folder for what is written, made before anything is planned."""
    if out is None:
        return None
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror or error}. Name a folder that can be made and written.") from None
    return folder


def _write(folder: Path, report: OffloadReport) -> list[Path]:
    """The report as text and as JSON, and its pictures."""
    written = []
    for name, text in (("report.txt", f"{report}\n"), ("report.json", report.to_json())):
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{folder / name} cannot be written: {error.strerror or error}.") from None
        written.append(folder / name)
    return [*written, *report.save_pictures(folder)]


def _report(
    model: Any, inputs: tuple[Any, ...], named: dict[str, Any], config: OffloadConfig, chosen: dict[str, Any]
) -> OffloadReport:
    """What explain() says; what torch complains about while it traces becomes one complaint."""
    try:
        report = explain(model, config, **chosen)(*inputs, **named)
    except GraphOffloadError:
        raise
    except Exception as error:  # the model is anyone's code
        raise CommandError(
            f"tracing {type(model).__name__} with these inputs failed: {type(error).__name__}: {error}\n{_cause(error)}"
        ) from error
    if not report.plans:
        raise CommandError(
            f"nothing to plan: no graph of {type(model).__name__} needs a gradient. Are its parameters frozen, or is it called "
            "under torch.no_grad? In training, what it returns must depend on a parameter that requires a gradient."
        )
    return report


def _cause(error: Exception) -> str:
    """What to do about a model that cannot be traced."""
    if type(error).__name__ in ("DataDependentOutputException", "GuardOnDataDependentSymNode", "UserError"):
        return (
            "The model looks at a tensor's value (.item(), a branch on it, a mask as an index); nothing is computed here. "
            "Plan it where it runs: graphoffload.last_plans() after a step."
        )
    return "Does the same call run in eager, on the CPU? If it does, torch.compile cannot trace this model."


def _no_gpu(config: OffloadConfig) -> list[str]:
    """What to do where no GPU was planned for."""
    if torch.cuda.is_available() or config.reserve != "auto" or resolve_hardware(config.hardware).source != "cpu":
        return []
    return ["", "No GPU here and none named: times are a CPU's. --hardware h200-sxm plans for that GPU."]


# run


def _run(args: argparse.Namespace) -> int:
    """Run a script, a module or a command with graphoffload on for whatever Inductor compiles there (GRAPHOFFLOAD=1).

    Options of graphoffload stand before the command; what follows the command's name is its own. The script compiles as it
    does without this: model.compile(), torch.compile(model), or a trainer's option. docs/trainers.md has each trainer's.
    """
    _config(args)
    launch(["-m", *args.module] if args.module else args.command_given, _given(args))
    return DONE


# The script


def _built(target: str, *, meta: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) as the script's function returns them."""
    name, _, function = target.partition(":") if not Path(target).is_file() else (target, "", "")
    function = function or "build"
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CommandError(f"{name} {what}; give a Python file and a function in it, such as train.py:build.")
    module = _imported(path)
    build = getattr(module, function, None)
    if not callable(build):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        own = [name for name in functions if getattr(vars(module)[name], "__module__", "") == module.__name__]
        there = f"its functions and classes: {', '.join(own)}" if own else "it has none"
        raise CommandError(f"{path} has no function {function!r}; {there}. Write one that returns {_FORMS}.")
    with torch.device("meta") if meta else nullcontext():
        result = _theirs(path, f"{path}:{function}()", build)
    return _checked(f"{path}:{function}()", result)


def _imported(path: Path) -> ModuleType:
    """The script as a module that is not `__main__`; files beside it can be imported, as when it is run."""
    name = f"_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} is no Python file; give one that ends in .py, such as train.py:build.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    before, sys.argv = sys.argv, [str(path)]
    try:
        _theirs(path, f"importing {path}", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    finally:
        sys.argv = before
    return module


def _theirs(path: Path, what: str, run: Callable[[], Any]) -> Any:
    """Runs the user's code; what it raises is shown from the first line of the script on."""
    try:
        return run()
    except SystemExit as error:
        raise CommandError(
            f'{what} ended the process (SystemExit: {error.code}). Put what trains under if __name__ == "__main__".'
        ) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [place for place, frame in enumerate(frames) if Path(frame.filename).resolve() == path.resolve()]
        shown = "".join(traceback.format_list(frames[places[0] :])) if places else ""
        raise CommandError(f"{what} failed: {type(error).__name__}: {error}\n{shown}".rstrip()) from error


def _checked(what: str, result: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Model, args and kwargs; or a complaint that says what came instead."""
    parts = tuple(result) if isinstance(result, (tuple, list)) else ()
    if len(parts) not in (2, 3):
        kinds = f" of {len(parts)} ({', '.join(type(part).__name__ for part in parts)})" if parts else ""
        raise CommandError(f"{what} returned a {type(result).__name__}{kinds}; it must return {_FORMS}.")
    model, inputs, named = (parts[0], (), parts[1]) if isinstance(parts[1], dict) and len(parts) == 2 else (*parts, {})[:3]
    if not callable(model) or isinstance(model, type):
        raise CommandError(f"{what} returned a {_kind(model)} for the model; it must return {_FORMS}.")
    if not isinstance(inputs, (tuple, list)):
        remedy = " Write (model, (tensor,))." if isinstance(inputs, torch.Tensor) else ""
        raise CommandError(f"{what} returned a {_kind(inputs)} for args; it must return {_FORMS}.{remedy}")
    if not isinstance(named, dict) or not all(isinstance(key, str) for key in named):
        raise CommandError(f"{what} returned a {_kind(named)} for kwargs; it must return {_FORMS}.")
    return model, tuple(inputs), named


def _kind(value: Any) -> str:
    return f"class ({value.__name__})" if isinstance(value, type) else type(value).__name__


if __name__ == "__main__":
    sys.exit(main())
