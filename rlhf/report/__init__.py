"""The HTML report of a run: one self-contained file, made from the run folder alone.

- `page`: write_report, the verdict and the tiles. `record`: the contents of the folder.
- `charts`: the contents of charts and tables, and how plotly draws a chart on a page.
- `model_card`: the same run in Markdown.

This package exports nothing: import from its modules, as in `from rlhf.report.page import write_report`.
"""
