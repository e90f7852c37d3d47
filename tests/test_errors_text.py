"""Every error of the configuration, of policies, of plans and of a running step: what, which, the numbers, and what to do."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import graphoffload
from graphoffload.analysis.saved_values import GraphPair
from graphoffload.compiler import pipeline
from graphoffload.errors import (
    ChecksumError,
    ConfigError,
    HardwareWarning,
    HostMemoryError,
    LargeSlowdownWarning,
    NoStreamsWarning,
    PageableMemoryWarning,
    PlanError,
    RuntimeStateError,
    VerifyError,
    warn,
)
from graphoffload.facts.plan import Action, Plan, Transfer
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.options.config import OffloadConfig
from graphoffload.passes.offload import insert_offloads
from graphoffload.passes.reload import insert_reloads
from graphoffload.runtime import registry
from graphoffload.runtime.pinned.pool import HostPool
from graphoffload.runtime.streams import copy_streams as streams
from graphoffload.testing import ZOO, compiled, run_step
from graphoffload.testing.faults import host_copies


@dataclasses.dataclass
class NotFrozen:
    def __call__(self, tensor: SavedTensor) -> Action | None:
        return None


@dataclasses.dataclass(frozen=True)
class NotHashable:
    settings: Any

    def __call__(self, tensor: SavedTensor) -> Action | None:
        return None


def local_policy() -> Any:
    def policy(tensor: SavedTensor) -> Action | None:
        return None

    return policy


def closure(action: Action) -> Any:
    def policy(tensor: SavedTensor) -> Action | None:
        return action

    return policy


def local_class() -> Any:
    @dataclasses.dataclass(frozen=True)
    class Local:
        def __call__(self, tensor: SavedTensor) -> Action | None:
            return None

    return Local()


WHY = "the compile cache must tell two policies apart, and the partitioner that holds one is pickled"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"device_budget": None}, ("device_budget=None", "NoneType", "40GiB", '"auto"')),
        ({"device_budget": "40"}, ("device_budget='40' has no unit", "40 bytes", 'Did you mean "40GiB"?', '"40B"')),
        ({"device_budget": " 40.5 "}, ("40 bytes", '"40.5GiB"')),
        ({"device_budget": 40}, ("device_budget=40 has no unit", 'Did you mean "40GiB"?')),
        ({"device_budget": "40000"}, ("device_budget='40000'", 'Did you mean "40000MiB"?')),
        ({"host_budget": "64"}, ("host_budget='64'", 'Did you mean "64GiB"?')),
        ({"reserve": "4"}, ("reserve='4'", 'Did you mean "4GiB"?')),
        ({"device_budget": 0}, ("device_budget=0", "less than 1 byte", '"auto"')),
        ({"device_budget": "0%"}, ("device_budget='0%'", "less than 1 byte")),
        ({"reserve": "lots"}, ("reserve='lots'", "does not parse", '"auto"')),
        ({"host_budget": -1}, ("host_budget=-1", "40GiB")),
        ({"min_tensor_bytes": "1%"}, ("min_tensor_bytes='1%'", "give bytes")),
        ({"min_tensor_bytes": "auto"}, ("min_tensor_bytes='auto'", "does not parse")),
        ({"max_inflight_bytes": 0}, ("max_inflight_bytes=0", "less than 1 byte", '"planned"')),
        ({"max_inflight_bytes": "many"}, ("max_inflight_bytes='many'", '"planned"')),
        ({"max_slowdown": "fast"}, ("max_slowdown='fast'", "no number", "0.02")),
        ({"max_slowdown": True}, ("max_slowdown=True", "bool", "0.02")),
        ({"max_slowdown": -0.1}, ("max_slowdown=-0.1", "at least 0")),
        ({"max_slowdown": float("nan")}, ("max_slowdown=nan", "out of range")),
        ({"max_slowdown": float("inf")}, ("max_slowdown=inf", "finite")),
        ({"offload_fraction": 1.5}, ("offload_fraction=1.5", "between 0 and 1")),
        ({"offload_fraction": None}, ("offload_fraction=None", "NoneType")),
        (
            {"max_slowdown": 0.1, "device_budget": "1GiB"},
            ("max_slowdown=0.1", "device_budget=1073741824", "Give one of the two"),
        ),
        ({"policy": "offlaod"}, ("policy='offlaod'", "auto, keep, offload, recompute", 'did you mean "offload"?')),
        ({"policy": 3}, ("policy=3", "int", "frozen policy object")),
        ({"policy": {}}, ("empty mapping", 'policy="auto"')),
        ({"policy": {"*.mlp": "drop"}}, ("policy['*.mlp']='drop'", "keep, recompute, offload, auto")),
        ({"policy": {"*.mlp": "recomptue"}}, ('did you mean "recompute"?',)),
        ({"policy": {3: "keep"}}, ("the pattern 3 (int)", '"*.mlp"')),
        ({"policy": ("keep", "offload")}, ("'keep', which is no (pattern, action) pair",)),
        ({"policy": lambda tensor: None}, ("is a lambda", WHY, "frozen dataclass")),
        ({"policy": closure("keep")}, ("closure.<locals>.policy is a closure", WHY)),
        ({"policy": local_policy()}, ("is a local function", WHY)),
        ({"policy": functools.partial(closure, "keep")}, ("partial is no instance of a frozen dataclass", WHY)),
        ({"policy": NotFrozen}, ("NotFrozen is a class", "policy=NotFrozen(...)")),
        ({"policy": NotFrozen()}, ("NotFrozen is no instance of a frozen dataclass", WHY, "@dataclass(frozen=True)")),
        ({"policy": NotHashable([])}, ("NotHashable(settings=[])", "not hashable", WHY)),
        ({"policy": local_class()}, ("Local has a class defined inside a function", "top level")),
        ({"offload_modules": 7}, ("offload_modules=7", "int", "*.self_attn")),
        ({"offload_modules": {"a": "b"}}, ("offload_modules={'a': 'b'}", "dict")),
        ({"offload_modules": []}, ("offload_modules=[]", "nothing could be offloaded", "None")),
        ({"offload_modules": ["a", 3]}, ("offload_modules holds 3 (int)",)),
        ({"hardware": 3}, ("hardware=3", "int", "h200-sxm", "HardwareProfile")),
        ({"hardware": " "}, ("hardware=' '", "measure")),
        ({"verify": "grpah"}, ("verify='grpah' (str)", "graph, checksum, off", "Did you mean 'graph'?")),
        ({"verify": False}, ("verify=False (bool)", "graph, checksum, off")),
        ({"inner": "onnx"}, ("inner='onnx'", "inductor, aot_eager")),
        ({"mode": "max-autotun"}, ("mode='max-autotun'", "reduce-overhead", "Did you mean 'max-autotune")),
        ({"dump_dir": 3}, ("dump_dir=3", "int", "None for no dumps")),
        ({"dump_dir": ""}, ("dump_dir=''",)),
    ],
    ids=lambda value: f"{next(iter(value))}" if isinstance(value, dict) else "",
)
def test_a_bad_value(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    """In code and in options alike."""
    with pytest.raises(ConfigError) as info:
        OffloadConfig(**options)
    with pytest.raises(ConfigError) as from_options:
        OffloadConfig.from_options(options, environ={})
    assert str(info.value) == str(from_options.value)
    for part in parts:
        assert part in str(info.value), info.value


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"device_bugdet": 1},
            ("'device_bugdet' is no option", "Did you mean 'device_budget'?", "Known: device_budget, reserve"),
        ),
        ({"max_autotune_gem": True}, ("'max_autotune_gem'", "'max_autotune_gemm'", "torch._inductor.config")),
        ({"zzz": True}, ("'zzz' is no option", "Known:")),
        ({3: 4}, ("the key 3, a int", '"device_budget"')),
        (
            {"max_autotune": "yes"},
            ("max_autotune='yes' is a str", "torch._inductor.config.max_autotune is a bool", "Give a bool"),
        ),
        ({"device-budget": 1, "device_budget": 1}, ("'device_budget' twice", "once")),
        ([("policy", "keep")], ("is a list", "{option: value}")),
    ],
)
def test_bad_options(options: Any, parts: tuple[str, ...]) -> None:
    """Keys that nobody knows, and what is meant."""
    with pytest.raises(ConfigError) as info:
        OffloadConfig.from_options(options, environ={})
    for part in parts:
        assert part in str(info.value), info.value


def test_with_options_knows_its_fields() -> None:
    """A mistyped field is no silent extra."""
    with pytest.raises(ConfigError, match=r"'verfiy' is no option.*Did you mean 'verify'"):
        OffloadConfig().with_options(verfiy="off")


def test_a_slowdown_in_percent_is_asked_about() -> None:
    """2 is 200 %: allowed, and said, with the line that asked for it; up to twice the time nothing is said."""
    with pytest.warns(
        LargeSlowdownWarning, match=r"=2 is a fraction: .* 3 times as long \(\+200%\).*=0\.02, or \"2%\""
    ) as caught:
        assert OffloadConfig(max_slowdown=2).max_slowdown == 2.0
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeSlowdownWarning)
        for given in (None, 0.02, 1.0, "50%"):
            OffloadConfig(max_slowdown=given)  # type: ignore[arg-type]


def test_the_second_call_of_explain_forgotten() -> None:
    """What was given instead of a configuration, and the right call; not what a tensor says of its truth."""
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(ConfigError, match=r"config is a Tensor.*The call is explain\(model, config\)\(\*inputs\)"):
        graphoffload.explain(model, x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"config is a list.*The call is tune\(model, lambda:"):
        graphoffload.tune(model, lambda: None, [x])  # type: ignore[arg-type]


def test_tune_wants_a_step_not_an_input() -> None:
    """Before anything is compiled."""
    with pytest.raises(ConfigError, match=r"step is a Tensor, which cannot be called.*The call is tune\(model, lambda:"):
        graphoffload.tune(torch.nn.Linear(4, 4), torch.randn(2, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "text", "parts"),
    [
        ("DEVICE_BUGDET", "1GiB", ("sets no known field", "Did you mean GRAPHOFFLOAD_DEVICE_BUDGET?", "Unset it")),
        ("device_budget", "1GiB", ("sets no known field", "GRAPHOFFLOAD_DEVICE_BUDGET")),
        ("DEVICE_BUDGET", "lots", ("device_budget='lots'", "came from the environment variable GRAPHOFFLOAD_DEVICE_BUDGET")),
        ("POLICY", "{'a': 1}", ("is no JSON", '{"*.mlp": "recompute"}')),
        ("POLICY", '{"a": "drop"}', ("policy['a']='drop'",)),
        ("MAX_SLOWDOWN", "2%%", ("max_slowdown='2%%'", "no number")),
        ("OFFLOAD_MODULES", ",", ("is empty",)),
        ("VERIFY", "maybe", ("verify='maybe'", "graph, checksum, off")),
        ("MIN_TENSOR_BYTES", "none", ("min_tensor_bytes='none'",)),
    ],
)
def test_bad_variables(variable: str, text: str, parts: tuple[str, ...]) -> None:
    """The variable is named: the user may have forgotten that it is set."""
    with pytest.raises(ConfigError) as info:
        OffloadConfig.from_options({}, environ={f"GRAPHOFFLOAD_{variable}": text})
    for part in (*parts, f"GRAPHOFFLOAD_{variable}"):
        assert part in str(info.value), info.value


OPS = torch.ops.graphoffload


def transfer(id: int, tensor: str) -> Transfer:
    return Transfer(
        id=id, tensor=tensor, nbytes=96, offload_after=tensor, release_after=None, reload_before="y", wait_before="y",
        module=f"layer{id}",
    )  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    """A plan of two transfers in checksum mode, known to the ops."""
    made = Plan(key="errors", graph="graph0", transfers=(transfer(0, "a"), transfer(1, "b")), checksum=True)
    registry.register(made, store=False)
    return made


def offloaded(x: Tensor, plan: Plan, id: int = 0) -> Tensor:
    handle: Tensor = OPS.offload(x, plan.key, id)
    return handle


def says(error: Any, *parts: str) -> None:
    for part in parts:
        assert part in str(error), f"{part!r} is missing in: {error}"


def test_a_second_release(plan: Plan) -> None:
    """One offload has one release; the next owner of the memory may be anything."""
    x = torch.ones(4, 6)
    handle = offloaded(x, plan)
    OPS.release(x, handle, plan.key, 0)
    with pytest.raises(RuntimeStateError) as info:
        OPS.release(x, handle, plan.key, 0)
    says(info.value, "a of layer0 was released twice", "plan errors")


def test_a_handle_of_another_tensor(plan: Plan) -> None:
    """Two tensors of the same shape exchanged between forward and backward: only the names can tell."""
    a, b = torch.ones(4, 6), torch.zeros(4, 6)
    handles = offloaded(a, plan, 0), offloaded(b, plan, 1)
    with pytest.raises(RuntimeStateError) as info:
        OPS.reload(handles[1], plan.key, 0, a.shape, a.stride(), a.dtype)
    says(info.value, "A handle for b of layer1", "where a of layer0", "out of order", "GRAPHOFFLOAD_DUMP_DIR")
    with pytest.raises(RuntimeStateError, match=r"plan errors.*was passed where .*plan elsewhere"):
        OPS.reload(handles[0], "elsewhere", 0, a.shape, a.stride(), a.dtype)


def test_a_handle_that_stands_for_nothing(plan: Plan) -> None:
    """A copy of a handle that nobody announced."""
    x = torch.ones(4, 6)
    handle = offloaded(x, plan)
    with pytest.raises(RuntimeStateError) as info:
        OPS.reload(handle.clone(), plan.key, 0, x.shape, x.stride(), x.dtype)
    says(info.value, "The host copy of a of layer0 is gone", "plan errors", "hook", "converts integers", "8 steps or 256 calls")


def test_a_wait_without_its_reload(plan: Plan) -> None:
    """For nothing, or for other memory than the reload writes to."""
    x = torch.ones(4, 6)
    handle = offloaded(x, plan)
    OPS.release(x, handle, plan.key, 0)
    with pytest.raises(RuntimeStateError) as info:
        OPS.wait(x, handle, plan.key, 0)
    says(info.value, "a of layer0: wait was given memory at 0x", "nothing was reloaded", "step is stopped")
    y = OPS.reload(handle, plan.key, 0, x.shape, x.stride(), x.dtype)
    with pytest.raises(RuntimeStateError) as info:
        OPS.wait(y.clone(), handle, plan.key, 0)
    says(info.value, "a of layer0: wait was given memory at 0x", f"reload writes to {y.data_ptr():#x}")


def test_other_bits_than_were_offloaded(plan: Plan) -> None:
    """Two exchanged elements leave every sum as it was; the weighted ones tell."""
    x = torch.arange(24.0).reshape(4, 6)

    def exchange(host: Tensor) -> None:
        host[[2, 9]] = host[[9, 2]]

    with host_copies(exchange):
        handle = offloaded(x, plan)
    OPS.release(x, handle, plan.key, 0)
    y = OPS.reload(handle, plan.key, 0, x.shape, x.stride(), x.dtype)
    with pytest.raises(ChecksumError) as info:
        OPS.wait(y, handle, plan.key, 0)
    says(info.value, "a of layer0: the 96 bytes", "digest [", "expected [", "plan errors", "GRAPHOFFLOAD_DUMP_DIR")


def test_more_host_memory_than_there_is() -> None:
    """The operating system refuses: sizes, what is held, the way out; and the pool's books are as before."""
    pool = HostPool()
    kept = pool.acquire(4096, pin=False)
    before = pool.snapshot()
    with pytest.raises(HostMemoryError) as info:
        pool.acquire(2**60, pin=False, name="a of layer0")
    says(info.value, "No host memory for a of layer0", "asked for", "4.00 KiB held already")
    says(info.value, "host_budget", "release_host_memory")
    assert info.value.__cause__ is not None
    assert pool.snapshot() == before
    pool.give_back(kept)
    assert pool.release_idle() == 4096


def test_memory_that_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses (a memlock limit): a warning with its code, and a buffer that works and is never unregistered."""
    asked: list[tuple[int, int]] = []

    def refuse(address: int, nbytes: int, flags: int) -> int:
        asked.append((address, nbytes))
        return 2

    def unregister(address: int) -> int:
        raise AssertionError(f"{address:#x} was never registered")

    driver = types.SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pool = HostPool()
    with pytest.warns(PageableMemoryWarning) as caught:
        buffer = pool.acquire(12288, pin=True, name="a of layer0")
    says(caught[0].message, "12.0 KiB", "could not be page-locked", "CUDA error 2", "ulimit -l", "host_budget")
    assert asked == [(buffer.flat(torch.uint8).data_ptr(), 12288)]
    assert asked[0][0] % 4096 == 0
    assert not buffer.pinned
    assert pool.snapshot().pinned_bytes == 0
    buffer.flat(torch.float32).fill_(1.5)
    pool.give_back(buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PageableMemoryWarning)
        assert pool.acquire(12288, pin=True) is buffer  # reused: said once
    pool.give_back(buffer)
    assert pool.release_idle() == 12288


def test_a_device_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are synchronous there: said once for a device, and never for a CPU."""
    monkeypatch.setattr(streams, "_STREAMS", {})
    with pytest.warns(NoStreamsWarning) as caught:
        assert streams.streams_of(torch.device("xpu", 1)) is None
    says(caught[0].message, "device xpu:1", "run synchronously", "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoStreamsWarning)
        assert streams.streams_of(torch.device("xpu", 1)) is None
        assert streams.streams_of(torch.device("cpu")) is None


@pytest.mark.parametrize("pass_name", ["offload", "reload"])
def test_a_plan_of_another_graph(pass_name: str, plan: Plan) -> None:
    """Both passes name the node that is not there, and have changed nothing by then."""

    def forward(x: Tensor) -> tuple[Tensor]:
        return (x.cos(),)

    pair = GraphPair(torch.fx.symbolic_trace(forward), torch.fx.symbolic_trace(forward), 1)
    before = str(pair.forward.graph), str(pair.backward.graph)
    with pytest.raises(PlanError) as info:
        {"offload": insert_offloads, "reload": insert_reloads}[pass_name](pair, plan)
    says(info.value, "Plan errors names the node 'a'", "graph of 3 nodes", "another graph, torch version or device")
    says(info.value, "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1")
    assert (str(pair.forward.graph), str(pair.backward.graph)) == before


def test_a_rewritten_graph_that_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that forgets its half: every violation is listed, and no copy was started."""
    monkeypatch.setattr(pipeline, "insert_reloads", lambda graphs, plan: graphs)
    config = OffloadConfig(policy="offload", inner="aot_eager", min_tensor_bytes=0)
    case = ZOO["attention"]
    module = compiled(case.fresh("cpu"), graphoffload.OffloadBackend(config))
    before = graphoffload.stats()
    with pytest.raises(BackendCompilerFailed, match="safety rule") as info:
        run_step(module, case.example("cpu"))
    error = info.value.inner_exception
    assert isinstance(error, VerifyError), repr(error)
    says(error, "once: transfer 0", "has 0 reload ops", "has 0 wait ops", "nothing was run")
    says(error, "GRAPHOFFLOAD_DUMP_DIR", 'policy="keep"')
    assert graphoffload.stats() == before


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_warning_names_the_line_of_the_users_own_code(depth: int) -> None:
    """Not a line of the package, of an installed one that calls it, or of code that torch has written."""
    library = str(Path(torch.__file__).parent / "called.py")
    scope: dict[str, Any] = {"warn": functools.partial(warn, HardwareWarning, "guessed")}
    users = "/home/me/.local/lib/python3.12/site-packages/torch/called.py"  # pip install --user
    for name in (library, users, "<eval_with_key>.7", "/tmp/torchinductor_me/ab/cab.py")[:depth]:
        exec(compile("def call(inner=warn): inner()\nwarn = call", name, "exec"), scope)
    with pytest.warns(HardwareWarning) as caught:
        scope["warn"]()
    assert caught[0].filename == __file__


def test_a_warning_in_a_thread_of_a_library_has_some_line() -> None:
    thread = threading.Thread(target=warn, args=(HardwareWarning, "guessed"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert [str(each.message) for each in caught] == ["guessed"]
