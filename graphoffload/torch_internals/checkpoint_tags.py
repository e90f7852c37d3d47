"""CheckpointPolicy tags of torch.utils.checkpoint, as they lie in node metadata. Seen in torch 2.11 to 2.15.

Without it: regions and tags of selective checkpointing are not followed.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from graphoffload.facts.saved_tensors import Tag

TAGS: dict[CheckpointPolicy, Tag] = {
    CheckpointPolicy.MUST_SAVE: "must_save",
    CheckpointPolicy.PREFER_SAVE: "prefer_save",
    CheckpointPolicy.MUST_RECOMPUTE: "must_recompute",
    CheckpointPolicy.PREFER_RECOMPUTE: "prefer_recompute",
    CheckpointPolicy.MUST_CPU_OFFLOAD: "must_offload",
    CheckpointPolicy.PREFER_CPU_OFFLOAD: "prefer_offload",
}


def tag_of(meta: dict[str, Any]) -> Tag | None:
    """A user's CheckpointPolicy tag on a joint-graph node."""
    policy = meta.get("recompute")
    return TAGS.get(policy) if isinstance(policy, CheckpointPolicy) else None
