"""Compare algorithms that share a start model, a budget and a judge: the work of `rlhf compare`.

plan.py         `plan_cells`: the cells of a comparison, one for each arm and seed, all checked before one runs
scheduler.py    `run_cells`: run the cells in processes, several at a time, and resume after a stop
trial.py        one cell: train on the budget (costs.py) or draw best-of-n samples, then judge and run suites
tuning/         `run_tuning`: equal trials for every arm before it is reported
results.py      `ComparisonResults`: the results, typed; `write` and `read` are results.json
aggregate.py    `read_cells`, `summarize`, `write_results`: the results, from the cells' folders alone
summary.py      the verdict and the tables in words
view.py         the reports of a comparison while it runs; terminal.py shows it, its cells by board.py
page.py         `write_compare_page`: report.html, and the data of its charts; rows.py: all rows, for its browser

Import these functions from their modules, like rlhf/api/comparing.py; the package itself exports nothing.
"""
