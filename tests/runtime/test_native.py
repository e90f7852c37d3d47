"""The compiled copy makes the calls that Python makes, in their order, and stops at the first error."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphoffload.runtime import streams
from graphoffload.runtime.streams import native

ROOT = Path(__file__).resolve().parents[2]
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
BLOCK = (2**40, 2**41, 2**33, 2)  # addresses and bytes beyond 32 bits, and a kind
COMPUTE, SIDE, ISSUED, DONE = 11, 12, 21, 22


class Driver:
    """Notes what is called; `refuses` is the number of the call that fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = -1
        self._functions = RECORD(self._noting("record")), WAIT(self._noting("wait")), COPY(self._noting("copy"))

    def _noting(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return 700 if len(self.calls) - 1 == self.refuses else 0

        return call

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the three functions."""
        record, wait, copy = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        return record, wait, copy


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension, built as an install builds it."""
    compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not compilers or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("no C compiler here, or no headers of Python")
    return build(tmp_path_factory.mktemp("built"))[0]


def build(folder: Path, **environment: str) -> list[Path]:
    """Run setup.py's build_ext; returns what came of it."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(folder.rglob("_copy*.so"))


def load(library: Path) -> Any:
    """A module of its own: the functions that it calls are those of all copies made with it."""
    loader = importlib.machinery.ExtensionFileLoader("_copy", str(library))
    spec = importlib.util.spec_from_file_location("_copy", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def module(library: Path) -> Any:
    """The extension, which no other module of this process calls."""
    return load(library)


@pytest.fixture
def driver(module: Any) -> Driver:
    del module
    return Driver()


def test_one_call_is_the_five_of_python(module: Any, driver: Driver) -> None:
    """Compute so far, then what else the copy depends on, then the copy, then its event."""
    copy = native.copy_by(module, *driver.addresses)
    assert copy(*BLOCK, COMPUTE, SIDE, ISSUED, DONE, 31, 32) == 0
    assert driver.calls == [
        ("record", ISSUED, COMPUTE),
        ("wait", SIDE, ISSUED, 0),
        ("wait", SIDE, 31, 0),
        ("wait", SIDE, 32, 0),
        ("copy", *BLOCK, SIDE),
        ("record", DONE, SIDE),
    ]


@pytest.mark.parametrize("refuses", range(5))
def test_the_first_error_ends_it(module: Any, driver: Driver, refuses: int) -> None:
    """Nothing is copied before what it depends on, and no event says that something was."""
    copy = native.copy_by(module, *driver.addresses)
    driver.refuses = refuses
    assert copy(*BLOCK, COMPUTE, SIDE, ISSUED, DONE, 31) == 700
    assert len(driver.calls) == refuses + 1


@pytest.mark.parametrize("arguments", [(), (1,) * 7, (1,) * 17, ("1",) * 8, (-1,) * 8, (2**64,) * 8])
def test_wrong_arguments_call_nothing(module: Any, driver: Driver, arguments: tuple[Any, ...]) -> None:
    """Too few, too many, no numbers, and such as fit no address."""
    copy = native.copy_by(module, *driver.addresses)
    with pytest.raises((TypeError, OverflowError)):
        copy(*arguments)
    assert driver.calls == []


def test_before_it_knows_the_driver(library: Path, tmp_path: Path) -> None:
    """Not a jump to address 0."""
    with pytest.raises(RuntimeError, match="use"):
        load(Path(shutil.copy(library, tmp_path))).copy(*BLOCK, COMPUTE, SIDE, ISSUED, DONE)


def test_it_takes_no_modules_place(module: Any) -> None:
    """A module that is named as another one takes its place for everybody: it was called copy once, and deepcopy was gone."""
    assert not [name for name, other in sys.modules.items() if other is module]


Installed = Callable[[Path | None], Any]
Log = pytest.LogCaptureFixture


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, caplog: Log, tmp_path: Path) -> Iterator[Installed]:
    """What compiled() finds where an install left this library, or none."""
    name = "graphoffload.runtime.streams._copy"

    def found(library: Path | None) -> Any:
        monkeypatch.setattr(streams, "__path__", [str(tmp_path)])
        if library is not None:
            shutil.copy(library, tmp_path)
        importlib.invalidate_caches()
        return native.compiled()

    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(streams, "_copy", None, raising=False)
    native.compiled.cache_clear()
    with caplog.at_level("DEBUG", logger=native.log.name):
        yield found
    native.compiled.cache_clear()
    sys.modules.pop(name, None)


def test_an_installed_one_is_used(library: Path, installed: Installed, caplog: Log) -> None:
    """By its import."""
    module = installed(library)
    assert module.copy.__doc__.startswith("copy(target, source")
    assert caplog.text == ""


def test_without_one_copies_are_issued_from_python(installed: Installed, caplog: Log) -> None:
    """As in a checkout that nobody installed."""
    assert installed(None) is None
    assert "call by call" in caplog.text
    assert "C compiler" in caplog.text


def test_what_cannot_be_loaded_is_not_used(library: Path, installed: Installed, caplog: Log, tmp_path: Path) -> None:
    """Cut short, as on a full disk; or from a folder without execution."""
    cut = tmp_path / "cut" / library.name
    cut.parent.mkdir()
    cut.write_bytes(b"")
    assert installed(cut) is None
    assert "call by call" in caplog.text


def test_one_of_another_source_is_not_used(
    library: Path, installed: Installed, caplog: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An editable install keeps what it built when the source beside it changes."""
    (tmp_path / "copy.c").write_text(native._SOURCE.read_text() + "\n")
    monkeypatch.setattr(native, "_SOURCE", tmp_path / "copy.c")
    assert installed(library) is None
    assert "install it again" in caplog.text


def test_an_install_without_a_compiler_goes_on(library: Path, tmp_path: Path) -> None:
    """One that is missing, and one that refuses: no library, and no failure."""
    del library
    for compiler in ("/nowhere/cc", "false"):
        assert build(tmp_path, CC=compiler) == []
