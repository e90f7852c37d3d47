"""Every error of the configuration and of policies: what, which value, what is known, and what to do instead."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from graphoffload.config import OffloadConfig
from graphoffload.errors import ConfigError
from graphoffload.saved import Action, SavedTensor


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
