"""Bugs seeded in the tuning of a comparison: unequal chances, tuning on the report, a default that is lost."""

from __future__ import annotations

from mutant import Mutant

HALVING = ("tests/comparison/test_halving.py",)
PLAN = "tests/comparison/test_tuning.py::"

TUNING = [
    Mutant(
        name="the-default-can-be-dropped",
        file="rlhf/comparison/tuning/plan.py",
        before="key=lambda trial: (trial != DEFAULT, -",
        after="key=lambda trial: (-",
        why="an unlucky first round drops the arm as written, and tuning ends worse than not tuning",
        tests=HALVING,
    ),
    Mutant(
        name="a-tie-goes-to-the-last-trial",
        file="rlhf/comparison/tuning/plan.py",
        before="key=lambda trial: (-finished[trial], trial)",
        after="key=lambda trial: (-finished[trial], -trial)",
        why="settings are changed that gain nothing",
        tests=HALVING,
    ),
    Mutant(
        name="rounds-of-equal-length",
        file="rlhf/comparison/tuning/plan.py",
        before="Fraction(1, size) for size in sizes[: k + 1]",
        after="Fraction(1, sizes[0]) for _ in sizes[: k + 1]",
        why="the first round eats most of the budget, and those that go on are hardly trained longer",
        tests=HALVING,
    ),
    Mutant(
        name="factor-on-one-side",
        file="rlhf/comparison/tuning/plan.py",
        before="factor ** (2 * u - 1)",
        after="factor**u",
        why="no trial ever has a smaller learning rate than the arm as written",
        tests=HALVING,
    ),
    Mutant(
        name="draws-of-all-trials-alike",
        file="rlhf/comparison/tuning/plan.py",
        before='random.Random(f"{seed}/{trial}/{key}")',
        after='random.Random(f"{seed}/{key}")',
        why="a trial is another one again, unless it is drawn anew, and no arm has the quantile of another",
        tests=HALVING,
    ),
    Mutant(
        name="tuned-on-reporting-seeds",
        file="rlhf/config/compare.py",
        before="both = sorted(set(self.seeds) & set(seeds))",
        after="both: list[int] = []",
        why="an arm is chosen by the luck of the seed that it is reported on",
        tests=(f"{PLAN}test_a_mistake_in_tuning_is_named_before_anything_runs",),
    ),
    Mutant(
        name="tuned-on-reporting-prompts",
        file="rlhf/comparison/tuning/plan.py",
        before='"part": [first + tune.prompts_share * (last - first), last]',
        after='"part": [first, last]',
        why="an arm is chosen by the prompts that it is reported on",
        tests=(f"{PLAN}test_trials_have_seeds_and_prompts_of_their_own",),
    ),
    Mutant(
        name="a-failed-trial-is-tried-again",
        file="rlhf/comparison/scheduler.py",
        before="is_lost = cell.config.trial is not None and (cell.folder / FAILED).is_file()",
        after="is_lost = False",
        why="a comparison that is continued gives a trial a second chance, and ends elsewhere",
        tests=(f"{PLAN}test_a_trial_that_diverges_is_a_counted_loss",),
    ),
    Mutant(
        name="every-round-begins-anew",
        file="rlhf/comparison/plan.py",
        before="return self.folder if self.config.trial is None else self.folder.parent",
        after="return self.folder",
        why="the model and the costs of a trial are looked for where they are not, and every trial fails",
        tests=(f"{PLAN}test_a_trial_that_diverges_is_a_counted_loss",),
    ),
    Mutant(
        name="tuned-arms-run-as-written",
        file="rlhf/comparison/tuning/plan.py",
        before="arms[name] = with_values(arm, values) if isinstance(arm, TrainedArm) else arm",
        after="arms[name] = arm",
        why="tuning is paid for, and what is reported is the arm without it",
        tests=(f"{PLAN}test_the_best_of_the_last_round_is_the_arm",),
    ),
]
