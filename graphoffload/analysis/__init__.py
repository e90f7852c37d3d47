"""Facts about a traced graph: what backward needs, what that costs, what must not be run again; and the verifier."""
