"""What every test starts from: a fixed seed, no options from the environment, a compile cache of this run's own."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported. One fresh cache for all workers of a run: no test passes on what an earlier run compiled.
CONTROLLER = "PYTEST_XDIST_WORKER" not in os.environ
if CONTROLLER:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="graphoffload-test-cache-")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that outnumber the cores wait for each other, 50 times as long
for _name in [name for name in os.environ if name.startswith("GRAPHOFFLOAD")]:
    del os.environ[_name]
os.environ["GRAPHOFFLOAD_CACHE_DIR"] = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "graphoffload")

settings.register_profile(
    "graphoffload", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("graphoffload")


def pytest_report_header() -> list[str]:
    """Versions, and what a bare checkout lacks."""
    lines = [f"torch {importlib.metadata.version('torch')}"]
    if not any(entry.name == "graphoffload" for entry in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        lines.append('not installed: tests of backend="graphoffload" by name will fail; run pip install --no-deps -e .')
    return lines


# Compilers make a million objects that live: a collection of garbage for every 700 of them takes a tenth of all the time.
gc.set_threshold(50_000, 20, 50)


def mark_the_long_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What long.txt names is marked long. A name that is not found where whole files were collected is an error."""
    lines = (ROOT / "tests" / "long.txt").read_text().splitlines()
    named = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in named:
            named.remove(item.nodeid)
            item.add_marker(pytest.mark.long)
    files = {item.nodeid.partition("::")[0] for item in items}
    missing = sorted(name for name in named if name.partition("::")[0] in files)
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/long.txt names tests that there are not: {missing}")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """tests/gpu is marked gpu as a whole; gpu tests are skipped where there is no GPU."""
    mark_the_long_cases(config, items)
    # pytest listens to loggers that do not propagate. Torch prints every graph for this one, once somebody listens.
    logging.getLogger("torch.__trace").propagate = True
    for item in items:
        if (ROOT / "tests" / "gpu") in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def pytest_sessionfinish() -> None:
    """The run's compile cache goes with the run."""
    if CONTROLLER:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_slate(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test compiles afresh (no recompile limit carried over) and starts from the same random state."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield


@pytest.fixture(scope="module", autouse=True)
def out_of_sight() -> None:
    """What other modules left is no longer looked at: a million objects cost every collection of garbage most of a second.

    What is compiled is dropped first: frozen, it would never be collected, and with it whatever it holds.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def guards_without_a_stopwatch() -> Iterator[None]:
    """Dynamo times the guards of each graph, after it has emptied the processor's caches: 20 ms a graph."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            from torch._dynamo import guards

            patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture
def kernels_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code allocates and frees as it does; only what it computes is not compiled, which takes most of the time."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the checkout."""
    return ROOT
