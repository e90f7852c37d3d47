"""What loops of users are made of: batches from the host, the plain end of a step, a decoder of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCHES = 3


def loader(device: torch.device, make: Callable[[int, torch.Generator], tuple[Tensor, ...]]) -> Callable[[int], list[Tensor]]:
    """Three batches on the host, page-locked where there is a GPU; each call copies one to the device.

    Batches come again, so that training lowers the loss, and wrong gradients would show in it.
    """
    with torch.device("cpu"):
        made = [make(number, torch.Generator().manual_seed(number)) for number in range(BATCHES)]
    if device.type == "cuda":
        made = [tuple(value.pin_memory() for value in batch) for batch in made]
    return lambda number: [value.to(device, non_blocking=True) for value in made[number % BATCHES]]


def words(device: torch.device, vocabulary: int, rows: int, length: int) -> Callable[[int], list[Tensor]]:
    """Batches of token ids."""
    return loader(device, lambda _, generator: (torch.randint(0, vocabulary, (rows, length), generator=generator),))


def pictures(device: torch.device, rows: int, side: int, classes: int) -> Callable[[int], list[Tensor]]:
    """Batches of square images, and a class of each."""

    def make(_: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        images = torch.randn(rows, 3, side, side, generator=generator)
        return images, torch.randint(0, classes, (rows,), generator=generator)

    return loader(device, make)


def norm_of(model: nn.Module) -> float:
    """Of all gradients together, which some loops log."""
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> tuple[float, float]:
    """The plain end of a step: backward, the optimizer, no gradients left. The loss, and the norm of the gradients."""
    loss.backward()
    norm = norm_of(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm


def decoder(name: str, tiny: bool, **sizes: int) -> Any:
    """A decoder of Transformers by the name of its configuration, in bfloat16; 8 layers of width 2048."""
    import transformers

    real = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 16}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shared = {"num_key_value_heads": 2 if tiny else 8, "vocab_size": 256 if tiny else 32000}
    config = getattr(transformers, name)(**(small if tiny else real), **shared, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
