"""torch._dynamo.reset(): nothing that was compiled is called any more, and a model that is deleted gives its memory back.

    del model, loss            autograd drops the handles of offloaded tensors
    torch._dynamo.reset()      their host memory and what is left on the device goes, and what is known of this thread's steps
    gc.collect()               the graphs themselves

A backward that is still to come finds its tensors all the same. Another thread's steps are its own: they go with its next step.
"""

from __future__ import annotations

from graphoffload.compiler import step_runs
from graphoffload.runtime import release_host_memory
from graphoffload.runtime.step import between_graphs


class Resets:
    """What torch tells of resets."""

    def reset(self) -> None:
        """torch._dynamo.reset() was called."""
        step_runs.forget()
        between_graphs.forget()
        release_host_memory()


RESETS = Resets()
