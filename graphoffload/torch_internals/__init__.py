"""Every name of torch that is not public, grouped by what it touches; tests/test_torch_internals.py finds any elsewhere.

releases           which torch this is
dynamo             what is compiled now, wrappers of torch.compile, limits, and compiles that leave no trace
partitioning       min-cut, how it is called, and what AOTAutograd knows of a graph's inputs
checkpoint_tags    CheckpointPolicy in node metadata
inductor           its settings and entry points, rules by which it makes kernels, the code that it writes
inductor_calls     what torch.compile calls where the backend is Inductor
autograd           counters and hooks of autograd, and AOTAutograd's compiled functions
storages           identity of storages, and weak references to them
streams            current device and stream, the allocator's counters
fake_tensors       fake tensors, and the way out of their modes
operators          overloads and schemas of operators
graphs             metadata of fx nodes, symbolic sizes as nodes
modules            nn.Module's compiled call, hooks and parameters
pytrees            nested containers of values
patching           attributes that are something else for a while

docs/torch_internals.md says for each what breaks without it.
"""
