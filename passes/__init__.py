"""The graph passes: they alone write to an `fx.Graph` and to metadata of its nodes. One pass a file, one contract for all:

    (graphs, plan, *, ...) -> graphs

A pass changes the pair of graphs in place and returns it. It changes only what the plan asks for, so an empty plan changes
nothing. In order:

    prepare_joint.py   copies of the joint graph, with tags for values that must be saved or must not be read again
    tag.py       recompute tags on the joint graph, so that torch's partitioner saves and recomputes as decided
    hoist.py     forward: what only backward reads is computed where its operands are, unless all is kept in the end
    offload.py   forward: offload after the producer, release when the copy is done; the handle is saved instead
    once.py      both: memory that is kept is saved once, since torch would donate it once for every value in it
    reload.py    backward: reload ahead of the first reader, wait right before it, saved views taken of the reloaded tensor
    module_names.py, regions.py   metadata only: the user's names of modules; memory of what regions return
    casts.py     each copy of the joint graph: casts to the type that a value has are left out
    by_shape.py  the joint graph, before it is copied: views by strides become views by shape
    slices.py    Dynamo's graph, before any of these: MLPs in slices of the tokens, where no other plan meets the budget
    capture.py   both, only for CUDA graphs: ops that may be captured replace those that may not
"""

if __name__ == "passes":  # imported through the repository root: a second copy of graphoffload.passes, with its own classes
    raise ImportError("import graphoffload.passes, not passes: the folder is packaged under graphoffload.")
