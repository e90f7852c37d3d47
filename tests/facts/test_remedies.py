"""Every cause for which something that was asked for is kept has a remedy of its own, and the warning names that one."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch

import graphoffload
from graphoffload.compiler import decide
from graphoffload.compiler import device_limits as limits
from graphoffload.compiler.constraints import constraints_for
from graphoffload.errors import NotOffloadedWarning
from graphoffload.facts.refusals import Refusal, refusal_of
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


def test_a_refusal_s_text_knows_its_code() -> None:
    """Wherever it goes, but for JSON: what is read from there is shown, and decides nothing."""
    assert len({refusal.value[0] for refusal in Refusal}) == len(Refusal)
    why = Refusal.UNKNOWN_SIZE.because(symbols="s0")
    assert why == "its symbolic size s0 is not known in backward"
    for same in (why, copy.deepcopy(why), pickle.loads(pickle.dumps(why))):
        assert refusal_of(same) is Refusal.UNKNOWN_SIZE
    assert json.loads(json.dumps(why)) == why
    assert refusal_of("its symbolic size s0 is not known in backward") is None


@pytest.mark.parametrize(
    ("why_not", "change"),
    [
        (Refusal.SHARES_WITH_OUTPUT.because(), "Do not return it"),
        (Refusal.LAZY_BITS.because(), "resolve_conj()"),
        (Refusal.UNKNOWN_SIZE.because(symbols="s0"), "dynamic=False"),
        (Refusal.EMPTY.because(), "Remove the tag: nothing changes that"),
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
        (True, Refusal.RANDOM.because(target="aten.rand.default"), "Tag it MUST_CPU_OFFLOAD or MUST_SAVE instead"),
        (False, Refusal.RANDOM.because(target="aten.rand.default"), "Tag it MUST_SAVE instead"),
        (True, Refusal.READS_WRITTEN.because(name="n"), "Write to a copy in forward"),
    ],
)
def test_a_tag_to_recompute(eligible: bool, why_not: str, change: str) -> None:
    fact = tensor(
        tag="must_recompute",
        recomputable=False,
        why_not_recompute=why_not,
        eligible=eligible,
        why_not="" if eligible else Refusal.EMPTY.because(),
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
    (text,) = nothing(tensor("a", eligible=False, why_not=Refusal.SHARES_WITH_OUTPUT.because()))
    assert "do not return it" in text
    assert "min_tensor_bytes" not in text


def test_several_causes_come_by_size_with_a_remedy_each() -> None:
    """The number of tensors is not what counts."""
    output = {"eligible": False, "why_not": Refusal.SHARES_WITH_OUTPUT.because()}
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
