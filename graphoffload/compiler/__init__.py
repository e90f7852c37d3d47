"""One compile: from a Dynamo graph and a configuration to a plan, two rewritten graphs, and Inductor's code for them."""
