"""Ways to solve one instance: exact search, greedy, rounding of the LP relaxation, local search."""
