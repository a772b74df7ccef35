"""Win rate, as a metric of the `evaluate` library.

Load it with `evaluate.load(metric_path("win_rate"))`.
"""
