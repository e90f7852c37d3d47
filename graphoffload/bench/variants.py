"""What can be measured, and how a name such as "offload:5.8GB" turns a workload into it.

    eager                  no compiler
    keep                   torch.compile, everything kept: the baseline's twin, so its ratio is the noise of the call
    budget:0.5             torch.compile with torch's activation_memory_budget
    checkpoint             every layer checkpointed, compiled          checkpoint-eager   the same, eager
    selective              checkpointed, but outputs of GEMMs, convolutions and attention kept; compiled
    save_on_cpu            torch.autograd.graph.save_on_cpu(pin_memory=True), eager
    torch-offload          torch's own offload pass, everything that it accepts; torch-offload-async: on its side stream
    ours-keep, recompute   graphoffload with policy="keep" or "recompute"
    offload:all            graphoffload with policy="offload"
    offload:5.8GB          the same, earliest produced first, until about that many bytes go
    auto, auto:40GiB       device_budget "auto" or absolute (run with --solo: else the baseline's memory counts as well)
    over:11.5GB            device_budget = what is allocated between steps + this; no reserve. For "peak over static at most"
    over:66%               the same, with a share of keep-all's peak; over:peak(NAME): with another variant's of the same call
    total:21.39GB          device_budget = this, of all that a process has allocated that trains this model alone; no reserve
    slowdown:0.02          max_slowdown
    ours:{"policy": ...}   any options of OffloadConfig as JSON
    per-block/NAME         keep, checkpoint, selective or any of ours, with every layer compiled on its own and the rest of the
                           model in eager; a layer's checkpoint is inside what is compiled;
                           per-block/offload:5.8GB moves the same bytes as offload:5.8GB, evenly from all layers
    tiled/NAME             any of these with MLPs that run 8192 tokens at a time (tiled.py); tiled:4096/NAME: so many
    hf-checkpoint, ...     what others ship (rivals.py), in eager; compiled/NAME and per-block/NAME compile it with plain torch
Any of ours takes further options: offload:all+max_inflight_bytes=2GiB+verify=checksum
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphoffload.api.introspect import explain
from graphoffload.bench import tiled
from graphoffload.bench.models import Workload
from graphoffload.bench.packages import NotMeasurable
from graphoffload.bench.rivals import RIVALS
from graphoffload.compiler.backend import OffloadBackend
from graphoffload.errors import ConfigError
from graphoffload.options.config import OffloadConfig
from graphoffload.runtime import stats
from graphoffload.runtime.registry import last_plans
from graphoffload.torch_internals import inductor, partitioning
from graphoffload.torch_internals.modules import set_compiled_call
from graphoffload.units import parse_size

PLAIN = ("eager", "keep", "checkpoint", "checkpoint-eager", "selective", "save_on_cpu", "torch-offload", "torch-offload-async")
OURS = ("ours-keep", "recompute", "offload", "auto", "over", "total", "slowdown", "ours")


@dataclass(frozen=True)
class Variant:
    """A parsed name: `kind` with its argument, and options of OffloadConfig given after "+".

    Attributes:
        per_block: each layer is compiled, and the rest of the model is not.
        whole: the model is compiled, which a rival is not by itself.
        tile: MLPs run so many tokens at a time; 0: all at once.
    """

    text: str
    kind: str
    argument: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    per_block: bool = False
    whole: bool = False
    tile: int = 0

    @property
    def relative_to(self) -> str:
        """The variant whose measured peak the budget refers to; "" where the budget is bytes."""
        named = re.fullmatch(r"peak\((.+)\)", self.argument)
        if self.kind != "over":
            return ""
        return named[1] if named else "keep" if self.argument.endswith("%") else ""

    def within(self, peak_bytes: int) -> Variant:
        """The variant with a budget in bytes, where the one that its budget refers to has that peak."""
        share = float(self.argument.removesuffix("%")) / 100 if self.argument.endswith("%") else 1.0
        return replace(self, argument=str(int(share * peak_bytes)))

    @property
    def ours(self) -> bool:
        """Whether graphoffload compiles it."""
        return self.kind in OURS

    @property
    def compiled(self) -> bool:
        """Whether any compiler is involved."""
        if self.kind in RIVALS:
            return self.per_block or self.whole
        return self.kind not in ("eager", "checkpoint-eager", "save_on_cpu")


def split_names(text: str) -> list[str]:
    """Names separated by commas; a comma inside braces or brackets belongs to its name."""
    names, depth, current = [], 0, ""
    for letter in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append(current)
            current = ""
        else:
            current += letter
    return [name.strip() for name in (*names, current) if name.strip()]


def parse(text: str) -> Variant:
    """The variant that a name means.

    Raises:
        ConfigError: unknown kind, or an argument that does not fit; the message lists the known kinds.
    """
    tiles = re.fullmatch(r"tiled(?::(\d+))?/(.+)", text)
    if tiles:
        return replace(parse(tiles[2]), text=text, tile=int(tiles[1] or tiled.TOKENS))
    if text.startswith("per-block/"):
        variant = parse(text.removeprefix("per-block/"))
        if not (variant.ours or variant.kind in ("keep", "checkpoint", "selective", *RIVALS)):
            raise ConfigError(f"{text!r}: only keep, checkpoint, selective and variants of graphoffload go block by block")
        return replace(variant, text=text, per_block=True)
    if text.startswith("compiled/"):
        variant = parse(text.removeprefix("compiled/"))
        if variant.kind not in RIVALS or variant.per_block:
            raise ConfigError(f"{text!r}: only what others ship is compiled so; there are: {', '.join(RIVALS)}")
        return replace(variant, text=text, whole=True)
    kind, _, argument = text.partition(":")
    options: dict[str, Any] = {}
    if kind == "ours":
        try:
            return Variant(text, kind, "", tuple(json.loads(argument or "{}").items()))
        except (ValueError, AttributeError) as error:
            raise ConfigError(f'{text!r}: {error}; give a JSON object of options, such as {{"policy": "offload"}}') from None
    first, *rest = re.split(r"\+(?![^()]*\))", text)
    kind, _, argument = first.partition(":")
    for part in rest:
        key, _, value = part.partition("=")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    if kind not in (*PLAIN, *OURS, *RIVALS, "budget"):
        raise ConfigError(f"unknown variant {text!r}; known: {', '.join((*PLAIN, 'budget:X', *OURS, *RIVALS))}")
    if kind in ("budget", "slowdown"):
        try:
            float(argument)
        except ValueError as error:
            raise ConfigError(f"{text!r}: {error}; {kind} takes a number, such as {kind}:0.05") from None
    if kind in ("offload", "over", "total") and not argument:
        raise ConfigError(f"{kind} needs a size, such as {kind}:5.8GB" + (" or offload:all" if kind == "offload" else ""))
    if options and kind not in OURS:
        raise ConfigError(f"{text!r}: only variants of graphoffload take options")
    variant = Variant(text, kind, argument, tuple(options.items()))
    if kind in ("over", "total"):
        _check_budget(variant)
    return variant


def _check_budget(variant: Variant) -> None:
    try:
        if variant.argument.endswith("%"):
            float(variant.argument.removesuffix("%"))
        elif variant.relative_to:
            parse(variant.relative_to)
        else:
            parse_size(variant.argument, field=variant.kind)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{variant.text!r}: {error}") from None


class Inductor:
    """Inductor as a backend object equal to itself alone, so that Dynamo never reuses another variant's code for it."""

    def __init__(self, **functorch: Any) -> None:
        self.functorch = functorch
        self.inductor: dict[str, Any] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with partitioning.config.patch(self.functorch):
            return inductor.compile_graph(graph, inputs, settings=self.inductor)


class _Alone(OffloadBackend):
    """Likewise, for graphoffload: two budgets may be equal, and the second one's plan would not be seen."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _tag_everything(graph: torch.fx.Graph) -> None:
    """Mark every node for torch's own offload pass; it takes what it can."""
    for node in graph.nodes:
        node.meta["should_offload"] = True


_KEPT_OPS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)  # fmt: skip


def keep_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective checkpointing's usual policy: keep what is expensive to compute again."""
    packet = getattr(op, "overloadpacket", op)
    return CheckpointPolicy.MUST_SAVE if packet in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = functools.partial(create_selective_checkpoint_contexts, keep_expensive)


class Checkpointed(nn.Module):
    """A layer under torch.utils.checkpoint, with the layer's own attributes: models ask for them (Qwen's attention_type)."""

    def __init__(self, layer: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if not name.startswith("_")})
        self.layer, self.selective = layer, selective

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.selective:
            return checkpoint(self.layer, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs)
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def wrap_blocks(workload: Workload, *, selective: bool, own_switch: bool = True) -> None:
    """Checkpoint every layer: by the model's own switch where it has one and that is wanted."""
    if workload.hugging_face and own_switch and not selective:
        model: Any = workload.module
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for path in workload.blocks:
        layers: Any = workload.module.get_submodule(path)
        for index, layer in enumerate(layers):
            layers[index] = Checkpointed(layer, selective=selective)


class Eligible:
    """Bytes that policy="offload" moves, by model and sizes: asked once a call, from a plan or from a compiled step."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def note(self, workload: Workload, nbytes: int) -> None:
        """Remember what a run of offload:all was seen to move."""
        self.known[_key(workload)] = nbytes

    def ask(self, workload: Workload, options: dict[str, Any], *, per_block: bool = False) -> int:
        """Bytes, from explain; where that fails, or block by block, from a forward that is compiled and thrown away."""
        key = _key(workload) + (" per block" if per_block else "")
        if key not in self.known:
            config = OffloadConfig(policy="offload", **options)
            if per_block:
                self.known[key] = _moved_bytes(workload, OffloadBackend(config))
                return self.known[key]
            try:
                with workload.recipe.forward_context(next(iter(workload.batch.values())).device):
                    report = explain(workload.module, config)(**workload.batch, **workload.constants)
                self.known[key] = int(report.offloaded_bytes)
            except Exception as error:
                print(f"    explain failed ({type(error).__name__}: {str(error)[:200]}); compiling a forward", flush=True)
                self.known[key] = _planned_bytes(workload, OffloadBackend(config))
        return self.known[key]


def _planned_bytes(workload: Workload, backend: Any) -> int:
    before = {plan.key for plan in last_plans()}
    workload.module.compile(backend=backend, dynamic=False)
    workload.loss()
    set_compiled_call(workload.module, None)
    return sum(plan.offloaded_bytes for plan in last_plans() if plan.key not in before)


def layers_of(workload: Workload) -> list[nn.Module]:
    """Every module that full checkpointing would wrap."""
    return [layer for path in workload.blocks for layer in workload.module.get_submodule(path).children()]


def _moved_bytes(workload: Workload, backend: Any) -> int:
    """What one forward copies to the host when each layer is compiled: one plan may serve many of them."""
    for layer in layers_of(workload):
        layer.compile(backend=backend, dynamic=False)
    before = stats()["d2h_bytes"]
    workload.loss()
    for layer in layers_of(workload):
        set_compiled_call(layer, None)
    return int(stats()["d2h_bytes"]) - int(before)


def _key(workload: Workload) -> str:
    return f"{workload.name} {sorted(workload.sizes.items())}"


def our_options(variant: Variant, workload: Workload, eligible: Eligible, own_bytes: int = 0) -> dict[str, Any]:
    """Options of OffloadConfig for a variant of ours. What exists between steps must exist already: "over" counts it.

    `own_bytes` are what a process has allocated between steps that trains the workload alone: "total" counts these.
    """
    extra = dict(variant.options)
    kind, argument = variant.kind, variant.argument
    if kind in ("ours-keep", "recompute"):
        return {"policy": kind.removeprefix("ours-"), **extra}
    if kind == "offload":
        if argument == "all":
            return {"policy": "offload", **extra}
        limits = {k: v for k, v in extra.items() if k in ("min_tensor_bytes", "offload_modules")}
        whole = eligible.ask(workload, limits, per_block=variant.per_block)
        share = parse_size(argument, field="offload") / max(whole, 1)
        return {"policy": "offload", "offload_fraction": min(share, 1.0), **extra}
    if kind == "auto":
        return {"device_budget": argument or "auto", **extra}
    if kind == "slowdown":
        return {"max_slowdown": float(argument), **extra}
    if kind in ("over", "total"):
        static = torch.cuda.memory_allocated() if torch.cuda.is_available() else _own_bytes(workload.module)
        room = parse_size(argument, field=kind) - (own_bytes if kind == "total" else 0)
        if room <= 0:
            raise ConfigError(f"{variant.text!r}: {own_bytes} bytes are allocated between steps, which leave nothing to plan.")
        return {"device_budget": static + room, "reserve": 0, **extra}
    return extra


def _own_bytes(module: nn.Module) -> int:
    """Parameters with their gradients, and buffers."""
    parameters = sum(p.numel() * p.element_size() * (2 if p.grad is not None else 1) for p in module.parameters())
    return parameters + sum(b.numel() * b.element_size() for b in module.buffers())


def apply(
    variant: Variant, workload: Workload, eligible: Eligible, own_bytes: int = 0
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Compile the workload's module in place as the variant says; returns the context that its steps run in."""
    kind, module = variant.kind, workload.module
    if variant.tile and not tiled.tile_mlps(layers_of(workload), variant.tile):
        raise NotMeasurable(f"{variant.text!r}: no layer of {workload.name} has an mlp")
    backend: Any = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if variant.ours:
        backend = _Alone(OffloadConfig(**our_options(variant, workload, eligible, own_bytes)))
    elif kind in RIVALS:
        context = RIVALS[kind](workload)
        backend = Inductor() if variant.compiled else None
    elif kind in ("checkpoint", "checkpoint-eager", "selective"):
        wrap_blocks(workload, selective=kind == "selective", own_switch=not variant.per_block)
        backend = Inductor() if variant.compiled else None
    elif kind == "budget":
        backend = Inductor(activation_memory_budget=float(variant.argument))
    elif kind.startswith("torch-offload"):
        backend = Inductor(
            enable_activation_offloading=True,
            activation_offload_separate_stream=kind.endswith("async"),
            enable_autograd_cache=False,
        )
        backend.inductor = {"joint_custom_post_pass": _tag_everything, "fx_graph_cache": False}
    elif kind == "keep":
        backend = Inductor()
    if backend is not None:
        for part in layers_of(workload) if variant.per_block else [module]:
            part.compile(backend=backend, dynamic=False)
    if kind == "save_on_cpu":
        return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
    return context
