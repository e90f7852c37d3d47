"""How one variant of a graph is compiled: which activations it computes again, and which of the others get the ops.

    recipe "light"    recomputes {silu, norm}     offloads {mm, mm_1}     calls 0 to 5 of a step copy mm and mm_1, call 6 copies
                                                                          mm alone, call 7 nothing

What is computed again is code, so it is the same for every call of a variant. Whether a tensor with ops is really copied is
decided call by call (runtime/step/follow.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Recipe:
    """One variant of a graph.

    Attributes:
        name: for messages.
        recomputes: names of saved activations that backward computes again; None: all that may be.
        offloads: names of saved activations that get the ops, once the graph is partitioned with what is recomputed; None: all
            that may be offloaded.
        reload_steps: (name, step of the backward before which its reload stands); what is not named is reloaded just in time
            for a call that runs alone.
        blocks: the share of the graph's blocks that are computed again whole, as torch.utils.checkpoint does, the last ones of
            them (analysis/blocks.py). Names are then those of activations that are saved all the same.
        slices: in how many slices of the tokens MLPs are computed (analysis/token_regions.py); 0: all tokens at once. Names are
            those of the graph with slices.
    """

    name: str = "alone"
    recomputes: frozenset[str] | None = frozenset()
    offloads: frozenset[str] | None = frozenset()
    reload_steps: tuple[tuple[str, int], ...] = ()
    blocks: float = 0.0
    slices: int = 0

    @property
    def identity(self) -> str:
        """What the key of a plan knows it by; that of FIRST is not yet any variant's."""
        if self.name == FIRST.name:
            return FIRST.name
        parts = ("*" if names is None else ",".join(sorted(names)) for names in (self.recomputes, self.offloads))
        steps = ",".join(f"{name}:{step}" for name, step in self.reload_steps)
        ways = (*((f"blocks {self.blocks:.3g}",) if self.blocks else ()), *((f"slices {self.slices}",) if self.slices else ()))
        return "|".join((*parts, steps, *ways))

    def in_slices(self, slices: int) -> Recipe:
        """The same with MLPs in slices; names of activations are to be found anew."""
        return replace(self, name=f"{self.name} in {slices} slices", slices=slices)


SMALLEST = Recipe("smallest", recomputes=None, offloads=None)
"""The variant that holds least until backward: it runs where nothing is known of a step yet."""
EVERYTHING_KEPT = Recipe("keep")
"""The variant that changes nothing."""
IN_BLOCKS = Recipe("blocks", blocks=1.0)
"""Whole blocks again: it reaches what no chain of single activations does, such as attention with its random state."""
FITTED = "fitted"
"""Names of variants that are made for one step begin with this."""
FIRST = Recipe("first")
"""Either of the two, as the graph's size says: for the first compile of a graph that is one of several."""
