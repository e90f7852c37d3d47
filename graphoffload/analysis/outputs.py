"""What the model returns holds memory for the whole of the step: how much, from which modules, and whether it is a cache.

    forward ─▶ logits, k0, v0, k1, v1, ...      the caller may hold them until backward ends

Transformers models return the keys and values of every layer (`past_key_values`) unless told not to. They are known by their
origin: two results of each layer's attention. When this is wrong: an attention that returns two results for another reason is
named a cache as well, so the remedy is a suggestion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphoffload.analysis.module_paths import module_path
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import example_storage_nbytes, fake, group_by_storage, storage_id
from graphoffload.units import format_bytes

_ATTENTION = re.compile(r"(?:.*\.)?[^.]*att(?:n|ention)[^.]*", re.IGNORECASE)
_PROJECTION = re.compile(r"\.(?:k|v|kv|qkv|key|value|c_attn|query_key_value)(?:_proj|_lin|_linear)?$")
_WORTH = 0.05  # of what backward needs: returned bytes below that are not worth a word,
_LEAST_BYTES = 1 << 20  # nor are fewer, but for a cache


@dataclass(frozen=True, slots=True)
class Returned:
    """Memory that the graph allocates for what it returns.

    nbytes, count: of all storages. largest: path of the modules that most of it comes from, numbers as "*", and their bytes.
    cache_bytes: of keys and values that every layer's attention returns; 0 where none are seen.
    """

    nbytes: int = 0
    count: int = 0
    largest: str = ""
    largest_bytes: int = 0
    cache_bytes: int = 0

    @property
    def cache_hint(self) -> str:
        """For the one line and for errors; "" where no cache is seen."""
        if not self.cache_bytes:
            return ""
        return f"the model returns a key-value cache of {format_bytes(self.cache_bytes)}: use_cache=False frees it"

    def notes(self, saved_bytes: int) -> list[str]:
        """A note where it is a share of what backward needs that is worth one."""
        small = self.nbytes < max(_LEAST_BYTES, _WORTH * saved_bytes)
        if small and self.cache_bytes < _WORTH * max(saved_bytes, 1):
            return []
        largest = f"{format_bytes(self.largest_bytes)}, is from {self.largest or 'no module'}"
        text = (
            f"outputs of the model hold {format_bytes(self.nbytes)} in {self.count} tensors for as long as the caller keeps "
            f"them; most, {largest}"
        )
        if self.cache_bytes:
            text += (
                f". {format_bytes(self.cache_bytes)} look like a key-value cache, which training does not need: call the model "
                "with use_cache=False, or set model.config.use_cache = False"
            )
        return [text]


def returned_by(pair: GraphPair) -> Returned:
    """What the forward graph returns to the caller and holds memory of its own."""
    nodes = pair.forward.graph.nodes
    inputs = set(group_by_storage(node for node in nodes if node.op in ("placeholder", "get_attr")))
    made = group_by_storage(node for node in nodes if node.op == "call_function")
    found: dict[int, tuple[str, int]] = {}
    for node in graph_outputs(pair.forward)[: pair.num_fwd_outputs]:
        value = None if node is None else fake(node)
        if value is not None and storage_id(value) not in inputs and storage_id(value) in made:
            identity = storage_id(value)
            found[identity] = module_path(made[identity][0]), example_storage_nbytes(value)
    groups: dict[str, int] = {}
    for path, nbytes in found.values():
        folded = re.sub(r"\d+", "*", path)
        groups[folded] = groups.get(folded, 0) + nbytes
    largest = max(groups, key=lambda path: groups[path], default="")
    total = sum(nbytes for _, nbytes in found.values())
    return Returned(total, len(found), largest, groups.get(largest, 0), _cache_bytes(list(found.values())))


def _cache_bytes(results: list[tuple[str, int]]) -> int:
    """Bytes of results that come in pairs from attention modules, of several layers or of projections to keys and values."""
    layers: dict[str, list[tuple[str, int]]] = {}
    for path, nbytes in results:
        match = _ATTENTION.match(path)
        if match:
            layers.setdefault(match[0], []).append((path, nbytes))
    pairs = [both for both in layers.values() if len(both) == 2]
    projected = any(_PROJECTION.search(path) for both in pairs for path, _ in both)
    return sum(nbytes for both in pairs for _, nbytes in both) if len(pairs) > 1 or projected else 0
