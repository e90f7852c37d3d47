"""FSDP2 and DDP in the ways that trainers use them. For several.trained."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as saving
from distributed.several import Compile, Steps, grads
from distributed.tensor_parallel import Model, batch, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, RESUMED_AT = 4, 2
Around = Callable[[nn.Module, bool], Any]


def _fitted(
    model: nn.Module, *, microbatches: int = 1, around: Around | None = None, evaluates: bool = False, resumed: Any = None
) -> Steps:
    """Steps of AdamW; around: what each microbatch runs in; resumed: makes the model that training goes on with."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    for step in range(STEPS):
        total = 0.0
        for microbatch in range(microbatches):
            words = batch(100 * step + 10 * microbatch + dist.get_rank())
            synced = microbatch == microbatches - 1
            with (around(model, synced) if around is not None else None) or contextlib.nullcontext():
                loss = loss_of(model, words) / microbatches
                loss.backward()
            total += loss.item()
        yield total, grads([model])
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            model.eval()
            with torch.no_grad():
                model(batch(step))
            model.train()
        if resumed is not None and step == RESUMED_AT:
            model, optimizer = _resumed(model, optimizer, resumed)


def _resumed(model: nn.Module, optimizer: Any, made: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    """Another model and optimizer with what these two saved."""
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saving.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=place[0])
    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    saving.load(state, checkpoint_id=place[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


def _sharded(compiled: Compile, *, meta: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of which each block is compiled and sharded."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        with torch.device("meta") if meta else contextlib.nullcontext():
            model = Model()
        for layer in model.layers:
            compiled(layer)
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if meta:
            model.to_empty(device="cpu")
            generator = torch.Generator().manual_seed(1 + dist.get_rank())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().normal_(0, 0.2, generator=generator)  # type: ignore[attr-defined]
        return model

    return made


def fsdp2(compiled: Compile) -> Steps:
    """Gradients in float32, parameters gathered twice; evaluation between steps; saved and resumed after three of them."""
    made = _sharded(compiled)
    return _fitted(made(), evaluates=True, resumed=made)


def fsdp2_mixed_precision(compiled: Compile) -> Steps:
    """bfloat16 parameters, float32 reductions, parameters that stay gathered until backward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fitted(_sharded(compiled, mp_policy=policy, reshard_after_forward=False)())


def fsdp2_accumulated(compiled: Compile) -> Steps:
    """Three microbatches, of which the last one reduces gradients."""
    return _fitted(
        _sharded(compiled)(), microbatches=3, around=lambda model, last: model.set_requires_gradient_sync(last)  # type: ignore[operator]
    )


def fsdp2_from_meta(compiled: Compile) -> Steps:
    """Made without memory, then `to_empty`; parameters live on the host."""
    return _fitted(_sharded(compiled, meta=True, offload_policy=CPUOffloadPolicy(pin_memory=False))())


def hybrid_sharded(compiled: Compile) -> Steps:
    """HSDP: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return _fitted(_sharded(compiled, mesh=mesh)())


class Partly(nn.Module):
    """A model with a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.unused = Model(), nn.Linear(4, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.model(words)


def _replicated(compiled: Compile, *, whole: bool = False, around: Around | None = None, **options: Any) -> Steps:
    partly = bool(options.get("find_unused_parameters"))
    model: Any = Partly() if partly else Model()
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # type: ignore[attr-defined]
    for layer in () if whole else (model.model if partly else model).layers:
        compiled(layer)
    model = DistributedDataParallel(model, **options)
    if whole:
        compiled(model)
    with torch._dynamo.config.patch(optimize_ddp=whole):  # or torch splits each block by the buckets
        yield from _fitted(model, microbatches=1 if around is None else 3, around=around)


def _unsynced(model: Any, last: bool) -> Any:
    return None if last else model.no_sync()


def ddp_static_graph(compiled: Compile) -> Steps:
    """Blocks, static_graph=True, gradients that are views of buckets."""
    return _replicated(compiled, static_graph=True, gradient_as_bucket_view=True)


def ddp_accumulated(compiled: Compile) -> Steps:
    """Blocks, three microbatches, two of them under no_sync()."""
    return _replicated(compiled, around=_unsynced)


def ddp_unused_parameters(compiled: Compile) -> Steps:
    """Blocks, find_unused_parameters=True."""
    return _replicated(compiled, find_unused_parameters=True)


def ddp_whole_buckets(compiled: Compile) -> Steps:
    """One model, which torch splits by small buckets; three microbatches, two of them under no_sync()."""
    return _replicated(compiled, whole=True, around=_unsynced, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
