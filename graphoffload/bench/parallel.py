"""A Llama spread over the ranks of a group, in the ways in which people train one: what `bench ranks` measures.

    fsdp2       each block and the model sharded (fully_shard): float32 shards, bfloat16 compute, other data on each rank
    ddp         blocks compiled one by one, then DistributedDataParallel; each block stays one graph (optimize_ddp=False)
    ddp_whole   the model compiled as a whole under DistributedDataParallel, which torch splits by gradient buckets
    tp          tensor parallel: columns and rows of the weights are split, the same data on each rank
    tp_fsdp2    two ranks divide each block as in tp, and those with the same half shard it as in fsdp2
    cp          context parallel: each rank has a part of every sequence, attention passes keys and values around; fully_shard
    pp          a pipeline: each rank has a part of the blocks, microbatches of one sequence by 1F1B
    pp_fsdp2    a pipeline of two stages; ranks of one stage shard it as in fsdp2, with other data on each
    alone       each rank trains a model of its own: what DistributedDataParallel is compared with
    accelerate  its FSDP2 plugin and regional compilation, a Llama of Transformers, graphoffload by its switch; checkpointed
                is activation_checkpointing=True of the plugin
    accelerate_offload    the same, and checkpointed means that the inputs of blocks are offloaded by accelerate as well

Blocks are compiled one by one unless the way says otherwise; embedding, head and loss are eager. A learning rate of 0 leaves
the weights as they are, to the bit, so that each step's gradients can be compared with keep-all's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from graphoffload.bench.models import Sizes, transformers_llama
from graphoffload.bench.nets import LlamaStack, RMSNorm
from graphoffload.bench.variants import Checkpointed
from graphoffload.integrations.switch import install, uninstall
from graphoffload.torch_internals import dynamo

LOW = torch.bfloat16


@dataclass(frozen=True)
class Compiling:
    """How the blocks of a model are compiled, and whether each of them is checkpointed; options: ours, None for plain torch."""

    backend: Any
    checkpointed: bool = False
    options: Mapping[str, Any] | None = None

    def blocks(self, layers: nn.ModuleList, *, around: bool = False) -> None:
        """One by one, in place; checkpointed inside what is compiled, or `around` it, where parameters are DTensors."""
        for index, layer in enumerate(layers):
            if around:
                layer.compile(backend=self.backend, dynamic=False)
            if self.checkpointed:
                layers[index] = Checkpointed(layer, selective=False)
            if not around:
                layers[index].compile(backend=self.backend, dynamic=False)

    def whole(self, model: Llama) -> None:
        """As one graph, or as many as torch makes of it, in place."""
        for index, layer in enumerate(model.layers if self.checkpointed else ()):
            model.layers[index] = Checkpointed(layer, selective=False)
        model.compile(backend=self.backend, dynamic=False)


@dataclass
class Share:
    """What one rank trains.

    Attributes:
        modules: whose parameters it has. run: forward and backward of a step; the loss, None where another rank has it.
        context: what steps run in.
    """

    modules: list[nn.Module]
    run: Callable[[], Tensor | None]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = field(default=contextlib.nullcontext)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all modules."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    def clear_gradients(self) -> None:
        """None of them is allocated any more."""
        for module in self.modules:
            module.zero_grad()


class Llama(LlamaStack):
    """The stack as a trainer calls it: labels come from outside, already shifted, so that a sequence may be split."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            labels = torch.roll(ids, -1, 1)
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss_of(self.head(self.norm(x)), labels)


class Stage(nn.Module):
    """A part of the blocks, with the embedding before the first one and the head after the last."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes, device: torch.device, number: int, count: int, dtype: torch.dtype = LOW) -> None:
        super().__init__()
        whole = llama({**sizes, "layers": sizes["layers"] // count}, device, dtype)
        self.embed = whole.embed if number == 0 else None
        self.layers = whole.layers
        self.norm: RMSNorm | None = whole.norm if number == count - 1 else None
        self.head: nn.Linear | None = whole.head if number == count - 1 else None
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def fsdp2(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Float32 shards, gathered as bfloat16 for each block and again in its backward."""
    model = llama(sizes, device, torch.float32)
    compiling.blocks(model.layers)
    _shard(model)
    ids = _ids(sizes, device, dist.get_rank())
    return Share([model], lambda: _backward(model(ids)))


def _shard(model: Llama | Stage, **options: Any) -> None:
    """Each block, then what is left: float32 shards of what is computed in bfloat16. options: of fully_shard."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.cos, model.sin = model.cos.to(LOW), model.sin.to(LOW)
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)


def ddp(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Blocks that stay whole; their gradients are reduced while earlier blocks run backward."""
    model = llama(sizes, device)
    compiling.blocks(model.layers)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ids = _ids(sizes, device, dist.get_rank())
    return Share([model], lambda: _backward(wrapped(ids)), dynamo.whole_under_ddp)


def ddp_whole(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """One model that torch splits by gradient buckets."""
    model = llama(sizes, device)
    compiling.whole(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ids = _ids(sizes, device, dist.get_rank())
    return Share([model], lambda: _backward(wrapped(ids)))


def alone(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """No collective at all."""
    model = llama(sizes, device)
    compiling.blocks(model.layers)
    ids = _ids(sizes, device, dist.get_rank())
    return Share([model], lambda: _backward(model(ids)))


def tp(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Heads and the hidden width of every block are divided among the ranks, the head by words."""
    model = llama(sizes, device)
    _divide(model, init_device_mesh(device.type, (dist.get_world_size(),)))
    compiling.blocks(model.layers, around=True)
    ids = _ids(sizes, device)
    return Share([model], lambda: _backward(model(ids)))


def tp_fsdp2(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Two ranks divide a block, and each shards its half with those that have the same one; other data on each pair."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = llama(sizes, device, torch.float32)
    _divide(model, mesh["tensor"])
    compiling.blocks(model.layers, around=True)
    _shard(model, mesh=mesh["data"])
    ids = _ids(sizes, device, mesh.get_local_rank("data"))
    return Share([model], lambda: _backward(model(ids)))


def _divide(model: Llama, mesh: DeviceMesh) -> None:
    """Weights become DTensors, split by columns and by rows."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
        attention: Any = layer.self_attn
        attention.heads //= mesh.size()
        attention.kv_heads //= mesh.size()
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def cp(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Sequences are divided, in pieces that are the same work for causal attention; parameters are sharded."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = llama(sizes, device)
    compiling.blocks(model.layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = _ids(sizes, device)

    def run() -> Tensor:
        ids, labels = given.clone(), torch.roll(given, -1, 1)
        buffers = [ids, labels, model.cos, model.sin]
        split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0], no_restore_buffers={ids, labels})
        with split, sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return _backward(model(ids, labels))

    return Share([model], run)


def pp(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """As many microbatches as there are sequences; each rank's blocks are one stage."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    stage = Stage(sizes, device, mesh.get_local_rank(), mesh.size())
    compiling.blocks(stage.layers)
    return _pipeline(stage, mesh, _ids(sizes, device))


def pp_fsdp2(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Two stages; ranks of a stage shard it, and keep what they have gathered for a forward until its backward."""
    mesh = init_device_mesh(device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "data"))
    stage = Stage(sizes, device, mesh.get_local_rank("stage"), 2, torch.float32)
    compiling.blocks(stage.layers)
    _shard(stage, mesh=mesh["data"], reshard_after_forward=False)
    return _pipeline(stage, mesh["stage"], _ids(sizes, device, mesh.get_local_rank("data")))


def _pipeline(stage: Stage, mesh: DeviceMesh, ids: Tensor) -> Share:
    """Stages on the ranks of a mesh; each sequence of `ids` is a microbatch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    number, count = mesh.get_local_rank(), mesh.size()
    part = PipelineStage(stage, number, count, ids.device, group=mesh.get_group())
    schedule = Schedule1F1B(part, len(ids), loss_fn=loss_of)
    labels = torch.roll(ids, -1, 1)

    def run() -> Tensor | None:
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": labels, "losses": losses} if number == count - 1 else {}
        schedule.step(*([ids] if number == 0 else []), **last)
        return torch.stack(losses).mean().detach() if losses else None

    return Share([stage], run)


def accelerate(sizes: Sizes, device: torch.device, compiling: Compiling, *, offload: bool = False) -> Share:
    """Blocks compiled and sharded by accelerate, graphoffload turned on by install()."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if compiling.options is not None:
        install(**compiling.options)
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=compiling.checkpointed, activation_checkpointing_offload=compiling.checkpointed and offload,
    )  # fmt: skip
    regional = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True, dynamic=False)
    trainer: Any = Accelerator(
        mixed_precision="bf16", cpu=device.type == "cpu", fsdp_plugin=sharding, dynamo_plugin=regional
    )
    torch.manual_seed(0)
    with device:
        made = transformers_llama(sizes)
    model, _ = trainer.prepare(made, torch.optim.SGD(made.parameters()))  # it asks for an optimizer; the bench has its own
    ids = _ids(sizes, device, dist.get_rank())

    def run() -> Tensor:
        with trainer.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        trainer.backward(loss)
        return loss.detach()  # type: ignore[no-any-return]

    return Share([model], run, _uninstalled)


def accelerate_offload(sizes: Sizes, device: torch.device, compiling: Compiling) -> Share:
    """Blocks compiled and sharded by accelerate, which offloads the inputs of checkpointed blocks."""
    return accelerate(sizes, device, compiling, offload=True)


@contextlib.contextmanager
def _uninstalled() -> Iterator[None]:
    """graphoffload is on for what is compiled until this ends, and no longer."""
    try:
        yield
    finally:
        uninstall()


WAYS: dict[str, Callable[[Sizes, torch.device, Compiling], Share]] = {
    way.__name__: way
    for way in (fsdp2, ddp, ddp_whole, tp, tp_fsdp2, cp, pp, pp_fsdp2, alone, accelerate, accelerate_offload)
}
_SMALL = {"layers": 24, "dim": 2048, "hidden": 8192, "heads": 32, "kv_heads": 8, "vocab": 32000, "batch": 2, "tokens": 8192}
_BASE = {"layers": 8, "dim": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000, "batch": 4, "tokens": 4096}
REAL: dict[str, Sizes] = {
    "fsdp2": {**_BASE, "layers": 16, "vocab": 128256, "batch": 2, "tokens": 8192},
    "ddp": _BASE,
    "ddp_whole": _BASE,
    "alone": _BASE,
    "tp": {**_BASE, "tokens": 8192},
    "tp_fsdp2": {**_BASE, "tokens": 8192},
    "cp": {**_BASE, "kv_heads": 32, "batch": 1, "tokens": 65536},
    "pp": {**_BASE, "layers": 16, "batch": 8, "tokens": 8192},
    "pp_fsdp2": {**_BASE, "layers": 16, "batch": 8, "tokens": 8192},
    "accelerate": _SMALL,
    "accelerate_offload": _SMALL,
}
"""On two GPUs of 139.8 GiB keep-all fits, and takes more than half of one."""
TINY: Sizes = {"layers": 4, "dim": 64, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 256, "batch": 4, "tokens": 32}


def llama(sizes: Sizes, device: torch.device, dtype: torch.dtype = LOW) -> Llama:
    """All of the model, made on the device."""
    torch.manual_seed(0)
    with device:
        model = Llama(**{name: size for name, size in sizes.items() if name != "batch"})
    return model.to(dtype).train()


def _ids(sizes: Sizes, device: torch.device, part: int = 0) -> Tensor:
    """The same on all ranks that have the same `part` of the data."""
    generator = torch.Generator().manual_seed(7 + part)
    return torch.randint(0, sizes["vocab"], (sizes["batch"], sizes["tokens"]), generator=generator, device="cpu").to(device)


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()
