"""Which saved activation is kept, recomputed or offloaded: pure Python and scipy, no torch, no graph.

program: the instance, steps with times, buffers and candidates. arrays: the same as arrays, made once.
simulator: instance and actions to Timeline, the referee of every solver. held: what holds the memory at one step.
evaluator: what a goal asks, and how two proposals compare. bound: LP relaxation, which no plan undercuts.
exact, greedy, relax, local: solvers; each proposes actions, the evaluator decides.
solvers: solve(), from a goal to the best proposal with its bound and reasons.
"""
