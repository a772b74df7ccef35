"""The HTML report of a run: one self-contained file, made from the run folder alone.

- `page`: write_report, the verdict and the tiles. `record`: what is read from the folder.
- `chart`: what a chart shows, whatever draws it, and how plotly draws one on a page. `charts`: those of a run.
- `report_card`: the tables of a reward model's report card.

This package exports nothing: import from its modules, as in `from rlhf.report.page import write_report`.
"""
