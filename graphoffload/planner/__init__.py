"""The planner decides which saved activation is kept, recomputed or offloaded. It is Python and scipy: no torch, no graph.

    problem     Program: steps with times, buffers, candidates          arrays      the same as arrays, made once
    simulator   Program and actions to a Timeline: time and memory      bottleneck  what holds the memory at one step
    goals       what a goal asks, and how two proposals compare         lower_bound what no plan undercuts
    strategies  each proposes actions; the simulator scores them        search      the best proposal of all strategies
    solver      solve(): a search, and what else is tried where it is above a budget or far from its bound
    step        all calls of compiled graphs in a training step as one Program, and its plan in terms of ops
    prefetch    reloads earlier and releases later where memory is free

Capuchin (Peng et al., ASPLOS 2020) and POFO (Beaumont, Eyraud-Dubois, Shilova, NeurIPS 2021) decide the same three actions.
Capuchin's decisions follow the tensor accesses that it measured at run time, and it prefers swapping to recomputation. POFO
finds optimal sequences of operations for a chain of layers. Checkmate (Jain et al., MLSys 2020) solves recomputation alone, for
any graph, as an integer program with the memory after every operation as a constraint. This planner limits the memory of every
step as Checkmate does, for any graph, and offloads as well. It is a heuristic with a lower bound.
"""
