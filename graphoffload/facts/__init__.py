"""Values that all other packages exchange: saved activations, plans, limits, goals and refusals. No torch, no graph."""
