"""What reaches from one graph of a step to the next: copies that outlive their graph, and tensors that stay."""
