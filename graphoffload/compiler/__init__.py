"""One compile: from a Dynamo graph and a configuration to a plan, two rewritten graphs, and what Inductor makes of them."""
