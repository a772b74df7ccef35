"""pass@k, as a metric of the `evaluate` library.

Load it with `evaluate.load(metric_path("pass_at_k"))`.
"""
