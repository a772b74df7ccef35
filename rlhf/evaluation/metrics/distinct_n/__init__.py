"""Distinct n-grams, as a metric of the `evaluate` library.

Load it with `evaluate.load(metric_path("distinct_n"))`.
"""
