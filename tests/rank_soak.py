"""Two processes train under FSDP2 for a long time as training really is, and write down their losses.

    found = spawned(soak, folder, GPUS, 500)
    check_soak(found, 500)

Evaluation with a larger batch, a failure on one rank alone after which all ranks give the step up, a checkpoint that is saved
and resumed by a new model. Plain torch first, then everything offloaded, then a budget that changes on the way. Copies of one
rank are delayed, and freed memory is overwritten.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as saving
from gpu.races import RANDOM, disturbances
from lazy import lazy_streams
from ranks import DELAYED_RANK, Place, in_a_group, parallel
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import graphoffload
from graphoffload.compiler import step_again
from graphoffload.errors import GraphOffloadWarning
from graphoffload.runtime import registry

EVERY = 50
"""Steps from one evaluation to the next, and from one failure to the next."""
CPU_BUDGETS = ("230KiB", "250KiB")
SHARES = (0.75, 0.9)
"""Of what plain torch takes over what is allocated between steps: the first budget, and the one after two thirds of the way."""


ANY_PEAK = mock.patch.object(step_again, "tolerated_bytes", return_value=2**40)
"""On a GPU aot_eager takes up to 3.4 % more than predicted, so that budgets are exceeded by that."""


class Refused(RuntimeError):
    """One rank's step fails."""


class Course:
    """One model on its way, under a backend."""

    def __init__(self, backend: Any, place: Place, folder: Path) -> None:
        self.backend, self.place, self.folder = backend, place, folder
        self.losses: list[float] = []
        self.given_up = self.evaluated = 0
        self.peak_bytes = self.static_bytes = 0
        self._fresh()

    def _fresh(self) -> None:
        self.model = parallel("fsdp2", self.backend, self.place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, foreach=False)

    def run(self, steps: int, budgets: tuple[Any, ...] = ()) -> None:
        """All steps; the second budget is set after two thirds of them."""
        every = min(EVERY, max(steps // 3, 1))
        for step in range(steps):
            if budgets and step == 2 * steps // 3:
                graphoffload.set_budget(budgets[1])
            if step == steps // 2:
                self._resume()
            fails = step % every == every // 2
            self._step(step, fails)
            if step % every == every - 1:
                self._evaluate(step)

    def _step(self, step: int, fails: bool) -> None:
        """Forward, backward and optimizer; a rank that fails tells the others, and all drop what they have."""
        if self.place.device == "cuda":
            self.static_bytes = max(self.static_bytes, torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        out = self.model(self._batch(step, self.place.tokens))
        loss: Tensor | None = None
        try:
            if fails and dist.get_rank() == DELAYED_RANK:
                raise Refused
            loss = out.square().mean()
        except Refused:
            pass
        failed = torch.tensor(float(loss is None), device=self.place.device)
        dist.all_reduce(failed)
        if failed.item():
            self.given_up += 1
            return
        assert loss is not None
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.place.device == "cuda":
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())

    def _evaluate(self, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.losses.append(self.model(self._batch(step, 2 * self.place.tokens)).square().mean().item())
        self.model.train()
        self.evaluated += 1

    def _resume(self) -> None:
        """Another model and optimizer with what these two saved; whatever they had is zero before."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        saving.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=self.folder)
        self._fresh()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        saving.load(state, checkpoint_id=self.folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _batch(self, step: int, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        return torch.randn(tokens, self.place.width, generator=generator).to(self.place.device)

    def weights(self) -> list[Tensor]:
        """This rank's shards."""
        return [parameter.to_local().detach().clone() for parameter in self.model.parameters()]  # type: ignore[attr-defined]


def soak(rank: int, port: int, folder: str, place: Place, steps: int) -> None:
    """One rank: plain torch, then each way of ours, in one process."""
    os.environ.update(GRAPHOFFLOAD_CACHE_DIR=f"{folder}/cache", WORLD_SIZE="2", RANK=str(rank))
    in_a_group(rank, port, place)
    plain = Course("aot_eager", place, Path(folder, "plain"))
    plain.run(steps)
    weights, seen = plain.weights(), {}
    del plain.model, plain.optimizer
    common = {"inner": "aot_eager", "hardware": "h200-sxm", "reserve": 0, "min_tensor_bytes": 1}
    budgets = _budgets(plain, place)
    for name, options in (("offload", {"policy": "offload"}), ("budget", {"device_budget": budgets[0]})):
        registry.forget()
        graphoffload.reset_stats()
        gc.collect()
        with warnings.catch_warnings(record=True) as caught, _disturbed(place), ANY_PEAK:
            warnings.simplefilter("always")
            ours = Course(graphoffload.OffloadBackend(**common, **options), place, Path(folder, name))
            ours.run(steps, budgets if name == "budget" else ())
            if place.device == "cuda":
                torch.cuda.synchronize()
        seen[name] = {
            "losses": len(ours.losses), "given_up": ours.given_up, "evaluated": ours.evaluated,
            "equal": ours.losses == plain.losses and all(map(torch.equal, ours.weights(), weights)),
            "apart_from": [i for i, (one, other) in enumerate(zip(ours.losses, plain.losses, strict=True)) if one != other][:1],
            "variants": sorted({plan.variant for plan in graphoffload.last_plans()}),
            "warnings": [str(item.message) for item in caught if issubclass(item.category, GraphOffloadWarning)],
            "in_use": graphoffload.host_memory().in_use_bytes, "held": graphoffload.host_memory().held_bytes,
            "peak_bytes": ours.peak_bytes, "plain_peak_bytes": plain.peak_bytes, "budgets": [str(budget) for budget in budgets],
            **graphoffload.stats(),
        }  # fmt: skip
        Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def _budgets(plain: Course, place: Place) -> tuple[Any, ...]:
    """The same on all ranks."""
    if place.device == "cpu":
        return CPU_BUDGETS
    sizes = torch.tensor([plain.static_bytes, plain.peak_bytes], device=place.device, dtype=torch.float64)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    static, peak = sizes.tolist()
    return tuple(int(static + share * (peak - static)) for share in SHARES)


@contextlib.contextmanager
def _disturbed(place: Place) -> Iterator[None]:
    """Copies as late as they may be: on a CPU on both ranks, on GPUs on one of them."""
    if place.device == "cpu":
        with lazy_streams() as lazy:
            yield
        assert not lazy.complaints, lazy.complaints[:3]
        return
    with disturbances(RANDOM, seed=1) if dist.get_rank() == DELAYED_RANK else contextlib.nullcontext():
        yield


def check_soak(found: list[dict[str, Any]], steps: int) -> None:
    """Losses and weights are plain torch's to the bit, copies ran, nothing is left, and nothing was complained of."""
    for rank, seen in enumerate(found):
        for name in ("offload", "budget"):
            got = seen[name]
            said = f"rank {rank}, {name}: {got}"
            assert got["equal"], said
            assert got["given_up"] >= 3, said
            assert got["evaluated"] >= 3, said
            assert got["losses"] == steps - got["given_up"] + got["evaluated"], said
            assert got["reloads"] == got["waits"] > 0, said
            assert got["warnings"] == [], said
            assert got["in_use"] == 0, said
        assert set(seen["budget"]["variants"]) - {""}, "no plan of a step"


