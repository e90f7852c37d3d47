"""What Inductor decides by rules of its own."""

from __future__ import annotations

from torch.fx import Node


def is_pointwise_use(node: Node) -> bool:
    """Whether Inductor counts what reads a value as pointwise, through views."""
    from torch._inductor import utils

    return bool(utils.is_pointwise_use(node))


def most_reads(device_type: str) -> int:
    """Buffers that a value may be computed from where it is read; what takes more Inductor stores. CPUs differ from 2.13 on."""
    from torch._inductor import config as inductor_config

    chosen: int | None = inductor_config.realize_acc_reads_threshold
    if chosen is None:
        name = "realize_cpu_acc_reads_threshold" if device_type == "cpu" else "_realize_acc_reads_threshold_default"
        chosen = int(getattr(inductor_config, name))
    return chosen
