"""Facts about a traced graph: the values that backward needs, the cost of each node, and the operations that must not run
again. verify.py checks the rewritten graphs."""
