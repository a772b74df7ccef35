"""Compare algorithms that share a start model, a budget and a judge: what `rlhf compare` runs.

plan.py        `make_plan`: the cells of a comparison, one for each arm and seed, all checked before anything runs
runner.py      `run_cells`: run the cells, several at a time (processes.py, launched.py), and resume after a stop
cell.py        one cell: train on the budget (costs.py) or draw best-of-n samples (draws.py), then judge (judge.py)
results.py     `read_cells`, `summarize`, `write_results`: results.json, from the cells' folders alone
figures.py     `write_figures`: the figures as PNG and SVG
page.py        `write_compare_page`: report.html

Import these functions from their modules, as rlhf/commands/compare.py does; the package itself exports nothing.
"""
