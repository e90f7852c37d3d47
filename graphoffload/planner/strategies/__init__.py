"""Ways to solve one instance: exact search, greedy, LP rounding, local search. docs/plan.md says what each is worth."""
