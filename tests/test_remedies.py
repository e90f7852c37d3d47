"""Every cause for which something that was asked for is kept has a remedy of its own, and the warning names that one."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

import graphoffload
from graphoffload.analysis import saved_values, symbols
from graphoffload.compiler import decide
from graphoffload.compiler import device_limits as limits
from graphoffload.compiler.constraints import constraints_for
from graphoffload.errors import NotOffloadedWarning
from graphoffload.facts import remedies
from graphoffload.facts.saved_tensors import SavedTable, SavedTensor
from graphoffload.hardware import host_memory
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime.pinned.pool import HostPool

MIB = 2**20


def tensor(name: str = "x", mib: float = 4, **fields: Any) -> SavedTensor:
    """An activation of some MiB."""
    given: dict[str, Any] = {
        "nbytes": int(mib * MIB), "dtype": "float32", "shape": (1,), "strides": (1,), "op": "aten.tanh.default",
        "module": "layers.0", "saved_by": ("layers.0",), "views": (name,), **fields,
    }  # fmt: skip
    return SavedTensor(name=name, **given)


def causes() -> list[str]:
    """What analysis gives as a reason not to offload, as written in its source; what is filled in becomes "*"."""
    found: list[ast.expr] = []
    for room in (saved_values, symbols):
        for node in ast.walk(ast.parse(inspect.getsource(room))):
            if isinstance(node, ast.FunctionDef) and node.name in ("_refusal", "_base"):
                found += [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("why_not", "text"):
                found.append(node.value)
    texts = [text for value in found for text in written(value)]
    return sorted({text for text in texts if " " in text})


def written(value: ast.AST) -> list[str]:
    """Texts in an expression."""
    if isinstance(value, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in value.values)]
    if isinstance(value, ast.Constant):
        return [str(value.value)]
    return [text for child in ast.iter_child_nodes(value) for text in written(child)]


def test_every_cause_in_the_analysis_is_known() -> None:
    """Whoever adds a refusal says what to do about it."""
    found = causes()
    assert len(found) >= 11, found
    for cause in found:
        assert sum(part in cause for part, _ in remedies._OFFLOAD) == 1, cause


@pytest.mark.parametrize(
    ("why_not", "change"),
    [
        ("shares memory with an output of the model", "Do not return it"),
        ("is a lazy conjugate or negative: its bits are not its values", "resolve_conj()"),
        ("its symbolic size s0 is not known in backward", "dynamic=False"),
        ("is empty", "Remove the tag: nothing changes that"),
    ],
)
def test_a_tag_to_offload(why_not: str, change: str) -> None:
    (constraint,) = constraints_for(SavedTable((tensor(tag="must_offload", eligible=False, why_not=why_not),)), OffloadConfig())
    assert all(part in constraint.warning for part in ("x (4.00 MiB) of module 'layers.0'", why_not, change)), (
        constraint.warning
    )
    assert "min_tensor_bytes" not in constraint.warning


@pytest.mark.parametrize(
    ("eligible", "why_not", "change"),
    [
        (True, "its recomputation draws random numbers (aten.rand.default)", "Tag it MUST_CPU_OFFLOAD or MUST_SAVE instead"),
        (False, "its recomputation draws random numbers (aten.rand.default)", "Tag it MUST_SAVE instead"),
        (True, "its recomputation reads n, which forward writes to", "Write to a copy in forward"),
    ],
)
def test_a_tag_to_recompute(eligible: bool, why_not: str, change: str) -> None:
    fact = tensor(
        tag="must_recompute",
        recomputable=False,
        why_not_recompute=why_not,
        eligible=eligible,
        why_not="" if eligible else "is empty",
    )
    (constraint,) = constraints_for(SavedTable((fact,)), OffloadConfig())
    assert all(part in constraint.warning for part in (why_not, change, "or remove the tag")), constraint.warning


def nothing(*tensors: SavedTensor, **options: Any) -> list[str]:
    """Warnings of policy="offload" on these."""
    config = OffloadConfig(policy="offload", **{"min_tensor_bytes": 0, **options})
    table = SavedTable(tensors)
    return decide._nothing_offloaded(constraints_for(table, config), table, config)


def test_a_policy_that_offloads_nothing_names_what_holds_it_back() -> None:
    """And nothing else: another option would change nothing."""
    (text,) = nothing(tensor("a"), tensor("b", 2), min_tensor_bytes="1GiB")
    assert "2 of 2 saved activations (6.00 MiB) are kept" in text
    assert "the largest, of 4.00 MiB: 4.00 MiB is less than min_tensor_bytes=1.00 GiB; lower min_tensor_bytes." in text
    assert "widen" not in text
    (text,) = nothing(tensor("a"), offload_fraction=0.0)
    assert "raise offload_fraction" in text
    assert "min_tensor_bytes" not in text
    (text,) = nothing(tensor("a", eligible=False, why_not="shares memory with an output of the model"))
    assert "do not return it" in text
    assert "min_tensor_bytes" not in text


def test_several_causes_come_by_size_with_a_remedy_each() -> None:
    """The number of tensors is not what counts."""
    output = {"eligible": False, "why_not": "shares memory with an output of the model"}
    (text,) = nothing(tensor("a", 1), tensor("b", 1), tensor("c", 9, **output), min_tensor_bytes="8MiB")
    first, second = text.index("1 (9.00 MiB), shares memory with an output"), text.index("2 (2.00 MiB), the largest")
    assert first < text.index("do not return it") < second < text.index("lower min_tensor_bytes")


def test_what_tags_recompute_is_not_called_kept() -> None:
    """policy="offload" against binding tags: nothing is offloaded, and nothing is kept either."""
    assert nothing(tensor(tag="must_recompute")) == []
    (text,) = nothing(tensor("a", 1, tag="must_recompute"), tensor("b", 1), min_tensor_bytes="2MiB")
    assert "1 of 2 saved activations (1.00 MiB) are kept" in text


@pytest.mark.parametrize(
    ("options", "locked", "part"),
    [({"host_budget": "4KiB"}, None, "Raise host_budget"), ({}, None, "share of the host's"), ({}, 4096, "ulimit -l")],
    ids=["given", "auto", "memlock"],
)
def test_a_host_that_is_full(options: dict[str, Any], locked: int | None, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what limits it: raising a number that nobody gave does not help where memory may not be locked."""
    monkeypatch.setattr(host_memory, "for_this_process", lambda: host_memory.HostRam(10**9, 5120))
    monkeypatch.setattr(limits, "POOL", HostPool())
    monkeypatch.setattr(limits, "_lockable_bytes", lambda: locked)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    explained = graphoffload.explain(model, policy="offload", min_tensor_bytes=0, inner="aot_eager", **options)
    with pytest.warns(NotOffloadedWarning) as caught:
        explained(torch.randn(64, 64))
    (text,) = (str(each.message) for each in caught if each.category is NotOffloadedWarning)
    assert "host_budget=4.00 KiB holds 0 B of them" in text
    assert part in text
