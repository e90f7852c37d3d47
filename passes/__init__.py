"""The graph passes: the only code that writes to an `fx.Graph`. One pass a file, one contract for all:

    (graphs, plan, *, ...) -> graphs

A pass changes the pair of graphs in place and returns it; what a plan does not ask for stays as it is, so an empty plan changes
nothing. In order:

    prepare_joint.py   copies of the joint graph, with the tags that say what must be saved and what must not be read again
    tag.py       the joint graph's recompute tags, so that torch's partitioner saves and recomputes what was decided
    offload.py   forward: offload behind the producer, release where the copy is done; the handle is saved in its place
    once.py      both: memory that is kept is saved once, since torch would donate it once for every value in it
    reload.py    backward: reload ahead of the first consumer, wait right before it, views taken anew
    capture.py   either, for CUDA graphs alone: the ops that may be captured in the place of those that may not
"""

if __name__ == "passes":  # found through the repository root: a second copy of graphoffload.passes, with its own classes
    raise ImportError("import graphoffload.passes, not passes: the folder is packaged under graphoffload.")
