"""Compare algorithms that share a start model, a budget and a judge: what `rlhf compare` runs.

plan.py         `make_plan`: the cells of a comparison, one for each arm and seed, all checked before anything runs
scheduler.py    `run_cells`: run the cells, several at a time (processes.py), and resume after a stop
trial.py        one cell: train on the budget (costs.py) or draw best-of-n samples, then judge, then the suites
results.py      `read_cells`, `summarize`, `write_results`: results.json, from the cells' folders alone
summary.py      the verdict and the tables in words; charts.py, figures.py: the figures (HTML; PNG and SVG)
page.py         `write_compare_page`: report.html

Import these functions from their modules, as rlhf/commands/compare.py does; the package itself exports nothing.
"""
