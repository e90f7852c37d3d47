"""passes/ at the top of the tree is importable as graphoffload.passes in every way that people install things."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECK = "import graphoffload as g, graphoffload.passes as p, graphoffload.compiler.backend; print(g.__file__, p.__file__)\n"
COMPILED = f"graphoffload/runtime/streams/_copy{sysconfig.get_config_var('EXT_SUFFIX')}"
IS_COMPILED = "from graphoffload.runtime.streams import native; print(native.compiled().__file__)\n"
BACKENDS = "import torch; print(torch._dynamo.list_backends())\n"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, link and all: builds leave their droppings there."""
    target = tmp_path_factory.mktemp("checkout")
    for name in ("graphoffload", "passes"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """Every module as an archive should name it, the source of the one that is compiled, the template, style and script of the
    page, and the marker of a typed package."""
    endings = ("py", "c", "html", "css", "js")
    package = [path.relative_to(ROOT) for ending in endings for path in (ROOT / "graphoffload").rglob(f"*.{ending}")]
    names = {str(path) for path in package if path.parts[1] != "passes"} | {"graphoffload/py.typed"}
    return names | {f"graphoffload/{path.relative_to(ROOT)}" for path in (ROOT / "passes").rglob("*.py")}


def test_link_is_relative() -> None:
    """An absolute link would point into the checkout of whoever made it."""
    link = ROOT / "graphoffload" / "passes"
    if not link.is_symlink():
        pytest.skip("not a checkout: an installed tree has a plain folder here")
    assert os.readlink(link) == "../passes"


def wheel_of(source: Path, out: Path) -> zipfile.ZipFile:
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, source, cwd=out)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_wheel(checkout: Path, modules: set[str], tmp_path: Path) -> None:
    with wheel_of(checkout, tmp_path) as wheel:
        names = wheel.namelist()
        code = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
        assert code == modules | {COMPILED}
        (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
        text = wheel.read(entry_points).decode()
        wheel.extractall(tmp_path / "site")
    assert "[torch_dynamo_backends]\ngraphoffload = graphoffload.compiler.backend:graphoffload" in text
    found = run(sys.executable, "-c", CHECK + IS_COMPILED, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    where, built = found.splitlines()
    assert where.split() == [str(tmp_path / "site" / "graphoffload" / f) for f in ("__init__.py", "passes/__init__.py")]
    assert built == str(tmp_path / "site" / COMPILED)
    tools = run(sys.executable, "-m", "graphoffload", "bench", "--list", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert "over:11.5GB" in tools, "what measures is installed as well"


def test_source_distribution_builds_the_same_wheel(checkout: Path, modules: set[str], tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", build, tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (source / "LICENSE").exists()
    out = tmp_path / "out"
    out.mkdir()
    with wheel_of(source, out) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == modules | {COMPILED}


def test_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    where = run(sys.executable, "-c", CHECK, cwd=tmp_path, PYTHONPATH=str(checkout))
    assert where.split() == [str(checkout / "graphoffload" / f) for f in ("__init__.py", "passes/__init__.py")]


def link_other_packages(folder: Path) -> None:
    """Everything installed here but graphoffload itself: what is found then is what the test installed."""
    folder.mkdir()
    for site in (Path(path) for path in sys.path if path.endswith("-packages")):
        for entry in site.iterdir():
            if "graphoffload" not in entry.name and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)


@pytest.mark.long
def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    """In an environment of its own that sees this one's torch; the backend is found by name without an import."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation"]
    here = str(tmp_path / "others")
    link_other_packages(Path(here))
    run(*pip, "-e", checkout, cwd=tmp_path, PYTHONPATH=here)
    listed, where, built = run(python, "-c", BACKENDS + CHECK + IS_COMPILED, cwd=tmp_path, PYTHONPATH=here).splitlines()
    assert "'graphoffload'" in listed
    assert where.split()[0] == str(checkout / "graphoffload" / "__init__.py")
    assert Path(where.split()[1]).resolve() == checkout / "passes" / "__init__.py"
    assert built == str(checkout / COMPILED)
