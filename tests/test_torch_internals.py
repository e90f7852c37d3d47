"""Private names of torch stand in graphoffload/torch_internals and nowhere else, and docs/torch_internals.md lists them."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INTERNALS = ROOT / "graphoffload" / "torch_internals"
PAGE = ROOT / "docs" / "torch_internals.md"
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")

# Private names of others than torch, with the reason.
NOT_TORCHS = {
    "os._exit": "ends a benchmark's process whose CUDA context is lost, without its destructors",
    "module._gradient_checkpointing_func": "transformers' own attribute, which it gives no other way to set",
    "AcceleratorState._reset_state": "accelerate's own: a benchmark makes a second Accelerator in one process",
    "GradientState._reset_state": "likewise",
}
FRAMES = {"f_back", "f_code", "f_globals", "f_lineno", "f_locals", "tb_frame", "_getframe", "currentframe", "walk_stack"}
READ_BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}


@functools.cache
def library() -> dict[str, ast.Module]:
    """Syntax of every module of the library outside torch_internals, by path; graphoffload/passes is a link to passes/."""
    paths = [*(ROOT / "graphoffload").rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    relative = [path.relative_to(ROOT) for path in paths]
    mine = [path for path in relative if path.parts[1] not in ("passes", "torch_internals")]
    return {str(path): ast.parse((ROOT / path).read_text()) for path in sorted(mine)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def names_of_torch() -> set[str]:
    """Private names that torch_internals reads from torch's objects: the ones that must not be read elsewhere."""
    found: set[str] = set()
    for path in INTERNALS.glob("*.py"):
        tree = ast.parse(path.read_text())
        found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
        found |= {name for name, _ in read_by_name(tree)}
    return found


def read_by_name(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Private attributes that are read or written by a name in a text, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in READ_BY_NAME:
            texts = [value.value for value in node.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
            yield from ((part, node.lineno) for text in texts for part in text.split(".") if is_private(part))


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """Private names that the library defines itself: functions, classes, variables, attributes of `self`."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


@functools.cache
def names_of_ours() -> frozenset[str]:
    return frozenset(defined(library().values()))


def complaints(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Private names of torch, interpreter frames and unittest in these modules, as parts of the library."""
    known, ours = names_of_torch(), names_of_ours() | defined(trees.values())
    for path, tree in trees.items():
        for node in ast.walk(tree):
            at = f"{path}:{getattr(node, 'lineno', 0)}"
            for module, name in imported(node):
                if module.split(".")[0] in ("torch", "functorch") and any(map(is_private, (*module.split("."), name))):
                    yield f"{at}: imports {module}.{name}".rstrip(".")
                if module.split(".")[0] == "unittest":
                    yield f"{at}: imports {module}; graphoffload.torch_internals.patching replaces attributes"
                if name in FRAMES:
                    yield f"{at}: imports {name}, which reads interpreter frames"
            if isinstance(node, ast.Attribute):
                whole = ast.unparse(node)
                own = whole.startswith(("self.", "cls.")) and whole.count(".") == 1
                if is_private(node.attr) and not own and (node.attr in known or node.attr not in ours or of_torch(node)):
                    if whole not in NOT_TORCHS:
                        yield f"{at}: {whole}"
                elif node.attr in FRAMES:
                    yield f"{at}: {whole} reads interpreter frames"
        yield from (f"{path}:{line}: {name} by its name" for name, line in read_by_name(tree) if name not in ours - known)


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what an import statement brings; the name is "" for a module."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((node.module or "", alias.name) for alias in node.names)


def of_torch(node: ast.Attribute) -> bool:
    """Whether a chain of attributes begins at torch."""
    return re.match(r"(torch|nn|functorch)\.", ast.unparse(node)) is not None


def test_private_names_of_torch_stand_in_one_package() -> None:
    found = list(complaints(library()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch._dynamo", "imports torch._dynamo"),
        ("from torch._inductor import config", "imports torch._inductor.config"),
        ("from torch.utils import _pytree as pytree", "imports torch.utils._pytree"),
        ("from torch import _C", "imports torch._C"),
        ("def f():\n    from torch.nn.utils.stateless import _reparametrize_module", "x.py:2: imports torch.nn"),
        ("x = torch._C._cuda_getDevice", "torch._C._cuda_getDevice"),
        ("torch.cuda._sleep(1)", "torch.cuda._sleep"),
        ("torch.cuda._of_a_later_release(1)", "torch.cuda._of_a_later_release"),
        ("x.untyped_storage()._weak_ref()", "x.untyped_storage()._weak_ref"),
        ("y = storage._cdata", "storage._cdata"),
        ("torch.UntypedStorage._expired(weak)", "torch.UntypedStorage._expired"),
        ("torch.UntypedStorage._free_weak_ref(weak)", "torch.UntypedStorage._free_weak_ref"),
        ("module._compiled_call_impl = None", "module._compiled_call_impl"),
        ("def _apply(): ...\nmodule._apply(f)", "module._apply"),
        ("x._version", "x._version"),
        ("target._schema", "target._schema"),
        ("memory._snapshot_of_a_later_release()", "memory._snapshot_of_a_later_release"),
        ('getattr(module, "_orig_mod", module)', "_orig_mod by its name"),
        ('operator.attrgetter("_cdata")', "_cdata by its name"),
        ("from unittest import mock", "imports unittest"),
        ("import unittest.mock", "imports unittest.mock"),
        ("import sys\nsys._getframe(1)", "sys._getframe"),
        ("inspect.currentframe()", "reads interpreter frames"),
        ("from inspect import currentframe", "reads interpreter frames"),
        ("frame.f_locals", "reads interpreter frames"),
    ],
)
def test_one_elsewhere_is_found(text: str, expected: str) -> None:
    """In a module that is added to the library."""
    found = list(complaints({"x.py": ast.parse(text)}))
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    "text", ["self._lock", "class A:\n    _own = 1\nother._own", "x.__dict__", "import torch.nn", "os._exit(1)"]
)
def test_names_of_our_own_are_not(text: str) -> None:
    assert not list(complaints({"x.py": ast.parse(text)}))


def test_every_name_that_is_excused_is_used() -> None:
    used = {ast.unparse(n) for tree in library().values() for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert set(NOT_TORCHS) <= used


def public_names(path: Path) -> list[str]:
    """What a module of torch_internals offers: `__all__` where it has one, else what it defines."""
    tree = ast.parse(path.read_text())
    module = importlib.import_module(f"graphoffload.torch_internals.{path.stem}")
    if hasattr(module, "__all__"):
        return list(module.__all__)
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


MODULES = sorted(path for path in INTERNALS.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_page_lists_every_name(path: Path) -> None:
    """With its module, what breaks without it, and the releases in which it was seen."""
    lines = PAGE.read_text().splitlines()
    rows = [line for line in lines if line.startswith(f"| `{path.stem}` |")]
    assert rows, f"docs/torch_internals.md has no row for {path.stem}"
    missing = [name for name in public_names(path) if not any(f"`{name}`" in row for row in rows)]
    assert not missing, f"docs/torch_internals.md does not list {missing} of {path.stem}"
    assert all(len(row.strip("|").split("|")) == 4 and all(cell.strip() for cell in row.strip("|").split("|")) for row in rows)


def test_the_page_lists_nothing_else() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) < 90
    for row in re.findall(r"^\| (`.*)$", text, re.MULTILINE):
        module, names = row.split("|")[:2]
        there = public_names(INTERNALS / f"{module.strip().strip('`')}.py")
        assert set(re.findall(r"`(\w+)`", names)) <= set(there), row
    assert all(f"`{path.stem}`" in text for path in MODULES)


def test_every_module_says_in_which_releases_it_was_seen() -> None:
    for path in MODULES:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert f"{RELEASES[0]} to {RELEASES[-1]}" in text or "every release" in text, path.name
    releases = importlib.import_module("graphoffload.torch_internals.releases")
    assert [".".join(map(str, end)) for end in (releases.OLDEST_TESTED, releases.NEWEST_TESTED)] == [RELEASES[0], RELEASES[-1]]
