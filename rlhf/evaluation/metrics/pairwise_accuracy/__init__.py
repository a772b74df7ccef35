"""Pairwise accuracy, as a metric of the `evaluate` library.

Load it with `evaluate.load(metric_path("pairwise_accuracy"))`.
"""
