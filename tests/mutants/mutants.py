"""The bugs we seed: those found in the field, and our own that a test was written for. Format: mutant.py."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = [
    Mutant(
        name="whiten-keeps-mean",
        file="rlhf/masked.py",
        before="scaled if shift_mean else scaled + mean",
        after="scaled + mean",
        why="advantages keep their mean: all completions are pushed up or down together",
        tests=("tests/test_masked.py",),
    ),
    Mutant(
        name="mean-without-rows",
        file="rlhf/masked.py",
        before="return Mean(self.total + other.total, self.weight + other.weight)",
        after="return Mean((self.value + other.value) / 2, 1.0)",
        why="a mean of means weighs short micro-batches like long ones (transformers' bug of 2024)",
        tests=("tests/test_masked.py",),
    ),
    Mutant(
        name="masked-sum-multiplies",
        file="rlhf/masked.py",
        before="return torch.where(mask, values, 0.0).sum()",
        after="return (values * mask).sum()",
        why="a NaN or infinity on a padded position comes through (NaN x 0 = NaN) and poisons the loss",
        tests=("tests/test_masked.py",),
    ),
]
