"""The compiled copy makes the calls that Python makes, in their order, and stops at the first error."""

from __future__ import annotations

import ctypes
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphoffload.runtime.streams import native

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
def module() -> Any:
    """A library of this file's own: the functions that it calls are those of all copies made with it."""
    compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not compilers or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("no C compiler here, or no headers of Python")
    return native.build()


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


def test_before_it_knows_the_driver() -> None:
    """Not a jump to address 0."""
    with pytest.raises(RuntimeError, match="use"):
        native.build().copy(*BLOCK, COMPUTE, SIDE, ISSUED, DONE)


def test_it_takes_no_modules_place(module: Any) -> None:
    """A module that is named as another one takes its place for everybody: it was called copy once, and deepcopy was gone."""
    assert not [name for name, other in sys.modules.items() if other is module]


Log = pytest.LogCaptureFixture


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, caplog: Log, tmp_path: Path) -> Iterator[Log]:
    """compiled() tries again, in folders of this test's own, and so it does after it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    native.compiled.cache_clear()
    with caplog.at_level("DEBUG", logger=native.log.name):
        yield caplog
    native.compiled.cache_clear()
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("compiler", ["", "/bin/false"])
def test_without_a_compiler_there_is_none(compiler: str, anew: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, or refusing: copies are issued from Python."""
    monkeypatch.setattr("shutil.which", lambda name: compiler or None)
    assert native.compiled() is None
    assert "call by call" in anew.text


def test_why_it_does_not_compile_is_said(module: Any, anew: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's own words: headers of Python that are not there are the likeliest cause."""
    del module
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert native.compiled() is None
    assert "Python.h" in anew.text


def test_a_compiler_that_refuses_is_not_the_last_word(module: Any, anew: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """CC may be one for another machine."""
    del module, anew
    monkeypatch.setenv("CC", "false")
    assert native.compiled() is not None


def test_what_cannot_be_loaded_is_not_used(module: Any, anew: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short, as on a full disk; or from a folder without execution."""
    del module
    compile_it = native._compile

    def cut(compiler: str, library: Path) -> None:
        compile_it(compiler, library)
        library.write_bytes(b"")

    monkeypatch.setattr(native, "_compile", cut)
    assert native.compiled() is None
    assert "call by call" in anew.text
