"""Dump folders: what is in them, several processes, graphs that cannot be printed, folders that cannot be written."""

from __future__ import annotations

import os
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Decision, Plan
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.report import dump
from graphoffload.report.dump import write_dump
from graphoffload.report.offload_report import plan_table


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def plan(graph: str = "graph_0", key: str = "0123456789abcdef") -> Plan:
    relu = SavedTensor(
        name="relu", views=("relu",), nbytes=128, dtype="float32", shape=(4, 8), strides=(8, 1), op="aten.relu", module="m"
    )
    return Plan(key=key, graph=graph, saved=SavedTable((relu,)), decisions=(Decision("relu", "offload", "policy"),))


def graph_of(*names: str) -> torch.fx.GraphModule:
    """A chain of functions from torch on one input."""
    graph = torch.fx.Graph()
    last = graph.placeholder("x")
    for name in names:
        last = graph.call_function(getattr(torch, name), (last,))
    graph.output(last)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def dumped(folder: Path) -> list[Path]:
    return write_dump(
        folder, plan(), joint=graph_of("relu", "neg"), forward_before=graph_of("relu"), backward_before=graph_of("neg"),
        forward=graph_of("relu", "abs"), backward=graph_of("abs", "neg"),
    )  # fmt: skip


def test_every_file_is_there_and_readable(tmp_path: Path) -> None:
    paths = dumped(tmp_path / "a" / "b")
    names = ["joint.txt", "forward.before.txt", "backward.before.txt", "forward.after.txt", "backward.after.txt"]
    names += ["plan.json", "plan.txt", "joint.svg", "before.svg", "after.svg"]
    assert [path.name for path in paths] == [f"graph_0.01234567.{name}" for name in names]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == sorted(path.name for path in paths)
    text = {path.name.removeprefix("graph_0.01234567."): path.read_text() for path in paths}
    assert "torch.relu" in text["joint.txt"]
    assert "torch.abs" in text["forward.after.txt"]
    assert "torch.abs" not in text["forward.before.txt"]
    assert Plan.from_json(text["plan.json"]) == plan()
    assert text["plan.txt"] == plan_table(plan(), compact=False)
    for name in ("joint.svg", "before.svg", "after.svg"):
        root = ElementTree.fromstring(text[name].encode())
        assert sum(rect.get("class") == "box offload" for rect in root.iter("{http://www.w3.org/2000/svg}rect")) == 1


def test_only_what_is_given_is_written(tmp_path: Path) -> None:
    assert [path.suffixes[-2:] for path in write_dump(tmp_path, plan())] == [[".plan", ".json"], [".plan", ".txt"]]
    names = [path.name.split(".", 2)[2] for path in write_dump(tmp_path, plan(), backward=graph_of("neg"))]
    assert names == ["backward.after.txt", "plan.json", "plan.txt", "after.svg"]


def test_dumping_again_replaces_and_other_keys_stand_beside(tmp_path: Path) -> None:
    first = dumped(tmp_path)
    assert dumped(tmp_path) == first
    write_dump(tmp_path, plan(key="fedcba98"))
    assert len(list(tmp_path.iterdir())) == len(first) + 2


def test_ranks_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert {path.name for path in write_dump(tmp_path, plan())} == {
        "graph_0.01234567.rank3.plan.json",
        "graph_0.01234567.rank3.plan.txt",
    }
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert all(".rank5." in path.name for path in write_dump(tmp_path, plan()))


def test_names_stay_inside_the_folder(tmp_path: Path) -> None:
    paths = write_dump(tmp_path / "d", plan(graph="../../etc/pass wd", key="../k"))
    assert all(path.parent == tmp_path / "d" for path in paths)
    assert paths[0].name == "etc_pass_wd.k.plan.json"
    assert write_dump(tmp_path, plan(graph="", key=""))[0].name == "graph.nokey.plan.json"


class Unprintable(torch.fx.GraphModule):
    def print_readable(self, *args: object, **kwargs: object) -> str:
        raise RuntimeError("no <code> for you")


def test_a_graph_that_cannot_be_printed_leaves_its_nodes_and_the_reason(tmp_path: Path) -> None:
    good = graph_of("relu")
    path = write_dump(tmp_path, plan(), joint=Unprintable(torch.nn.Module(), good.graph))[0]
    assert path.read_text().startswith("# print_readable failed (RuntimeError: no <code> for you); the nodes follow\n")
    assert "relu" in path.read_text().partition("\n")[2]


def test_a_graph_that_is_none_at_all_leaves_the_reason_everywhere(tmp_path: Path) -> None:
    text, *_, drawing = write_dump(tmp_path, plan(), joint="no <graph> -- at all")  # type: ignore[arg-type]
    assert text.read_text().startswith("# this could not be printed: AttributeError")
    page = ElementTree.fromstring(drawing.read_bytes())
    assert any("this could not be drawn: AttributeError" in (element.text or "") for element in page.iter())


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "below", "Not a directory")):
        with pytest.raises(
            ConfigError, match=rf"dump_dir='{folder}' cannot be written: {reason} \(errno \d+\).*Name a folder.*unset"
        ):
            write_dump(folder, plan())


def test_a_write_that_fails_half_way_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump.os, "replace", full)
    with pytest.raises(ConfigError, match=r"No space left on device \(errno 28\); 0 files were"):
        write_dump(tmp_path, plan())
    assert os.listdir(tmp_path) == []


def test_threads_that_write_the_same_file_leave_one_whole(tmp_path: Path) -> None:
    threads = [threading.Thread(target=dumped, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 10
    assert Plan.from_json((tmp_path / "graph_0.01234567.plan.json").read_text()) == plan()
