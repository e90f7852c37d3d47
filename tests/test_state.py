"""docs/state.md lists every global mutable value, and nothing that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MUTABLE = {
    "dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict", "ChainMap", "SimpleNamespace",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary", "count", "cycle", "ContextVar", "local",
}  # fmt: skip
TABLES = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
WRITES = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "add", "discard", "update", "setdefault", "sort",
    "reverse", "intersection_update", "difference_update", "symmetric_difference_update",
}  # fmt: skip
EMPTY = {"{}", "[]"}
CACHES = {"cache", "lru_cache"}


def last(node: ast.expr) -> str:
    """The last part of a dotted name, of a call or a subscript of it as well: "WeakSet" of weakref.WeakSet[type]()."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def own_classes(trees: dict[str, ast.Module]) -> set[str]:
    """Classes whose instances can change: no frozen dataclass, no enum, no named tuple."""
    found = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
                if not frozen and not {last(base) for base in node.bases} & {"Enum", "IntEnum", "StrEnum", "NamedTuple"}:
                    found.add(node.name)
    return found


def written(trees: dict[str, ast.Module]) -> set[str]:
    """Names that any module writes into: a subscript, a method that changes what it is called on, `|=`."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(last(node.value))
        elif isinstance(node, ast.AugAssign):
            found.add(last(node.target))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            found.add(last(node.func.value))
    return found


def bound(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Names bound at the top of a module, in its branches as well, and to what."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from ((name.id, statement.value) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
            yield statement.target.id, statement.value
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from bound(getattr(statement, part, []))


def state(trees: dict[str, ast.Module]) -> set[str]:
    """Global mutable values, as "module.name"."""
    classes, changed = own_classes(trees), written(trees)
    found = set()
    for module, tree in trees.items():
        for name, value in bound(tree.body):
            table = isinstance(value, TABLES) and (name in changed or ast.unparse(value) in EMPTY)
            made = isinstance(value, ast.Call) and last(value) in MUTABLE | classes
            if (table or made) and name != "__all__":
                found.add(f"{module}.{name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found |= {f"{module}.{name}" for name in node.names}
            elif isinstance(node, ast.FunctionDef) and {last(decorator) for decorator in node.decorator_list} & CACHES:
                found.add(f"{module}.{node.name}")
    return found


def trees_of(folder: Path) -> dict[str, ast.Module]:
    """Every module of a package, by its name inside."""
    paths = (path for place in (folder, folder / "passes") for path in place.rglob("*.py"))  # passes/ is a link in a checkout
    names = {path.relative_to(folder).with_suffix(""): path for path in paths}
    return {".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in names.items()}


def test_every_global_mutable_value_is_in_the_page(root: Path) -> None:
    """With what it holds, its lock, and who resets it; what is gone is gone from the page."""
    rows = [line for line in (root / "docs" / "state.md").read_text().splitlines() if line.startswith("| `")]
    assert all(len([cell for cell in row.split("|") if cell.strip()]) == 4 for row in rows)
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    found = state(trees_of(root / "graphoffload"))
    assert sorted(set(found) - set(listed)) == [], "not in docs/state.md"
    assert sorted(set(listed) - found) == [], "in docs/state.md, and no more in the code"
    assert len(listed) == len(set(listed))


def test_the_page_is_short(root: Path) -> None:
    """One reads it in a minute."""
    assert len((root / "docs" / "state.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "source",
    [
        "x = {}", "x: list[int] = []", "x = set()", "x = itertools.count(1)", "x = weakref.WeakSet[int]()", "x = Own()",
        "x = ContextVar('x')", "x = threading.local()", "if 1:\n x = []", "try:\n x = {}\nfinally:\n pass",
        "x = {1: 2}\ndef f(): x[3] = 4", "x = [1]\ndef f(): x.append(2)", "x = {1}\ndef f(): del x[0]",
        "x = None\ndef f():\n global x\n x = 1", "@functools.cache\ndef x(): ...", "@functools.lru_cache(3)\ndef x(): ...",
        "a, x = 1, 2\ndef f():\n global x", "x = defaultdict(list)",
    ],
)  # fmt: skip
def test_it_is_found(source: str) -> None:
    """However it is bound."""
    own = "class Own: ...\n"
    assert state({"m": ast.parse(own + source)}) == {"m.x"}


@pytest.mark.parametrize(
    "source",
    ["x = 3", "x = {1: 2}", "x = (1, 2)", "x = frozenset((1,))", "x = Frozen()", "x = re.compile('a')", "def f(): x = {}",
     "class C:\n x = 3"],
)  # fmt: skip
def test_a_constant_is_none(source: str) -> None:
    """A table that nothing writes to, and what cannot change."""
    assert state({"m": ast.parse("@dataclass(frozen=True)\nclass Frozen: ...\n" + source)}) == set()
