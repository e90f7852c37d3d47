"""Ways to solve one instance: greedy, rounding of the LP relaxation, local search. docs/plan.md says what each is worth."""
