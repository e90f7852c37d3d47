"""Predicted peaks against the allocations in the code that Inductor writes for a GPU: Triton's, written on a CPU and never run.

Forward and backward of each net are counted apart, beyond parameters and inputs. A prediction may be too high, but not too low.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from analysis import as_on_a_gpu
from analysis.as_on_a_gpu import THRESHOLDS, copied, writing_triton
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._inductor import config, ir
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import Layout
from torch.fx import GraphModule, Node

import graphoffload
from graphoffload.analysis import program as programs
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import example_storage_nbytes, fake, storage_id
from graphoffload.bench.nets import ConvNeXtBlock, EncoderBlock, LlamaBlock, ResidualConv
from graphoffload.compiler import pipeline
from graphoffload.compiler.trial import Trial
from graphoffload.compiler.written_order import in_order
from graphoffload.facts.plan import Plan
from graphoffload.hardware.profile import PROFILES
from graphoffload.planner.simulator import simulate
from graphoffload.torch_internals.inductor_layouts import rows_alone_padded

TOO_LOW, C = 0.995, 64


class Code(Exception):
    """The code for a graph is written: nothing is compiled or run."""


@dataclass(frozen=True)
class Buffer:
    """One of Inductor's buffers. nbytes: none for several results at once. part_of: the buffer of several results, or ""."""

    nbytes: int
    stride: list[int]
    part_of: str

    @classmethod
    def of(cls, buffer: Any, number: Callable[[Any], int]) -> Buffer:
        """number: the value of a size, symbolic or not."""
        if isinstance(buffer.layout, (ir.MultiOutputLayout, ir.NoneLayout)):
            return cls(0, [], "")
        layout, part_of = buffer.get_layout(), buffer.inputs[0].get_name() if isinstance(buffer, ir.MultiOutput) else ""
        stride = [number(one) for one in layout.stride]
        return cls(number(layout.storage_size()) * int(buffer.get_dtype().itemsize), stride, part_of)


def written(
    module: GraphModule,
    visible: int,
    donated: list[int] | None = None,
    laid_out: Mapping[str, list[int]] | None = None,
    unfused_bytes: int | None = None,
) -> tuple[str, dict[str, Buffer]]:
    """The code for a graph, and its buffers. visible: outputs that keep the graph's strides. donated: None for a forward.
    laid_out: the strides of inputs that have others than the graph says. unfused_bytes: the plan's."""
    graph, found = copied(module), list[tuple[str, dict[str, Buffer]]]()
    (last,) = graph.find_nodes(op="output")
    last.meta["user_visible_output_idxs"] = [at for at, node in enumerate(last.args[0][:visible]) if node is not None]
    codegen, context = GraphLowering.codegen, TracingContext(None)
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=donated or [])  # type: ignore[assignment]

    def noting(lowering: Any) -> None:
        code, number = codegen(lowering)[0].value, lowering.sizevars.optimization_hint
        found.append((code, {name: Buffer.of(buffer, number) for name, buffer in lowering.name_to_buffer.items()}))
        raise Code

    stop = mock.patch.object(GraphLowering, "codegen", noting)
    unhashed = mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="")
    with writing_triton(unfused_bytes), tracing(context), stop, unhashed:
        try:
            compile_fx_inner(
                GraphModule({}, graph),
                [_with_strides(node, (laid_out or {}).get(node.name)) for node in graph.find_nodes(op="placeholder")],
                is_backward=donated is not None,
            )
        except Exception as error:
            if not found:
                pytest.skip(f"Inductor writes no Triton here: {error}")
    return found[0]


def _with_strides(node: Node, strides: list[int] | None) -> Any:
    value = node.meta["val"]
    if strides is None:
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def returned(code: str) -> list[str]:
    """What the code for a graph returns, by name; "" for a view."""
    (line,) = re.findall(r"^        return \((.*?),? ?\)$", code[code.index("def call(") :], flags=re.MULTILINE)[:1]
    return [name.strip() for name in re.sub(r"reinterpret_tensor\(.*?\), \d+\)", "", line).split(",")]


def counted(code: str, buffers: Mapping[str, Buffer], inputs: Mapping[str, tuple[str, int]]) -> int:
    """The most bytes that are held at once. inputs: the memory of each argument that is given up, and its size."""
    names, sizes, holders = dict[str, list[str]](), dict[str, int](), Counter[str]()

    def hold(name: str, *memory: str) -> None:
        names[name] = [*memory]
        holders.update(memory)

    for name, (memory, nbytes) in inputs.items():
        sizes[memory] = nbytes
        hold(name, memory)
    parts = {name: one.part_of for name, one in buffers.items() if one.part_of}
    peak = sum(sizes.values())
    body = code[code.index("def call(") :]
    for line in body[: body.index("        return (")].splitlines():
        for part in line.split("#")[0].strip().split("; "):
            if part.startswith("del "):
                holders.subtract(names.pop(part.removeprefix("del "), ()))
            elif (made := re.match(r"(buf\d+) = (?:reinterpret_tensor\()?(.*)", part)) is not None:
                name, source = made[1], re.match(r"\w+", made[2])
                results = [one for one, whole in parts.items() if whole == name]
                if source is not None and source[0] in names and name not in parts:
                    hold(name, *names[source[0]])
                else:
                    sizes |= {one: buffers[one].nbytes for one in results or [name]}
                    hold(name, *(results or [name]))
                peak = max(peak, sum(sizes[memory] for memory, number in holders.items() if number))
    return peak


class Planned(Exception):
    """The plan is made: nothing is compiled or run."""


def compared(net: nn.Module, *inputs: Tensor, dynamic: bool = False, **goal: Any) -> list[tuple[int, int]]:
    """(predicted, written) peak of the forward and of the backward, both without the workspaces of kernels.

    dynamic: the graph is for any size, planned for that of the inputs. goal: options of the plan; without any, all is kept.
    """
    found: list[Trial] = []

    def noting(*args: Any) -> Trial:
        found.append(chosen(*args))
        raise Planned

    chosen, options = pipeline.trial_of, {"hardware": "h100-sxm", "min_tensor_bytes": 0, **(goal or {"policy": "keep"})}
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="graphoffload", dynamic=dynamic, options=options)
    with mock.patch.object(pipeline, "trial_of", noting), config.patch(THRESHOLDS), pytest.raises(Exception, match="Planned"):
        compiled(*inputs)
    apart = found[-1].analysis.unfused_bytes
    pair, table, program = found[-1].analysis.pair, found[-1].analysis.table, found[-1].instance.program
    bare = [tuple(replace(step, workspace_bytes=0) for step in steps) for steps in (program.forward, program.backward)]
    program = replace(program, forward=bare[0], backward=bare[1], static_bytes=0, reserve_bytes=0)
    memory = simulate(program, [found[-1].actions[tensor.name] for tensor in table.tensors], PROFILES["h100-sxm"]).memory
    places, outputs = pair.backward.graph.find_nodes(op="placeholder"), graph_outputs(pair.forward)
    static = {
        storage_id(value) for node in pair.forward.graph.find_nodes(op="placeholder") if (value := fake(node)) is not None
    }
    held = {str(node): value for node in outputs if node is not None and (value := fake(node)) is not None}
    known = [node for node in outputs[pair.num_fwd_outputs :] if str(node) in held]
    kept = {storage_id(held[str(node)]) for node in known}
    given: dict[str, tuple[str, int]] = {}
    laid_out: dict[str, list[int]] = {}
    code, buffers = written(pair.forward, pair.num_fwd_outputs, unfused_bytes=apart)
    for at, (node, name) in enumerate(zip(outputs, returned(code), strict=True)):
        if node is None or str(node) not in held:
            continue
        value, buffer = held[str(node)], buffers.get(name)
        if at >= pair.num_fwd_outputs and buffer is not None:
            laid_out[node.name] = buffer.stride
            if storage_id(value) in static:  # saved is a copy of an input
                given[node.name] = (f"copy of {node.name}", buffer.nbytes)
        if storage_id(value) in static:
            continue
        if at >= pair.num_fwd_outputs or storage_id(value) not in kept:  # what is only returned lives until the end
            name = node.name if at >= pair.num_fwd_outputs else f"the caller's {node.name}"
            given[name] = (str(storage_id(value)), example_storage_nbytes(value))
    for node in places:
        if node.name.startswith("tangents") and (value := fake(node)) is not None:
            given[f"autograd's {node.name}"] = (node.name, example_storage_nbytes(value))
    donated = programs._donated(pair, table, {node.name: node for node in places})
    forward = counted(code, buffers, {})
    at_hand = [at for at, node in enumerate(places) if node in donated]
    backward = counted(*written(pair.backward, 1 << 30, at_hand, laid_out, apart), given)
    return [(max(memory[: len(bare[0])]), forward), (max(memory[len(bare[0]) :]), backward)]


class Residual(nn.Module):
    """Two convolutions with batch norm and ReLU, and a shortcut: a basic block of a ResNet."""

    def __init__(self, width: int = C) -> None:
        super().__init__()
        one, other = (nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)) for _ in range(2))
        self.body = nn.Sequential(one, nn.ReLU(), other)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + x).relu()


class Inverted(nn.Module):
    """An inverted bottleneck with squeeze-and-excite and SiLU: a block of an EfficientNet."""

    def __init__(self) -> None:
        super().__init__()
        wide, depthwise, narrow = (
            nn.Conv2d(C, 4 * C, 1),
            nn.Conv2d(4 * C, 4 * C, 3, padding=1, groups=4 * C),
            nn.Conv2d(4 * C, C, 1),
        )
        self.wide = nn.Sequential(wide, nn.BatchNorm2d(4 * C), nn.SiLU(), depthwise, nn.BatchNorm2d(4 * C), nn.SiLU())
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(4 * C, C, 1), nn.SiLU(), nn.Conv2d(C, 4 * C, 1), nn.Sigmoid()
        )
        self.narrow = nn.Sequential(narrow, nn.BatchNorm2d(C))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        result: Tensor = x + self.narrow(wide * self.squeeze(wide))
        return result


class Two(nn.Module):
    """Two convolutions of one tensor. Their backwards' sum is returned, and written over the first one's result."""

    def __init__(self, width: int = C) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.one(x) + self.other(x)
        return result


class Scaled(nn.Module):
    """A long chain after a sum with a factor, which is two operations; and comparisons, whose numbers are of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, C)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        relu = (self.norm(nn.functional.hardswish(x)) + y).relu()
        long = torch.add(relu, x, alpha=0.5)
        for _ in range(4):
            long = (long * relu).sin() + long * 0.3
        return long * long.sigmoid()


def images(channels: int = C) -> Tensor:
    return torch.empty(4, channels, 64, 64).to(memory_format=torch.channels_last).requires_grad_()


def tokens() -> Tensor:
    return torch.empty(2, 1024, 128, requires_grad=True)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "U-Net": (lambda: ResidualConv(2 * C, C), lambda: (images(2 * C),)),
    "ResNet": (Residual, lambda: (images(),)),
    "EfficientNet": (Inverted, lambda: (images(),)),
    "ConvNeXt": (lambda: ConvNeXtBlock(C), lambda: (images(),)),
    "two": (Two, lambda: (images(),)),
    "scaled": (Scaled, lambda: (images(), images())),
    "encoder": (lambda: EncoderBlock(128, 4), lambda: (tokens(),)),
    "Llama": (lambda: LlamaBlock(128, 344, 4, 4), lambda: (tokens(), torch.empty(1024, 32), torch.empty(1024, 32))),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One of the nets, and its inputs."""
    dtype = torch.float32 if name == "scaled" else torch.bfloat16
    net, inputs = NETS[name][0]().to(dtype), NETS[name][1]()
    if any(isinstance(part, nn.Conv2d) for part in net.modules()):
        net = net.to(memory_format=torch.channels_last)
    return net, tuple(value.detach().to(dtype).requires_grad_(value.requires_grad) for value in inputs)


@pytest.mark.parametrize("name", NETS)
def test_no_peak_is_predicted_too_low(name: str) -> None:
    net, inputs = made(name)
    for predicted, taken in compared(net, *inputs):
        assert taken > 0
        assert predicted >= TOO_LOW * taken, (predicted, taken)


class Biased(nn.Module):
    """Attention with a bias for each distance, and an MLP with ReLU and dropout: a layer of T5."""

    def __init__(self, heads: int = 4, length: int = 256) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.RMSNorm(C) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.empty(heads, length, length))
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C, bias=False), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * C, C, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norms[0](x)
        q, k, v = (one(normed).view(batch, length, self.heads, -1).transpose(1, 2) for one in self.projections[:3])
        scores = q @ k.transpose(-1, -2) + self.bias[:, :length, :length]
        shares = nn.functional.dropout(scores.float().softmax(-1).to(x.dtype), 0.1)
        x = x + self.projections[3]((shares @ v).transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


@pytest.mark.parametrize("dynamic", [False, True], ids=["one size", "any size"])
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_peaks_of_layers_with_dropout(share: float, dynamic: bool) -> None:
    """Their masks are computed where their operands are; and each size of a graph for any size is known by its text."""
    net = nn.Sequential(Biased(), Biased(), Biased()).to(torch.bfloat16)
    inputs = torch.empty(8, 256, C, dtype=torch.bfloat16, requires_grad=True)
    goal = {}
    if share < 1:
        keep = graphoffload.explain(net, policy="keep", hardware="h100-sxm")(inputs).keep_peak_bytes
        goal = {"device_budget": int(share * keep), "reserve": 0, "host_budget": 0}
    (predicted, taken), (backward, taken_backward) = compared(net, inputs, dynamic=dynamic, **goal)
    assert TOO_LOW * taken <= predicted <= taken / TOO_LOW
    assert TOO_LOW * taken_backward <= backward <= 1.05 * taken_backward, (
        "a saved product that a kernel of three reads is written over"
    )


def test_random_numbers_that_are_drawn_before_a_loop_ends_are_in_memory() -> None:
    """The softmax of 2048 scores is a loop, and the dropout behind it, whose mask is not saved, another one: numbers of float32
    are stored between the two."""
    net, x = Biased(length=2048).to(torch.bfloat16), torch.empty(2, 2048, C, dtype=torch.bfloat16, requires_grad=True)
    forward, backward = compared(net, x, policy="recompute")
    assert forward[1] > 2 * 4 * 2048 * 2048 * (4 + 2), "numbers, and scores that shares are written over, of four heads"
    for predicted, taken in (forward, backward):
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW, (predicted, taken)


def test_short_rows_have_no_gaps_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 49 tokens: Inductor would have each 49 x 49 of their attention begin at a multiple of 128 bytes."""
    net = Biased(length=49).to(torch.bfloat16)
    x = torch.empty(256, 49, C, dtype=torch.bfloat16, requires_grad=True)
    found = compared(net, x)
    for predicted, taken in found:
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW, (predicted, taken)
    monkeypatch.setattr(as_on_a_gpu, "rows_alone_padded", contextlib.nullcontext)
    assert compared(net, x)[0][1] > found[0][1]


def test_long_rows_are_padded() -> None:
    """As on any GPU: products are faster."""
    pad = Layout._pad_strides
    with rows_alone_padded():
        assert Layout._pad_strides([1445, 85, 1], [2, 17, 85], torch.float32) == [1445, 85, 1]
        assert Layout._pad_strides([2401, 1, 49], [8, 49, 49], torch.bfloat16) == [2401, 1, 49]
        for strides, size in (([1100, 1], [34, 1100]), ([4400, 1100, 1], [2, 4, 1100]), ([1, 1100], [1100, 3])):
            padded = Layout._pad_strides(strides, size, torch.bfloat16)
            assert padded == pad(strides, size, torch.bfloat16)
            assert padded != strides


class Masked(nn.Module):
    """Scores with one mask for all heads, a softmax, and dropout."""

    def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.dropout(scores.sin().masked_fill(mask, -1e4).softmax(-1), 0.1) * 2


@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_of_several_heads_keeps_rows_out_of_registers(heads: int) -> None:
    """What is read is not contiguous, and so a row of 512 is a loop, and the random numbers are stored."""
    scores, mask = torch.empty(2, heads, 512, 512, requires_grad=True), torch.zeros(2, 1, 512, 512, dtype=torch.bool)
    (predicted, taken), _ = compared(Masked(), scores, mask, policy="recompute")
    numbers = scores.nbytes if heads > 1 else 0
    assert taken < scores.nbytes + numbers + 2**20
    assert TOO_LOW * taken <= predicted <= taken / TOO_LOW, (predicted, taken)


class Capped(nn.Module):
    """A language model's head whose scores are capped, and returned beside the loss, as Gemma 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(C, 32 * C, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = 30 * (self.head(x) / 30).tanh()
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten()), scores


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_result_is_written_over_the_first_operand_that_may_go(policy: str) -> None:
    """That of the cap's backward over a sum in the same kernel, and so not over a saved product that it reads after it. And
    over a product that is computed again, which sums of the same kernel read before."""
    x, labels = torch.empty(4, 512, C, dtype=torch.bfloat16, requires_grad=True), torch.zeros(4, 512, dtype=torch.int64)
    for predicted, taken in compared(Capped().to(torch.bfloat16), x, labels, policy=policy):
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW, (predicted, taken)


@pytest.mark.parametrize("name", [name for name in NETS if name != "U-Net"])  # its group norm of any size stores one value more
def test_peaks_of_a_graph_for_any_size(name: str) -> None:
    net, inputs = made(name)
    for predicted, taken in compared(net, *inputs, dynamic=True):
        assert predicted >= TOO_LOW * taken, (predicted, taken)


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("net", [Two, Residual], ids=["two", "ResNet"])
def test_copies_of_contiguous_images_are_counted(net: Callable[[int], nn.Module], weights: torch.memory_format) -> None:
    """With so many channels Inductor runs convolutions on channels_last memory, whatever comes and is returned."""
    image = torch.empty(4, 2 * C, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    for predicted, taken in compared(net(2 * C).to(torch.bfloat16).to(memory_format=weights), image):
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW


class MixedPrecision(nn.Module):
    """A net under autocast: gradients of its weights are cast to float32, and returned."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = self.net(x)
        return result


class Funnel(nn.Module):
    """Large activations, then large weights: their gradients are there when backward comes to the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
        self.head = nn.Sequential(nn.Linear(C, 16 * C), nn.GELU(), nn.Linear(16 * C, 16 * C))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean(1))
        return result


def test_gradients_are_cast_where_they_arise() -> None:
    """To float32, and not all at the end of backward: they take twice the memory from there on."""
    for predicted, taken in compared(MixedPrecision(Funnel()), torch.empty(4, 1024, C)):
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW


def test_a_value_of_many_reads_is_not_written_for_its_own_kernel() -> None:
    """A batch norm's gradient reads nine tensors, in float32, and its only reader casts it."""
    image = torch.empty(4, 2 * C, 32, 32).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    net = nn.Sequential(Residual(2 * C), Two(2 * C)).to(torch.bfloat16).to(memory_format=torch.channels_last)
    for predicted, taken in compared(net, image):
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW


class Layers(nn.Module):
    """Residual layers. The gradient of a sum is stored when backward comes to its addition to a product. GELU's backward comes
    before and computes it too, so that it is not written over what the loss saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * C, 4 * C) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x.square().mean()


def test_a_value_that_is_stored_late_is_written_over_nothing() -> None:
    for predicted, taken in compared(Layers(), torch.empty(1024, 4 * C)):
        assert TOO_LOW * taken <= predicted <= taken / TOO_LOW


class Joined(nn.Module):
    """Sums of two products, concatenated: they are written into the result, one after the other."""

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.up, self.saved = nn.Linear(2 * C, 16 * C, bias=False), saved
        self.one, self.other = (nn.Linear(16 * C, 2 * C, bias=False) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for part in x.split(512):
            wide = self.up(part)
            parts.append(self.one(wide) + self.other(wide))
        whole = torch.cat(parts)
        return whole.sin().sum(0) if self.saved else whole * 2


@pytest.mark.parametrize("saved", [False, True])
def test_operands_of_a_concatenation_are_in_memory(saved: bool) -> None:
    """As parts of it, or by themselves where backward reads it."""
    (predicted, taken), _ = compared(Joined(saved=saved), torch.empty(4096, 2 * C, requires_grad=True))
    assert TOO_LOW * taken <= predicted <= taken / TOO_LOW


def test_running_statistics_take_no_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written at the end of the graph, far from the kernel that has the mean and the variance."""
    kernels, write = list[list[str]](), written

    def noting(*args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        code, buffers = write(*args, **kwargs)
        kernels.append(re.findall(r"^ +(triton_\w+)\.run\(", code, flags=re.MULTILINE))
        return code, buffers

    monkeypatch.setitem(compared.__globals__, "written", noting)
    compared(nn.Sequential(*(Residual() for _ in range(4))), torch.empty(4, C, 16, 16))
    named = Counter(re.sub(r"_\d+$", "", name) for name in kernels[0])
    assert named["triton_poi_fused_add_copy_"] == 8, "of the batches' count"
    assert named["triton_poi_fused__native_batch_norm_legit_functional_copy_"] == 0, named


def kernels_under(policy: str, name: str) -> tuple[int, ...]:
    """How many kernels Inductor writes for the forward and for the backward of a net under a plan, products not counted."""
    found, (net, inputs) = list[tuple[GraphPair, Plan]](), made(name)

    def noting(pair: GraphPair, plan: Plan) -> GraphPair:
        found.append((inserted(pair, plan), plan))
        raise Planned

    inserted = pipeline.insert_reloads
    torch._dynamo.reset()
    options = {"hardware": "h100-sxm", "min_tensor_bytes": 0, "policy": policy}
    with (
        mock.patch.object(pipeline, "insert_reloads", noting),
        config.patch(THRESHOLDS),
        pytest.raises(Exception, match="Planned"),
    ):
        torch.compile(net, backend="graphoffload", options=options)(*inputs)
    (pair, plan) = found[0]
    assert bool(plan.transfers) == (policy == "offload")
    with in_order():
        codes = written(pair.forward, pair.num_fwd_outputs)[0], written(pair.backward, 1 << 30, [])[0]
    return tuple(len(re.findall(r"^ +triton_\w+\.run\(", code, flags=re.MULTILINE)) for code in codes)


QUICK = ["Llama", "ResNet", "EfficientNet"]
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in NETS if name not in (*QUICK, "two")]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_offloading_takes_no_kernel(name: str) -> None:
    """What is offloaded is computed with what reads it, as if it were kept."""
    assert kernels_under("offload", name) == kernels_under("keep", name)
