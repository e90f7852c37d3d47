"""The configuration: defaults of the contract, every accepted form, options over environment, identity."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphoffload.errors import ConfigError
from graphoffload.facts.plan import Action
from graphoffload.facts.saved_tensors import SavedTensor
from graphoffload.hardware.profile import PROFILES
from graphoffload.options.config import FIELD_NAMES, OffloadConfig, read_environment, split_options

DEFAULTS: dict[str, Any] = {
    "device_budget": "auto", "reserve": "auto", "max_slowdown": None, "policy": "auto", "offload_modules": None,
    "min_tensor_bytes": 2**20, "offload_fraction": 1.0, "host_budget": "auto", "max_inflight_bytes": None,
    "hardware": "measure", "verify": "graph", "dump_dir": None, "inner": "inductor", "mode": None,
}  # fmt: skip


def keep_everything(tensor: SavedTensor) -> Action | None:
    """A module-level policy."""
    return "keep"


def offload_everything(tensor: SavedTensor) -> Action | None:
    """Another one."""
    return "offload"


@dataclasses.dataclass(frozen=True)
class LargerThan:
    """A frozen policy object."""

    nbytes: int

    def __call__(self, tensor: SavedTensor) -> Action | None:
        return "offload" if (tensor.nbytes or 0) > self.nbytes else None


# One changed value of every field: what makes another configuration.
CHANGED: dict[str, Any] = {
    "device_budget": "40GiB", "reserve": "1GiB", "max_slowdown": 0.02, "policy": {"*.mlp": "recompute"},
    "offload_modules": ["*.self_attn"], "min_tensor_bytes": 0, "offload_fraction": 0.5, "host_budget": "50%",
    "max_inflight_bytes": "2GiB", "hardware": "h200-sxm", "verify": "checksum", "dump_dir": Path("dumps"),
    "inner": "aot_eager", "mode": "max-autotune",
}  # fmt: skip


def test_the_fields_are_those_of_the_contract() -> None:
    """Names, order and defaults."""
    config = OffloadConfig()
    assert {name: getattr(config, name) for name in FIELD_NAMES} == DEFAULTS
    assert list(FIELD_NAMES) == [field.name for field in dataclasses.fields(OffloadConfig)][:-1]
    assert OffloadConfig.from_options(None, environ={}) == config


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("device_budget", "40 GiB", 40 * 2**30),
        ("device_budget", " 80 % ", "80%"),
        ("device_budget", 4096, 4096),
        ("device_budget", np.int64(4097), 4097),
        ("max_slowdown", np.float32(0.5), 0.5),
        ("offload_fraction", np.int64(1), 1.0),
        ("reserve", 0, 0),
        ("host_budget", "50%", "50%"),
        ("max_slowdown", 0, 0.0),
        ("max_slowdown", "2%", 0.02),
        ("policy", {"a": "keep", "b": "auto"}, (("a", "keep"), ("b", "auto"))),
        ("offload_modules", "*.mlp", ("*.mlp",)),
        ("offload_modules", [" a ", "b"], ("a", "b")),
        ("offload_modules", {"b", "a"}, ("a", "b")),
        ("min_tensor_bytes", "64KiB", 2**16),
        ("max_inflight_bytes", "planned", None),
        ("dump_dir", Path("x") / "y", os.path.join("x", "y")),
        ("mode", "reduce-overhead", "reduce-overhead"),
        ("hardware", PROFILES["h200-sxm"], PROFILES["h200-sxm"]),
    ],
)
def test_accepted_forms(field: str, value: Any, stored: Any) -> None:
    """One stored form for every way to write a value."""
    config = OffloadConfig(**{field: value})
    assert getattr(config, field) == stored
    assert config == OffloadConfig(**{field: stored})
    assert config.digest() == OffloadConfig(**{field: stored}).digest()
    hash(config)


@pytest.mark.parametrize("field", FIELD_NAMES)
def test_every_field_is_part_of_the_identity(field: str) -> None:
    """A changed field changes equality and digest; pickle and deepcopy change nothing."""
    config = OffloadConfig(**{field: CHANGED[field]})
    assert config != OffloadConfig()
    assert config.digest() != OffloadConfig().digest()
    for other in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        OffloadConfig().with_options(**{field: CHANGED[field]}),
    ):
        assert other == config
        assert hash(other) == hash(config)
        assert other.digest() == config.digest()


def test_digests_tell_policies_apart() -> None:
    """Functions by name and source, objects by class and fields; equal values in new objects are equal."""
    policies: list[Any] = ["auto", "keep", keep_everything, offload_everything, LargerThan(1), LargerThan(2), {"a": "keep"}]
    policies += [{"a": "keep", "b": "keep"}, {"b": "keep", "a": "keep"}]
    assert len({OffloadConfig(policy=policy).digest() for policy in policies}) == len(policies)
    assert OffloadConfig(policy=LargerThan(1)).digest() == OffloadConfig(policy=LargerThan(1)).digest()
    assert pickle.loads(pickle.dumps(OffloadConfig(policy=keep_everything))).policy is keep_everything


DIGESTS = """
import sys
from graphoffload.options.config import OffloadConfig
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    import mine
    print(OffloadConfig(policy=mine.policy, offload_modules="*.mlp").digest())
    del sys.modules["mine"], sys.path[0]
"""


def test_a_digest_follows_the_source_of_a_policy(tmp_path: Path) -> None:
    """The same name with another body is another policy; another process agrees about the same body."""
    for name, body in (("first", "return 'keep'"), ("same", "return 'keep'"), ("other", "return 'offload'")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def policy(tensor):\n    {body}\n")
    root = Path(__file__).resolve().parents[2]
    found = []
    for seed, names in (("1", ["first", "other"]), ("2", ["same"])):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", DIGESTS, *(str(tmp_path / name) for name in names)]
        found += subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    first, other, same = found
    assert first == same != other


def test_inductor_options_go_to_the_inner_compiler() -> None:
    """Dotted ones and ones with dashes too; ours stay ours."""
    options = {"device-budget": "1GiB", "max_autotune": True, "triton.cudagraphs": False, "shape-padding": True}
    own, inductor = split_options(options)
    assert own == {"device_budget": "1GiB"}
    assert inductor == {"max_autotune": True, "triton.cudagraphs": False, "shape_padding": True}
    config = OffloadConfig.from_options(options, environ={})
    assert dict(config.inductor_options) == inductor
    assert config.device_budget == 2**30
    assert config.digest() != config.with_options(inductor_options=()).digest()
    assert pickle.loads(pickle.dumps(config)).inductor_options == config.inductor_options


VARIABLES: dict[str, tuple[str, Any]] = {
    "device_budget": ("40GiB", 40 * 2**30), "reserve": ("AUTO", "auto"), "max_slowdown": ("0.02", 0.02),
    "policy": ('{"*.mlp": "recompute"}', (("*.mlp", "recompute"),)),
    "offload_modules": ("*.mlp, core_attn", ("*.mlp", "core_attn")),
    "min_tensor_bytes": ("64KiB", 2**16), "offload_fraction": ("50%", 0.5), "host_budget": ("8GB", 8 * 10**9),
    "max_inflight_bytes": ("planned", None), "hardware": ("h200-sxm", "h200-sxm"), "verify": ("0", "off"),
    "dump_dir": ("dumps", "dumps"), "inner": ("aot_eager", "aot_eager"), "mode": ("none", None),
}  # fmt: skip


@pytest.mark.parametrize("field", FIELD_NAMES)
def test_every_field_has_a_variable(field: str) -> None:
    """Parsed by the field's type; an option wins over it."""
    text, stored = VARIABLES[field]
    environ = {f"GRAPHOFFLOAD_{field.upper()}": text, "OTHER": "x", "GRAPHOFFLOAD_CACHE_DIR": "/x", "GRAPHOFFLOAD_RESERVE": ""}
    environ[f"GRAPHOFFLOAD_{field.upper()}"] = text
    assert getattr(OffloadConfig.from_options({}, environ=environ), field) == stored
    option = CHANGED[field]
    assert OffloadConfig.from_options({field: option}, environ=environ) == OffloadConfig(**{field: option})
    assert set(read_environment(environ)) == {field}


def test_the_environment_is_read_only_by_from_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in code is what is meant."""
    monkeypatch.setenv("GRAPHOFFLOAD_POLICY", "keep")
    assert OffloadConfig().policy == "auto"
    assert OffloadConfig.from_options({}).policy == "keep"


def test_budget_and_slowdown_are_one_choice() -> None:
    """An explicit one in options sets aside the other's variable; both from the same place are an error."""
    slow = {"GRAPHOFFLOAD_MAX_SLOWDOWN": "0.1"}
    budget = {"GRAPHOFFLOAD_DEVICE_BUDGET": "1GiB"}
    assert OffloadConfig.from_options({"device_budget": "2GiB"}, environ=slow).max_slowdown is None
    assert OffloadConfig.from_options({"max_slowdown": 0.2}, environ=budget).device_budget == "auto"
    assert OffloadConfig.from_options({"device_budget": "auto"}, environ=slow).max_slowdown == 0.1
    assert OffloadConfig(max_slowdown=0.1, device_budget="auto").max_slowdown == 0.1
    with pytest.raises(ConfigError, match=r"max_slowdown=0.1 beside device_budget=1073741824.*Give one of the two"):
        OffloadConfig.from_options({}, environ={**slow, **budget})


@pytest.mark.parametrize("field", ["device_budget", "host_budget", "reserve"])
def test_a_small_size_with_a_unit_is_copied(field: str) -> None:
    """It is stored as an int, which would lack its unit if the user had given it so."""
    config = OffloadConfig(**{field: "1KiB"}).with_options(policy="keep")
    assert getattr(config, field) == 1024
    with pytest.raises(ConfigError, match="has no unit"):
        config.with_options(**{field: 1024})


def test_with_options() -> None:
    """A copy; the original stays."""
    config = OffloadConfig(policy="keep")
    assert config.with_options(verify="off") == OffloadConfig(policy="keep", verify="off")
    assert config.verify == "graph"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.verify = "off"  # type: ignore[misc]


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.sampled_from(["keep", "recompute", "offload", "auto"]), min_size=1))
def test_mappings_keep_their_order(policy: dict[str, str]) -> None:
    """First match wins, so order is meaning; blank patterns are refused."""
    if all(pattern.strip() for pattern in policy):
        expected = tuple((pattern.strip(), action) for pattern, action in policy.items())
        assert OffloadConfig(policy=policy).policy == expected
    else:
        with pytest.raises(ConfigError, match="a pattern is a str"):
            OffloadConfig(policy=policy)


def test_small_sizes_with_a_unit_or_for_what_may_be_small_are_meant() -> None:
    """A hint is for what nobody means: tests of tiny models have budgets of kilobytes."""
    config = OffloadConfig(device_budget="40B", host_budget="512 b", reserve=0, min_tensor_bytes="40", max_inflight_bytes=40)
    assert (config.device_budget, config.host_budget, config.min_tensor_bytes, config.max_inflight_bytes) == (40, 512, 40, 40)
    assert OffloadConfig(device_budget=8192, host_budget=0, reserve="0").device_budget == 8192
    assert OffloadConfig(device_budget=str(2**20)).device_budget == 2**20


@pytest.mark.parametrize(
    ("fields", "has_budget", "limits_time"),
    [({}, False, False), ({"device_budget": "80%"}, True, False), ({"max_slowdown": 0.0}, False, True)],
)
def test_a_configuration_says_what_it_limits(fields: dict[str, Any], has_budget: bool, limits_time: bool) -> None:
    config = OffloadConfig(**fields)
    assert (config.has_budget, config.limits_time) == (has_budget, limits_time)
