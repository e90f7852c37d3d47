"""State that outlives one graph of a step: copies that end in a later graph, and tensors that stay on the device."""
