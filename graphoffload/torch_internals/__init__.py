"""Every name of torch that is not public, grouped by what it touches; nothing elsewhere uses one.

releases           which torch this is
dynamo             what is traced now, and compiles that leave no trace
partitioning       min-cut, and what AOTAutograd knows of a graph's inputs
checkpoint_tags    CheckpointPolicy in node metadata
inductor           rules by which Inductor makes kernels
autograd           the numbers of autograd nodes, and AOTAutograd's compiled functions
"""
