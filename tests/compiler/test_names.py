"""Names of modules are those of named_modules(), from whichever frame a graph starts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import graphoffload
from graphoffload.errors import PatternError, PatternWarning
from graphoffload.options.patterns import clean_path, matches, placed, resolve, root_of
from graphoffload.testing import observe

OPTIONS: dict[str, Any] = {"inner": "aot_eager", "min_tensor_bytes": 0}
Run = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """One activation in each of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).tanh()


class Inner(nn.Module):
    """Two blocks: the one module of its class in what holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Skipping(nn.Module):
    """Its forward breaks before it calls the body, which Dynamo compiles by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Inner(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_eagerly(self.body, x)).tanh()


class SkippingBlocks(nn.Module):
    """Each block is compiled by itself, by one code."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Inner()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body.blocks:
            x = _eagerly(block, x)
        return x


def _eagerly(module: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    out: Tensor = module(x)
    return out


class Wrapper(nn.Module):
    """Goes to what it wraps past its own attributes, as peft's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.__dict__["_modules"]["base_model"](x)
        return out


def planned(model: nn.Module, run: Run | None = None, **options: Any) -> tuple[set[str], int]:
    """Modules in the plans of one step, and tensors that it offloaded; a PatternWarning by the second step is an error."""
    torch._dynamo.reset()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    if run is None:
        run = model
        model.compile(backend="graphoffload", options={**OPTIONS, **options})
    with observe() as seen, warnings.catch_warnings():
        warnings.simplefilter("error", PatternWarning)
        run(torch.randn(4, 8, requires_grad=True)).sum().backward()
        for _ in range(2):
            optimizer.step()
    tensors = [tensor for plan in seen.plans for tensor in plan.saved.tensors]
    return {path for tensor in tensors for path in (tensor.module, *tensor.saved_by) if path}, seen.counters["offloads"]


def only(pattern: str) -> dict[str, Any]:
    """What is needed in those modules is offloaded."""
    return {"policy": {pattern: "offload", "*": "keep"}}


@pytest.mark.parametrize("build", [Inner, lambda: Wrapper(Inner()), Skipping], ids=["plain", "wrapped", "skipped frame"])
def test_a_plan_names_modules_as_the_model_does(build: Callable[[], nn.Module]) -> None:
    """And none otherwise."""
    model = build()
    names, _ = planned(model, policy="offload")
    assert names <= {name for name, _ in model.named_modules()}
    assert any(name.endswith("blocks.1.down") for name in names)


@pytest.mark.parametrize("build", [lambda: Wrapper(Inner()), Skipping], ids=["wrapped", "skipped frame"])
@pytest.mark.parametrize("around", ["", "_orig_mod."])
def test_a_name_from_named_modules_is_a_pattern(build: Callable[[], nn.Module], around: str) -> None:
    """With and without what torch.compile puts around the model: what that one module needs goes, its input."""
    model = build()
    (name,) = (name for name, _ in model.named_modules() if name.endswith("blocks.1.down"))
    assert planned(model, **only(around + name))[1] == 1


def test_a_name_from_the_frame_is_a_pattern() -> None:
    """As it was where the compiled frame's module is known by itself."""
    assert planned(Skipping(), **only("blocks.1.down"))[1] == 1
    assert planned(Skipping(), **only("body.blocks.1.down"))[1] == 1


def test_one_code_for_several_modules_has_a_name_for_all() -> None:
    """Dynamo compiles the first block and runs the second by that: the name of one alone would be wrong."""
    names, offloads = planned(SkippingBlocks(), **only("body.blocks.*.down"))
    assert names == {"body.blocks.*", "body.blocks.*.down"}
    assert offloads == 2
    assert planned(SkippingBlocks(), **only("down"))[1] == 2


class Trainer:
    """Holds a model, and has a step that is compiled."""

    def __init__(self) -> None:
        self.model = Inner()

    def step(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


@pytest.mark.parametrize("name", ["model.blocks.1.down", "blocks.1.down"])
def test_a_step_that_calls_a_model(name: str) -> None:
    """From the trainer, as before, and from the model."""
    trainer = Trainer()
    backend = graphoffload.OffloadBackend(**OPTIONS, **only(name))
    assert planned(trainer.model, torch.compile(trainer.step, backend=backend))[1] == 1


def test_a_partitioner_inside_inductor_knows_names_as_well() -> None:
    """Without our backend, from the joint graph."""
    model = Wrapper(Inner())
    config = graphoffload.OffloadConfig(min_tensor_bytes=0, **only("base_model.blocks.1.down"))
    options = {"custom_partitioner_fn": graphoffload.OffloadPartitioner(config), "reorder_for_peak_memory": False}
    assert planned(model, torch.compile(model, options=options))[1] == 1


def test_explain_names_modules_alike() -> None:
    """Before anything is compiled."""
    (plan,) = graphoffload.explain(Wrapper(Inner()), **OPTIONS, **only("base_model.blocks.1.down"))(torch.randn(4, 8)).plans
    assert [tensor.saved_by for tensor in plan.saved.tensors if plan.action(tensor.name) == "offload"] == [
        ("base_model", "base_model.blocks.1", "base_model.blocks.1.down")
    ]


class Hooked(Inner):
    """What a hook computes is a frame of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(_double)


def _double(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out.sin()


@pytest.mark.parametrize("build", [Skipping, Hooked, lambda: nn.Sequential(Inner(), Block())])
def test_a_frame_inside_the_model_is_a_part_of_it(build: Callable[[], nn.Module]) -> None:
    """A pattern that matches in another frame is no error, and none is warned of before the last step."""
    assert planned(build(), **only("*blocks.*"))[1] > 0


def test_each_pattern_is_named_with_its_own_near_misses() -> None:
    """In the warning for a model in parts, from the modules of all of them, and in the error for a whole graph."""
    wrong = {"*.hed": "offload", "*.blcks": "offload", "*": "keep"}
    model = Skipping()
    torch._dynamo.reset()
    model.compile(backend="graphoffload", options={**OPTIONS, "policy": wrong})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    texts = [str(seen.message) for seen in caught if seen.category is PatternWarning]
    near = {"'*.hed'": "Near: 'head'", "'*.blcks'": "Near: '*.blocks'"}
    assert len(texts) == 2, texts
    for pattern, text in zip(near, sorted(texts, reverse=True), strict=True):
        assert pattern in text
        assert near[pattern] in text
        assert not any(other in text for other in near if other != pattern)
    error = str(resolve(wrong, ["head", "body.blocks.0.down"]).error())
    assert "'*.hed' matches no module" in error
    assert "'*.blcks' matches none either. Near: '*.blocks'." in error


def test_a_whole_graph_is_still_an_error() -> None:
    """No frame was skipped: a pattern that matches nothing stops the first forward."""
    with pytest.raises(BackendCompilerFailed) as caught:
        planned(Wrapper(Inner()), **only("base_model.blocks.7"))
    assert isinstance(caught.value.inner_exception, PatternError)
    assert "base_model.blocks.0" in str(caught.value)
    assert "__dict__" not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [("a.b", "c.0", "a.b.c.0"), ("a.b", "", "a.b"), ("", "c", "c"), ("", "", ""), ("a.*", "_orig_mod.c", "a.*.c")],
)
def test_a_path_keeps_where_its_frame_starts(root: str, path: str, expected: str) -> None:
    """Both are told from the text that stays on the node."""
    assert clean_path(placed(root, path)) == expected
    assert root_of(placed(root, path)) == root
    assert clean_path(expected) == expected
    assert matches(path, clean_path(placed(root, path)), [root] if root else []) or not path


def llama(layers: int = 2) -> nn.Module:
    """A peft model with adapters."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=layers, use_cache=False, **sizes)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    return model


def loss_of(model: nn.Module) -> Tensor:
    """One forward."""
    ids = torch.arange(32).view(2, 16)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def test_a_peft_models_names() -> None:
    """Those of its named_modules(), as a table has them, and as patterns."""
    model = llama()
    names = {name for name, _ in model.named_modules()}
    seen, offloads = _peft_step(model, policy="offload")
    assert "base_model.model.model.layers.0.mlp" in seen
    assert seen <= names
    _, some = _peft_step(llama(), **only("base_model.model.model.layers.0.mlp"))
    assert 0 < some < offloads


def _peft_step(model: nn.Module, **options: Any) -> tuple[set[str], int]:
    model.compile(backend="graphoffload", options={**OPTIONS, **options})
    return planned(model, lambda _: loss_of(model))


@pytest.mark.parametrize("wrap", [pytest.param(False, marks=pytest.mark.long), True], ids=["alone", "as accelerate wraps it"])
def test_a_peft_model_with_checkpointing_trains(wrap: bool) -> None:
    """Its hooks make Dynamo skip the outer frames: graphs start further in, and none is the whole."""
    model = llama(layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    policy = {"*.self_attn*": "offload", "*.mlp*": "offload", "base_model.model.lm_head": "keep"}
    if wrap:
        forward = model.forward

        @functools.wraps(forward)
        def wrapped(**kwargs: Any) -> Any:
            return forward(**kwargs)

        model.forward = wrapped
    model.compile(backend="graphoffload", options={**OPTIONS, "policy": policy})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with observe() as seen, warnings.catch_warnings():
        warnings.simplefilter("error", PatternWarning)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
    assert seen.counters["offloads"] > 0
    paths = {path for plan in seen.plans for tensor in plan.saved.tensors for path in tensor.saved_by}
    assert paths <= {name for name, _ in model.named_modules()}
