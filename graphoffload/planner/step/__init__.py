"""One plan for a training step of several compiled graphs: which variant each call runs, and what each call copies.

    facts     what was recorded of a step: calls, gaps between them, memory outside, and the variants of each graph
              and the problem: these facts with what the plan is for
    joint     facts and a variant for each call to one Program
    events    what the runtime can do, and when: the joint timeline in terms of the ops that each variant has
    replay    time and memory of such a schedule
    solve     plan_step(): variants, actions and the schedule of every call
    climb     plans of few calls that are far above their bound, call by call
    late_copies   plans that wait for a few copies back, where those whose copies are in time are bad
    stored    the problem as JSON and back, for dumps

A *step* of this package is a training step; a step of a `Program` is one operation.
"""
