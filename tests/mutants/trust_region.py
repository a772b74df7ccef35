"""Bugs seeded in the natural gradient and the trust region."""

from __future__ import annotations

from mutant import Mutant

ALGO = "rlhf/algo/trust_region.py"
STEP = "rlhf/training/trust_region.py"
MATHEMATICS = ("tests/algo/test_trust_region.py",)
STEPS = ("tests/training/test_trust_region_steps.py",)
FISHER = ("tests/models/test_token_fisher.py",)

TRUST_REGION = [
    Mutant(
        name="trust-region-climbs",
        file="rlhf/training/searched.py",
        before="old[name] - length * step)",
        after="old[name] + length * step)",
        why="the step goes up the loss; every length is rejected, or NPG unlearns",
        tests=STEPS,
    ),
    Mutant(
        name="damping-forgotten",
        file="rlhf/algorithms/trust_region.py",
        before="return space.fisher_product(vector) + self.damping * vector",
        after="return space.fisher_product(vector)",
        why="conjugate gradients divide by eigenvalues that are noise",
        tests=STEPS,
    ),
    Mutant(
        name="damping-in-the-length",
        file=ALGO,
        before="- damping * float(x @ x)",
        after="+ 0.0 * damping * float(x @ x)",
        why="the step is shorter than the region allows, by an amount that depends on the damping",
        tests=MATHEMATICS,
    ),
    Mutant(
        name="length-without-root",
        file=ALGO,
        before="return math.sqrt(2.0 * max_kl / curvature)",
        after="return (2.0 * max_kl / curvature)",
        why="the KL of a step is not the one that was asked for",
        tests=MATHEMATICS,
    ),
    Mutant(
        name="line-search-ignores-the-kl",
        file=ALGO,
        before="return trial.improvement > 0.0 and trial.kl <= max_kl",
        after="return trial.improvement > 0.0",
        why="violations of the region are accepted: NPG under TRPO's name",
        tests=MATHEMATICS,
    ),
    Mutant(
        name="line-search-ignores-the-loss",
        file=ALGO,
        before="return trial.improvement > 0.0 and trial.kl <= max_kl",
        after="return trial.kl <= max_kl",
        why="steps that make the surrogate worse are accepted",
        tests=MATHEMATICS,
    ),
    Mutant(
        name="rejected-step-stays",
        file="rlhf/algorithms/trust_region.py",
        before="            space.restore()",
        after="            pass",
        why="the last length that was tried and rejected stays in the weights",
        tests=STEPS,
    ),
    Mutant(
        name="kl-of-new-to-old",
        file="rlhf/models/token_fisher.py",
        before="kl_of_distributions(log_old, log_new)",
        after="kl_of_distributions(log_new, log_old)",
        why="the other direction of the KL is bounded: TRPO's theory is about KL(old || new)",
        tests=FISHER,
    ),
    Mutant(
        name="fisher-without-the-mean",
        file=ALGO,
        before="return pi * (tangent - (pi * tangent).sum(dim=-1, keepdim=True))",
        after="return pi * tangent",
        why="the metric counts shifts of all logits, which change no probability",
        tests=MATHEMATICS,
    ),
    Mutant(
        name="fisher-temperature-once",
        file="rlhf/models/token_fisher.py",
        before="softmax_fisher_product(self._log_pi(logits), scaled) / self.temperature",
        after="softmax_fisher_product(self._log_pi(logits), scaled)",
        why="at a temperature other than 1 the metric is off by a factor, and no product symmetric with the KL",
        tests=FISHER,
    ),
    Mutant(
        name="fisher-not-averaged",
        file="rlhf/training/searched.py",
        before="return total / _count_tokens(minibatch)",
        after="return total",
        why="the metric is a sum over tokens: steps shrink with the batch, and the damping means nothing",
        tests=STEPS,
    ),
    Mutant(
        name="cg-direction-not-conjugate",
        file=ALGO,
        before="direction = remainder + (squared / before) * direction",
        after="direction = remainder",
        why="steepest descent: far from solved after as many iterations",
        tests=MATHEMATICS,
    ),
    Mutant(
        name="trust-region-in-every-epoch",
        file="rlhf/training/online_run.py",
        before="stepped = epoch > 0 and",
        after="stepped = epoch < 0 and",
        why="the policy moves once an epoch: the bound holds for each move, not for their sum",
        tests=STEPS,
    ),
    Mutant(
        name="orthogonal-head-not-normalized",
        file="rlhf/models/scalar_head.py",
        before='"orthogonal": 1.0 / float(noise.norm())',
        after='"orthogonal": 1.0',
        why="the first values are as large as the square root of the width",
        tests=("tests/models/test_scalar_head.py",),
    ),
    Mutant(
        name="shuffle-is-not-read",
        file="rlhf/training/online_run.py",
        before="if not run.config.batch.shuffle:",
        after="if False:",
        why="the ablation of shuffling compares a run with itself",
        tests=(
            "tests/training/test_online.py::test_without_shuffling_minibatches_are_the_same_in_every_epoch_and_step",
        ),
    ),
]
