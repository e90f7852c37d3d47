"""Bad input: an error or a named warning that says what, which, the numbers and the remedy, and that loses nothing."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy

import graphoffload
from graphoffload import errors
from graphoffload.errors import (
    ConfigError,
    GraphOffloadError,
    GraphOffloadWarning,
    HostMemoryError,
    PatternError,
    PatternWarning,
    TagError,
)
from graphoffload.monitor import pattern_coverage as fragments
from graphoffload.options.patterns import resolve
from graphoffload.runtime.handles import ENTRIES
from graphoffload.runtime.pinned import slabs
from graphoffload.testing import ZOO, assert_equal_bits, compiled, keep_all, observe, run_case, run_step
from graphoffload.testing.structure import Selective, tag_everything

CASE = ZOO["attention"]
OPTIONS: dict[str, Any] = {"inner": "aot_eager", "policy": "offload", "min_tensor_bytes": 0}


def backend(**options: Any) -> Any:
    return graphoffload.OffloadBackend(graphoffload.OffloadConfig(**{**OPTIONS, **options}))


def compile_error(case_or_module: Any = CASE, **options: Any) -> GraphOffloadError:
    """The error that a compile raises, out of torch's wrapper; afterwards the same module still trains."""
    module = case_or_module.fresh("cpu") if case_or_module is CASE else case_or_module
    arguments = CASE.example("cpu") if case_or_module is CASE else ZOO["selective"].example("cpu")
    with pytest.raises(BackendCompilerFailed) as info:
        run_step(compiled(module, backend(**options)), arguments)
    error = info.value.inner_exception
    assert isinstance(error, GraphOffloadError), repr(error)
    expected = run_step(compiled(module, keep_all()), arguments)
    assert_equal_bits(run_step(compiled(module, backend(policy="keep")), arguments), expected)
    return error


def says(error: BaseException, *parts: str) -> None:
    """The message holds every part."""
    for part in parts:
        assert part in str(error), f"{part!r} is missing in: {error}"


def first(caught: Any, category: type[Warning]) -> Warning:
    """The first warning of a category; torch has warnings of its own."""
    found: Warning = next(warning.message for warning in caught if warning.category is category)
    return found


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"device_bugdet": "1GiB"}, ("device_bugdet", "device_budget", "Known:", "policy", "torch._inductor.config")),
        ({"max_autotune_gem": True}, ("max_autotune_gem", "max_autotune_gemm")),
        ({"device_budget": "40 Gigs"}, ("device_budget='40 Gigs'", "GiB")),
        ({"device_budget": "much"}, ("device_budget='much'", "does not parse", "40GiB")),
        ({"device_budget": "140%"}, ("140%", "100 %")),
        ({"device_budget": -1}, ("device_budget=-1",)),
        ({"device_budget": 3.5j}, ("device_budget=3.5j", "complex")),
        ({"host_budget": True}, ("host_budget=True", "bool")),
        ({"max_slowdown": "fast"}, ("max_slowdown='fast'",)),
        ({"max_slowdown": -0.1}, ("max_slowdown=-0.1",)),
        ({"max_slowdown": 0.1, "device_budget": "1GiB"}, ("max_slowdown=0.1", "device_budget", "one of the two")),
        ({"policy": "offlaod"}, ("policy='offlaod'", '"offload"', "recompute")),
        ({"policy": 3}, ("policy=3", "int")),
        ({"policy": {"*.mlp": "drop"}}, ("'*.mlp'", "'drop'", "keep, recompute, offload")),
        ({"policy": lambda tensor: "keep"}, ("lambda", "frozen dataclass")),
        ({"offload_modules": 7}, ("offload_modules=7", "int")),
        ({"min_tensor_bytes": "tiny"}, ("min_tensor_bytes='tiny'",)),
        ({"offload_fraction": 1.5}, ("offload_fraction=1.5",)),
        ({"verify": "sometimes"}, ("verify='sometimes'", "graph", "checksum", "off")),
        ({"inner": "onnx"}, ("inner='onnx'", "inductor", "aot_eager")),
        ({"max_inflight_bytes": 0}, ("max_inflight_bytes=0",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_checked_at_once(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Unknown option, wrong type, out of range: before anything is traced."""
    with pytest.raises(ConfigError) as info:
        graphoffload.OffloadConfig.from_options(options)
    says(info.value, *parts)


@pytest.mark.parametrize("how", ["name", "object"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_bad_option_of_torch_compile_reaches_the_user(how: str, in_place: bool) -> None:
    """As the error that it is: torch.compile keeps options to itself until the first graph."""
    module = CASE.fresh("cpu")
    torch._dynamo.reset()
    given: dict[str, Any] = {"backend": "graphoffload" if how == "name" else graphoffload.OffloadBackend()}
    given["options"] = {"device_bugdet": "1GiB"}
    if in_place:
        module.compile(**given)
    with pytest.raises(ConfigError) as info:
        (module if in_place else torch.compile(module, **given))(*CASE.example("cpu"))
    says(info.value, "device_bugdet", "device_budget", "OffloadBackend and offload() check them at once")


def test_a_bad_option_is_an_error_at_once_where_we_are_called() -> None:
    """By offload(), by the backend's object, and by the decorator."""
    for call in (graphoffload.OffloadBackend, lambda **options: graphoffload.offload(CASE.fresh("cpu"), **options)):
        with pytest.raises(ConfigError, match="device_bugdet"):
            call(device_bugdet="1GiB")


def test_a_bad_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value came from somewhere the user may have forgotten."""
    monkeypatch.setenv("GRAPHOFFLOAD_DEVICE_BUDGET", "lots")
    with pytest.raises(ConfigError) as info:
        graphoffload.OffloadConfig.from_options({})
    says(info.value, "GRAPHOFFLOAD_DEVICE_BUDGET", "lots")
    monkeypatch.delenv("GRAPHOFFLOAD_DEVICE_BUDGET")
    monkeypatch.setenv("GRAPHOFFLOAD_DEVICE_BUGDET", "1GiB")
    with pytest.raises(ConfigError) as info:
        graphoffload.OffloadConfig.from_options({})
    says(info.value, "GRAPHOFFLOAD_DEVICE_BUGDET", "GRAPHOFFLOAD_DEVICE_BUDGET")


@pytest.mark.parametrize(
    "options",
    [{"offload_modules": ("*.kk",)}, {"policy": {"*.kk": "offload"}}, {"offload_modules": ("core_atn",)}],
    ids=["module", "policy", "boundary"],
)
def test_a_pattern_that_matches_nothing(options: dict[str, Any]) -> None:
    """A silent no-op is what users of other tools complain of first: an error that names near misses."""
    error = compile_error(**options)
    assert isinstance(error, PatternError)
    says(error, "*.kk" if "kk" in str(options) else "core_atn", "k" if "kk" in str(options) else "core_attn")


def test_a_pattern_that_matches_nothing_in_a_fragment() -> None:
    """With graph breaks each graph is a part: one warning after the first backward, and the step goes on."""
    case = ZOO["graph_break"]
    expected = run_case(case, keep_all(), "cpu")
    with pytest.warns(PatternWarning, match="nowhere") as caught:
        got = run_case(case, backend(policy={"*.nowhere": "recompute", "*": "offload"}), "cpu")
    assert len([w for w in caught if w.category is PatternWarning]) == 1
    assert_equal_bits(got[0], expected[0])


def test_a_model_with_graph_breaks_leaves_nothing_to_another() -> None:
    """Neither that a pattern may match elsewhere, which makes an error a warning, nor that it did."""
    options: dict[str, Any] = {"policy": {"*.nowhere": "recompute", "*": "offload"}}
    with pytest.warns(PatternWarning, match="nowhere"):
        run_case(ZOO["graph_break"], backend(**options), "cpu")
    error = compile_error(**options)
    assert isinstance(error, PatternError)
    with pytest.warns(PatternWarning, match="nowhere"):
        run_case(ZOO["graph_break"], backend(**options), "cpu")


class Broken(torch.nn.Module):
    """Two parts, the second of which is compiled again for another activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, ends: str) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        x = self.second(x)
        return x.tanh() if ends == "tanh" else x.sigmoid()


def test_a_part_that_is_compiled_again_is_still_a_part() -> None:
    """Of another activation, where only the last graph changes: what matched in the first still counts."""
    torch._dynamo.reset()
    module = Broken()
    graphoffload.offload(module, policy={"first": "offload", "second": "offload"}, inner="aot_eager", min_tensor_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphOffloadWarning)
        for ends in ("tanh", "sigmoid"):
            module(torch.randn(4, 8), ends).sum().backward()


class EndsWithoutGradient(torch.nn.Module):
    """Two parts, the last of which needs no gradient: it is never planned, and nobody knows that it was the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        with torch.no_grad():
            return x, self.second(x)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one, whose first bucket is no larger than others."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class FourLayers(torch.nn.Module):
    """DDP cuts what Dynamo gives it into a graph for each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def split_by_ddp() -> torch.nn.Module:
    """In buckets of a layer each."""
    return torch.nn.parallel.DistributedDataParallel(FourLayers(), bucket_cap_mb=0.02)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("build", "width", "somewhere"),
    [(EndsWithoutGradient, 8, "first"), (split_by_ddp, 64, "*layers.1")],
    ids=["the last needs no gradient", "ddp"],
)
def test_a_pattern_that_matches_nothing_where_no_part_is_the_last(
    build: Callable[[], torch.nn.Module], width: int, somewhere: str
) -> None:
    """Said once, by the optimizer's second step; what matches in one of the parts is not."""
    torch._dynamo.reset()
    module = build()
    config = backend(policy={"*.nowhere": "recompute", somewhere: "offload", "*": "keep"}, min_tensor_bytes=0)
    compiled_module = torch.compile(module, backend=config)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    said: list[list[str]] = []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = compiled_module(torch.randn(4, width))
            (output[0] if isinstance(output, tuple) else output).sum().backward()
            optimizer.step()
        said.append([str(item.message) for item in caught if item.category is PatternWarning])
    assert [len(texts) for texts in said] == [0, 1, 0, 0]
    assert "'*.nowhere' matched no module in any graph" in said[1][0]


def test_one_configurations_last_part_says_nothing_of_another() -> None:
    """Of one model (0: nobody knows which) whose other compile has parts to come, in which a pattern may match."""
    part = fragments.Fragment("part")
    fragments.remember(part, "one", ["first"], resolve(["first"], ["a"]))
    fragments.remember(part, "other", ["second"], resolve(["second"], ["a"]))
    with pytest.warns(PatternWarning, match="'second' matched no module") as caught:
        fragments.warn_of_unmatched(0, "other")
    assert len(caught) == 1
    fragments.remember(part, "one", ["first"], resolve(["first"], ["first"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fragments.warn_of_unmatched(0, "one")


def test_unknown_hardware() -> None:
    """A profile's name is looked up when a plan needs it."""
    error = compile_error(hardware="h2000-sxm")
    assert isinstance(error, ConfigError)
    says(error, "h2000-sxm", "h200-sxm")


def test_contradictory_tags() -> None:
    """MUST_SAVE against a policy that recomputes the very same tensors."""
    error = compile_error(Selective(tag_everything(CheckpointPolicy.MUST_SAVE)), policy={"inside": "recompute", "*": "keep"})
    assert isinstance(error, TagError)
    says(error, "MUST_SAVE", "inside", "recompute")


def test_too_little_host_memory() -> None:
    """What policy="offload" names does not fit: a warning with the numbers; what fits goes, earliest first."""
    expected = run_case(CASE, keep_all(), "cpu")
    with pytest.warns(errors.NotOffloadedWarning) as caught, observe() as seen:
        got = run_case(CASE, backend(host_budget="4KiB"), "cpu")
    assert_equal_bits(got[0], expected[0])
    assert 0 < seen.copied_bytes <= 4096
    says(first(caught, errors.NotOffloadedWarning), "4.00 KiB", "host_budget", "GRAPHOFFLOAD_HOST_BUDGET", "are kept")


def test_no_host_memory_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system refuses: an error at that step, and the next one is right."""
    module = compiled(CASE.fresh("cpu"), backend())
    expected = run_step(module, CASE.example("cpu"))
    graphoffload.release_host_memory()

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise MemoryError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(slabs, "Slab", refuse)
        with pytest.raises(HostMemoryError, match=r"No host memory for .*asked for.*host_budget"):
            run_step(module, CASE.example("cpu"))
    gc.collect()
    assert graphoffload.host_memory().in_use_bytes == 0
    assert_equal_bits(run_step(module, CASE.example("cpu")), expected)


def test_a_backward_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for nothing, step after step: a warning that says how many bytes, once; training is not stopped."""
    monkeypatch.setattr(ENTRIES, "_warned", False)  # an earlier test of this process may have made it say so
    module = compiled(CASE.fresh("cpu"), backend())

    def evaluate_with_gradients() -> None:
        for seed in range(40):
            module(*CASE.example("cpu", seed=seed))
        run_step(module, CASE.example("cpu"))

    with pytest.warns(errors.BackwardNeverCameWarning) as caught:
        evaluate_with_gradients()
    (warning,) = [w for w in caught if w.category is errors.BackwardNeverCameWarning]
    says(warning.message, "no_grad", "iB")  # type: ignore[arg-type]


def test_a_single_forward_without_backward_is_no_reason_to_warn() -> None:
    """A shape probe or a skipped step is normal."""
    module = compiled(CASE.fresh("cpu"), backend())
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.BackwardNeverCameWarning)
        module(*CASE.example("cpu"))
        for _ in range(3):
            run_step(module, CASE.example("cpu"))


@pytest.mark.parametrize(
    ("version", "warned"), [("9.9.0", True), ("9.9.0+cu999", True), ("2.16.0", True), ("2.15.0", False), ("2.11.0+cpu", False)]
)
def test_a_torch_that_was_not_tested(version: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer torch is used, with a warning that names it and the tested ones."""
    from graphoffload.torch_internals import releases

    monkeypatch.setattr(releases, "_checked", False)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        releases.check_torch()
    found = [w for w in caught if w.category is errors.UntestedTorchWarning]
    assert bool(found) == warned
    for warning in found:
        says(warning.message, version.split("+")[0], "2.11", "2.15")  # type: ignore[arg-type]


class Doubles(nn.Module):
    """An inference graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2.0


def test_an_inference_graph_is_untouched(caplog: pytest.LogCaptureFixture) -> None:
    """No plan that moves anything, no warning, nothing above DEBUG."""
    x = torch.ones(4, 4)
    with (
        warnings.catch_warnings(),
        caplog.at_level(logging.DEBUG, logger="graphoffload"),
        observe() as seen,
        torch.no_grad(),
    ):
        warnings.simplefilter("error", errors.GraphOffloadWarning)
        assert torch.equal(compiled(Doubles(), backend())(x), Doubles()(x))
    assert seen.copied_bytes == seen.planned_bytes == 0
    ours = [record for record in caplog.records if record.name.split(".")[0] == "graphoffload"]
    assert all(record.levelno <= logging.DEBUG for record in ours)
    assert [record for record in ours if "untouched" in record.getMessage()]


def test_nothing_eligible_is_said() -> None:
    """Everything is below min_tensor_bytes: policy="offload" does nothing, and that is a named warning."""
    with pytest.warns(errors.NotOffloadedWarning, match="min_tensor_bytes") as caught, observe() as seen:
        run_case(CASE, backend(min_tensor_bytes="1GiB"), "cpu")
    assert seen.copied_bytes == 0
    says(first(caught, errors.NotOffloadedWarning), "1.00 GiB")


def test_torchs_own_memory_budget_is_named() -> None:
    """activation_memory_budget below 1 would recompute behind our back, and re-draw dropout."""
    import torch._functorch.config as functorch_config

    case = ZOO["dropout"]
    expected = run_case(case, keep_all(), "cpu")
    with (
        functorch_config.patch(activation_memory_budget=0.5),
        pytest.warns(errors.FallbackWarning, match="activation_memory_budget"),
    ):
        got = run_case(case, backend(), "cpu")
    assert_equal_bits(got[0], expected[0])


def test_suppressed_errors_are_named() -> None:
    """suppress_errors turns every error above into silent eager training."""
    import torch._dynamo.config as dynamo_config

    with dynamo_config.patch(suppress_errors=True), pytest.warns(errors.FallbackWarning, match="suppress_errors"):
        run_case(CASE, backend(), "cpu")


def test_the_last_compile_before_torch_gives_up_says_so() -> None:
    """The one after it would run in eager, and nothing of ours would be called."""
    x = torch.randn(8, 16, requires_grad=True)

    def train(number: int) -> list[str]:
        model = Doubles()
        model.compile(backend=graphoffload.OffloadBackend(inner="aot_eager", policy="keep", min_tensor_bytes=number))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(x).sum().backward()
        return [str(item.message) for item in caught if issubclass(item.category, errors.FallbackWarning)]

    with torch._dynamo.config.patch(recompile_limit=3):
        said = [train(number) for number in range(3)]
    assert said[:2] == [[], []]
    assert len(said[2]) == 1
    assert "this is compile 3 of the same code" in said[2][0]
