"""The rules of the house (docs/layout.md), each a function from sources to complaints, and a test that each can complain."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PASSES = ROOT / "graphoffload", ROOT / "passes"

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 59  # the docstring not counted: it may carry a protocol or a timeline
MAX_NAMES = 20

# What writes to an fx.Graph, or to the tags that steer the partitioner.
WRITERS = {
    "erase_node", "inserting_before", "inserting_after", "replace_all_uses_with", "replace_input_with", "prepend",
    "eliminate_dead_code", "update_arg", "update_kwarg", "insert_arg", "node_copy", "graph_copy",
}  # fmt: skip
WRITTEN = {"args", "kwargs"}
# Facts, decisions and the planner are pure: they can be built, printed and tested without a graph and without torch.
PURE_ROOMS = {"errors", "units", "facts", "planner", "patience"}
FACT_ROOMS = {"facts", "hardware", "options", "planner", "report"}
MACHINE_PATHS = re.compile(r"/(?:work|root)/|/opt/(?:wheels|pypi)|/tmp/v/")


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file: its place in the checkout, the room it belongs to, its text."""

    path: str
    room: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def sources() -> list[Source]:
    """Every module of the package; graphoffload/passes is a link, its files are listed once, as passes/."""
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *PASSES.rglob("*.py")]):
        relative = path.relative_to(ROOT)
        if relative.parts[:2] == ("graphoffload", "passes"):
            continue
        room = "passes" if relative.parts[0] == "passes" else relative.parts[1].removesuffix(".py")
        found.append(Source(str(relative), room, path.read_text()))
    return found


def layers() -> list[str]:
    """Packages and modules of the import contract in pyproject.toml, from the top down."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [name.strip() for layer in contract["layers"] for name in layer.split("|")]


# Rules: sources in, complaints out.


def front_door_imports(files: Iterable[Source]) -> Iterator[str]:
    """Nothing imports the package itself, which imports everything; nor by a relative path. The contract cannot see these."""
    for file in files:
        if file.room == "__init__":
            continue
        for node in ast.walk(file.tree):
            whole = isinstance(node, ast.Import) and any(alias.name == "graphoffload" for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{file.path}:{node.lineno}: a relative import; write graphoffload.PACKAGE.MODULE."
            elif isinstance(node, ast.ImportFrom) and node.module == "graphoffload":
                whole = not all(is_room(alias.name) for alias in node.names)
            if whole:
                yield f"{file.path}:{node.lineno}: imports the package graphoffload itself; import what defines it."


def is_room(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


def writes_outside_passes(files: Iterable[Source]) -> Iterator[str]:
    """Only passes/ writes to an fx.Graph, and to the metadata of its nodes."""
    for file in files:
        if file.room == "passes":
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
                yield f"{file.path}:{node.lineno}: calls .{node.func.attr}(); only files in passes/ write to a graph."
            if isinstance(node, (ast.Assign, ast.AugAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Attribute) and target.attr in WRITTEN and not is_self(target.value):
                        yield f"{file.path}:{node.lineno}: sets .{target.attr}; only files in passes/ write to a graph."
                    if is_metadata(target) and "/bench/" not in file.path:  # which tags what torch's own methods offload
                        yield f"{file.path}:{node.lineno}: writes .meta[...]; only files in passes/ write to a graph."


def is_metadata(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "meta"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def graph_in_facts(files: Iterable[Source]) -> Iterator[str]:
    """Facts and decisions hold names, bytes and times; never a node. Pure rooms do not import torch at all.

    A pair of graphs may travel in a frozen dataclass; a node in one is private to its module.
    """
    for file in files:
        if file.room in PURE_ROOMS:
            for node in ast.walk(file.tree):
                if imports_torch(node):
                    yield f"{file.path}:{getattr(node, 'lineno', 0)}: imports torch; the room {file.room} is pure."
        for cls in (node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)):
            if not is_frozen_dataclass(cls) or cls.name.startswith("_"):
                continue
            graph_types = {"Node", "Graph", "GraphModule"} if file.room in FACT_ROOMS else {"Node"}
            for field in (node for node in cls.body if isinstance(node, ast.AnnAssign)):
                names = set(re.findall(r"\w+", ast.unparse(field.annotation)))
                if names & graph_types:
                    yield (
                        f"{file.path}:{field.lineno}: frozen {cls.name}.{ast.unparse(field.target)} holds "
                        f"{', '.join(sorted(names & graph_types))}; facts hold names."
                    )


def imports_torch(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in node.names)
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    return module.split(".")[0] == "torch" or module.startswith("graphoffload.torch_internals")


def is_frozen_dataclass(cls: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(deco) and "frozen=True" in ast.unparse(deco) for deco in cls.decorator_list)


def too_long(files: Iterable[Source]) -> Iterator[str]:
    """Modules of at most 400 lines, functions under 60."""
    for file in files:
        lines = len(file.text.splitlines())
        if lines > MAX_MODULE_LINES:
            yield f"{file.path}: {lines} lines, at most {MAX_MODULE_LINES}; split it by what its parts are about."
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and code_lines(node) > MAX_FUNCTION_LINES:
                yield f"{file.path}:{node.lineno}: {node.name} has {code_lines(node)} lines, at most {MAX_FUNCTION_LINES}."


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def named_like_module(files: Iterable[Source]) -> Iterator[str]:
    """A function never shares its module's name: graphoffload.plan is a room, never a function that hides it."""
    for file in files:
        stem = Path(file.path).stem
        for node in file.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == stem:
                yield f"{file.path}:{node.lineno}: {node.name} has the name of its module; one of the two needs another."


def own_byte_units(files: Iterable[Source]) -> Iterator[str]:
    """One place turns bytes into GiB and back; elsewhere a factor of 2**30 is a second size function in the making."""
    for file in files:
        if file.room == "units":
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.BinOp) and re.fullmatch(r"2 \*\* [34]0|1 << [34]0|1024 \*\* [34]", ast.unparse(node)):
                yield f"{file.path}:{node.lineno}: {ast.unparse(node)}; sizes are read and printed by graphoffload.units alone."


def machine_paths(files: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Nothing names the machine it was written on."""
    for path, text in files:
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATHS.search(line):
                yield f"{path}:{number}: names a path of some machine: {line.strip()[:80]}"


RULES: dict[str, Callable[[], Iterator[str]]] = {
    "nothing imports the front door": lambda: front_door_imports(sources()),
    "only passes write to graphs": lambda: writes_outside_passes(sources()),
    "facts hold no nodes": lambda: graph_in_facts(sources()),
    "modules and functions are short": lambda: too_long(sources()),
    "no function is named like its module": lambda: named_like_module(sources()),
    "one size function": lambda: own_byte_units(sources()),
    "no machine paths": lambda: machine_paths(tracked_texts()),
}


def tracked_texts() -> list[tuple[str, str]]:
    """(path, text) of every text file that belongs to the project; this file spells the pattern and is left out."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:  # an unpacked source distribution
        folders = ("graphoffload", "passes", "tests", "examples", "docs")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = []
    for path in paths:
        if not path.is_file() or path.is_symlink() or path == Path(__file__).resolve() or path.suffix in {".png", ".pyc"}:
            continue
        texts.append((str(path.relative_to(ROOT)), path.read_text(errors="replace")))
    return texts


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    complaints = list(RULES[rule]())
    assert not complaints, f"{rule}:\n" + "\n".join(complaints)


def bad(text: str, room: str = "report", path: str = "") -> list[Source]:
    return [Source(path or f"graphoffload/{room}.py", room, text)]


@pytest.mark.parametrize(
    ("complaints", "expected"),
    [
        (front_door_imports(bad("from graphoffload import offload")), "the package graphoffload itself"),
        (front_door_imports(bad("import graphoffload")), "the package graphoffload itself"),
        (front_door_imports(bad("from . import units")), "relative"),
        (writes_outside_passes(bad("graph.erase_node(node)")), "erase_node"),
        (writes_outside_passes(bad("with graph.inserting_after(node): pass")), "inserting_after"),
        (writes_outside_passes(bad("node.args = ()")), "sets .args"),
        (writes_outside_passes(bad("node.meta['val'] = value")), "writes .meta"),
        (graph_in_facts(bad("import torch.fx", "facts")), "pure"),
        (graph_in_facts(bad("from graphoffload.torch_internals import pytrees", "planner")), "pure"),
        (graph_in_facts(bad("@dataclass(frozen=True)\nclass Fact:\n    node: fx.Node | None = None")), "Fact.node holds Node"),
        (graph_in_facts(bad("@dataclass(frozen=True)\nclass Fact:\n    graph: fx.Graph", "options")), "Fact.graph holds Graph"),
        (too_long(bad("\n" * 401)), "401 lines"),
        (too_long(bad("def f():\n" + "    x = 1\n" * 60)), "f has 61 lines"),
        (named_like_module(bad("def report(): ...")), "the name of its module"),
        (own_byte_units(bad("gib = n / 2**30")), "2 ** 30"),
        (own_byte_units(bad("gib = n / (1 << 30)")), "1 << 30"),
        (machine_paths([("a.md", "see /work" + "/main")]), "a.md:1"),
    ],
)
def test_rule_can_complain(complaints: Iterator[str], expected: str) -> None:
    found = list(complaints)
    assert len(found) == 1, found
    assert expected in found[0]


def test_imports_go_down_the_flow() -> None:
    """The contract in pyproject.toml, which docs/layout.md describes."""
    command = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_an_import_that_goes_up_breaks_the_contract(tmp_path: Path) -> None:
    """In a copy of the tree, where the facts import the planner."""
    shutil.copytree(PACKAGE, tmp_path / "graphoffload", symlinks=False, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    limits = tmp_path / "graphoffload" / "facts" / "limits.py"
    limits.write_text(limits.read_text() + "\nfrom graphoffload.planner import simulator\n")
    command = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([command, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode != 0
    assert "graphoffload.facts is not allowed to import graphoffload.planner" in run.stdout


def test_layout_describes_every_package() -> None:
    listed = layers()
    assert len(listed) == len(set(listed))
    there = {source.room for source in sources()} - {"__init__"}
    assert set(listed) == there
    assert len(there) <= 24, "a newcomer reads the names of all packages at one look"
    text = (ROOT / "docs" / "layout.md").read_text()
    missing = [room for room in listed if not re.search(rf"`{room}/?`", text)]
    assert not missing, f"docs/layout.md has no row for {missing}"


def test_every_config_field_is_documented() -> None:
    config = importlib.import_module("graphoffload.options.config")
    text = (ROOT / "docs" / "config.md").read_text()
    missing = [field.name for field in dataclasses.fields(config.OffloadConfig) if f"`{field.name}`" not in text]
    assert not missing, f"docs/config.md does not mention {missing}"


def test_every_error_class_is_tested() -> None:
    errors = importlib.import_module("graphoffload.errors")
    bases = {errors.GraphOffloadError, errors.GraphOffloadWarning}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, tuple(bases)) and c not in bases]
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__).resolve()]
    texts = "\n".join(path.read_text() for path in files)
    missing = [c.__name__ for c in classes if not re.search(rf"\b{c.__name__}\b", texts)]
    assert len(classes) > 10
    assert not missing, f"no test mentions {missing}"


def test_front_door() -> None:
    package = importlib.import_module("graphoffload")
    names = list(package.__all__)
    assert len(names) <= MAX_NAMES, f"{len(names)} names in graphoffload.__all__, at most {MAX_NAMES}"
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(package, name), f"graphoffload.__all__ promises {name}, which is not there"
    assert len((package.__doc__ or "").splitlines()) >= 10, "the package docstring is a tour from joint graph to reload"
    hidden = [name for name in names if is_room(name) and not isinstance(getattr(package, name), type(package))]
    assert not hidden, f"graphoffload.{hidden} hide the modules of that name"


def test_contract_names_are_there() -> None:
    """What users write (the table of the README) never goes away unnoticed."""
    package = importlib.import_module("graphoffload")
    for name in (
        "OffloadBackend", "OffloadPartitioner", "partition_fn", "offload", "mark_boundary", "mark_boundaries", "explain",
        "last_plans", "OffloadConfig", "OffloadReport", "host_memory", "stats",
    ):  # fmt: skip
        assert name in package.__all__, name


def test_passes_from_the_root_are_refused() -> None:
    """`import passes` would load a second copy of every pass; it names the right import instead."""
    run = subprocess.run([sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "ImportError" in run.stderr
    assert "graphoffload.passes" in run.stderr


def tool(*command: str) -> None:
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"


def test_ruff() -> None:
    tool("ruff", "check", ".")


@pytest.mark.slow
def test_mypy_strict() -> None:
    tool("mypy")
