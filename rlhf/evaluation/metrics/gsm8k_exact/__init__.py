"""Exact match of final answers, as a metric of the `evaluate` library.

Load it with `evaluate.load(metric_path("gsm8k_exact"))`.
"""
