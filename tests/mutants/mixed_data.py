"""Bugs seeded where rows come from several sources, or are streamed."""

from __future__ import annotations

from mutant import Mutant

QUOTAS, MIXTURE = "rlhf/data/mixture.py", "rlhf/data/mixture.py"
OF_MIXTURE = ("tests/data/test_mixture.py",)

MIXED_DATA = [
    Mutant(
        name="quotas-too-early",
        file=QUOTAS,
        before="if behind[source] < total:",
        after="if behind[source] < 0:",
        why="a source is drawn from before it is due, and another falls a row and more behind its share",
        tests=("tests/data/test_quotas.py",),
    ),
    Mutant(
        name="quotas-deadline-unweighted",
        file=QUOTAS,
        before="slack * weights[best] < ((k2 - 1) * total - behind[best]) * weight",
        after="slack < (k2 - 1) * total - behind[best]",
        why="the source furthest behind comes first instead of the one whose deadline does",
        tests=("tests/data/test_quotas.py",),
    ),
    Mutant(
        name="stream-same-order-every-epoch",
        file=MIXTURE,
        before="key = (epoch, block.start.number)",
        after="key = (0, block.start.number)",
        why="every epoch has the order of the first",
        tests=OF_MIXTURE,
    ),
    Mutant(
        name="stream-keeps-the-order-of-every-block",
        file=MIXTURE,
        before="while len(self._orders) > KEPT_BLOCKS:",
        after="while len(self._orders) > 256 * KEPT_BLOCKS:",
        why="memory grows with the rows drawn",
        tests=OF_MIXTURE,
    ),
    Mutant(
        name="stream-counts-skips-again",
        file=MIXTURE,
        before="after = BlockStart(start.number + 1, used, start.skipped + skipped, following)",
        after="after = BlockStart(start.number + 1, used, start.skipped, following)",
        why="the rows left out in one block are forgotten in the next",
        tests=OF_MIXTURE,
    ),
    Mutant(
        name="stream-ignores-the-limit-of-later-blocks",
        file=MIXTURE,
        before="limit = None if self.config.limit is None else self.config.limit - start.usable",
        after="limit = self.config.limit",
        why="a limit beyond the first block is never reached, or too late",
        tests=OF_MIXTURE,
    ),
    Mutant(
        name="source-loss-own-denominators",
        file="rlhf/training/offline.py",
        before="return self._denominators",
        after="return self.loss.denominators(batch)",
        why="each source's loss is divided by its own rows: a source of few rows weighs as much as one of many",
        tests=("tests/equivalence/test_same_mixed_run.py",),
    ),
]
