"""Measure graphoffload, and what it competes with, on your own GPU: python -m graphoffload bench --list.

    cli.py        the tools of `bench`                    run.py        variants of one model beside compiled keep-all
    together.py   several models at once on one host      runner.py     one model, one baseline, many variants
    variants.py   "over:8.6GB", "checkpoint", ...         measure.py    how every figure is measured
    models.py     what is trained, nets.py its networks   observed.py   plans, counters and the synchronous twin
    recipe.py     optimizer and precision of a step       rivals.py     variants that are others' packages
    catalogue.py  tables that others publish, by name     tables.py     runs one of them
    process.py    a model and its variants as text        verdict.py    what a row's status says
    run_options.py  how a Runner measures
    results.py    result files                            page.py       tables of a page, written from result files
    table.py      the table at the end of a call          figure.py     step time against memory, drawn
    where.py      where a step's memory and time go       op_cost.py    host time of the four ops
    overlap.py    what ran beside what, from a trace      plans.py      one plan made on two machines, compared
    ranks.py      a model over several GPUs, rank.py its processes, parallel.py the ways
    midsize.py    one measurement that says much          soak.py       a long run with failures, and its books

Nothing here is imported by the rest of graphoffload, `python -m graphoffload` apart.
"""
