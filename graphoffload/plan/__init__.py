"""Which saved activation is kept, recomputed or offloaded: pure Python and scipy, no torch, no graph.

program    the instance: steps with times, buffers, candidates        (data)
arrays     the same as arrays, made once per instance and hardware    (data)
simulate   instance + actions -> Timeline: the referee of every solver
held       what holds the memory at one step, for messages
bound      LP relaxation: no plan is faster (or smaller) than this
greedy, relax, local     solvers; each proposes actions, the referee decides
solvers    solve(): goals in, best proposal with its bound and reasons out
"""
