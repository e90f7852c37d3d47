"""Nested containers of values, as torch flattens them. Seen in torch 2.11 to 2.15.

Without it: what a model takes and gives beyond plain tensors (dicts, dataclasses that are registered with torch) is not seen.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
