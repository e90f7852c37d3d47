"""One self-contained HTML page for a report: figures, lanes and memory over the step, the table, and budgets to compare.

    Plan, StepReport ── content.py ──▶ plain values ── html.py, with page.html, .css, .js and plotly.js ──▶ one file

Python decides what is shown and writes every number as text or in the unit of its axis; page.js only draws, sorts and folds.
The page loads nothing: its policy (CSP) forbids that.
"""
