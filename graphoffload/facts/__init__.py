"""Values that everything else passes along: what is saved, what was decided, what may be used. No torch, no graph."""
