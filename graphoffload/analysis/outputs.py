"""The memory of the model's outputs: its size, the modules that it comes from, and whether it is a key-value cache.

    forward ─▶ logits, k0, v0, k1, v1, ...      the caller may hold them until backward ends

Transformers models return the keys and values of every layer (`past_key_values`) unless they are told not to. A cache is
recognized by its origin: two results from the attention of each layer. This is wrong for an attention that returns two results
for another reason, so the message only suggests the remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphoffload.analysis.module_paths import module_path
from graphoffload.analysis.saved_values import GraphPair, graph_outputs
from graphoffload.analysis.storages import example_nbytes, example_storage_nbytes, fake, group_by_storage, storage_id
from graphoffload.units import format_bytes

_ATTENTION = re.compile(r"(?:.*\.)?[^.]*att(?:n|ention)[^.]*", re.IGNORECASE)
_PROJECTION = re.compile(r"\.(?:k|v|kv|qkv|key|value|c_attn|query_key_value)(?:_proj|_lin|_linear)?$")
_WORTH = 0.05  # outputs get a note if they hold this fraction of the bytes that backward needs,
_LEAST_BYTES = 1 << 20  # and at least this many bytes; a cache always gets one


_LOSS_BYTES = 12
"""For each number of an output, what an eager loss takes at its peak: `cross_entropy` in float32 has the logarithms, and their
gradient and that of the scores in its backward."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Memory that the graph allocates for its outputs.

    Attributes:
        nbytes, count: bytes and number of the outputs' storages.
        largest: path of the modules that return the most bytes, with numbers as "*".
        largest_bytes: the bytes that these modules return.
        cache_bytes: bytes of the keys and values that every layer's attention returns; 0 if there are none.
    """

    nbytes: int = 0
    count: int = 0
    largest: str = ""
    largest_bytes: int = 0
    cache_bytes: int = 0

    @property
    def cache_hint(self) -> str:
        """Advice for the plan's one line and for errors; "" if there is no cache."""
        if not self.cache_bytes:
            return ""
        return f"the model returns a key-value cache of {format_bytes(self.cache_bytes)}: use_cache=False frees it"

    def notes(self, saved_bytes: int) -> list[str]:
        """A note, if the outputs are large compared with `saved_bytes`."""
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
    """Outputs of the forward graph that have memory of their own."""
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


def loss_bytes(pair: GraphPair) -> int:
    """About what an eager loss of the outputs takes between forward and backward, above what forward leaves; 0 where the graph
    computes its loss itself, and returns one number that has a gradient."""
    gradients = [fake(n) for n in pair.backward.graph.find_nodes(op="placeholder") if str(n.target).startswith("tangents")]
    sizes = [(example_nbytes(value), value.element_size()) for value in gradients if value is not None]
    counts = [nbytes // size for nbytes, size in sizes]
    if not counts or 1 in counts:
        return 0
    cached = returned_by(pair).cache_bytes // min(size for _, size in sizes)  # no loss reads a key-value cache
    return _LOSS_BYTES * max(0, sum(counts) - cached)


def _cache_bytes(results: list[tuple[str, int]]) -> int:
    """Bytes of results that attention modules return in pairs: in several layers, or from projections to keys and values."""
    layers: dict[str, list[tuple[str, int]]] = {}
    for path, nbytes in results:
        match = _ATTENTION.match(path)
        if match:
            layers.setdefault(match[0], []).append((path, nbytes))
    pairs = [both for both in layers.values() if len(both) == 2]
    projected = any(_PROJECTION.search(path) for both in pairs for path, _ in both)
    return sum(nbytes for both in pairs for _, nbytes in both) if len(pairs) > 1 or projected else 0
