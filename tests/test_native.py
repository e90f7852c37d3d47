"""The compiled copy makes the calls that Python makes, in their order, and stops at the first error."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphoffload.runtime import native

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


@pytest.fixture
def driver() -> Iterator[Driver]:
    if native.compiled() is None:
        pytest.skip("no C compiler here")
    driver = Driver()
    yield driver
    native.compiled().use(0, 0, 0)


def test_one_call_is_the_five_of_python(driver: Driver) -> None:
    """Compute so far, then what else the copy depends on, then the copy, then its event."""
    copy = native.copy_by(*driver.addresses)
    assert copy is not None
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
def test_the_first_error_ends_it(driver: Driver, refuses: int) -> None:
    """Nothing is copied before what it depends on, and no event says that something was."""
    copy = native.copy_by(*driver.addresses)
    driver.refuses = refuses
    assert copy is not None
    assert copy(*BLOCK, COMPUTE, SIDE, ISSUED, DONE, 31) == 700
    assert len(driver.calls) == refuses + 1


@pytest.mark.parametrize("arguments", [(), (1,) * 7, (1,) * (9 + native.MOST_AFTER), ("1",) * 8, (-1,) * 8, (2**64,) * 8])
def test_wrong_arguments_call_nothing(driver: Driver, arguments: tuple[Any, ...]) -> None:
    """Too few, too many, no numbers, and such as fit no address."""
    copy = native.copy_by(*driver.addresses)
    assert copy is not None
    with pytest.raises((TypeError, OverflowError)):
        copy(*arguments)
    assert driver.calls == []


def test_before_it_knows_the_driver(driver: Driver) -> None:
    """Not a jump to address 0."""
    native.compiled().use(0, 0, 0)
    with pytest.raises(RuntimeError, match="use"):
        native.compiled().copy(*BLOCK, COMPUTE, SIDE, ISSUED, DONE)
    assert driver.calls == []


def test_it_takes_no_modules_place(driver: Driver) -> None:
    """A module that is named as another one takes its place for everybody: it was called copy once, and deepcopy was gone."""
    del driver
    assert not [name for name, module in sys.modules.items() if module is native.compiled()]


@pytest.mark.parametrize("compiler", ["", "/bin/false"])
def test_without_a_compiler_there_is_none(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, or refusing: copies are issued from Python, and nothing is left behind."""
    monkeypatch.setenv("GRAPHOFFLOAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: compiler or None)
    native.compiled.cache_clear()
    assert native.copy_by(1, 2, 3) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    native.compiled.cache_clear()
