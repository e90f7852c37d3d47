"""The net: the fast architectures in full, the judge's own judgement, and the page. `make net` runs all architectures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import graphoffload
from net import judge, page, runner
from net.step import OwnStep, Saved, Taken, missing, take, whole_error, worse
from net.table import Architecture, Missing, everything, hf

FAST = [name for name, architecture in everything().items() if architecture.fast]
LONG = ("mamba", "mixtral")
"""Every run plans a state space (analysis/test_kernels.py) and trains experts (compiler/test_checkpointing_reached.py)."""
KINDS = (
    "dense decoder", "experts", "latent attention", "sinks", "sliding windows", "state space", "linear attention", "encoder",
    "encoder and decoder", "speech", "spectrum", "image transformer", "convolutions", "detection", "diffusion, U-Net",
    "diffusion, transformer", "vision-language", "contrastive", "adapter", "adapter on weights of 4 bits", "adapter in float32",
    "precision, bfloat16", "precision, float16", "float8", "packed documents", "block mask", "nested tensor",
    "several tokens ahead", "loss, in chunks", "gradients computed in forward", "reinforcement", "gradient accumulation",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in FAST])
def test_fast_architecture(name: str) -> None:
    """Every way, aot_eager: gradients, counters; device and host bytes together are what plain torch keeps."""
    architecture = everything()[name]
    try:
        case, plain = judge.begin(architecture, "aot_eager", "cpu")
    except Missing as error:
        pytest.skip(str(error))
    if plain["outcome"] == "skipped":
        pytest.skip(plain["why"])
    assert case is not None, plain
    assert plain["outcome"] == "ok", plain
    for way in judge.WAYS:
        found = judge.examine(case, way)
        assert found["outcome"] == "ok", (way, found)
        if way == "offload":
            assert found["offloads"] > 0
            assert not found["notes"], found


def test_under_inductor() -> None:
    """Two operations; `make net` has the architectures."""
    case, plain = judge.begin(small(), "inductor", "cpu")
    assert case is not None, plain
    for way in ("offload", "recompute"):
        found = judge.examine(case, way)
        assert found["outcome"] == "ok", found
    assert plain["saved_bytes"] > 0


def test_sixty_architectures_of_every_kind() -> None:
    kinds = [architecture.kind for architecture in everything().values()]
    assert len(kinds) >= 60
    missing = [kind for kind in KINDS if not any(kind in known for known in kinds)]
    assert not missing


def test_a_release_without_an_architecture_is_skipped() -> None:
    with pytest.raises(Missing, match="has no NowhereConfig"):
        hf("NowhereConfig")

    def build() -> Any:
        return hf("NowhereConfig")

    case, said = judge.begin(small(build=build), "aot_eager", "cpu")
    assert case is None
    assert said["outcome"] == "skipped"

    def broken() -> Any:
        raise TypeError("no such field")

    case, said = judge.begin(small(build=broken), "aot_eager", "cpu")
    assert case is None
    assert said == {"outcome": "error", "why": "eager: TypeError: no such field"}


# The judge.


def taken(**grads: Any) -> Taken:
    tensors = {name: None if value is None else torch.tensor(value, dtype=torch.float64) for name, value in grads.items()}
    return Taken(torch.tensor(1.0), tensors, {})


def test_an_error_in_a_small_tensor_is_seen() -> None:
    """The norm of all gradients hides what is far off in a tensor of small ones."""
    exact, plain = taken(a=[1e3, 2e3], b=[1e-2, 3e-2]), taken(a=[1e3, 2e3], b=[1e-2, 3.0000001e-2])
    off = taken(a=[1e3, 2e3], b=[1e-2, 4e-2])
    assert whole_error(off, exact) < 1e-5
    assert any("grad of b" in text for text in worse(off, plain, exact))
    assert not worse(plain, plain, exact)


def test_nan_and_missing_gradients_are_errors() -> None:
    exact = taken(a=[1.0], b=[2.0])
    assert whole_error(taken(a=[float("nan")], b=[2.0]), exact) == float("inf")
    assert whole_error(taken(a=None, b=[2.0]), exact) == float("inf")
    assert worse(taken(a=[float("nan")], b=[2.0]), exact, exact)
    assert missing(taken(a=None, b=[2.0]), exact)
    zero = taken(a=[1.0], b=[2.0], unused=[0.0])
    assert whole_error(zero, taken(a=[1.0], b=[2.0], unused=None)) == 0.0
    assert missing(zero, taken(a=[1.0], b=[2.0], unused=None))


class Tanh(torch.nn.Module):
    """Saves two activations of 4 x 8 floats: the second operation's input, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((x * self.scale).tanh() @ x.t()).tanh().sum()}


def small(**changes: Any) -> Architecture:
    architecture = Architecture(name="small", kind="test", build=lambda: (Tanh(), {"x": torch.randn(4, 8)}))
    return dataclasses.replace(architecture, **changes)


def test_saved_bytes_are_counted_by_storage() -> None:
    model, inputs = small().fresh()
    saved = Saved()
    take(model, inputs, saved)
    assert saved.nbytes == 4 * 8 * 4 + 4 * 4 * 4  # both results of tanh; x and the parameter are not activations
    assert saved.tickets == 0


def test_memory_that_comes_again_is_counted_again() -> None:
    """Steps in a row: the activations of one lie where those of one before were."""

    class Twice(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tanh()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                loss = self.inner(x)["loss"]
                loss.backward()
            return loss

    saved = Saved()
    take(Twice(), {"x": torch.randn(4, 8)}, saved)
    assert saved.nbytes == 8 * (4 * 8 * 4 + 4 * 4 * 4)


def test_a_step_of_its_own_is_judged_by_what_it_moved() -> None:
    """Updates are compared, and undone: a second step finds the parameters of the first."""

    class Moved(OwnStep):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tanh()

        def parts(self) -> list[torch.nn.Module]:
            return [self.inner]

        def step(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.inner(x)["loss"]
            loss.backward()
            with torch.no_grad():
                self.inner.scale -= self.inner.scale.grad
            return loss

    model, inputs = Moved(), {"x": torch.randn(4, 8)}
    first, second = take(model, inputs), take(model, inputs)
    grad = first.grads["inner.scale"]
    assert grad is not None
    torch.testing.assert_close(first.updates["inner.scale"], -grad)
    assert torch.equal(first.updates["inner.scale"], second.updates["inner.scale"])
    assert torch.equal(model.inner.scale, torch.ones(8))
    off = dataclasses.replace(first, updates={"inner.scale": first.updates["inner.scale"] * 1.01})
    assert any("update of inner.scale" in text for text in worse(off, second, first))


def test_eight_bits_are_judged_by_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that rounding to 16 bits would hide is seen where plain torch.compile runs the same kernels."""
    case, plain = judge.begin(small(precision="bfloat16"), "aot_eager", "cpu")
    assert case is not None, plain
    assert judge.examine(case, "offload")["outcome"] == "ok"

    def slightly_off(*arguments: Any) -> Taken:
        right = take(*arguments)
        return dataclasses.replace(right, grads={"scale": right.grads["scale"] * 1.001})  # type: ignore[operator]

    monkeypatch.setattr(judge, "take", slightly_off)
    assert "by the same kernels" in judge.examine(case, "offload")["why"]


def test_a_broken_way_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a thousandth off, bytes that never went, copies that never came back."""
    case, plain = judge.begin(small(), "aot_eager", "cpu")
    assert case is not None, plain
    good = judge.examine(case, "offload")
    assert good["outcome"] == "ok", good
    assert not good["notes"]
    assert good["host_bytes"] == case.saved.nbytes

    def slightly_off(*arguments: Any) -> Taken:
        right = take(*arguments)
        return dataclasses.replace(right, grads={"scale": right.grads["scale"] * 1.001})  # type: ignore[operator]

    with monkeypatch.context() as patch:
        patch.setattr(judge, "take", slightly_off)
        assert judge.examine(case, "offload")["outcome"] == "wrong"
    honest = graphoffload.stats
    with monkeypatch.context() as patch:
        patch.setattr(graphoffload, "stats", lambda: {**honest(), "d2h_bytes": 0, "offloads": 0, "reloads": 0})
        found = judge.examine(case, "offload")
        assert found["outcome"] == "wrong"
        assert "no offload was executed" in found["why"]
        assert any(note.startswith("identity") for note in found["notes"])
    with monkeypatch.context() as patch:
        patch.setattr(graphoffload, "stats", lambda: {**honest(), "reloads": 0})
        assert "reloads" in judge.examine(case, "offload")["why"]


def test_what_plain_torch_cannot_do_is_not_ours() -> None:
    class Refused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            if torch.compiler.is_compiling():
                raise ValueError("not compiled")
            return {"loss": (self.weight * x).sum()}

    case, said = judge.begin(small(build=lambda: (Refused(), {"x": torch.randn(2)})), "aot_eager", "cpu")
    assert case is None
    assert said["outcome"] == "error"
    assert page.cell({"plain": said}, "plain") == "fails"
    assert page.cell({"plain": said}, "offload") == ""


def test_a_way_without_end_is_ended() -> None:
    found = runner.judged("llama", "aot_eager", "cpu", ["offload"], limit_s=0.01)
    assert found == {"plain": {"outcome": "timeout", "why": "did not end within 0 s"}}


# The page.


def test_page_is_what_the_results_say() -> None:
    """To write it anew: make net, or PYTHONPATH=tests python -m net.page."""
    assert page.PAGE.read_text() == page.page(runner.load(runner.RESULTS))


def test_what_was_not_run_is_not_ok() -> None:
    assert page.cell({}, "offload") == "not run"
    assert page.cell({"plain": {"outcome": "ok"}}, "budget") == "not run"
    kept = {"outcome": "ok", "notes": ["the plan keeps all"]}
    assert page.cell({"plain": {"outcome": "ok"}, "budget": kept}, "budget") == "keeps all"
    assert page.cell({"plain": {"outcome": "ok"}, "budget": {"outcome": "wrong"}}, "budget") == "**wrong**"
