"""Whether FSDP2 shards a module of this process (torch.distributed.fsdp.fully_shard). Seen in 2.11 to 2.15."""

from __future__ import annotations

import sys


def copies_between_calls() -> bool:
    """Whether code of FSDP2 runs between compiled calls.

    It copies a list of addresses to the device on the compute stream, after it gathered a module's parameters and before it
    reduces their gradients.
    """
    state = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state"), "FSDPState", None)
    if state is None:
        return False
    modules = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    return any(isinstance(found(), state) for found in list(modules.values()))
